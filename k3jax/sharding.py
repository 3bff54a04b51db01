"""Mesh axes, and the one table that maps a parameter's logical axes to them.

Every parameter names its logical axes where it is made (:func:`k3jax.nn.param`); nobody else writes a mesh axis. All
mesh axes are always present, at size 1 where they are not used, so that a sharding rule never has to ask.
"""

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor", "pipeline")

RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "key": None,
    "value": None,
    "rank": None,
    "latent": "fsdp",
    "experts": "expert",
    "router": None,
    "ff": "tensor",
    "tap": None,
}


BATCH_AXES = ("data", "fsdp")


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The rows of a batch spread over the axes that hold different ones."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def fitting(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """Sharding of a parameter of this shape, whose last dimensions have these logical axes. A dimension that its mesh
    axis does not divide stays whole."""
    wanted = spec(axes, stacked=len(shape) - len(axes))
    fits = [axis is not None and size % mesh.shape[axis] == 0 for axis, size in zip(wanted, shape)]
    return NamedSharding(mesh, PartitionSpec(*(axis if fit else None for axis, fit in zip(wanted, fits))))


def spec(axes: Sequence[str], *, stacked: int = 0) -> PartitionSpec:
    """Sharding of a parameter with these logical axes, behind ``stacked`` unsharded layer axes.

    A mesh axis shards one dimension only: where two logical axes map to the same one, the first keeps it.

    Raises:
      KeyError: a logical axis without a rule; the message names it and lists those that exist.
    """
    used: set[str] = set()
    dims: list[str | None] = [None] * stacked
    for axis in axes:
        if axis not in RULES:
            raise KeyError(f"logical axis {axis!r} has no sharding rule; rules exist for {sorted(RULES)}")
        mesh_axis = RULES[axis]
        dims.append(None if mesh_axis in used else mesh_axis)
        used.add(mesh_axis)
    return PartitionSpec(*dims)
