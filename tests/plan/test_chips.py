"""Topologies by name, and the bandwidth of groups of devices on them."""

import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.plan import chips


def groups(topology: chips.Topology, mesh: dict[str, int], axis: str) -> np.ndarray:
    ids = np.arange(topology.devices).reshape(tuple(mesh.values()))
    return np.moveaxis(ids, list(mesh).index(axis), -1).reshape(-1, mesh[axis])


def test_names_of_topologies():
    assert chips.topology("v5p:4x4x8").devices == 128
    assert chips.topology("tpu7x:2x2x1").devices == 8  # two devices a chip
    assert chips.topology("h200:4x8").devices == 32
    assert chips.topology("h100:8").shape == (1, 8)  # one node


@pytest.mark.parametrize(
    "text, message",
    [
        ("v9:2x2", "there is no chip 'v9'; chips: v4"),
        ("v5p:4x4", "takes 3 numbers: v5p:4x4x4"),
        ("v6e:4xfour", "takes 2 numbers: v6e:4x4"),
        ("h100:4x8x1", r"nodes x GPUs \(or the GPUs of one node\): h100:4x8"),
        ("h100:x8", "'x8' is no shape of h100"),
        ("h100:", "'' is no shape"),
        ("v5e", "'' is no shape"),
    ],
)
def test_wrong_topologies_are_refused_with_what_would_do(text, message):
    with pytest.raises(ConfigError, match=message):
        chips.topology(text)


def test_devices_come_host_by_host():
    """As libtpu 0.0.52 describes v5p:4x4x4."""
    places = chips.coordinates(chips.topology("v5p:4x4x4"))
    first = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (2, 1, 0), (3, 1, 0), (0, 2, 0)]
    assert [tuple(map(int, one)) for one in places[:9]] == first and tuple(places[16]) == (0, 0, 1)
    assert len(np.unique(places, axis=0)) == 64


def test_a_ring_has_two_links_a_line_one_and_interleaved_groups_share():
    topology = chips.topology("v5p:4x4x4")
    places, link = chips.coordinates(topology), topology.chip.link
    inner = {"outer": 16, "ring": 4}
    assert chips.group_bandwidth(topology, places, groups(topology, inner, "ring")) == 2 * link
    half = {"outer": 32, "pair": 2}
    assert chips.group_bandwidth(topology, places, groups(topology, half, "pair")) == link
    opposite = {"a": 16, "opposite": 2, "b": 2}  # two hops either way round, and another pair on the same links
    assert chips.group_bandwidth(topology, places, groups(topology, opposite, "opposite")) == link
    plane = {"outer": 4, "plane": 16}
    assert chips.group_bandwidth(topology, places, groups(topology, plane, "plane")) == 4 * link


def test_the_two_devices_of_a_chip_share_its_links():
    topology = chips.topology("tpu7x:4x4x4")
    places, link = chips.coordinates(topology), topology.chip.link
    apart = {"outer": 16, "ring": 4, "core": 2}
    assert chips.group_bandwidth(topology, places, groups(topology, apart, "ring")) == link
    assert chips.group_bandwidth(topology, places, groups(topology, apart, "core")) == 6 * link


def test_gpus_have_a_switch_inside_and_a_card_outside():
    topology = chips.topology("h100:2x8")
    places = chips.coordinates(topology)
    mesh = {"node": 2, "gpu": 8}
    assert chips.group_bandwidth(topology, places, groups(topology, mesh, "gpu")) == topology.chip.link
    assert chips.group_bandwidth(topology, places, groups(topology, mesh, "node")) == topology.chip.remote


def test_an_all_to_all_on_a_long_ring_is_bound_by_its_middle():
    topology = chips.topology("v5p:16x4x4")
    places = np.stack(np.unravel_index(np.arange(256), (4, 4, 16)), 1)[:, ::-1]
    ring = groups(topology, {"outer": 16, "ring": 16}, "ring")
    gather = chips.seconds(topology, places, "all-gather", ring, 1e9)
    assert chips.seconds(topology, places, "all-to-all", ring, 1e9) == 4 * gather
