"""Presets: the counts that they promise, the published numbers behind them, and loading them by name or file."""

import json
import re

import pytest

from k3jax import config as c
from k3jax import config_io, presets
from k3jax.accounting import count_parameters
from k3jax.hf import config as hf_config

EVERY = sorted(presets.PRESETS)
LADDER = {name: int(name[8:-1]) for name in EVERY if name.startswith("attnres_")}


@pytest.mark.parametrize("name", EVERY)
def test_docstring_counts(name):
    counts = count_parameters(presets.load(name).model)
    documented = re.search(r"([\d,]+) parameters, ([\d,]+) active", presets.PRESETS[name].__doc__)
    assert documented.groups() == (f"{counts.total:,}", f"{counts.active:,}")


def test_kimi_k3_counts():
    counts = count_parameters(presets.kimi_k3().model)
    assert counts.total == 2_779_484_476_000
    assert round(counts.active / 1e9, 2) == 104.19


def test_kimi_k3_counts_by_hand():
    """The arithmetic of the released tensor shapes, router bias included."""
    d, vocab, layers, width = 7168, 163840, 93, 96 * 128
    kda = 3 * width * d + 2 * width * d + 128 * d + width * 128 + 96 * d + 3 * width * 4 + width + 96 + 128
    mla = 1536 * d + 1536 + 96 * 192 * 1536 + 576 * d + 512 + 96 * 256 * 512 + 2 * width * d
    expert = 3 * 3584 * 3072
    router, latent, shared = 896 * d + 896, 2 * 3584 * d + 3584, 3 * d * 6144
    assert count_parameters(presets.kimi_k3().model).parts == {
        "embedding": vocab * d,
        "head": vocab * d,
        "KDA": 69 * kda,
        "MLA": 24 * mla,
        "routed experts": 92 * 896 * expert,
        "shared experts": 92 * shared,
        "latent projections": 92 * latent,
        "router": 92 * router,
        "dense FFN": 3 * d * 33792,
        "norms": layers * 2 * d + d,
        "attention residuals": layers * 4 * d + 2 * d,
    }


def test_kimi_linear_48b_counts():
    counts = count_parameters(presets.kimi_linear_48b().model)
    assert (round(counts.total / 1e9, 2), round(counts.active / 1e9, 2)) == (49.12, 3.11)


@pytest.mark.parametrize("name", LADDER)
def test_attention_residuals_ladder_counts_without_embeddings(name):
    counts = count_parameters(presets.load(name).model)
    assert round((counts.active - counts.parts["head"]) / 1e6) == LADDER[name]


def test_published_recipes():
    largest, first = presets.attnres_528m(), presets.kimi_linear_653m()
    assert (largest.seq_len, largest.batch, largest.optimizer.schedule.peak) == (8192, 432, 2.02e-3)
    assert (first.seq_len, first.batch, first.optimizer.schedule.peak) == (4096, 336, 2.006e-3)
    assert largest.tokens == pytest.approx(119e9, rel=1e-4)
    assert first.tokens == pytest.approx(38.8e9, rel=1e-4)
    assert presets.kimi_linear_48b().tokens_per_step == 2**25


def test_kimi_k3_is_the_released_configuration(goldens):
    released = json.loads((goldens / "kimi_k3_config.json").read_text())
    assert config_io.diff(hf_config.read(released).model, presets.kimi_k3().model) == {}


@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_small_presets_have_every_part(name):
    model = presets.load(name).model
    assert min(count_parameters(model).parts.values()) > 0
    assert model.full_attention == (4, 8, 12, 13)
    assert set(model.kinds) == {c.LayerKind("kda", "dense"), c.LayerKind("kda", "moe"), c.LayerKind("mla", "moe")}
    assert model.layers % model.residual.block == 1, "the last depth block is partial"
    assert isinstance(model.moe.balancer, c.QuantileBalancing) and isinstance(model.activation, c.SiTU)


def test_tiny_tells_widths_apart():
    model = presets.tiny().model
    assert model.kda.heads * model.kda.head_dim != model.dim
    assert model.mla.q_rank != model.mla.kv_rank
    assert presets.tiny().seq_len % 64, "rows must end inside a chunk"


def test_load_by_file(tmp_path):
    config = config_io.override(presets.tiny(), ["seed=7"])
    config_io.save_json(config, tmp_path / "config.json")
    assert presets.load(str(tmp_path / "config.json")) == config
    (tmp_path / "plain").write_text((tmp_path / "config.json").read_text())
    assert presets.load(str(tmp_path / "plain")) == config


def test_unknown_presets_are_named():
    with pytest.raises(c.ConfigError, match="no preset or file 'kimi_k4'; did you mean 'kimi_k3'") as raised:
        presets.load("kimi_k4")
    assert all(name in str(raised.value) for name in EVERY)
    with pytest.raises(c.ConfigError, match=r"configuration file 'absent\.json'"):
        presets.load("absent.json")
