"""Held-out batches predict every byte once, and compression baselines are those of the programs."""

import gzip
import lzma

import numpy as np
import pytest

from k3jax.config_data import BestFit, Stream
from k3jax.data.held_out import HeldOutBatches, compression_baselines
from k3jax.data.tokenizers import ByteTokenizer


@pytest.mark.parametrize("packing", [Stream(), BestFit()], ids=str)
@pytest.mark.parametrize("length, batch", [(1, 1), (5, 2), (16, 3), (400, 2)])
def test_every_byte_and_every_end_is_predicted_once(make_documents, packing, length, batch):
    documents = make_documents()
    held = HeldOutBatches(documents, length=length, batch=batch, packing=packing)
    targets = np.concatenate([b.targets_BT[b.weights_BT > 0] for b in held])
    text = np.concatenate([documents[i].targets[:-1] for i in range(len(documents))])
    assert {b.tokens_BT.shape for b in held} == {(batch, length)}
    assert sorted(targets[targets < 256]) == sorted(text)
    if packing == Stream():
        assert targets[targets < 256].tolist() == text.tolist()
    assert (targets == ByteTokenizer.eos).sum() == len(documents)
    assert held.bytes == len(text) == documents.bytes.sum()


@pytest.mark.parametrize("packing", [Stream(), BestFit()], ids=str)
@pytest.mark.parametrize("max_bytes", [1, 6, 7, 17, 40, 10_000])
def test_capped_text_counts_what_it_predicts(make_documents, packing, max_bytes):
    documents = make_documents()
    held = HeldOutBatches(documents, length=3, batch=2, packing=packing, max_bytes=max_bytes)
    counts = [int(((b.targets_BT < 256) * b.weights_BT).sum()) for b in held]
    assert held.bytes == sum(counts)
    assert held.bytes >= min(max_bytes, documents.bytes.sum())
    assert len(held) == 1 or sum(counts[:-1]) < max_bytes, "no batch beyond the one that reaches the cap"


def test_processes_share_each_batch(make_documents):
    held = HeldOutBatches(make_documents(), length=5, batch=4, packing=Stream())
    parts = [held.local(i, 2) for i in range(2)]
    assert [part.bytes for part in parts] == [held.bytes] * 2 and len(parts[0]) == len(held)
    for number in range(len(held)):
        whole = np.concatenate([part[number].targets_BT for part in parts])
        np.testing.assert_array_equal(whole, held[number].targets_BT)
    with pytest.raises(ValueError, match="process 0 of 3 cannot have an equal part of 4 rows"):
        held.local(0, 3)


def test_baselines_are_those_of_the_programs():
    texts = [b"first text, " * 40, b"def f(x):\n    return x\n" * 9, b"abc" * 1000]
    got = compression_baselines(texts)
    whole = b"".join(texts)
    assert got["gzip"]["whole"] == pytest.approx(8 * len(gzip.compress(whole, 9, mtime=0)) / len(whole), rel=1e-12)
    parts = [lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) for text in texts]
    assert got["xz"]["per_file"] == pytest.approx(8 * sum(map(len, parts)) / len(whole), rel=1e-12)


def test_bad_sizes_are_named(make_documents):
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        HeldOutBatches(make_documents(), length=4, batch=1, packing=Stream(), max_bytes=0)
    with pytest.raises(ValueError, match="at least one row, got 0"):
        HeldOutBatches(make_documents(), length=4, batch=0, packing=Stream())
