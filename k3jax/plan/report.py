"""A plan as text, as JSON and as a picture."""

import json
import pathlib
from collections.abc import Iterator

from matplotlib.figure import Figure

from k3jax import layouts, run_folder
from k3jax.config import ModelConfig
from k3jax.plan import hlo
from k3jax.plan.compiled import Plan

GB = 1e9


def text(plan: Plan) -> str:
    """The tables of a plan."""
    return "\n".join([*_memory(plan), "", *_collectives(plan), "", *_times(plan)])


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield f"HBM per device, of {memory.hbm / GB:.1f} GB on {plan.topology.name}"
    sources = {
        "parameters": "shapes and shardings, float32",
        "optimizer": "shapes and shardings",
        "gradients": "float32, lying like the parameters",
        "saved": "what layers keep for the backward pass, by shapes",
        "other": "what remains of the compiled program: one layer's working set, gathered weights, loss",
    }
    for name, source in sources.items():
        yield f"  {name:12}{getattr(memory, name) / GB:8.2f} GB   {source}"
    share = memory.total / memory.hbm
    verdict = "fits" if memory.fits else "does not fit"
    yield f"  {'total':12}{memory.total / GB:8.2f} GB   {share:.0%} of the device: {verdict}"
    if not memory.fits:
        yield f"  largest: {memory.largest}. By arithmetic it would fit with"
        yield from (f"    {one.flags}  ({one.total / GB:.1f} GB)" for one in plan.remedies)
        yield "    more devices" if plan.remedies else "    more devices only"


def _collectives(plan: Plan) -> Iterator[str]:
    yield "communication of one device and step"
    yield f"  {'what':20}{'axes':26}{'instructions':>13}{'executed':>10}{'payload GB':>12}{'sent GB':>10}  asynchronous"
    for (kind, axes), row in hlo.summary(plan.sent).items():
        hidden = row["asynchronous"] / row["payload"] if row["payload"] else 0
        yield (
            f"  {kind:20}{' x '.join(axes) or 'irregular':26}{row['static']:>13,}{row['executed']:>10,}"
            f"{row['payload'] / GB:>12.3f}{row['sent'] / GB:>10.3f}  {hidden:.0%}"
        )


def _times(plan: Plan) -> Iterator[str]:
    times = plan.times
    yield "predicted step"
    rows = {
        "fused operations": (times.fused, "the compiler's estimated cycles over the clock"),
        "kernels": (times.kernels, "counted cycles of KDA, operations of grouped matmuls over the peak"),
        "exposed communication": (times.exposed, f"of {times.communication:.3f} s by link bandwidth"),
        "step": (times.step, f"bound by {times.binding}"),
    }
    for name, (seconds, source) in rows.items():
        yield f"  {name:24}{seconds:9.3f} s   {source}"
    yield f"  {'model FLOP utilisation':24}{times.mfu:9.1%}     at most: stalls, host and network latency are not in it"
    if plan.unknown:
        yield f"  not in it either: the kernels {', '.join(plan.unknown)}"
    yield f"lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s"


def as_json(plan: Plan, model: ModelConfig, config: str) -> dict:
    """Everything that the tables show, for other programs. config: the name that the plan was made for."""
    times, memory = plan.times, plan.memory
    sent = [
        {"kind": kind, "axes": list(axes), **row} for (kind, axes), row in hlo.summary(plan.sent).items()
    ]  # fmt: skip
    return {
        "config": config,
        "topology": plan.topology.name,
        "layout": layouts.text(plan.layout),
        "layers": model.layers,
        "memory": {**vars(memory), "total": memory.total, "fits": memory.fits},
        "collectives": sent,
        "seconds": {**vars(times), "step": times.step},
        "mfu": times.mfu,
        "binding": times.binding,
        "unknown_kernels": plan.unknown,
        "remedies": [one._asdict() for one in plan.remedies],
        "lower_seconds": plan.lower_seconds,
        "compile_seconds": plan.compile_seconds,
    }


def write(plan: Plan, model: ModelConfig, config: str, folder: pathlib.Path) -> None:
    """``plan.txt``, ``plan.json`` and ``plan.png`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_text(folder / "plan.txt", text(plan) + "\n")
    run_folder.write_text(folder / "plan.json", json.dumps(as_json(plan, model, config), indent=1) + "\n")
    figure(plan).savefig(folder / "plan.png", dpi=150)


def figure(plan: Plan) -> Figure:
    """Memory and time as stacked bars."""
    drawn = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    memory, times = plan.memory, plan.times
    _bar(left, {n: getattr(memory, n) / GB for n in ("parameters", "optimizer", "gradients", "saved", "other")})
    left.axvline(memory.hbm / GB, color="black", linestyle="--", label="capacity")
    left.set_xlabel("HBM per device, GB")
    _bar(right, {"fused": times.fused, "kernels": times.kernels, "exposed communication": times.exposed})
    right.axvline(times.ideal, color="black", linestyle="--", label="model operations at the peak")
    right.set_xlabel("predicted step, s")
    for axes in (left, right):
        axes.set_yticks([])
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, frameon=False)
    drawn.suptitle(f"{plan.topology.name}  {layouts.text(plan.layout)}", fontsize="medium")
    return drawn


def _bar(axes, parts: dict[str, float]) -> None:
    start = 0.0
    for name, size in parts.items():
        axes.barh(0, size, left=start, label=f"{name} {size:.3g}")
        start += size
