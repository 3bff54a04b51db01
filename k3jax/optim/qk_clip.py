"""QK-Clip: shrinking the query and key weights of attention heads whose logits grew too large."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def qk_clip(layer: Mapping[str, jax.Array], max_logits: jax.Array, *, threshold: float) -> dict[str, jax.Array]:
    """Rescales the heads of an MLA layer so that logits seen in the step just made would not exceed `threshold`.

    With S_h the largest logit of head h before the softmax and gamma_h = min(1, threshold / S_h) (Kimi K2,
    arXiv 2507.20534): content queries and keys times sqrt(gamma_h) each, so that their product shrinks by gamma_h. The
    queries against the key part that all heads share (the 'rope' channels, unrotated in Kimi K3) times gamma_h, because
    the shared key cannot shrink for one head. Values, the latent and all other weights are returned as they are. A head
    at or below the threshold keeps its bits, and so does one whose S is not finite: scaling by it would erase the head.

    KDA has no use for it: its queries and keys have unit length.

    Args:
      layer: parameters of one MLA layer (or a stack of them), with `q_up` [..., R, H, nope + rope] or, without q-LoRA,
        `q` [..., D, H, nope + rope], and `k_up` [..., R, H, nope].
      max_logits: S, [..., H], over every token of the global batch.
      threshold: tau.

    Returns:
      A new dict with the two arrays replaced.

    Raises:
      ValueError: the layer is not an MLA layer, or the shapes do not belong together.
    """
    q_name = "q_up" if "q_up" in layer else "q"
    if q_name not in layer or "k_up" not in layer:
        raise ValueError(f"qk_clip needs an MLA layer with 'q_up' or 'q', and 'k_up'; got {sorted(layer)}")
    q, k_up = layer[q_name], layer["k_up"]
    heads = (*k_up.shape[:-3], k_up.shape[-2])
    if max_logits.shape != heads or (*q.shape[:-3], q.shape[-2]) != heads or q.shape[-1] < k_up.shape[-1]:
        raise ValueError(f"shapes do not match: {q_name} {q.shape}, k_up {k_up.shape}, max_logits {max_logits.shape}")
    s = max_logits.astype(jnp.float32)
    gamma = jnp.where((s > threshold) & jnp.isfinite(s), threshold / s, 1.0)[..., None, :, None]
    is_content = jnp.arange(q.shape[-1]) < k_up.shape[-1]
    q_scale = jnp.where(is_content, jnp.sqrt(gamma), gamma)
    return {**layer, q_name: (q * q_scale).astype(q.dtype), "k_up": (k_up * jnp.sqrt(gamma)).astype(k_up.dtype)}
