"""What a configuration is and costs, printed before anything is allocated.

python -m k3jax.describe kimi_k3
python -m k3jax.describe nano --set model.moe.experts=32 --parameters
python -m k3jax.describe kimi_k3 --layout kimi_k3_v5p
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial

import jax
from absl import app, flags

from k3jax import accounting, config_io, layout_report, layouts, placement, presets, sharding
from k3jax.accounting import Parameter
from k3jax.config import ConfigError, ModelConfig
from k3jax.config_layout import Layout
from k3jax.config_optim import Optimizer
from k3jax.model import attnres, layout
from k3jax.model.kda import describe_short_conv as describe_conv
from k3jax.run_config import TrainConfig
from pallas_kernels import kda


def describe(config: TrainConfig, *, show_parameters: bool = False, layout: Layout | None = None) -> str:
    """The description as text; with ``show_parameters``, every array with its shape, role, axes and sharding; with a
    layout, what a device holds of every array.

    Raises:
      ConfigError: the layout does not fit the model or the rows.
    """
    model = config.model
    parameters = accounting.parameters(model)
    sections = [
        _layers(model),
        _kernels(config),
        _run(config),
        _counts(model),
        _flops(config),
        _bytes(config),
        _sharding(parameters, config.optimizer),
    ]
    if show_parameters:
        sections.append(_parameters(parameters))
    if layout is not None:
        placement.check_batch(config, layout_report.mesh_of(layout))
        sections.append(layout_report.text(config, layout))
    return "\n\n".join("\n".join(section) for section in sections)


def layer_map(model: ModelConfig) -> str:
    """One letter per layer, K for KDA and M for MLA, small where the feed-forward part is dense, with ``|`` before each
    layer that starts a depth block."""
    letters = []
    for layer, kind in enumerate(model.kinds):
        letter = kind.mixer[0]
        block = "|" if attnres.closes_block(model.residual, layer) else ""
        letters.append(block + (letter if kind.ffn == "dense" else letter.upper()))
    return "".join(letters)


def scan_plan(model: ModelConfig) -> str:
    """The segments that run as scans, such as ``22 x [M, 3 K]``."""

    def body(run: layout.Run) -> str:
        letter = run.kind.mixer[0] if run.kind.ffn == "dense" else run.kind.mixer[0].upper()
        return letter if run.count == 1 else f"{run.count} {letter}"

    return "  ".join(
        f"{segment.repeats} x [{', '.join(map(body, segment.runs))}]" for segment in layout.plan(model.kinds)
    )


def _layers(model: ModelConfig) -> list[str]:
    mixers, ffns = Counter(kind.mixer for kind in model.kinds), Counter(kind.ffn for kind in model.kinds)
    moe = model.moe
    bodies = sum(len(segment.runs) for segment in layout.plan(model.kinds))
    borrowers = sum(kind.borrows for kind in model.kinds)
    shared = f"  keys       {borrowers} MLA layers read the compressed keys and values of an earlier one"
    return [
        f"{model.layers} layers of width {model.dim:,}: {mixers['kda']} KDA + {mixers['mla']} MLA, "
        f"{ffns['dense']} dense + {ffns['moe']} MoE; vocabulary {model.vocab:,}",
        f"  layers     {layer_map(model)}",
        "             K KDA, M MLA, small letter: dense feed-forward part, |: a depth block starts",
        f"  scan plan  {scan_plan(model)}  ({bodies} layer bodies to compile)",
        *([shared] if borrowers else []),
        f"  residual   {model.residual}",
        f"  experts    {moe.active} of {moe.experts} active, {moe.shared} shared, {moe.balancer}",
        f"  compute    {model.dtype}, rematerialization: {model.remat}",
    ]


def _kernels(config: TrainConfig) -> list[str]:
    """Which implementation of each operation runs where, and why; the choice is made when a program is lowered."""
    model = config.model
    x = jax.ShapeDtypeStruct((1, config.seq_len, model.kda.heads, model.kda.head_dim), model.dtype)
    taps = jax.ShapeDtypeStruct((model.kda.conv, *x.shape[2:]), "float32")
    operations = {"KDA recurrence": partial(kda.describe, x, x), "short convolution": partial(describe_conv, x, taps)}
    slots = attnres.source_slots(model.residual, model.layers)
    if slots:
        sources = jax.ShapeDtypeStruct((slots, 1, config.seq_len, model.dim), model.dtype)
        operations["depth mixture"] = partial(attnres.describe, sources)
    lines = []
    for name, choice in operations.items():
        lines.append(f"{name}, by target of the program")
        chosen = {platform: choice(platform=platform) for platform in ("cpu", "gpu", "tpu")}
        lines += [f"  {platform:22}{x.implementation}: {x.reason}" for platform, x in chosen.items()]
    return lines


def _run(config: TrainConfig) -> list[str]:
    return [
        f"run: {config.steps:,} steps of {config.batch:,} x {config.seq_len:,} = {config.tokens_per_step:,} tokens, "
        f"{_count(config.tokens)} tokens in all"
    ]


def _counts(model: ModelConfig) -> list[str]:
    counts = accounting.count_parameters(model)
    lines = ["parameters of the text model"]
    lines += [f"  {name:22}{size:>22,}  {size / counts.total:7.2%}" for name, size in counts.parts.items() if size]
    lines.append(f"  {'total':22}{counts.total:>22,}  {_count(counts.total)}")
    lines.append(f"  {'active for one token':22}{counts.active:>22,}  {_count(counts.active)}")
    lines.append("  active: the experts that a token visits and all else; the head counted, the embedding not")
    return lines


def _flops(config: TrainConfig) -> list[str]:
    flops = accounting.flops_per_token(config.model, config.seq_len)
    formulas = {
        "weights": "2 x active entries of weight matrices",
        "MLA": "per layer H (qk + v) (T + 1): causal, a document as long as the row",
        "KDA": f"per layer H (6 K^2 + 3 C K + C^2), chunks of C = {accounting.KDA_CHUNK}",
    }
    lines = [f"floating-point operations per token, rows of T = {config.seq_len:,} (matrix products)"]
    lines += [f"  {name:22}{_short(size):>22}  {formulas[name]}" for name, size in flops.parts.items()]
    lines.append(f"  {'forward':22}{_short(flops.forward):>22}")
    lines.append(f"  {'backward':22}{_short(flops.backward):>22}  2 x forward, rematerialization not counted")
    step = (flops.forward + flops.backward) * config.tokens_per_step
    lines.append(f"  {'one step':22}{_short(step):>22}")
    return lines


def _bytes(config: TrainConfig) -> list[str]:
    model, optimizer = config.model, config.optimizer
    cache = accounting.cache_bytes(model)

    def line(name: str, size: int, note: str) -> str:
        return f"  {name:22}{size:>22,}  {_short(size)}B, {note}"

    return [
        "bytes",
        line("master weights", 4 * accounting.count_parameters(model).total, "float32"),
        *(line(name, size, "float32") for name, size in accounting.optimizer_bytes(model, optimizer).items() if size),
        line("checkpoint", accounting.checkpoint_bytes(model, optimizer), "all of the above"),
        line("MLA cache", cache.mla_per_token, f"per token, {model.dtype}"),
        line("KDA state", cache.kda_state, "per sequence of any length, float32"),
        line("KDA convolutions", cache.kda_conv, f"per sequence, {model.dtype}"),
    ]


def _sharding(parameters: Iterable[Parameter], optimizer: Optimizer) -> list[str]:
    """One line for each role and set of axes that occurs."""
    sizes: Counter = Counter()
    for parameter in parameters:
        if parameter.meta is not None:
            sizes[parameter.meta] += parameter.size
    lines = [f"sharding over {', '.join(sharding.MESH_AXES)}; behind the unsharded layer axes"]
    for meta, size in sorted(sizes.items(), key=lambda item: (item[0].role.value, item[0].axes)):
        group = getattr(optimizer, meta.role.group)
        update = type(group).__name__ + (" + decay" if meta.role.decayed and group.weight_decay else "")
        axes = f"{' '.join(meta.axes):20}-> {_spec(meta.axes):20}"
        lines.append(f"  {meta.role.value:12}{update:15}{axes}{_count(size):>12}")
    return lines


def _parameters(parameters: Iterable[Parameter]) -> list[str]:
    rows = [("path", "shape", "role", "axes", "sharding")]
    for p in parameters:
        shape = " ".join(map(str, p.shape))
        if p.meta is None:
            rows.append((p.path, shape, "state", "", "replicated"))
        else:
            axes, spec = " ".join(p.meta.axes), _spec(p.meta.axes, stacked=p.stacked)
            rows.append((p.path, shape, p.meta.role.value, axes, spec))
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    return ["".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _spec(axes: tuple[str, ...], *, stacked: int = 0) -> str:
    return " ".join(
        "-" if axis is None else axis if isinstance(axis, str) else "x".join(axis)
        for axis in sharding.spec(axes, stacked=stacked)
    )


def _short(number: float, *, giga: str = "G") -> str:
    """Two decimals and a decimal prefix."""
    for prefix, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), (giga, 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:,.2f} {prefix}"
    return f"{number:,.0f} "


def _count(number: float) -> str:
    """The same for a count, where 1e9 is a B."""
    return _short(number, giga="B").strip()


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError(f"name one preset or file (presets: {', '.join(presets.PRESETS)})")
    try:
        config = config_io.override(presets.load(argv[1]), flags.FLAGS["set"].value)
        layout = layouts.load(flags.FLAGS.layout) if flags.FLAGS.layout else None
        print(describe(config, show_parameters=flags.FLAGS["parameters"].value, layout=layout))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_bool("parameters", False, "list every parameter with shape, role, logical axes and sharding")
    flags.DEFINE_string("layout", "", "a name (k3jax.layouts) or axis=size,...: what a device holds of every array")
    app.run(main)
