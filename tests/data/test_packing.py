"""Packing: rows against the definition, nothing lost, nothing cut that may not be, and what the report says."""

import itertools
from collections import Counter

import numpy as np
import pytest

from k3jax.config_data import BestFit, Stream
from k3jax.data.documents import DataError, part_bytes
from k3jax.data.packing import PackedRows, best_fit
from k3jax.data.tokenizers import ByteTokenizer

LENGTHS = [1, 2, 7, 8, 64, 500]
EOS = ByteTokenizer.eos


def targets(rows) -> Counter:
    """Every (input, target) that counts, over all rows."""
    found = Counter()
    for row in rows:
        counts = row.weights_BT > 0
        found.update(zip(row.tokens_BT[counts].tolist(), row.targets_BT[counts].tolist()))
    return found


def all_targets(documents) -> Counter:
    found = Counter()
    for i in range(len(documents)):
        found.update(zip(documents[i].inputs.tolist(), documents[i].targets.tolist()))
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_stream_equals_the_documents_written_one_token_at_a_time(make_documents, framed, length):
    documents = make_documents()
    pairs = [framed(bytes(documents[i].targets[:-1].astype(np.uint8))) for i in range(len(documents))]
    stream = [(*pair, number) for number, document in enumerate(pairs) for pair in document]
    rows = PackedRows(documents, length, Stream())
    assert len(rows) == -(-len(stream) // length)
    for index in range(len(rows)):
        want = stream[index * length : (index + 1) * length]
        row = rows[index]
        pad = length - len(want)
        assert row.tokens_BT[: len(want)].tolist() == [token for token, _, _ in want]
        assert row.targets_BT[: len(want)].tolist() == [target for _, target, _ in want]
        assert row.segments_BT.tolist() == [number - want[0][2] for _, _, number in want] + [-1] * pad
        assert row.weights_BT.tolist() == [1.0] * len(want) + [0.0] * pad
    with pytest.raises(IndexError, match=f"row {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_no_target_lies_in_another_document(make_documents):
    """A target is the next input of the same document or, at its end, EOS; the next row's BOS is never a target."""
    row = PackedRows(make_documents(), 64, Stream())[0]
    same = row.segments_BT[1:] == row.segments_BT[:-1]
    valid = row.weights_BT[:-1] > 0
    assert (row.targets_BT[:-1] == row.tokens_BT[1:])[same & valid].all()
    assert (row.targets_BT[:-1] == EOS)[~same & valid].all()
    assert ByteTokenizer.bos not in row.targets_BT
    assert not (row.targets_BT[:-1] == row.tokens_BT[1:])[~same & valid].any(), "a plain shift would cross documents"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("packing", [Stream(), BestFit(), BestFit(long="truncate")], ids=str)
def test_nothing_is_lost_but_what_the_report_says(make_documents, packing, length):
    """The negative control is truncation: it does lose, and the report has the exact count."""
    documents = make_documents()
    rows = PackedRows(documents, length, packing)
    report = rows.plan.report
    found, want = targets(rows), all_targets(documents)
    assert sum((want - found).values()) == report.dropped and not found - want
    truncates = packing == BestFit(long="truncate") and length < 34
    assert (report.dropped > 0) == truncates == (report.truncated > 0)
    used = sum(int((row.segments_BT >= 0).sum()) for row in rows)
    assert used == report.positions == documents.lengths.sum() - report.dropped
    assert report.padding == pytest.approx(1 - used / (len(rows) * length))
    for row in rows:
        on = row.segments_BT >= 0
        assert (np.diff(row.segments_BT[on]) >= 0).all() and (np.diff(on.astype(int)) <= 0).all()
        assert row.weights_BT.tolist() == on.astype(float).tolist()


@pytest.mark.parametrize("length", LENGTHS[2:])
def test_split_documents_are_counted_and_others_are_whole(make_documents, length):
    documents = make_documents()
    plan = PackedRows(documents, length, BestFit()).plan
    rows_of = [set() for _ in range(len(documents))]
    for index in range(plan.report.rows):
        for number, start, stop in zip(*plan.row(index)):
            rows_of[number].add(index)
            assert 0 <= start < stop <= documents.lengths[number]
    split = [number for number, rows in enumerate(rows_of) if len(rows) > 1]
    assert len(split) == plan.report.split
    assert split == [number for number, count in enumerate(documents.lengths) if count > length]


@pytest.mark.parametrize("room", [1, 5, 17, 64])
def test_best_fit_places_like_one_document_after_another(room):
    def one_by_one(lengths) -> list[int]:
        left = []
        for need in sorted(lengths, reverse=True):
            fits = [row for row, space in enumerate(left) if space >= need]
            if fits:
                left[min(fits, key=left.__getitem__)] -= need
            else:
                left.append(room - need)
        return sorted(left)

    noise = np.random.default_rng(room)
    for count in (1, 3, 50, 300):
        lengths = noise.integers(1, room + 1, count)
        row, rows = best_fit(lengths, room)
        left = room - np.bincount(row, lengths, minlength=rows).astype(int)
        assert sorted(left.tolist()) == one_by_one(lengths.tolist())


def test_best_fit_pads_little_and_plans_many_documents_quickly():
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(6.5, 1.3, 200_000)).astype(np.int64) + 1, 8192)
    _, rows = best_fit(lengths, 8192)
    assert 1 - lengths.sum() / (rows * 8192) < 1e-3


@pytest.mark.parametrize("packing", [Stream(), BestFit()], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_of_rows_count_their_targets(make_documents, packing, length):
    rows = PackedRows(make_documents(), length, packing)
    counted = [int(((row.targets_BT < 256) * row.weights_BT).sum()) for row in rows]
    assert rows.plan.row_bytes().tolist() == counted


def test_bytes_of_parts_add_up_for_any_tokenizer():
    """Seven tokens for 30 bytes: every way to cut them gives 30, and EOS stands for none."""
    for cut in range(9):
        assert part_bytes(8, 30, 0, cut) + part_bytes(8, 30, cut, 8) == 30
    assert part_bytes(8, 30, 7, 8) == 0 and part_bytes(1, 0, 0, 1) == 0


def test_a_document_longer_than_the_row_is_named_where_it_must_be_whole(make_documents):
    documents = make_documents()
    with pytest.raises(DataError, match=r"files: c has 34 tokens, longer than the row of 33; 1 documents are too long"):
        PackedRows(documents, 33, BestFit(long="refuse"))
    rows = PackedRows(documents, 34, BestFit(long="refuse"))
    ends = [row.targets_BT[row.weights_BT > 0][-1] for row in rows]
    assert rows.plan.report.split == 0 and set(ends) == {EOS}


def test_bad_shapes_are_named(make_documents):
    with pytest.raises(ValueError, match="at least one token, got length 0"):
        PackedRows(make_documents(), 0, Stream())
    with pytest.raises(DataError, match="files holds no documents"):
        PackedRows(make_documents([]), 8, BestFit())
    with pytest.raises(TypeError, match="packing is a Stream or a BestFit, got str"):
        PackedRows(make_documents(), 8, "stream")


def test_single_documents_of_every_length_survive(make_documents, framed):
    for size, length in itertools.product((1, 5, 6, 7, 13), (6, 7)):
        documents = make_documents([("one", bytes(range(size)))])
        for packing in (Stream(), BestFit()):
            assert targets(PackedRows(documents, length, packing)) == Counter(framed(bytes(range(size))))
