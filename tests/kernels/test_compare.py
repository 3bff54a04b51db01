"""How chains of dependent matrix products are counted."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.product_chains import chains


def program(kernel, scratch=()):
    x = jnp.ones((8, 8))
    call = pl.pallas_call(kernel, out_shape=x, scratch_shapes=scratch, interpret=True)
    return jax.make_jaxpr(call)(x)


def test_chains_follow_values_loops_branches_and_references():
    def loops(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jax.lax.fori_loop(0, 3, lambda _, y: y @ x, x @ x) + jax.lax.fori_loop(0, 2, lambda _, y: y @ x, x)

    def stateful(x_ref, o_ref, state_ref):
        x, state = x_ref[...], state_ref[...]

        @pl.when(x[0, 0] > 0)
        def _():
            state_ref[...] = (x @ x @ x) @ state @ x

        o_ref[...] = x_ref[...] @ x

    assert chains(program(loops)) == (4, 0)
    assert chains(program(stateful, [pltpu.VMEM((8, 8), jnp.float32)])) == (4, 2)
    both = jax.make_jaxpr(lambda x: jax.jit(lambda y: y)(x))(jnp.ones(3))
    assert chains(both) == (0, 0)
