"""Shards of rows on simulated devices equal the whole rows on one, values and gradients."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError
from k3jax.model.kda import short_conv
from k3jax.model.mla import attention
from k3jax.parallel import context
from k3jax.parallel.attention import compressed_attention
from pallas_kernels import testing
from pallas_kernels.kda import kda

T, H, K, V = 64, 2, 16, 8
TOKENS = ("q", "k", "v", "gate", "beta")
BAR = 1e-5
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def row(*parts) -> list[int]:
    """Documents by (number, tokens)."""
    return [number for number, tokens in parts for _ in range(tokens)]


# A document; documents that cross borders, begin at one (32) and follow each other within a shard; shards of padding
# before, between and behind the tokens of documents; a row of padding. Numbers need not follow each other.
IDS = np.asarray(
    [
        row((0, T)),
        row((0, 13), (1, 19), (2, 3), (3, 1), (5, 2), (70_000, 20), (70_001, 6)),
        row((-1, 17), (4, 4), (-1, 11), (6, 9), (-1, 23)),
        row((3, 10), (-1, 24), (3, 10), (8, 12), (-1, 8)),
        row((-1, T)),
    ],
    np.int32,
)
B = len(IDS)


def mesh(devices):
    return jax.sharding.Mesh(jax.devices()[:devices], ("context",))


def over_shards(fn, devices, ins, outs):
    return jax.jit(jax.shard_map(fn, mesh=mesh(devices), in_specs=ins, out_specs=outs, check_vma=False))


def collectives(compiled) -> dict[str, list[int]]:
    """Elements of the result of each collective in a compiled program, by kind."""
    found = {}
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(", line):
            shapes = re.findall(r"\[([\d,]*)\]", match[1])
            sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]
            found.setdefault(match[2], []).append(sum(sizes))
    return found


def kda_inputs(time=T) -> dict:
    """Decays so weak that what enters a shard is still there at its end."""
    rng = np.random.default_rng(0)
    A_log, dt_bias = 0.3 * rng.standard_normal(H), 0.3 * rng.standard_normal((H, K))
    z = testing.raw_gate("weak", (B, time, H, K), rng) + rng.standard_normal((B, time, H, K))
    arrays = {
        "q": rng.standard_normal((B, time, H, K)),
        "k": rng.standard_normal((B, time, H, K)),
        "v": rng.standard_normal((B, time, H, V)),
        "gate": z / np.exp(A_log)[:, None] - dt_bias,
        "beta": rng.standard_normal((B, time, H)),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": rng.standard_normal((B, H, K, V)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def call(fn, inputs, ids, **options):
    return fn(
        *(inputs[n] for n in TOKENS), **{n: x for n, x in inputs.items() if n not in TOKENS}, segment_ids=ids, **options
    )


def kda_over(devices, **options):
    """Outputs and the leaving state of every shard, [R, B, H, K, V]."""
    tokens = P(None, "context")
    ins = {name: tokens if name in TOKENS else P() for name in kda_inputs(1)}

    def local(inputs, ids):
        o, state = call(context.kda_context, inputs, ids, axis="context", **options)
        return {"o": o, "state": state[None]}

    return over_shards(local, devices, (ins, tokens), {"o": tokens, "state": P("context")})


def whole(inputs, ids):
    """The same from whole rows: the states at their middle and at their end."""
    o, state = call(kda, inputs, ids)
    half = {n: x[:, : T // 2] if n in TOKENS else x for n, x in inputs.items()}
    return {"o": o, "state": jnp.stack([call(kda, half, ids[:, : T // 2])[1], state])}


@functools.cache
def lowered_kda(devices, time=T):
    inputs = kda_inputs(time)

    def run(inputs, ids, cot):
        values, pull = jax.vjp(lambda inputs: kda_over(devices)(inputs, ids), inputs)
        return values, pull(cot)[0]

    shapes = {"o": inputs["v"], "state": jax.ShapeDtypeStruct((devices, B, H, K, V), jnp.float32)}
    ids = np.repeat(IDS, time // T, axis=1)
    return jax.jit(run).lower(inputs, ids, shapes)


@functools.cache
def compiled_kda(devices):
    return lowered_kda(devices).compile()


def cotangents() -> dict:
    rng = np.random.default_rng(1)
    shapes = {"o": (B, T, H, V), "state": (2, B, H, K, V)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@functools.cache
def expected_kda():
    """Values, and gradients by the cotangents of output and states."""

    @jax.jit
    def run(inputs, cot):
        values, pull = jax.vjp(lambda inputs: whole(inputs, jnp.asarray(IDS)), inputs)
        return values, pull(cot)[0]

    return run(kda_inputs(), cotangents())


@pytest.mark.parametrize("devices", (2, 4, 8))
def test_kda(devices):
    cot = cotangents()
    states = jnp.zeros((devices, B, H, K, V)).at[jnp.asarray([devices // 2 - 1, devices - 1])].set(cot["state"])
    values, gradients = compiled_kda(devices)(kda_inputs(), IDS, cot | {"state": states})
    values["state"] = values["state"][devices // 2 - 1 :: devices // 2]
    expected, expected_gradients = expected_kda()
    testing.assert_close(values | gradients, expected | expected_gradients, BAR)


def test_kda_of_one_document_a_row_and_from_nothing():
    inputs = kda_inputs()
    del inputs["initial_state"]
    tokens = P(None, "context")

    def local(inputs):
        return call(context.kda_context, inputs, None, axis="context")[0]

    ins = {name: tokens if name in TOKENS else P() for name in inputs}
    o = over_shards(local, 4, (ins,), tokens)(inputs)
    testing.assert_close({"o": o}, {"o": jax.jit(lambda inputs: call(kda, inputs, None)[0])(inputs)}, BAR)


def drop_state(monkeypatch):
    monkeypatch.setattr(context, "entering_state", lambda summaries, initial_state, *rest: initial_state)


def drop_M(monkeypatch):
    fold = context.entering_state
    zeroed = lambda summaries, *rest: fold(summaries._replace(M=0 * summaries.M), *rest)  # noqa: E731
    monkeypatch.setattr(context, "entering_state", zeroed)


def drop_documents(monkeypatch):
    monkeypatch.setattr(context, "_continues", lambda ends: jnp.ones(ends.shape[:2], bool))


@pytest.mark.parametrize("control", (drop_state, drop_M, drop_documents))
def test_what_is_left_out_of_kda_is_seen(control, monkeypatch):
    control(monkeypatch)
    values = kda_over(4, implementation="reference")(kda_inputs(), jnp.asarray(IDS))
    assert testing.relative_error(values["o"], expected_kda()[0]["o"]) > 1e-2


def test_kda_sends_the_same_whatever_the_length():
    """One all-gather forward and one backward; gradients of what all shards are handed are added up."""
    state = B * H * K * (K + V)
    for time in (T, 2 * T):
        gathered = re.findall(r"stablehlo.all_gather.*-> tensor<([\dx]+)xf32>", lowered_kda(4, time).as_text())
        sizes = sorted(int(np.prod([int(n) for n in shape.split("x")])) for shape in gathered)
        assert sizes == [4 * state, 4 * (state + 4 * B)]
    found = collectives(compiled_kda(4))
    assert sorted(found["all-gather"]) == sizes and found.keys() == {"all-gather", "all-reduce"}
    assert sum(found["all-reduce"]) == H + H * K + B * H * K * V


def conv_inputs(time=T):
    rng = np.random.default_rng(2)
    xs = [jnp.asarray(rng.standard_normal((B, time, H, width)), jnp.float32) for width in (K, V)]
    return xs, [jnp.asarray(rng.standard_normal((4, H, width)), jnp.float32) for width in (K, V)]


@jax.jit
def conv_whole(inputs, ids):
    return [short_conv(x, w, ids) for x, w in zip(*inputs)]


def conv_by_fix(inputs, ids):
    return context.short_conv_context(short_conv, *inputs, ids, axis="context")


def conv_by_history(inputs, ids):
    histories = context.halo(inputs[0], ids, axis="context", width=4)
    return [short_conv(x, w, ids, history) for x, w, history in zip(*inputs, histories)]


def conv_over(devices, local):
    tokens = P(None, "context")
    return over_shards(local, devices, ((tokens, P()), tokens), tokens)


def conv_values_and_gradients(fn, time):
    inputs, ids = conv_inputs(time), jnp.asarray(IDS[:, :time])
    ys, pull = jax.vjp(lambda inputs: fn(inputs, ids), inputs)
    dxs, dws = pull([jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in ys])[0]
    return {f"{name}{n}": x for name, xs in dict(y=ys, dx=dxs, dw=dws).items() for n, x in enumerate(xs)}


@pytest.mark.parametrize(
    ("local", "devices", "time"), ((conv_by_fix, 2, T), (conv_by_fix, 8, 24), (conv_by_history, 4, T))
)
def test_short_convolution(local, devices, time):
    """Shards of three tokens have just enough for a convolution of four taps."""
    run = jax.jit(conv_values_and_gradients, static_argnums=(0, 1))
    testing.assert_close(run(conv_over(devices, local), time), run(conv_whole, time), BAR)


def test_short_convolution_with_padding_inside_a_document():
    inputs = conv_inputs(16)
    ids = jnp.asarray([row((0, 3), (-1, 2), (0, 11))] * B)
    result = conv_over(4, conv_by_fix)(inputs, ids)
    testing.assert_close(dict(enumerate(result)), dict(enumerate(conv_whole(inputs, ids))), BAR)


def test_a_missing_halo_is_seen(monkeypatch):
    monkeypatch.setattr(context.lax, "ppermute", lambda x, axis, steps: jnp.zeros_like(x))
    inputs, ids = conv_inputs(), jnp.asarray(IDS)
    result = conv_over(4, conv_by_fix)(inputs, ids)
    assert testing.relative_error(result[0], conv_whole(inputs, ids)[0]) > 1e-2


def test_shards_shorter_than_the_convolution_are_refused():
    with pytest.raises(ConfigError, match=r"4 taps needs the 3 tokens .* have 2 tokens: use at most 5 devices"):
        conv_over(8, conv_by_fix)(conv_inputs(16), jnp.asarray(IDS[:, :16]))


R, SHARED, WIDTH = 12, 4, 8


def mla_inputs() -> dict:
    rng = np.random.default_rng(3)
    shapes = dict(q=(B, T, H, WIDTH + SHARED), latent=(B, T, R), shared=(B, T, SHARED), up=(R, H, WIDTH + V))
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def attend(up, q, latent, shared, query_position, key_position, query_segment, key_segment):
    k, v = jnp.split(jnp.einsum("bsr,rhk->bshk", latent, up), [WIDTH], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], SHARED))], axis=-1)
    where = dict(query_position=query_position, key_position=key_position)
    return attention(q, k, v, scale=0.3, **where, query_segment=query_segment, key_segment=key_segment)


def mla_over(devices, order):
    tokens = P(None, "context")

    def local(x, ids):
        arrays = x["q"], x["latent"], x["shared"]
        up = functools.partial(attend, x["up"])
        o, max_logit = context.mla_context(up, *arrays, ids, axis="context", order=order)
        return o, jax.lax.pmax(max_logit, "context")

    ins = dict.fromkeys(("q", "latent", "shared"), tokens) | {"up": P()}
    return over_shards(local, devices, (ins, tokens), (tokens, P()))


def mla_whole(x, ids):
    position = jnp.arange(T)[None]
    return attend(x["up"], x["q"], x["latent"], x["shared"], position, position, ids, ids)


def mla_values_and_gradients(fn, x, ids):
    o, pull, max_logit = jax.vjp(lambda x: fn(x, ids), x, has_aux=True)
    do = jnp.where((ids >= 0)[..., None, None], jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape), 0)
    return pull(do)[0] | {"o": jnp.where((ids >= 0)[..., None, None], o, 0), "max_logit": max_logit}


@functools.cache
def expected_mla():
    return jax.jit(functools.partial(mla_values_and_gradients, mla_whole))(mla_inputs(), IDS)


@pytest.mark.parametrize(
    ("devices", "order"),
    [(8, context.Contiguous()), (4, context.Zigzag())],
    ids=str,
)
def test_mla(devices, order):
    run = jax.jit(functools.partial(mla_values_and_gradients, mla_over(devices, order)))
    compiled = run.lower(mla_inputs(), IDS).compile()
    result = compiled(mla_inputs(), IDS)
    testing.assert_close(result, expected_mla(), BAR)
    found = collectives(compiled)
    assert sorted(found["all-gather"]) == [B * T, B * T * (R + SHARED)]
    assert found["reduce-scatter"] == [B * T * (R + SHARED) // devices]


def test_documents_that_are_not_told_apart_are_seen():
    blind = mla_over(4, context.Contiguous())(mla_inputs(), jnp.zeros_like(IDS))[0]
    assert testing.relative_error(blind[1], expected_mla()["o"][1]) > 1e-2


def compressed(x, ids):
    """Blocks that divide neither the queries nor the keys."""
    where = dict(
        query_position=jnp.arange(T)[None], key_position=jnp.arange(T)[None], query_segment=ids, key_segment=ids
    )
    ups = jnp.split(x["up"], [WIDTH], axis=-1)
    sizes = dict(query_block=24, key_block=20)
    return compressed_attention(x["q"], x["latent"], x["shared"], *ups, scale=0.3, **where, **sizes)


def test_attention_a_block_at_a_time():
    result = jax.jit(functools.partial(mla_values_and_gradients, compressed))(mla_inputs(), IDS)
    testing.assert_close(result, expected_mla(), BAR)


@pytest.mark.parametrize("attend, quadratic", [(compressed, False), (mla_whole, True)], ids=["blocks", "control"])
def test_a_loop_over_layers_keeps_no_mask_of_all_tokens(attend, quadratic):
    """Nothing of T x S entries is kept for the gradient, nor taken out of the loop; one matrix of logits would be."""
    x = mla_inputs()

    def layers(q):
        def layer(q, _):
            o = attend({**x, "q": q}, IDS)[0]
            return q + jnp.pad(o, [(0, 0)] * 3 + [(0, q.shape[-1] - o.shape[-1])]), None

        return jax.lax.scan(layer, q, None, length=2)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(layers))(x["q"]))
    kept = [math.prod(map(int, dims.split(","))) for dims in re.findall(r":(?:f32|bool)\[([\d,]+)\]", text)]
    assert (max(kept) >= B * H * T * T) == quadratic


@pytest.mark.parametrize("devices", (1, 3, 4))
def test_zigzag_shares_the_keys_equally(devices):
    place, order = P(None, "context"), context.Zigzag()

    def local(x):
        there = context.arrange(x, axis="context", order=order)
        where = context.positions(x.shape[1], axis="context", order=order)
        return there, where, context.restore(there, axis="context", order=order)

    held = jnp.arange(devices * 4)[None]
    there, where, back = over_shards(local, devices, (place,), (place, place, place))(held)
    assert (there == where).all() and (back == held).all()
    work = np.asarray(there).reshape(devices, 4).sum(axis=1)
    assert (work == work[0]).all()


def test_zigzag_halves_shards():
    with pytest.raises(ConfigError, match="they have 3 tokens; 4 would halve"):
        place = P(None, "context")
        arrange = functools.partial(context.arrange, axis="context", order=context.Zigzag())
        over_shards(arrange, 2, (place,), place)(jnp.zeros((1, 6)))
