"""What describe prints, and the accounting behind it against the arrays and states that a run makes."""

import itertools
import math
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from k3jax import config_io, presets
from k3jax.accounting import PARTS, cache_bytes, checkpoint_bytes, count_parameters, flops_per_token, optimizer_bytes
from k3jax.describe import describe, layer_map, scan_plan
from k3jax.model import kda, mla
from k3jax.model.transformer import init_decode_state
from k3jax.step import abstract_state

TINY = presets.tiny()


def total_bytes(tree):
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def test_kimi_k3_command():
    """The whole command in a process of its own: seconds, and no weights."""
    began = time.monotonic()
    command = [sys.executable, "-m", "k3jax.describe", "kimi_k3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds = time.monotonic() - began
    text = done.stdout
    for expected in (
        "69 KDA + 24 MLA, 1 dense + 92 MoE",
        "|kKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMKKKM|KKKMKKKMM\n",
        "1 x [k, 2 K]  22 x [M, 3 K]  1 x [2 M]  (5 layer bodies to compile)",
        "2,779,484,476,000",
        "104.19 B",
        "the head counted, the embedding not",
        "27,648",
        "434,110,464",
    ):
        assert expected in text, expected
    assert seconds < 45


def test_a_bad_command_gets_one_line():
    command = [sys.executable, "-m", "k3jax.describe", "nano", "--set", "model.dimm=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: model.dimm: ModelConfig has no field 'dimm'; did you mean 'dim'?")
    assert "Traceback" not in done.stderr


def test_layer_map_and_scan_plan():
    assert layer_map(TINY.model) == "|kKK|MKK|KMK|KKM|M"
    assert scan_plan(TINY.model) == "1 x [k, 2 K]  2 x [M, 3 K]  1 x [2 M]"
    plain = config_io.override(TINY, ["model.residual=PlainResidual", "model.dense_layers=0"]).model
    assert layer_map(plain) == "KKKMKKKMKKKMM"


def test_every_parameter_is_listed_once():
    text = describe(TINY, show_parameters=True)
    listing = [line.split() for line in text[text.index("path ") :].splitlines()[1:]]
    sizes = [math.prod(map(int, itertools.takewhile(str.isdigit, row[1:]))) for row in listing]
    assert sum(sizes) == count_parameters(TINY.model).total
    assert len({row[0] for row in listing}) == len(listing)
    assert "segments/0/1/ffn/gate" in text and "- - expert fsdp tensor" in text


@pytest.mark.parametrize("settings", [[], ["optimizer.matrices=AdamW", "optimizer.router=Muon"]])
def test_bytes_are_those_of_the_train_state(settings):
    config = config_io.override(TINY, settings)
    state = abstract_state(config)
    optimizer = sum(optimizer_bytes(config.model, config.optimizer).values())
    scalars = total_bytes([x for x in jax.tree.leaves(state.opt_state) if x.ndim == 0])
    assert optimizer == total_bytes(state.opt_state) - scalars
    assert checkpoint_bytes(config.model, config.optimizer) == total_bytes(state.weights) + optimizer


def test_cache_bytes():
    """Of the tiny model, and of K3, whose numbers are known."""
    model = TINY.model
    cache = cache_bytes(model)
    assert cache.mla_per_token == 4 * model.mla.cache_dim * 4
    assert cache.kda_state == 9 * model.kda.heads * model.kda.head_dim**2 * 4
    assert cache.kda_conv == 9 * 3 * 3 * model.kda.heads * model.kda.head_dim * 4
    long = init_decode_state(model, batch=1, length=10)
    caches = [x for segment in long.caches for x in segment]
    assert total_bytes([x for x in caches if isinstance(x, mla.MLACache)]) == 10 * cache.mla_per_token
    assert total_bytes([x for x in caches if isinstance(x, kda.KDACache)]) == cache.kda_state + cache.kda_conv
    assert cache_bytes(presets.kimi_k3().model) == (27_648, 434_110_464, 69 * 3 * 3 * 12288 * 2)


def test_flops_by_hand():
    model, seq_len = TINY.model, TINY.seq_len
    d, h, k = model.dim, model.kda.heads, model.kda.head_dim
    kda_weights = 5 * d * h * k + d * 8 + 8 * h * k + d * h
    mla_weights = d * 24 + 24 * 2 * 18 + d * 26 + 20 * 2 * (12 + 10) + 2 * d * 2 * 10
    moe_weights = d * 8 + 2 * d * 16 + 2 * 3 * 16 * 14 + 3 * d * 28
    weights = 9 * kda_weights + 4 * mla_weights + 12 * moe_weights + 3 * d * 48 + d * model.vocab
    flops = flops_per_token(model, seq_len)
    assert flops.parts == {
        "weights": 2 * weights,
        "MLA": 4 * 2 * 2 * (18 + 10) * (seq_len + 1) / 2,
        "KDA": 9 * h * (6 * k**2 + 3 * 64 * k + 64**2),
    }
    assert flops.backward == 2 * flops.forward
    assert (
        9 * h * 126_976 == flops_per_token(config_io.override(TINY, ["model.kda.head_dim=128"]).model, 1).parts["KDA"]
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["model.moe.latent=None", "model.moe.shared=0"],
        ["model.residual=FullAttnRes", "model.mla.q_rank=None", "model.kda.output_gate=LowRankGate(rank=3)"],
        ["model.full_attention=()", "model.dense_layers=13"],
    ],
)
def test_variants_are_described(settings):
    config = config_io.override(TINY, settings)
    text = describe(config)
    counts = count_parameters(config.model)
    assert sum(counts.parts.values()) == counts.total and set(counts.parts) == set(PARTS)
    assert f"{counts.total:,}" in text
