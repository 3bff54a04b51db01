"""Batches against a slow account of the same stream, the split, the order, and every way to hand over bad input."""

import dataclasses
import gzip
import itertools
import lzma

import numpy as np
import pytest

from k3jax.config_data import StdlibCorpus, TextFolder
from k3jax.data import (
    ByteTokenizer,
    Documents,
    HeldOutBatches,
    PackedRows,
    compression_baselines,
    load_corpus,
    train_batches,
)

TOKENIZER = ByteTokenizer()
FILES = [
    ("a", b"alpha"),
    ("b", b"x"),
    ("c", b"a longer document that spans rows"),
    ("d", "é\n".encode()),
    ("e", b"12345678"),
]


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(StdlibCorpus())


def _stream(files):
    """(input, target, document) of every position, written one at a time."""
    for number, (_, content) in enumerate(files):
        tokens = [TOKENIZER.bos, *content]
        yield from zip(tokens, [*content, TOKENIZER.eos], itertools.repeat(number), strict=False)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 64, 500])
def test_rows_equal_the_stream_written_one_token_at_a_time(length):
    rows = PackedRows(Documents.join(FILES), length, TOKENIZER)
    stream = list(_stream(FILES))
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


def test_no_target_lies_in_another_document():
    """A target is the next input of the same document or, at its end, EOS; the next row's BOS is never a target."""
    row = PackedRows(Documents.join(FILES), 64, TOKENIZER)[0]
    same = row.segments_BT[1:] == row.segments_BT[:-1]
    valid = row.weights_BT[:-1] > 0
    assert (row.targets_BT[:-1] == row.tokens_BT[1:])[same & valid].all()
    assert (row.targets_BT[:-1] == TOKENIZER.eos)[~same & valid].all()
    assert TOKENIZER.bos not in row.targets_BT
    assert not (row.targets_BT[:-1] == row.tokens_BT[1:])[~same & valid].any(), "a plain shift would cross documents"


def test_batches_are_a_function_of_seed_and_step():
    documents = Documents.join(FILES)

    def make(seed):
        return train_batches(documents, length=4, batch=3, seed=seed, tokenizer=TOKENIZER)

    first, again, other = make(5), make(5), make(6)
    in_order = [first[n] for n in range(12)]
    for n in reversed(range(12)):
        for got, want in zip(again[n], in_order[n], strict=True):
            np.testing.assert_array_equal(got, want)
    assert in_order[0].tokens_BT.shape == (3, 4) and in_order[0].tokens_BT.dtype == np.int32
    assert in_order[0].weights_BT.dtype == np.float32
    assert any((other[n].tokens_BT != in_order[n].tokens_BT).any() for n in range(3))


def test_every_pass_sees_every_row_once_in_its_own_order():
    files = [("n", bytes(range(1, 60)))]
    batches = train_batches(Documents.join(files), length=4, batch=3, seed=0, tokenizer=TOKENIZER)  # 15 rows, 5 batches
    passes = [[tuple(row) for n in range(5) for row in batches[5 * epoch + n].targets_BT] for epoch in range(3)]
    assert len(set(passes[0])) == 15
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("length, batch", [(1, 1), (5, 2), (16, 3), (400, 2)])
def test_held_out_predicts_every_byte_and_every_end_once(length, batch):
    documents = Documents.join(FILES)
    held = HeldOutBatches(documents, length=length, batch=batch, tokenizer=TOKENIZER)
    targets = np.concatenate([b.targets_BT[b.weights_BT > 0] for b in held])
    assert {b.tokens_BT.shape for b in held} == {(batch, length)}
    assert bytes(targets[targets < 256].astype(np.uint8)) == documents.data.tobytes()
    assert (targets == TOKENIZER.eos).sum() == len(documents)
    assert held.bytes == len(documents.data)


@pytest.mark.parametrize("max_bytes", [1, 6, 7, 17, 40, 10_000])
def test_capped_held_out_counts_what_it_predicts(max_bytes):
    documents = Documents.join(FILES)
    held = HeldOutBatches(documents, length=3, batch=2, tokenizer=TOKENIZER, max_bytes=max_bytes)
    counts = [int(((b.targets_BT < 256) * b.weights_BT).sum()) for b in held]
    assert held.bytes == sum(counts)
    assert held.bytes >= min(max_bytes, len(documents.data))
    assert len(held) == 1 or sum(counts[:-1]) < max_bytes, "no batch beyond the one that reaches the cap"


def test_stdlib_split_is_disjoint_stable_and_large_enough(corpus):
    train, held = set(corpus.train.names), set(corpus.held_out.names)
    assert not train & held
    assert {"os.py", "json/decoder.py"} <= train | held
    assert not [name for name in train | held if "site-packages" in name or "_sysconfigdata" in name]
    assert 10e6 < len(corpus.train.data) < 80e6
    assert 2e5 < len(corpus.held_out.data) < 3e6
    again = load_corpus(StdlibCorpus())
    assert again.fingerprint == corpus.fingerprint and again.held_out.names == corpus.held_out.names


def test_a_file_keeps_its_side_when_others_leave(tmp_path):
    few = [f"file{i}.txt" for i in range(40)]
    for name in few:
        (tmp_path / name).write_text(name)
    source = TextFolder(path=str(tmp_path), held_out=0.3)
    before = set(load_corpus(source).held_out.names)
    for name in few[::3]:
        (tmp_path / name).unlink()
    assert set(load_corpus(source).held_out.names) == before - set(few[::3])


def test_folder_leaves_out_what_is_hidden_binary_empty_or_unmatched(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for path in ("b.txt", "sub/a.txt", ".hidden.txt", ".git/c.txt", "note.md"):
        (tmp_path / path).write_text(path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.txt").write_bytes(b"\xff\xd8\x00")
    found = load_corpus(TextFolder(path=str(tmp_path), pattern="*.txt"))
    assert sorted(found.train.names + found.held_out.names) == ["b.txt", "sub/a.txt"]
    assert found.skipped == ("image.txt",)
    assert len(found.held_out) == 1, "the smallest hash is held out when the share alone would leave nothing"


def test_baselines_are_those_of_the_programs(corpus):
    first, second = (corpus.held_out[i].tobytes() for i in (0, 1))
    documents = Documents.join([("a", first), ("b", second), ("c", b"abc" * 1000)])
    got = compression_baselines(documents)
    whole = documents.data.tobytes()
    assert got["gzip"]["whole"] == pytest.approx(8 * len(gzip.compress(whole, 9, mtime=0)) / len(whole), rel=1e-12)
    parts = [lzma.compress(documents[i].tobytes(), preset=9 | lzma.PRESET_EXTREME) for i in range(3)]
    assert got["xz"]["per_file"] == pytest.approx(8 * sum(map(len, parts)) / len(whole), rel=1e-12)


def test_tokenizer_round_trips_text_and_names_a_bad_token():
    text = "def f():\n\treturn 'é漢🙂'"
    tokens = TOKENIZER.encode(text)
    assert tokens.dtype == np.int32 and tokens.max() < 256
    assert TOKENIZER.decode([TOKENIZER.bos, *tokens, TOKENIZER.eos]) == text
    assert TOKENIZER.decode(TOKENIZER.encode(b"\xff!")) == "\ufffd!"
    with pytest.raises(ValueError, match="token 258 is not one of the 258"):
        TOKENIZER.decode([65, 258])
    TOKENIZER.check_fits(258)
    with pytest.raises(ValueError, match="258 tokens but the model's vocabulary is only 257"):
        TOKENIZER.check_fits(257)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.* does not exist"):
        load_corpus(TextFolder(path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"holds no file that matches '\*.rst'"):
        load_corpus(TextFolder(path=str(tmp_path), pattern="*.rst"))
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        load_corpus(TextFolder(path=str(tmp_path / "one.txt")))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"needs two text files.*found 1 .of 2 files matched, 1 were not UTF-8"):
        load_corpus(TextFolder(path=str(tmp_path)))


def test_bad_settings_are_named():
    documents = Documents.join(FILES)
    for share in (0.0, 1.0, -0.1, True, "0.1"):
        with pytest.raises(ValueError, match="must be the share of files kept for evaluation"):
            StdlibCorpus(held_out=share)
    with pytest.raises(ValueError, match=r"TextFolder.path = '', but it must be a non-empty string"):
        TextFolder(path="")
    with pytest.raises(TypeError, match="held_outt"):
        dataclasses.replace(StdlibCorpus(), held_outt=0.1)
    with pytest.raises(TypeError, match="a source is a StdlibCorpus or a TextFolder, got str"):
        load_corpus("stdlib")
    with pytest.raises(ValueError, match="at least one row, got 0"):
        train_batches(documents, length=4, batch=0, seed=0, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=r"0..2\*\*32-1, got -1"):
        train_batches(documents, length=4, batch=1, seed=-1, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="at least one token, got length 0"):
        PackedRows(documents, 0, TOKENIZER)
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        HeldOutBatches(documents, length=4, batch=1, tokenizer=TOKENIZER, max_bytes=0)
