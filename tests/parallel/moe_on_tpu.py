"""The schedule of one MoE layer on a TPU7x slice, compiled from shapes: one name per line of what is issued between the
start and the end of the dispatch. Needs libtpu; run by test_overlap.py.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from k3jax import config as c
from k3jax import layouts, placement, presets, runtime, sharding
from k3jax.model.moe import MoELayer
from k3jax.plan import chips, hlo

LAYOUT = layouts.load("fsdp=2,expert=2,tensor=2,transport=RaggedAllToAll")
MOE = c.MoE(experts=8, active=2, width=512, shared=1)


def lowered() -> jax.stages.Lowered:
    """The layer's forward pass."""
    model = c.replace(presets.load("kimi_k3").model, dim=512, moe=MOE)
    mesh = placement.make_mesh(LAYOUT.sizes, chips.devices_of(chips.topology("tpu7x:2x2x1")))
    graph, state = nnx.split(jax.eval_shape(lambda: MoELayer(model)))

    def place(variable):
        axes = variable.get_metadata().get("axes")
        where = sharding.fitting(mesh, axes, variable.shape) if axes else sharding.replicated(mesh)
        return variable.replace(jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=where))

    def layer(state, x, valid):
        return nnx.merge(graph, state)(model, x, valid, observe=False, transport=LAYOUT.transport)[0]

    state = jax.tree.map(place, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    tokens = NamedSharding(mesh, sharding.TOKENS)
    x = jax.ShapeDtypeStruct((4, 4096, model.dim), jnp.bfloat16, sharding=tokens)
    valid = jax.ShapeDtypeStruct(x.shape[:2], bool, sharding=tokens)
    with jax.set_mesh(mesh):
        return jax.jit(layer).lower(state, x, valid)


def main() -> None:
    runtime.start_without_devices()
    program = hlo.Program.parse(lowered().compile().as_text())
    issued = program.computations[program.entry]
    ends = [n for n, one in enumerate(issued) if "ragged-all-to-all" in one.name and one.opcode.endswith("-done")]
    end = max(ends, key=lambda n: issued[n].bytes)
    update = issued[end].operands.strip().lstrip("%")
    begin = next(n for n, one in enumerate(issued) if one.name == update)
    print("\n".join(one.op_name or one.name for one in issued[begin:end]))


if __name__ == "__main__":
    main()
