"""Every parameter of every preset has a role and a sharding rule, and one that has not is refused."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from k3jax import nn, presets, sharding
from k3jax.accounting import parameters
from k3jax.model import layout, weights
from k3jax.roles import Role, meta_by_path, path_name


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_every_parameter_has_a_role_and_a_rule(name):
    model = presets.load(name).model
    structure = weights.structure(model)
    metas = meta_by_path(structure.meta)
    shapes = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(structure.shapes.params)}
    assert set(metas) == set(shapes)
    segments = layout.plan(model.kinds)
    for path, leaf in shapes.items():
        meta, stacked = metas[path], 2 if path.startswith("segments/") else 0
        assert leaf.dtype == jnp.float32, path
        assert leaf.ndim == len(meta.axes) + stacked, path
        if stacked:
            _, segment, run, *_ = path.split("/")
            layers = (segments[int(segment)].repeats, segments[int(segment)].runs[int(run)].count)
            assert leaf.shape[:2] == layers, path
        spec = sharding.spec(meta.axes, stacked=stacked)
        used = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        assert len(spec) == leaf.ndim and len(used) == len(set(used)), path
        assert set(used) <= set(sharding.MESH_AXES), path
    moe_layers = sum(kind.ffn == "moe" for kind in model.kinds)
    assert sum(x.size for x in jax.tree.leaves(structure.shapes.router)) == moe_layers * model.moe.experts


def test_every_role_occurs():
    assert {p.meta.role for p in parameters(presets.tiny().model) if p.meta} == set(Role)


def test_kimi_k3_divides_over_a_pod():
    """16 x 16 x 8 chips: every sharded dimension splits evenly, and no chip holds over twice its share."""
    sizes = {"data": 1, "fsdp": 16, "expert": 16, "context": 1, "tensor": 8, "pipeline": 1}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    held = total = 0
    for p in parameters(presets.kimi_k3().model):
        if p.meta is None:
            continue
        held += math.prod(sharding.fitting(mesh, p.meta.axes, p.shape, name=p.path).shard_shape(p.shape))
        total += p.size
    assert held < 2 * total / (16 * 16 * 8)


def test_spec():
    assert sharding.spec(("embed", "ff"), stacked=2) == PartitionSpec(None, None, ("fsdp", "expert"), "tensor")
    assert sharding.spec(("embed", "ff"), dense=("expert",)) == PartitionSpec("expert", "tensor")
    assert sharding.spec(("experts", "embed")) == PartitionSpec("expert", "fsdp"), "what is left of two axes"
    assert sharding.spec(("vocab", "heads")) == PartitionSpec("tensor", None), "one mesh axis shards one dimension"
    assert sharding.spec(("tap", "key", "value")) == PartitionSpec(None, None, None)
    for axes in (*sharding.SPLIT.values(), *sharding.SPREAD.values(), sharding.TOKEN_AXES):
        assert set(axes) <= set(sharding.MESH_AXES)


class Bare(nnx.Module):
    """A module that makes one parameter properly and one behind the back of nn.param."""

    def __init__(self):
        self.good = nn.norm_weight("good", 4, "embed")
        self.bad = nnx.Param(jnp.zeros(4))


def test_a_parameter_without_a_role_is_refused():
    params = nnx.split(Bare(), nnx.Param)[1]
    with pytest.raises(ValueError, match="parameter bad has no role"):
        nn.metadata(params)


def test_bad_axes_are_refused():
    def make(shape, axes):
        return nn.param("w", shape, role=Role.MATRIX, axes=axes, init=nn.ZEROS)

    assert make((2, 3), ("embed", "ff")).get_metadata()["role"] is Role.MATRIX
    with pytest.raises(KeyError, match=r"'embedd' has no sharding rule.*'embed'"):
        make((2, 3), ("embedd", "ff"))
    with pytest.raises(ValueError, match=r"parameter w: 1 axes \('embed',\) for shape \(2, 3\)"):
        make((2, 3), ("embed",))


def test_a_role_that_its_axes_do_not_fit_is_refused():
    class Wrong(nnx.Module):
        def __init__(self):
            self.w = nn.param("w", (2, 3), role=Role.EXPERTS, axes=("embed", "ff"), init=nn.ZEROS)

    with pytest.raises(ValueError, match="needs exactly one axis named 'experts'"):
        nn.metadata(nnx.split(Wrong(), nnx.Param)[1])


def test_initial_values_depend_on_seed_and_path_only():
    """Another parameter changes nobody's initial value."""

    class Some(nnx.Module):
        def __init__(self, *names):
            for name in names:
                weight = nn.param(name, (3,), role=Role.VECTOR, axes=("embed",), init=nn.Normal(1.0))
                setattr(self, name, weight)

    few, more = nn.initialize(lambda: Some("a"), 0), nn.initialize(lambda: Some("b", "a"), 0)
    other_seed = nn.initialize(lambda: Some("a"), 1)
    assert (few.a[...] == more.a[...]).all()
    assert (few.a[...] != more.b[...]).all()
    assert (few.a[...] != other_seed.a[...]).all()
