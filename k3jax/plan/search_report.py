"""A search as text, as JSON and as a picture, and the plan of its best layout."""

import json
import pathlib

from matplotlib.figure import Figure

from k3jax import run_folder
from k3jax.plan import report
from k3jax.plan.search import Candidate, Found
from k3jax.plan.units import seconds, size
from k3jax.run_config import TrainConfig

GB = 1e9
SHOWN = 20


def text(found: Found) -> str:
    """The ranking."""
    lines = [
        f"{found.legal:,} ways to share the {found.topology.devices:,} devices of {found.topology.name}; with other "
        f"transports and spreadings of the best {len(found.fitting):,} layouts fit",
        f"{'':>4}{'step':>11}{'HBM':>11}  {'bound by':24}{'from':12}layout",
    ]
    best = {one.layout for one in found.best}
    for number, one in enumerate(found.fitting[:SHOWN], 1):
        mark = "*" if one.layout in best else " "
        lines.append(
            f"{number:>3}{mark}{seconds(one.step):>11}{size(one.bytes):>11}  {one.binding:24}{_how(one):12}{one.layout}"
        )
        if one.late:
            lines.append(f"{'':6}not compiled: {one.late}")
    if len(found.fitting) > SHOWN:
        lines.append(f"  and {len(found.fitting) - SHOWN:,} more")
    lines.append("  * is beaten by none in both memory and time")
    for one in found.failed:
        why = one.failure or f"does not fit: {size(one.bytes)} of {size(found.topology.chip.hbm)}"
        lines.append(f"  failed: {one.layout}\n{'':10}{why}")
    return "\n".join(lines)


def _how(one: Candidate) -> str:
    return "arithmetic" if one.compiled is None else "compiler"


def as_json(found: Found, config: TrainConfig, name: str) -> dict:
    """The ranking for other programs, with the whole plans of those that no other beats."""
    best = {one.layout for one in found.best}
    return {
        "name": name,
        "topology": found.topology.name,
        "shapes": found.legal,
        "layouts": [
            {
                "layout": one.layout,
                "made": _how(one),
                "step": one.step,
                "bytes": one.bytes,
                "fits": one.fits,
                "binding": one.binding,
                "undominated": one.layout in best,
                "failure": one.failure or one.late,
            }
            for one in (*found.fitting, *found.failed)
        ],
        "best": [plan(one, config, name) for one in found.best],
    }


def plan(one: Candidate, config: TrainConfig, name: str) -> dict:
    """The plan of a candidate, as `report.write` leaves it: the compiler's if there is one."""
    return report.as_json(one.predicted, config, name) if one.compiled is None else one.compiled


def write(found: Found, config: TrainConfig, name: str, folder: pathlib.Path) -> None:
    """``search.txt``, ``search.json`` and ``search.png``, and the first layout's ``plan.json``, from which
    `launch.from_plan` makes a run."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_text(folder / "search.txt", text(found) + "\n")
    run_folder.write_text(folder / "search.json", json.dumps(as_json(found, config, name), indent=1) + "\n")
    if found.fitting:
        run_folder.write_text(folder / "plan.json", json.dumps(plan(found.fitting[0], config, name), indent=1) + "\n")
    figure(found).savefig(folder / "search.png", dpi=150)


def figure(found: Found) -> Figure:
    """Memory against predicted time."""
    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.subplots()
    for how, color in (("arithmetic", "tab:gray"), ("compiler", "tab:blue")):
        shown = [one for one in found.fitting if _how(one) == how and one.fits]
        axes.scatter([one.bytes / GB for one in shown], [one.step for one in shown], s=14, color=color, label=how)
    front = sorted(found.best, key=lambda one: one.bytes)
    axes.plot([one.bytes / GB for one in front], [one.step for one in front], color="black", label="beaten by none")
    for one in front[:6]:
        axes.annotate(one.layout.split(",transport")[0], (one.bytes / GB, one.step), fontsize="x-small")
    axes.axvline(found.topology.chip.hbm / GB, color="black", linestyle="--", label="capacity")
    axes.set_xlabel("HBM per device, GB")
    axes.set_ylabel("predicted step, s")
    axes.set_yscale("log")
    axes.legend(fontsize="small", frameon=False)
    drawn.suptitle(f"{found.topology.name}: {found.legal:,} ways to share the devices", fontsize="medium")
    return drawn
