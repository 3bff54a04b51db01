"""What would make a step fit that does not: changes of batch, rematerialization and layout, and their bytes."""

from collections.abc import Iterator
from typing import NamedTuple

from k3jax import layout_report, memory
from k3jax.config import ConfigError, replace
from k3jax.config_layout import Layout
from k3jax.plan.needs import Memory
from k3jax.run_config import TrainConfig


class Remedy(NamedTuple):
    """A change, as the flags that make it, and the bytes per device that the step would then need by arithmetic."""

    flags: str
    total: int


def remedies(config: TrainConfig, layout: Layout, needs: Memory) -> list[Remedy]:
    """Changes that would bring the step under the capacity, the least saving first. What is not known of a changed
    program, its working set, is taken to stay, or to halve with the tokens of a micro-batch."""
    found = [remedy for remedy in _changes(config, layout, needs) if remedy.total <= needs.hbm]
    return sorted(found, key=lambda remedy: -remedy.total)


def _changes(config: TrainConfig, layout: Layout, needs: Memory) -> Iterator[Remedy]:
    rows = config.batch // config.micro_batches
    ways = layout.data * layout.fsdp * layout.expert
    for factor in (2, 4, 8):
        if rows % (factor * ways) == 0:
            fewer = needs.saved * (factor - 1) // factor + max(needs.other, 0) * (factor - 1) // factor
            extra = needs.gradients if config.micro_batches == 1 else 0
            yield Remedy(f"--set micro_batches={config.micro_batches * factor}", needs.total - fewer + extra)
            yield Remedy(f"--batch {config.batch // factor}", needs.total - fewer)
    if config.model.remat != "full":
        kept, _ = memory.kept(config.model, min(config.seq_len, 1024))
        least, _ = memory.kept(replace(config.model, remat="full"), min(config.seq_len, 1024))
        yield Remedy("--remat full", needs.total - round(needs.saved * (1 - least / kept)))
    yield from _spread(config, layout, needs)


def _spread(config: TrainConfig, layout: Layout, needs: Memory) -> Iterator[Remedy]:
    """State over more axes of the same mesh."""
    before = sum(one.bytes for one in layout_report.state(config, layout))
    for name, wider in (("dense", ("fsdp", "expert")), ("optimizer", ("data", "context"))):
        changed = replace(layout, **{name: wider})
        if changed == layout:
            continue
        try:
            after = sum(one.bytes for one in layout_report.state(config, changed))
        except ConfigError:
            continue
        if after < before:
            yield Remedy(f"--layout ...,{name}={wider!r}", needs.total - (before - after))
