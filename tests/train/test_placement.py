"""Where arrays lie on a mesh, and training that does not depend on it."""

import jax
import numpy as np
import pytest

from k3jax import config as c
from k3jax import layouts, placement
from k3jax.config import ConfigError
from k3jax.data import Batch
from k3jax.roles import path_name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date=2", "there is no axis 'date'; did you mean 'data'.*; the axes are data, fsdp"),
        ("data=zero", "not of the form axis=size"),
        ("data=0", "size of at least 1"),
        ("data", "not of the form axis=size"),
    ],
)
def test_impossible_meshes_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        layouts.load(text)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, "the mesh data 3 needs 3 devices, but there are 8; data = 8 would fit"),
        ({"fsdp": 2, "tensor": 2}, "fsdp 2 x tensor 2 needs 4 .* are 8; data = 2 or fsdp = 4 or tensor = 4 would fit"),
        ({"expert": 4, "context": 4}, "needs 16 devices, but there are 8; expert = 2 or context = 2 would fit"),
        ({"expert": 3, "context": 5}, "needs 15 devices, but there are 8$"),
    ],
)
def test_axes_multiply_to_the_devices(sizes, message):
    with pytest.raises(ConfigError, match=message):
        placement.make_mesh(sizes)


def test_a_mesh_is_all_devices():
    assert placement.make_mesh(layouts.load("data=2,fsdp=4").sizes).shape["fsdp"] == 4


@pytest.mark.parametrize(("batch", "micro_batches", "used"), [(16, 1, 8), (12, 1, 6), (12, 3, 4), (1, 1, None)])
def test_by_default_as_many_devices_share_the_rows_as_divide_them(micro, batch, micro_batches, used):
    mesh, _ = placement.layout_of_flag("", c.replace(micro, batch=batch, micro_batches=micro_batches))
    assert (mesh and mesh.shape["data"]) == used


@pytest.mark.parametrize(("batch", "micro_batches", "message"), [(12, 1, "8 or 16 would"), (16, 4, "8 or 16 would")])
def test_rows_that_do_not_divide_are_refused(micro, batch, micro_batches, message):
    mesh = placement.make_mesh({"data": 4, "fsdp": 2})
    with pytest.raises(ConfigError, match=message):
        placement.check_batch(c.replace(micro, batch=batch, micro_batches=micro_batches), mesh)


def test_the_optimizer_lies_like_its_parameters(micro):
    mesh = placement.make_mesh({"fsdp": 8})
    shardings = placement.state_shardings(micro, mesh)
    by_name = {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(shardings)}
    spread = [name for name, spec in by_name.items() if "fsdp" in spec]
    assert by_name["weights/params/embed"] == jax.sharding.PartitionSpec("tensor", "fsdp")
    moments = [name for name in spread if name.startswith("opt_state/") and name.endswith("/embed")]
    assert len(moments) == 2  # Adam keeps two for the embedding
    assert not [name for name in spread if name.startswith("guard")]


def test_a_dimension_that_does_not_divide_stays_whole(micro):
    mesh = placement.make_mesh({"fsdp": 8})
    model = c.replace(micro.model, dim=20)
    shardings = placement.state_shardings(c.replace(micro, model=model), mesh)
    assert shardings.weights.params["embed"].spec == jax.sharding.PartitionSpec("tensor", None)


def test_rows_of_a_process_make_the_global_batch():
    mesh = placement.make_mesh({"data": 8})
    rows = np.arange(16 * 3).reshape(16, 3)
    placed = placement.put_batch(Batch(rows, rows, rows, rows), mesh, *placement.rows_of_this_process(16, mesh))
    np.testing.assert_array_equal(placed.tokens_BT, rows)
    assert placed.tokens_BT.addressable_shards[0].data.shape == (2, 3)
