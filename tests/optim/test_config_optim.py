"""Optimizer configuration: what cannot run cannot be made."""

import dataclasses
from typing import get_args

import pytest

from k3jax.config_optim import WSD, AdamW, Cosine, Muon, NewtonSchulz, Optimizer, QKClip
from k3jax.optim.muon import NEWTON_SCHULZ


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Muon, "momentum", 1.0),
        (Muon, "momentum", -0.1),
        (Muon, "newton_schulz", "jordan"),
        (Muon, "dtype", "float16"),
        (Muon, "heads", "both"),
        (Muon, "weight_decay", float("nan")),
        (AdamW, "b2", 1.0),
        (AdamW, "eps", 0.0),
        (Cosine, "peak", 0.0),
        (Cosine, "floor", 1.0),
        (Cosine, "warmup", 1.0),
        (WSD, "decay", 0.995),
        (WSD, "decay", 0.0),
        (QKClip, "threshold", -1.0),
        (Optimizer, "clip_norm", 0.0),
    ],
)
def test_bad_values_are_named(kind, field, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{field}.*got"):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(Muon, "rms", "0.2"), (AdamW, "b1", True), (Optimizer, "rest", Muon()), (Optimizer, "schedule", 1e-3)],
)
def test_bad_types_are_named(kind, field, value):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\.{field}"):
        kind(**{field: value})


def test_misspelt_fields_and_assignment():
    with pytest.raises(TypeError):
        Muon(momentom=0.9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Muon().momentum = 0.9


def test_every_named_schedule_has_a_table():
    assert set(get_args(NewtonSchulz)) == set(NEWTON_SCHULZ)
    assert {name: len(table) for name, table in NEWTON_SCHULZ.items()} == {
        "jordan5": 5,
        "polar5": 5,
        "polar8": 8,
        "hybrid10": 10,
    }
