"""The optimizer of a run: roles choose the group, the configuration chooses what updates it."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3jax.config_optim import AdamW, Muon, Optimizer
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
    rate = make_schedule(config.schedule, total_steps)
    groups = {name: _group(getattr(config, name), meta, rate, orthogonalize) for name in ("matrices", "router", "rest")}
    by_group = optax.partition(groups, lambda params: _map_meta(params, metas, lambda m: m.role.group))
    if config.clip_norm is None:
        return by_group
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), by_group)


def _group(
    config: Muon | AdamW, meta, rate: optax.Schedule, orthogonalize: Orthogonalize
) -> optax.GradientTransformation:
    metas = meta_by_path(meta)

    def scaled_rate(count):
        return config.lr_scale * rate(count)

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
    return optax.chain(scale, decay, optax.scale_by_learning_rate(scaled_rate))


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
