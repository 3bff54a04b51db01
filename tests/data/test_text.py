"""Text sources: what is read, on which side of the split it lands, and what bad input is told."""

import gzip
import json
import os

import pyarrow as pa
import pytest
from pyarrow import parquet

from k3jax.config_data import JsonLines, Parquet, StdlibCorpus, TextFolder
from k3jax.data.documents import DataError
from k3jax.data.text import load_corpus


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(StdlibCorpus())


def contents(corpus) -> list[str]:
    return sorted(texts[i].decode() for texts in (corpus.train, corpus.held_out) for i in range(len(texts)))


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


def test_json_lines_are_documents_and_equal_ones_stay_together(tmp_path):
    lines = [{"text": f"line {i % 20} é", "other": i} for i in range(60)] + [{"text": ""}]
    half = [json.dumps(line) + "\n" for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(half[:30]))  # blank lines between, none at the end
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(half[30:])
    found = load_corpus(JsonLines(path=str(tmp_path / "*.jsonl*"), held_out=0.3))
    assert contents(found) == sorted(line["text"] for line in lines[:-1])
    sides = [{texts[i] for i in range(len(texts))} for texts in (found.train, found.held_out)]
    assert sides[0] and sides[1] and not sides[0] & sides[1], "no text is on both sides"
    assert f"{tmp_path / 'a.jsonl'}:1" in found.train.names + found.held_out.names


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "cut', r"bad\.jsonl:2: not JSON: "),
        ("[1]", r"bad\.jsonl:2: list, but every line must be a JSON object"),
        ('{"body": "b", "id": 1}', r"bad\.jsonl:2: no field 'text'; the fields are: body, id"),
        ("[" * 100_000, r"bad\.jsonl:2: JSON that is nested too deeply"),
        ('{"text": 3}', r"bad\.jsonl:2: field 'text' holds int, but it must hold a string"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        load_corpus(JsonLines(path=str(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    packed = gzip.compress(b"".join(json.dumps({"text": f"{number} words"}).encode() + b"\n" for number in range(500)))
    damaged = {"flipped": packed[:10] + b"\xff" + packed[11:], "cut": packed[: len(packed) // 2]}[damage]
    (tmp_path / "a.jsonl.gz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read after line \d+: "):
        load_corpus(JsonLines(path=str(tmp_path / "*.gz")))


def test_a_parquet_string_that_is_not_utf8_is_named_by_its_row(tmp_path):
    offsets, data = pa.array([b"abc", b"\xff\xfe", b"def"]).buffers()[1:]
    table = pa.table({"text": pa.StringArray.from_buffers(3, offsets, data)})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet:row 1: not UTF-8: "):
        load_corpus(Parquet(path=str(tmp_path / "rows.parquet")))


def test_a_file_name_that_is_not_utf8_is_read_and_shown_with_escapes(tmp_path):
    for name in (b"a.txt", b"b\xff.txt", b"b\xfe.txt"):
        with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
            file.write("words")
    found = load_corpus(TextFolder(path=str(tmp_path)))
    names = sorted(found.train.names + found.held_out.names)
    assert names == ["a.txt", r"b\xfe.txt", r"b\xff.txt"] and [name.encode() for name in names]
    lines = os.path.join(os.fsencode(tmp_path), b"\xff.jsonl")
    with open(lines, "w") as file:
        file.write("{")
    with pytest.raises(DataError, match=r"\\xff\.jsonl:1: not JSON") as caught:
        load_corpus(JsonLines(path=os.fsdecode(lines)))
    assert str(caught.value).encode()


def test_a_subfolder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    for name in ("a.txt", "b.txt", "locked/c.txt"):
        (tmp_path / name).write_text(name)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    source = TextFolder(path=str(tmp_path))
    assert len(contents(load_corpus(source))) == 3
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="locked: Permission denied"):
        load_corpus(source)


def test_parquet_rows_are_documents_and_errors_name_the_columns(tmp_path):
    table = pa.table({"body": ["one", None, "", "two é", "three"], "count": [1, 2, 3, 4, 5]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    source = dict(path=str(tmp_path / "*.parquet"))
    found = load_corpus(Parquet(column="body", **source))
    assert contents(found) == ["one", "three", "two é"]
    assert f"{tmp_path / 'rows.parquet'}:row 3" in found.train.names + found.held_out.names
    with pytest.raises(DataError, match=r"rows\.parquet: no column 'text'; the columns are: body, count"):
        load_corpus(Parquet(**source))
    with pytest.raises(DataError, match=r"column 'count' holds int64, but it must hold strings"):
        load_corpus(Parquet(column="count", **source))
    (tmp_path / "rows.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: "):
        load_corpus(Parquet(column="body", **source))
    with pytest.raises(DataError, match=r"no file matches '.*nothing\.parquet'"):
        load_corpus(Parquet(path=str(tmp_path / "nothing.parquet")))


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.* does not exist"):
        load_corpus(TextFolder(path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=r"holds no file that matches '\*'"):
        load_corpus(TextFolder(path=str(tmp_path)))
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(DataError, match="is not a folder"):
        load_corpus(TextFolder(path=str(tmp_path / "one.txt")))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"needs two text documents.*found 1 \(1 were not UTF-8"):
        load_corpus(TextFolder(path=str(tmp_path)))
    with pytest.raises(TypeError, match="a text source is a folder, JSON lines or Parquet, got str"):
        load_corpus("stdlib")
