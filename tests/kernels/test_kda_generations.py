"""The forward kernel overlaps two chunks on recent chips and not on others: the same bits, with documents in both."""

import jax
import jax.numpy as jnp
import numpy as np
from kda_cases import ARRAYS, QUICK, make_inputs

from pallas_kernels.kda import mosaic_tpu


def test_chips_before_v6e_give_the_same_bits(monkeypatch):
    """Two pairs of heads, whose second halves start in different rounds; a document that ends inside a chunk."""
    inputs = make_inputs(3, B=1, T=80, H=4, K=16, V=16)
    ids = jnp.asarray(np.repeat([0, 1], (40, 40))[None], jnp.int32)
    static = dict(lower_bound=-5.0, num_segments=None, chunk_size=32, interpret=True)
    results = []
    for recent in (True, False):
        monkeypatch.setattr(mosaic_tpu, "_recent_target", lambda recent=recent: recent)
        run = lambda x: mosaic_tpu.kda_mosaic_tpu(*(x[n] for n in ARRAYS), ids, **static)  # noqa: E731
        results.append(jax.jit(run, compiler_options=QUICK)(inputs))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.all(np.isfinite(results[0][0])) and np.any(results[0][0])
