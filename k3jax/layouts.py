"""Named layouts, each for a configuration and a slice, and layouts from the text of a command."""

import re

from k3jax import config_io
from k3jax.config import ConfigError
from k3jax.config_layout import Layout
from k3jax.parallel.transport import Balanced, RaggedAllToAll

OTHER = ("transport", "mla", "dense", "optimizer")

LAYOUTS: dict[str, Layout] = {
    # nano on 8 devices: one row on each, cut in two along time.
    "nano_8": Layout(fsdp=2, expert=2, context=2),
    # The rungs of Attention Residuals on 16 chips (v5e:4x4, v6e:4x4, v5p:2x2x4). Their heads are 12 to 17, so that
    # nothing is split by tensor; all their batches divide by 16.
    "attnres_16": Layout(fsdp=2, expert=8),
    # The first four of them on 64 chips (v5e:8x8, v6e:8x8, v5p:4x4x4). Their widths divide by 16, not all by 64.
    "attnres_64": Layout(data=4, fsdp=2, expert=8, optimizer=("data",)),
    # kimi_linear_48b on v5p:8x8x8: 16 experts a chip, 8 heads.
    "kimi_linear_48b_v5p": Layout(fsdp=8, expert=16, tensor=4),
    # The same with rows of a million tokens: 32K tokens of one row on a chip, 16K between sub-layers.
    "kimi_linear_48b_1m_v5p": Layout(expert=8, context=32, tensor=2),
    # kimi_k3 on v5p:16x16x16, 4,096 chips: 14 experts a chip, 24 heads. Dense weights, 2 % of the parameters, are
    # gathered from the 64 chips of the expert axis only, in shards of 112 rows: over all 1,024 a shard has 7. What the
    # optimizer keeps of them is spread over all, so that no two chips orthogonalize the same matrix.
    "kimi_k3_v5p": Layout(
        fsdp=16, expert=64, tensor=4, dense=("expert",), optimizer=("fsdp",), transport=RaggedAllToAll()
    ),
    # kimi_k3 on tpu7x:16x16x16, 8,192 devices: 12 heads a device.
    "kimi_k3_tpu7x": Layout(
        fsdp=16, expert=64, tensor=8, dense=("expert",), optimizer=("fsdp",), transport=RaggedAllToAll()
    ),
    # As kimi_k3_v5p, with the balanced plan: the same rows on every chip whatever the router does.
    "kimi_k3_v5p_balanced": Layout(
        fsdp=16, expert=64, tensor=4, dense=("expert",), optimizer=("fsdp",), transport=Balanced()
    ),
}


def load(text: str) -> Layout:
    """A layout by name, or from fields: ``fsdp=4,tensor=2,transport=Balanced``; a name may be followed by fields.

    Raises:
      ConfigError: no such layout or axis, or a size that is none.
    """
    first, *rest = _fields(text) or [""]
    if "=" in first or not first:
        base, settings = Layout(), [first, *rest] if first else []
    elif first in LAYOUTS:
        base, settings = LAYOUTS[first], rest
    else:
        near = config_io.did_you_mean(first, LAYOUTS)
        raise ConfigError(
            f"--layout={text}: {first!r} is no layout and not of the form axis=size{near} "
            f"(layouts: {', '.join(LAYOUTS)})"
        )
    try:
        for setting in settings:
            _check(setting, base)
        return config_io.override(base, settings)
    except ConfigError as error:
        raise ConfigError(f"--layout={text}: {error}") from error


def _fields(text: str) -> list[str]:
    """The parts between commas that no parenthesis encloses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _check(setting: str, base: Layout) -> None:
    """Raises ConfigError for an axis that does not exist or a size that is none."""
    name, _, value = setting.partition("=")
    if name.partition(".")[0] in OTHER:
        return
    if name not in base.sizes:
        near = config_io.did_you_mean(name, [*base.sizes, *OTHER])
        raise ConfigError(
            f"there is no axis {name!r}{near}; the axes are {', '.join(base.sizes)}; the other fields"
            f" are {', '.join(OTHER)}"
        )
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{setting!r} is not of the form axis=size with a size of at least 1")


def product(layout: Layout) -> str:
    """``fsdp 2 x expert 4 = 8 devices``."""
    sizes = [f"{name} {size}" for name, size in layout.sizes.items() if size > 1]
    return f"{' x '.join(sizes)} = {layout.devices} devices" if sizes else "1 device"


def text(layout: Layout) -> str:
    """What :func:`load` reads the layout from."""
    default, plain = Layout(), [f"{name}={size}" for name, size in layout.sizes.items() if size > 1]
    rest = [f"{name}={getattr(layout, name)!r}" for name in OTHER
            if getattr(layout, name) != getattr(default, name)]  # fmt: skip
    return ",".join(plain + rest)
