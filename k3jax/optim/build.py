"""The optimizer of a run: roles choose the group, the configuration chooses what updates it."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3jax.config_optim import AdamW, Muon, Optimizer, Schedule, Tunable
from k3jax.optim.muon import Orthogonalize, orthogonalize, scale_by_muon
from k3jax.optim.schedule import make_schedule
from k3jax.roles import meta_by_path, meta_of


def build_optimizer(
    config: Optimizer, meta: Any, total_steps: int, *, orthogonalize: Orthogonalize = orthogonalize
) -> optax.GradientTransformation:
    """Gradient clipping, then Muon or AdamW per group, each with its learning rate and decoupled weight decay.

    Args:
      config: the groups, the schedule and the clip.
      meta: tree of ParamMeta with the structure of the parameters.
      total_steps: number of optimizer steps of the whole run, for the schedule.
      orthogonalize: as for `scale_by_muon`.

    Returns:
      A transformation of trees of arrays; `update` needs the parameters, for weight decay.

    Raises:
      ValueError: on a parameter without a role, naming its path: here if `meta` lacks the leaf, in `init` if it lacks
        the path.
    """
    metas = meta_by_path(meta)

    def group(name: str) -> optax.GradientTransformation:
        updater = getattr(config, name)
        rate = _scale_by_rate(config.schedule, total_steps, updater.lr_scale)
        return _group(updater, meta, rate, orthogonalize)

    groups = {name: group(name) for name in ("matrices", "router", "rest")}
    by_group = optax.partition(groups, lambda params: _map_meta(params, metas, lambda m: m.role.group))
    if config.clip_norm is None:
        return by_group
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), by_group)


def _group(
    config: Muon | AdamW, meta, rate: optax.GradientTransformation, orthogonalize: Orthogonalize
) -> optax.GradientTransformation:
    metas = meta_by_path(meta)

    def decayed(params):
        return _map_meta(params, metas, lambda m: m.role.decayed)

    match config:
        case Muon():
            scale = scale_by_muon(config, meta, orthogonalize=orthogonalize)
        case AdamW():
            scale = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.float32)
        case _:
            raise TypeError(f"a group of parameters takes Muon or AdamW, got {config!r}")
    decay = optax.add_decayed_weights(config.weight_decay, decayed)
    return optax.chain(scale, decay, rate)


class TunableState(NamedTuple):
    """count: [] int32, updates made. peak: [] float32, the largest rate of the schedule."""

    count: jax.Array
    peak: jax.Array


def _scale_by_rate(config: Schedule, total_steps: int, lr_scale: float) -> optax.GradientTransformation:
    """Multiplies updates by minus the scheduled rate times ``lr_scale``."""
    if not isinstance(config, Tunable):
        rate = make_schedule(config, total_steps)
        return optax.scale_by_learning_rate(lambda count: lr_scale * rate(count))

    def init(params):
        del params
        return TunableState(jnp.zeros((), jnp.int32), jnp.asarray(config.schedule.peak, jnp.float32))

    def update(updates, state, params=None):
        del params
        step = -lr_scale * make_schedule(config, total_steps, peak=state.peak)(state.count)
        updates = jax.tree.map(lambda u: step.astype(u.dtype) * u, updates)
        return updates, TunableState(optax.safe_increment(state.count), state.peak)

    return optax.GradientTransformation(init, update)


def learning_rate(config: Schedule, total_steps: int, opt_state: Any) -> jax.Array:
    """The rate of the next update of a state of :func:`build_optimizer`: skipped steps are no updates."""

    def first(name: str) -> jax.Array:
        return optax.tree.get_all_with_path(opt_state, name)[0][1]

    peak = first("peak") if isinstance(config, Tunable) else None
    return make_schedule(config, total_steps, peak=peak)(first("count"))


def _map_meta(tree, metas, fn):
    """The tree with each array replaced by fn(its ParamMeta)."""
    return jax.tree_util.tree_map_with_path(lambda path, x: fn(meta_of(metas, path, jnp.ndim(x))), tree)


def update_rms(updates: Any, meta: Any) -> dict[str, jax.Array]:
    """Root mean square of the updates of each role present, float32 scalars keyed by the role's value."""
    metas = meta_by_path(meta)
    squares, counts = collections.defaultdict(float), collections.Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        role = meta_of(metas, path, x.ndim).role.value
        squares[role] += jnp.sum(jnp.square(x.astype(jnp.float32)))
        counts[role] += x.size
    return {role: jnp.sqrt(squares[role] / float(counts[role])) for role in sorted(squares)}
