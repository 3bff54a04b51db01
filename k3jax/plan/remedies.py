"""What would make a step fit that does not: changes of batch, rematerialization and layout, and their bytes."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from k3jax import layout_report, layouts, placement
from k3jax.config import ConfigError, replace
from k3jax.config_layout import Layout
from k3jax.plan import arithmetic
from k3jax.plan.plans import Plan, Remedy
from k3jax.run_config import TrainConfig


class _Change(NamedTuple):
    flags: str
    config: TrainConfig
    layout: Layout


def remedied(config: TrainConfig, plan: Plan) -> Plan:
    """The plan, and if it does not fit with the changes that would bring it under the capacity, the least saving first.

    Of the same change in several degrees it is the smallest that is enough. What a change saves is what it saves by
    arithmetic, also for a compiled plan.
    """
    if plan.memory.fits:
        return plan
    now = arithmetic.unchecked(config, plan.layout, plan.topology).memory.total
    found = []
    for degrees in _changes(config, plan.layout):
        for one in degrees:
            total = plan.memory.total - now + _needs(one, plan)
            if total <= plan.memory.hbm:
                found.append(Remedy(one.flags, round(total)))
                break
    return dataclasses.replace(plan, remedies=sorted(found, key=lambda one: -one.total))


def _needs(change: _Change, plan: Plan) -> float:
    """Bytes by arithmetic; infinite where the model or the rows do not allow the change."""
    try:
        mesh = layout_report.mesh_of(change.layout)
        placement.check_model(change.config.model, mesh)
        placement.check_batch(change.config, mesh)
    except ConfigError:
        return float("inf")
    return arithmetic.unchecked(change.config, change.layout, plan.topology).memory.total


def _changes(config: TrainConfig, layout: Layout) -> Iterator[Iterator[_Change]]:
    rows = config.batch // config.micro_batches
    factors = _factors(rows)
    parts = [config.micro_batches * factor for factor in factors]
    yield (_Change(f"--set micro_batches={n}", replace(config, micro_batches=n), layout) for n in parts)
    yield (
        _Change(f"--batch {config.batch // n}", replace(config, batch=config.batch // n, stages=()), layout)
        for n in factors
    )
    if config.model.remat != "full":
        model = replace(config.model, remat="full")
        yield iter([_Change("--remat full", replace(config, model=model), layout)])
    for degrees in _moves(layout):
        yield (_Change(f'--layout "{layouts.text(one)}"', config, one) for one in degrees if one != layout)


def _moves(layout: Layout) -> Iterator[Iterator[Layout]]:
    """Layouts of the same devices: state over more of them, and rows cut into more pieces."""
    alike = tuple(name for name in ("data", "context") if layout.sizes[name] > 1)
    yield iter([replace(layout, dense=("fsdp", "expert"))])
    yield iter([replace(layout, optimizer=tuple(dict.fromkeys((*layout.optimizer, *alike))))])
    for old, new in (("data", "fsdp"), ("data", "context"), ("fsdp", "context")):
        size = layout.sizes[old]
        yield (replace(layout, **{old: size // n, new: layout.sizes[new] * n}) for n in _factors(size))


def _factors(number: int) -> list[int]:
    """What divides it, from 2 on."""
    return [factor for factor in range(2, number + 1) if number % factor == 0]
