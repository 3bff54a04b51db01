"""Muon: steepest descent in the spectral norm, block by block (Jordan 2024; Moonlight, arXiv 2502.16982)."""

import collections
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3jax.config_optim import Muon, NewtonSchulz, NewtonSchulzDtype
from k3jax.optim.blocks import BlockLayout, block_layout
from k3jax.roles import meta_by_path, meta_of

_JORDAN = (3.4445, -4.7750, 2.0315)
_CUBIC_TAIL = (2.0, -1.5, 0.5)

# Minimax odd quintics for singular values in [1e-3, 1], each on the range the one before leaves (arXiv 2505.16932).
_POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_POLAR_TAIL = (1.875, -1.25, 0.375)


def _with_margin(table, *, margin: float = 1.01):
    """p(x) -> p(x / margin): a singular value that rounding lifted above its range does not diverge."""
    return tuple((a / margin, b / margin**3, c / margin**5) for a, b, c in table)


NEWTON_SCHULZ: dict[NewtonSchulz, tuple[tuple[float, float, float], ...]] = {
    "jordan5": (_JORDAN,) * 5,
    "polar5": _with_margin(_POLAR[:5]),
    "polar8": (*_with_margin(_POLAR), _POLAR_TAIL),
    "hybrid10": (_JORDAN,) * 8 + (_CUBIC_TAIL,) * 2,
}
"""Coefficients (a, b, c) of each step X <- (a I + b A + c A^2) X with A = X X^T.

Where singular values in [1e-3, 1] of the normalized block end: jordan5 [0.47, 1.20] (0.68 from 1e-2; it does not
converge, by design), polar5 [0.85, 1.12], polar8 and hybrid10 within 1e-3 of one.
"""


def newton_schulz(
    x: jax.Array, *, schedule: NewtonSchulz = "polar5", dtype: NewtonSchulzDtype = "float32", eps: float = 1e-7
) -> jax.Array:
    """Maps each matrix U S V^T of a stack to nearly U V^T.

    The norm, and every sum inside a product, is float32: bfloat16 has too few bits to hold a sum over a long axis. With
    dtype float32 the products run at full precision on every backend.

    Args:
      x: [..., rows, cols].
      schedule: a key of `NEWTON_SCHULZ`.
      dtype: of the factors of each matrix product.
      eps: added to the Frobenius norm. A zero matrix stays zero.

    Returns:
      [..., rows, cols], float32.
    """
    if x.shape[-2] > x.shape[-1]:
        wide = newton_schulz(jnp.swapaxes(x, -1, -2), schedule=schedule, dtype=dtype, eps=eps)
        return jnp.swapaxes(wide, -1, -2)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None

    def product(left, right, equation):
        left, right = left.astype(dtype), right.astype(dtype)
        return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)

    def step(x, coefficients):
        a, b, c = coefficients
        gram = product(x, x, "...ik,...jk->...ij")
        polynomial = b * gram + c * product(gram, gram, "...ij,...jk->...ik")
        return a * x + product(polynomial, x, "...ij,...jk->...ik"), None

    x = x.astype(jnp.float32)
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + eps)
    return jax.lax.scan(step, x, jnp.asarray(NEWTON_SCHULZ[schedule], jnp.float32))[0]


def orthogonalize(updates: Any, meta: Any, *, config: Muon) -> Any:
    """Orthogonalizes every block of every array and scales it to the RMS that AdamW updates have.

    Blocks of one shape and role, from all parameters, form one stack and share one Newton-Schulz loop: the number of
    loops to compile does not grow with the number of parameters. Roles stay apart because they are sharded differently.

    Args:
      updates: tree of arrays; masked-out nodes are left alone.
      meta: tree of ParamMeta that covers the arrays.
      config: names the schedule, the scale of a block (`config.rms * sqrt(max(rows, cols))`), and so on.

    Returns:
      The tree, float32.
    """
    metas = meta_by_path(meta)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    layouts = []
    stacks = collections.defaultdict(list)
    for i, (path, x) in enumerate(leaves):
        meta = meta_of(metas, path, x.ndim)
        layout = block_layout(meta, x.shape, heads=config.heads)
        layouts.append(layout)
        stacks[meta.role, layout.short, layout.long].append(i)
    results = [None] * len(leaves)
    for members in stacks.values():
        arrays = [leaves[i][1] for i in members]
        for i, result in zip(members, _orthogonalize_stack(arrays, [layouts[i] for i in members], config)):
            results[i] = result
    return jax.tree.unflatten(treedef, results)


def _orthogonalize_stack(arrays: list[jax.Array], layouts: list[BlockLayout], config: Muon) -> list[jax.Array]:
    """Orthogonalizes arrays whose blocks have one shape, in one batch."""
    stack = jnp.concatenate([layout.split(x) for x, layout in zip(arrays, layouts)])
    stack = newton_schulz(stack, schedule=config.newton_schulz, dtype=config.dtype, eps=config.eps)
    stack = config.scale(layouts[0].long) * stack
    ends = list(itertools.accumulate(layout.count for layout in layouts))
    return [layout.merge(part) for layout, part in zip(layouts, jnp.split(stack, ends[:-1]))]


Orthogonalize = Callable[..., Any]
"""`orthogonalize`, or a function of the same arguments."""


class MuonState(NamedTuple):
    """Averaged gradients, float32, shaped like the parameters."""

    momentum: optax.Updates


def scale_by_muon(
    config: Muon, meta: Any, *, orthogonalize: Orthogonalize = orthogonalize
) -> optax.GradientTransformation:
    """Replaces gradients by orthogonalized Nesterov momentum; neither learning rate nor weight decay.

        M <- mu M + (1 - mu) G;    U = mu M + (1 - mu) G;    update = rms sqrt(max(rows, cols)) NewtonSchulz(U)

    (Moonlight, arXiv 2502.16982, with an average in place of a sum, a difference that Newton-Schulz normalizes away.)
    Momentum and arithmetic are float32 for gradients of any dtype; the update has the gradient's dtype.

    Args:
      config: coefficients.
      meta: tree of ParamMeta that covers the parameters; it may name more than the transformation is given.
      orthogonalize: what to call; `k3jax.parallel.muon.orthogonalize_arrays` for parameters on several devices.

    Raises:
      ValueError: on a parameter without a role, naming its path.
    """
    meta_by_path(meta)  # raises here rather than in the first step

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params))

    def update(gradients, state, params=None):
        del params
        mu = config.momentum

        def average(m, g):
            return mu * m + (1 - mu) * g.astype(jnp.float32)

        momentum = jax.tree.map(average, state.momentum, gradients)
        with jax.named_scope("muon"):
            updates = orthogonalize(jax.tree.map(average, momentum, gradients), meta, config=config)
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, gradients)
        return updates, MuonState(momentum)

    return optax.GradientTransformation(init, update)
