"""States that are carried across chunks, and how the tokens of a chunk meet them.

There is one slot per document, or, when nobody asked for states by document, a single slot that holds the state of the
current one: the document that enters a chunk reads it, the document that leaves the chunk writes it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs
from pallas_kernels.kda.intra_chunk import einsum


class ChunkDocuments(NamedTuple):
    """Documents of the tokens of one chunk, or of all chunks along a leading axis. None: nothing to mask."""

    valid_BC: jax.Array | None = None  # False on padding
    ids_BC: jax.Array | None = None  # document of each token
    read_BC: jax.Array | None = None  # slot that the token reads, -1 for none
    write_BC: jax.Array | None = None  # slot that the token writes, -1 for none
    keep_B: jax.Array | None = None  # False where the single slot changes hands, so that its old content is dropped

    @property
    def same_BCC(self):
        """True where two tokens of the chunk share a document."""
        return None if self.ids_BC is None else self.ids_BC[:, :, None] == self.ids_BC[:, None, :]


def chunk_documents(segment_ids, shape_BT, chunk, *, per_document) -> ChunkDocuments:
    """Documents of every chunk, [chunks, B, ...], of tokens padded to a multiple of the chunk length."""
    B, T = shape_BT
    padding = -T % chunk

    def split(x_BT):
        return x_BT.reshape(B, -1, chunk).swapaxes(0, 1)

    if segment_ids is None:
        valid_BT = jnp.broadcast_to(jnp.arange(T + padding) < T, (B, T + padding))
        return ChunkDocuments(valid_BC=split(valid_BT)) if padding else ChunkDocuments()
    docs = inputs.documents(jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1))
    valid, ids = split(docs.valid), split(docs.ids)
    if per_document:
        return ChunkDocuments(valid, ids, ids, ids, jnp.ones(ids.shape[:2], bool))
    leaving = ids[:, :, -1:]
    entering = jnp.concatenate([ids[:1, :, :1], leaving[:-1]])
    read, write = (jnp.where(ids == x, 0, -1) for x in (entering, leaving))
    return ChunkDocuments(valid, ids, read, write, (entering == leaving)[..., 0])


def entering_state(slots_BNHKV, docs):
    """State [B, H, K, V] of the document that enters the chunk."""
    return slots_BNHKV[jnp.arange(slots_BNHKV.shape[0]), _entering_slot(slots_BNHKV, docs)]


def with_entering_state(slots_BNHKV, state_BHKV, docs):
    """The slots with the entering document's state put back."""
    return slots_BNHKV.at[jnp.arange(slots_BNHKV.shape[0]), _entering_slot(slots_BNHKV, docs)].set(state_BHKV)


def _entering_slot(slots_BNHKV, docs):
    B, N = slots_BNHKV.shape[:2]
    return jnp.zeros(B, jnp.int32) if N == 1 else docs.read_BC[:, 0]


def read(slots_BNHKV, x_BHCK, slot_BC):
    """[B, H, C, V]: row i of x times the state in the slot of token i; rows without a slot give zero."""
    return _rows_times_states("bhck,bhkv->bhcv", slots_BNHKV, x_BHCK, slot_BC)


def read_transposed(slots_BNHKV, y_BHCV, slot_BC):
    """[B, H, C, K]: the same with transposed states."""
    return _rows_times_states("bhcv,bhkv->bhck", slots_BNHKV, y_BHCV, slot_BC)


def _rows_times_states(equation, slots_BNHKV, x, slot_BC):
    if slots_BNHKV.shape[1] == 1:
        return _mask(einsum(equation, x, slots_BNHKV[:, 0]), None if slot_BC is None else slot_BC == 0)

    def add(n_B, y):
        product = einsum(equation, x, slots_BNHKV[jnp.arange(len(n_B)), n_B])
        return y + _mask(product, slot_BC == n_B[:, None])

    out = jax.eval_shape(lambda: einsum(equation, x, slots_BNHKV[:, 0]))
    return _each_document(slot_BC, add, jnp.zeros(out.shape, out.dtype))


def update(slots_BNHKV, decay_BHCK, outer, slot_BC, keep_B):
    """Decays every slot to the end of its document in this chunk and adds sum_i x_i y_i^T for each (x, y) in outer."""
    if slots_BNHKV.shape[1] == 1:
        decay_BHK = decay_BHCK[:, :, -1]
        if keep_B is not None:
            decay_BHK = jnp.where(keep_B[:, None, None], decay_BHK, 0)
        added = _outer_sum(outer, None if slot_BC is None else slot_BC == 0)
        return (decay_BHK[..., None] * slots_BNHKV[:, 0] + added)[:, None]

    def step(n_B, slots):
        b = jnp.arange(len(n_B))
        mine_BC = slot_BC == n_B[:, None]
        decay_BHK = einsum("bhck,bc->bhk", decay_BHCK, _last(mine_BC).astype(decay_BHCK.dtype))
        new = decay_BHK[..., None] * slots[b, n_B] + _outer_sum(outer, mine_BC)
        present = jnp.any(mine_BC, axis=1)[:, None, None, None]
        return slots.at[b, n_B].set(jnp.where(present, new, slots[b, n_B]))

    return _each_document(slot_BC, step, slots_BNHKV)


def decay_cotangent(slots_BNHKV, dslots_BNHKV, like_BHCK, slot_BC, keep_B):
    """Cotangent of decay_BHCK in ``update``: for each slot sum_v S * dS, at the last token of its document."""
    if slots_BNHKV.shape[1] == 1:
        ddecay_BHK = jnp.sum(slots_BNHKV[:, 0] * dslots_BNHKV[:, 0], axis=-1)
        if keep_B is not None:
            ddecay_BHK = jnp.where(keep_B[:, None, None], ddecay_BHK, 0)
        return jnp.zeros_like(like_BHCK).at[:, :, -1].set(ddecay_BHK)

    def add(n_B, ddecay_BHCK):
        b = jnp.arange(len(n_B))
        ddecay_BHK = jnp.sum(slots_BNHKV[b, n_B] * dslots_BNHKV[b, n_B], axis=-1)
        return ddecay_BHCK + _mask(ddecay_BHK[:, :, None], _last(slot_BC == n_B[:, None]))

    return _each_document(slot_BC, add, jnp.zeros_like(like_BHCK))


def _each_document(slot_BC, body, init):
    """Calls carry = body(n_B, carry) for the 1st, 2nd, ... document of each row of the chunk; not differentiable."""
    first_B, last_B = slot_BC[:, 0], slot_BC[:, -1]
    trips = jnp.max(last_B - first_B) + 1
    return jax.lax.fori_loop(0, trips, lambda i, carry: body(jnp.minimum(first_B + i, last_B + 1), carry), init)


def _last(mine_BC):
    return mine_BC & ~jnp.pad(mine_BC[:, 1:], ((0, 0), (0, 1)))


def _outer_sum(outer, mask_BC):
    return sum(einsum("bhck,bhcv->bhkv", _mask(x, mask_BC), y) for x, y in outer)


def _mask(x_BHCD, mask_BC):
    return x_BHCD if mask_BC is None else jnp.where(mask_BC[:, None, :, None], x_BHCD, 0)
