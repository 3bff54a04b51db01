"""A plan as text, as JSON and as a picture."""

import json
import pathlib
from collections.abc import Iterator

from matplotlib.figure import Figure

from k3jax import config_io, layouts, run_folder
from k3jax.plan import hlo
from k3jax.plan.plans import Arithmetic, Plan
from k3jax.plan.units import seconds, size
from k3jax.run_config import TrainConfig

GB = 1e9


def text(plan: Plan) -> str:
    """The tables of a plan."""
    head = ["BY ARITHMETIC: nothing was compiled", ""] if isinstance(plan.made, Arithmetic) else []
    return "\n".join([*head, *_memory(plan), "", *_collectives(plan), "", *_times(plan)])


def _memory(plan: Plan) -> Iterator[str]:
    memory, made = plan.memory, plan.made
    yield f"HBM per device, of {size(memory.hbm)} on {plan.topology.name}"
    rest = "what remains of the compiled program: one layer's working set, gathered weights, loss"
    sources = {
        "parameters": "shapes and shardings, float32",
        "optimizer": "shapes and shardings",
        "gradients": "float32, lying like the parameters",
        "saved": "what layers keep for the backward pass, by shapes",
        "other": f"the rest at the peak, {made.peak}" if isinstance(made, Arithmetic) else rest,
    }
    for name, source in sources.items():
        yield f"  {name:12}{size(getattr(memory, name)):>11}   {source}"
    if isinstance(made, Arithmetic):
        yield from (f"    {size(one.amount):>11}   {one.name}: {one.source}" for one in made.memory)
    share = memory.total / memory.hbm
    verdict = "fits" if memory.fits else "does not fit"
    yield f"  {'total':12}{size(memory.total):>11}   {share:.0%} of the device: {verdict}"
    if not memory.fits:
        yield f"  largest: {memory.largest}"
        tried = "micro-batches, rows, rematerialization, the same devices along other axes"
        yield f"  by arithmetic it would fit with{'' if plan.remedies else f' no single change of {tried}'}"
        yield from (f"    {one.flags}  ({size(one.total)})" for one in plan.remedies)
        yield "  --search looks at all layouts of these devices; more devices are the last resort"


def _collectives(plan: Plan) -> Iterator[str]:
    by_shapes = isinstance(plan.made, Arithmetic)
    last = "for" if by_shapes else "asynchronous"
    yield "communication of one device and step"
    yield f"  {'what':20}{'axes':26}{'instructions':>13}{'executed':>10}{'payload':>12}{'sent':>12}  {last}"
    for (kind, axes), row in hlo.summary(plan.sent).items():
        hidden = row["asynchronous"] / row["payload"] if row["payload"] else 0
        what = dict.fromkeys(one.op_name for one in plan.sent if (one.kind, one.axes) == (kind, axes))
        last = "; ".join(what) if by_shapes else f"{hidden:.0%}"
        yield (
            f"  {kind:20}{' x '.join(axes) or 'irregular':26}{row['static']:>13,}{row['executed']:>10,}"
            f"{size(row['payload']):>12}{size(row['sent']):>12}  {last}"
        )


def _times(plan: Plan) -> Iterator[str]:
    times, made = plan.times, plan.made
    by_shapes = isinstance(made, Arithmetic)
    yield "predicted step"
    kernels = "counted cycles of KDA, operations of grouped matmuls over the peak"
    if not plan.topology.is_tpu:
        kernels = "operations of KDA and of the experts" if by_shapes else "none: all is counted above"
    rows = {
        "fused operations": (
            times.fused,
            "operations and bytes over what the device can do" if by_shapes else made.fused,
        ),
        "kernels": (times.kernels, kernels),
        "exposed communication": (times.exposed, _of_communication(plan)),
        "step": (times.step, f"bound by {times.binding}"),
    }
    for name, (time, source) in rows.items():
        yield f"  {name:24}{seconds(time):>11}   {source}"
    yield f"  {'model FLOP utilisation':24}{times.mfu:>11.1%}   at most: stalls, host and network latency are not in it"
    if by_shapes:
        yield "  in parts"
        yield from (f"    {seconds(one.amount):>11}   {one.name}: {one.source}" for one in made.times)
        yield f"computed in {made.seconds:.1f} s"
        return
    if made.unknown:
        yield f"  not in it either: the kernels {', '.join(made.unknown)}"
    yield f"lowered in {made.lower_seconds:.0f} s, compiled in {made.compile_seconds:.0f} s"


def _of_communication(plan: Plan) -> str:
    if isinstance(plan.made, Arithmetic):
        return "all of it, by link bandwidth: what hides behind computation only a schedule says"
    return f"of {seconds(plan.times.communication)} by link bandwidth"


def as_json(plan: Plan, config: TrainConfig, name: str) -> dict:
    """Everything that the tables show, for other programs, and the whole configuration. name: what it was made from."""
    times, memory, made = plan.times, plan.memory, plan.made
    sent = [
        {"kind": kind, "axes": list(axes), **row} for (kind, axes), row in hlo.summary(plan.sent).items()
    ]  # fmt: skip
    found = {
        "name": name,
        "config": config_io.to_dict(config),
        "topology": plan.topology.name,
        "layout": layouts.text(plan.layout),
        "made": type(made).__name__.lower(),
        "memory": {**vars(memory), "total": memory.total, "fits": memory.fits},
        "collectives": sent,
        "seconds": {**vars(times), "step": times.step},
        "mfu": times.mfu,
        "binding": times.binding,
        "remedies": [one._asdict() for one in plan.remedies],
    }
    if isinstance(made, Arithmetic):
        terms = {"memory_terms": made.memory, "time_terms": made.times}
        return found | {"peak": made.peak} | {name: [one._asdict() for one in part] for name, part in terms.items()}
    return found | {
        "fused_source": made.fused,
        "unknown_kernels": made.unknown,
        "lower_seconds": made.lower_seconds,
        "compile_seconds": made.compile_seconds,
    }


def write(plan: Plan, config: TrainConfig, name: str, folder: pathlib.Path) -> None:
    """``plan.txt``, ``plan.json`` and ``plan.png`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_text(folder / "plan.txt", text(plan) + "\n")
    run_folder.write_text(folder / "plan.json", json.dumps(as_json(plan, config, name), indent=1) + "\n")
    figure(plan).savefig(folder / "plan.png", dpi=150)


def figure(plan: Plan) -> Figure:
    """Memory and time as stacked bars."""
    drawn = Figure(figsize=(9, 3.6), layout="constrained")
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
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2, frameon=False)
    how = ", by arithmetic" if isinstance(plan.made, Arithmetic) else ""
    drawn.suptitle(f"{plan.topology.name}  {layouts.text(plan.layout)}{how}", fontsize="small")
    return drawn


def _bar(axes, parts: dict[str, float]) -> None:
    start = 0.0
    for name, width in parts.items():
        axes.barh(0, width, left=start, label=f"{name} {width:.3g}")
        start += width
