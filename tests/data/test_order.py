"""The global order: a function of seed and step alone, on any number of processes and workers."""

import itertools
import json
import sys
from collections import Counter

import numpy as np
import pytest

from k3jax.config_data import BestFit, Stream
from k3jax.data.order import Batches, Interleave
from k3jax.data.packing import PackedRows

FILES = [(f"file{i}", bytes([65 + i % 26]) * (3 + 7 * i % 40)) for i in range(60)]


def equal(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def make(make_documents):
    """Batches of one source or a mixture of two, whose tokens differ."""

    def batches(*, seed=5, batch=4, length=16, packing=Stream(), weights=(1.0,), files=FILES):  # noqa: B008
        parts = {"upper": files, "lower": [(name, content.lower()) for name, content in files[::2]]}
        rows = {
            name: PackedRows(make_documents(some), length, packing)
            for name, some in itertools.islice(parts.items(), len(weights))
        }
        return Batches(rows, list(weights), batch=batch, seed=seed)

    return batches


def test_batches_are_a_function_of_seed_and_step(make):
    first, again, other = make(), make(), make(seed=6)
    in_order = [first[n] for n in range(12)]
    for n in reversed(range(12)):
        equal(again[n], in_order[n])
    assert in_order[0].tokens_BT.shape == (4, 16) and in_order[0].tokens_BT.dtype == np.int32
    assert in_order[0].weights_BT.dtype == np.float32
    assert any((other[n].tokens_BT != in_order[n].tokens_BT).any() for n in range(3))


def test_every_pass_sees_every_row_once_in_its_own_order(make):
    batches = make(batch=3, length=4, files=[("n", bytes(range(1, 60)))])  # 15 rows, 5 batches
    passes = [[tuple(row) for n in range(5) for row in batches[5 * epoch + n].targets_BT] for epoch in range(3)]
    assert len(set(passes[0])) == 15
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0)])
def test_processes_share_each_batch_whatever_their_number(make, count, weights):
    batches = make(weights=weights, packing=BestFit())
    parts = [batches.local(i, count) for i in range(count)]
    for n in (0, 1, 7, 100_000):
        whole = [np.concatenate(fields) for fields in zip(*(part[n] for part in parts))]
        equal(whole, batches[n])
        assert len(parts[0][n].tokens_BT) == 4 // count


def test_reading_ahead_changes_nothing(make):
    batches = make(weights=(3.0, 1.0))
    for part in (batches, batches.local(1, 2)):
        got = list(part.iterate(7, 9, buffer=3))
        assert len(got) == 9
        for number, batch in enumerate(got):
            equal(batch, part[7 + number])
    endless = batches.iterate(100_000)
    equal(next(endless), batches[100_000])
    endless.close()


class Watching:
    """Documents that say in their targets whether the process that reads them has started JAX: 1 for no, 2 for yes."""

    name, bytes, lengths = "watching", np.zeros(8, np.int64), np.full(8, 5)

    def __len__(self):
        return 8

    def title(self, index):
        return str(index)

    def __getitem__(self, index):
        from k3jax.data import Document

        bridge = sys.modules.get("jax._src.xla_bridge")
        started = bridge is not None and bridge.backends_are_initialized()
        inputs = np.full(5, index, np.int32)
        return Document(inputs, np.full(5, 1 + started, np.int32), np.ones(5, np.float32), 0)


def test_workers_make_the_same_batches_and_never_start_jax():
    """The negative control is this process, which has started it."""
    import jax

    jax.devices()
    batches = Batches({"watching": PackedRows(Watching(), 5, BestFit())}, [1.0], batch=2, seed=0)
    assert set(batches[0].targets_BT.flat) == {2}
    made = list(batches.iterate(3, 6, workers=2, buffer=2))
    assert len(made) == 6
    for number, batch in enumerate(made):
        np.testing.assert_array_equal(batch.tokens_BT, batches[3 + number].tokens_BT)
        assert set(batch.targets_BT.flat) == {1}


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [0.7, 0.2, 0.1], [5.0, 1e-3, 3.0], [1.0] * 7])
def test_a_mixture_keeps_its_proportions_from_the_first_row_on(weights):
    interleave, share = Interleave(weights), np.array(weights) / sum(weights)
    seen = Counter()
    for row in range(3000):
        assert interleave.counts(row) == [seen[source] for source in range(len(weights))]
        assert np.abs(np.array(interleave.counts(row)) - share * row).max() < len(weights)
        source, index = interleave[row]
        assert index == seen[source], "every source is read in its own order, without holes"
        seen[source] += 1
    far = interleave.counts(10**12)
    assert sum(far) == 10**12 and np.allclose(np.array(far) / 10**12, share, atol=1e-8)


def test_a_part_of_a_mixture_is_read_in_its_own_order_whatever_the_weights(make):
    """The negative control is another seed."""

    def lower(batches, steps):
        rows = np.concatenate([batches[n].targets_BT for n in range(steps)])
        return [tuple(row) for row in rows if any(97 <= target < 123 for target in row)]

    often, rarely = lower(make(weights=(1.0, 3.0)), 12), lower(make(weights=(5.0, 1.0)), 12)
    assert len(often) == 36 and len(rarely) == 8
    assert often[:8] == rarely
    assert lower(make(weights=(5.0, 1.0), seed=6), 12) != rarely


def test_the_position_counts_what_was_read_and_is_plain_json(make):
    batches = make(weights=(3.0, 1.0))
    position = json.loads(json.dumps(batches.position(50)))
    assert position == batches.position(50) and position["rows"] == 200
    sources = position["sources"]
    assert (sources["upper"]["rows"], sources["lower"]["rows"]) == (150, 50)
    for name, entry in sources.items():
        assert entry["rows_per_epoch"] == batches.packing_report[name].rows
        assert entry["epoch"] * entry["rows_per_epoch"] + entry["row"] == entry["rows"]


def test_bad_numbers_are_named(make):
    with pytest.raises(ValueError, match="at least one row, got 0"):
        make(batch=0)
    with pytest.raises(ValueError, match=r"0..2\*\*32-1, got -1"):
        make(seed=-1)
    with pytest.raises(ValueError, match="process 0 of 3 cannot have an equal part of 4 rows"):
        make().local(0, 3)
    with pytest.raises(IndexError, match="step -1 lies before the first batch"):
        make()[-1]
