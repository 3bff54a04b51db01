"""Which device a program is built for, asked of the mesh in scope and of the lowering, never of what is attached."""

import functools
from typing import NamedTuple

import jax
from absl import logging
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def is_tpu() -> bool | None:
    """Whether the mesh in scope (``jax.set_mesh``, ``jax.sharding.use_abstract_mesh``) is of TPUs. None: no mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform == "tpu"


def axes_outside_shard_map() -> tuple[str, ...]:
    """Mesh axes that keep a kernel from being called here: only inside ``jax.shard_map`` does it see local arrays.

    Explicit axes of any size, for a kernel's blocks have no sharding; automatic ones that hold several devices.
    """
    mesh, kinds = jax.sharding.get_abstract_mesh(), jax.sharding.AxisType
    return tuple(
        name
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        if kind == kinds.Explicit or (kind == kinds.Auto and size > 1)
    )


class Choice(NamedTuple):
    """An implementation, and why it is the one to run."""

    implementation: str
    reason: str


def describe(missing: str, *, platform: str) -> Choice:
    """What `run` takes in a program lowered for "cpu", "gpu" or "tpu"; missing as for `run`."""
    if platform != "tpu":
        return Choice("xla", "the target is no TPU")
    return Choice("xla", missing) if missing else Choice("mosaic_tpu", "the target is a TPU")


def run(kernel, plain, *arrays, title: str, missing: str):
    """kernel(*arrays) where the program is lowered for TPU, plain(*arrays) for all other targets.

    title: what is computed on which shapes, for the log, which says once which of the two runs.
    missing: why the kernel does not take the arrays, empty if it does; then plain runs everywhere.
    """
    tpu = is_tpu()
    if tpu is None and not missing:
        log_once(f"{title}: mosaic_tpu if it is lowered for TPU, else xla")
        return jax.lax.platform_dependent(*arrays, tpu=kernel, default=plain)
    choice = describe(missing, platform="tpu" if tpu is not False else "other")
    log_once(f"{title}: {choice.implementation}, {choice.reason}")
    return (kernel if choice.implementation == "mosaic_tpu" else plain)(*arrays)


@functools.cache
def log_once(line):
    """Each line once, however often a program is traced."""
    logging.info(line)


def only_on_tpu(x, *, name: str):
    """x; lowering it for another target raises NotImplementedError in the words of `name`. x must be of integers."""
    return _only_on_tpu.bind(x, name=name)


_only_on_tpu = Primitive("only_on_tpu")
_only_on_tpu.def_impl(jax.jit(_only_on_tpu.bind, static_argnames="name"))
_only_on_tpu.def_abstract_eval(lambda x, *, name: x)
batching.defvectorized(_only_on_tpu)


def _refuse(context, x, *, name):
    platforms = ", ".join(context.module_context.platforms)
    raise NotImplementedError(
        f"{name} runs on TPU, and this program is being lowered for {platforms}; "
        "leave the implementation to the target (None), or name one that runs anywhere"
    )


mlir.register_lowering(_only_on_tpu, _refuse)
mlir.register_lowering(_only_on_tpu, lambda context, x, *, name: [x], platform="tpu")
