"""Token records: the same bytes from any number of processes, the documents of the text, and damage that is named."""

import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from k3jax import config_data as c
from k3jax import tokenize
from k3jax.config import ConfigError
from k3jax.data import make_records as making
from k3jax.data.bench import open_batches
from k3jax.data.documents import DataError
from k3jax.data.load import load_data
from k3jax.data.records import CHUNK, describe_file, read_manifest

TOKENIZER = c.Bytes()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> c.TextFolder:
    """Documents from 1 byte to three records."""
    folder = tmp_path_factory.mktemp("text")
    noise = np.random.default_rng(0)
    for number in range(60):
        size = 3 * CHUNK - 5 if number == 7 else int(noise.integers(1, 900))
        (folder / f"é{number}.txt").write_bytes(noise.integers(32, 127, size).astype(np.uint8).tobytes())
    return c.TextFolder(path=str(folder), held_out=0.2)


@pytest.fixture(scope="module")
def made(text, tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("made") / "tokens"
    making.make_records(text, TOKENIZER, out, workers=2, shard_bytes=8000)
    return out


@pytest.fixture
def copied(made, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(made, tmp_path / "tokens"))


def load(path):
    return load_data(c.TokenRecords(path=str(path)), TOKENIZER, vocab=258)


def read_all(data) -> list:
    (part,) = data.parts
    return [documents[i] for documents in (part.train, part.held_out) for i in range(len(documents))]


def test_any_number_of_processes_makes_the_same_files(text, made, tmp_path):
    seen = []
    making.make_records(
        text, TOKENIZER, tmp_path / "one", workers=1, shard_bytes=8000, progress=lambda *at: seen.append(at)
    )
    files = sorted(path.name for path in made.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len([name for name in files if name.startswith("train-")]) > 2
    for name in files:
        assert (made / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["one"], "nothing unfinished is left"


def test_records_are_the_documents_of_the_text(text, made):
    want, got = load_data(text, TOKENIZER, vocab=258), load(made)
    for one, other in zip(read_all(got), read_all(want), strict=True):
        assert one.bytes == other.bytes
        for name in ("inputs", "targets", "weights"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    (part,), (read,) = want.parts, got.parts
    titles = [read.held_out.title(i) for i in range(len(read.held_out))]
    assert titles == [part.held_out.title(i) for i in range(len(titles))]
    shape = dict(length=700, batch=3, seed=1)
    for packing in (c.Stream(), c.BestFit()):
        pair = [data.batches(packing=packing, **shape) for data in (want, got)]
        for n in (0, 5, 100_000):
            for one, other in zip(pair[0][n], pair[1][n]):
                np.testing.assert_array_equal(one, other)


def test_the_manifest_counts_and_says_where_it_came_from(text, made):
    manifest = read_manifest(made)
    data = load_data(text, TOKENIZER, vocab=258)
    assert manifest["source"] == {"type": "TextFolder", "path": text.path, "pattern": "*", "held_out": 0.2}
    assert manifest["tokenizer"]["hash"] == "bytes" and manifest["dtype"] == "uint8"
    for split, documents in (("train", data.parts[0].train), ("held_out", data.parts[0].held_out)):
        entry = manifest["splits"][split]
        assert entry["documents"] == len(documents)
        assert entry["bytes"] == entry["tokens"] == documents.bytes.sum()
    assert "tokens" in tokenize.describe(manifest, made)


def test_a_run_starts_at_step_100000_at_once(made):
    _, seconds = open_batches(str(made), 256, 8, c.BestFit())
    assert seconds < 2


def test_a_corrupt_record_is_named_with_its_file(copied):
    """One byte of one record; all the others are still read."""
    path = copied / "train-00001.array_record"
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    (part,) = load(copied).parts
    failures = []
    for index in range(len(part.train)):
        try:
            part.train[index]
        except DataError as error:
            failures.append(str(error))
    assert len(failures) == 1 and re.search(r"train-00001\.array_record: record \d+ cannot be read", failures[0])


def test_a_shard_without_its_end_is_named(copied):
    path = copied / "train-00001.array_record"
    data = load(copied)
    path.write_bytes(path.read_bytes()[:70000])
    with pytest.raises(DataError, match=r"train-00001\.array_record has 70000 bytes, but the manifest says"):
        load(copied)
    with pytest.raises(DataError, match=r"train-00001\.array_record: record 0 cannot be read"):
        read_all(data)


def test_documents_travel_to_other_processes(made):
    (part,) = load(made).parts
    part.train[0]
    copy = pickle.loads(pickle.dumps(part.train))
    np.testing.assert_array_equal(copy[11].targets, part.train[11].targets)


def test_a_file_that_goes_away_during_a_run_is_named(copied):
    data = load(copied)
    batches = data.batches(length=300, batch=2, seed=0)
    for path in copied.glob("train-*"):
        path.unlink()
    with pytest.raises(DataError, match=r"train-0000\d\.array_record is gone since the run began"):
        list(batches.iterate(0, 40))


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda folder: (folder / "manifest.json").unlink(),
            r"tokens holds no manifest\.json: python -m k3jax.tokenize",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json: "),
        (lambda folder: (folder / "manifest.json").write_text("{}"), r"not a manifest of format 1"),
        (lambda folder: (folder / "train-00000.array_record").unlink(), r"train-00000\.array_record is missing"),
        (lambda folder: (folder / "train.index.npy").write_bytes(b"x"), r"has 1 bytes, but the manifest says \d+"),
    ],
)
def test_a_folder_that_is_not_complete_is_refused(copied, damage, message):
    damage(copied)
    with pytest.raises(DataError, match=message):
        load(copied)


def change_manifest(folder: pathlib.Path, change) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda manifest: manifest.pop("splits"), r"manifest\.json: the manifest has no field 'splits'"),
        (lambda manifest: manifest["splits"].pop("held_out"), r"the manifest\.splits has no field 'held_out'"),
        (
            lambda manifest: manifest["splits"]["train"]["shards"][1].update(size="9"),
            r"the manifest\.splits\.train\.shards\[1\]\.size is str, but it must be int",
        ),
        (lambda manifest: manifest.update(tokenizer=None), r"the manifest\.tokenizer is NoneType, but it must be dict"),
        (lambda manifest: manifest.update(dtype="float32"), r"dtype 'float32', but tokens are uint8, "),
        (lambda manifest: manifest["splits"]["train"]["files"].pop(), r"the files of train are \['train\.index"),
    ],
)
def test_a_manifest_that_lacks_a_field_is_refused(copied, change, message):
    change_manifest(copied, change)
    with pytest.raises(DataError, match=message):
        load(copied)


@pytest.mark.parametrize("name", ["train.index.npy", "held_out.index.npy", "train.names.txt", "held_out.names.txt"])
def test_one_byte_of_the_index_or_the_names_is_noticed(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[-9] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(name)} is damaged: its digest is \w+, but the manifest says"):
        load(copied)


def other_lengths(index: np.ndarray) -> np.ndarray:
    """With the sums of before."""
    index[3:5, 0] += [1, -1]
    return index


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda index: index[:-1], r"documents, tokens, bytes, records \[\d+, .*, but the manifest says \[\d+, "),
        (lambda index: index.reshape(-1), r"holds int64 \[\d+\], but an index is int64 \[N, 3\]"),
        (lambda index: index.astype(np.float64), r"holds float64 "),
        (None, r"train\.index\.npy: "),
        (other_lengths, r"record \d+ holds \d+ tokens, but the index says \d+"),
    ],
)
def test_an_index_that_the_manifest_vouches_for_is_checked_all_the_same(copied, change, message):
    path = copied / "train.index.npy"
    if change is None:
        path.write_bytes(b"\0" * path.stat().st_size)
    else:
        np.save(path, change(np.load(path)))
    change_manifest(copied, lambda manifest: manifest["splits"]["train"]["files"][0].update(describe_file(path)))
    with pytest.raises(DataError, match=message):
        read_all(load(copied))


def test_another_tokenizer_than_the_records_were_made_with_is_refused(copied):
    change_manifest(copied, lambda manifest: manifest["tokenizer"].update(hash="0123", size=1000))
    with pytest.raises(DataError, match=r"was tokenized by .* \(hash 0123, 1000 tokens\), but the run's tokenizer has"):
        load(copied)


def test_tokenizing_refuses_a_folder_in_use_and_a_source_that_changes(text, made, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="is not an empty folder"):
        making.make_records(text, TOKENIZER, made, workers=1)
    scan = making.scan(text)
    monkeypatch.setattr(making, "scan", lambda source: scan._replace(keys=scan.keys + np.uint64(1)))
    with pytest.raises(DataError, match="the source changed while it was tokenized"):
        making.make_records(text, TOKENIZER, tmp_path / "tokens", workers=1)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_that_makes_the_same_folder_is_refused(text, tmp_path, monkeypatch):
    """It leaves the first one's work alone; what a killed process left is cleared away."""
    out, scan = tmp_path / "tokens", making.scan
    unfinished = tmp_path / ".tokens.unfinished"
    unfinished.mkdir()
    for name in ("lock", "train-00099.array_record"):
        (unfinished / name).write_text("left by a killed process")

    def meanwhile(source):
        (unfinished / "work").write_text("")
        again = [
            sys.executable,
            "-m",
            "k3jax.tokenize",
            "--out",
            str(out),
            "--source",
            f"TextFolder(path='{text.path}')",
        ]
        second = subprocess.run(again, capture_output=True, text=True)
        assert second.returncode == 8, second.stderr
        assert re.search(rf"tokens is being made by process {os.getpid()} on \S+; wait for it", second.stderr)
        (unfinished / "work").unlink()
        return scan(source)

    monkeypatch.setattr(making, "scan", meanwhile)
    making.make_records(text, TOKENIZER, out, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["manifest.json"]
        + [
            f"{split}{end}"
            for split in ("train", "held_out")
            for end in ("-00000.array_record", ".index.npy", ".names.txt")
        ]
    )


def test_the_command_takes_the_source_of_a_run_or_its_own(tmp_path):
    assert tokenize.read_job(None, None, None) == tokenize.Job(c.StdlibCorpus(), c.Bytes())
    job = tokenize.read_job("tiny", "JsonLines(path='a.jsonl')", "TiktokenRanks(path='r')")
    assert job == tokenize.Job(c.JsonLines(path="a.jsonl"), c.TiktokenRanks(path="r"))
    with pytest.raises(ConfigError, match="there is no 'TokenRecords' here"):
        tokenize.read_job(None, "TokenRecords(path='tokens')", None)


def test_tokenizing_processes_do_not_even_import_jax(tmp_path):
    """The negative control is a module that does."""
    program = "import sys, importlib; list(map(importlib.import_module, sys.argv[1:])); print('jax' in sys.modules)"

    def imports_jax(*modules: str, path: pathlib.Path) -> bool:
        run = [sys.executable, "-c", program, *modules]
        done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=path)
        return done.stdout.strip() == "True"

    root = pathlib.Path(__file__).parent.parent.parent
    modules = ["k3jax.data.make_records", "k3jax.data.packing", "k3jax.data.tasks", "k3jax.tokenize"]
    assert not imports_jax(*modules, path=root)
    (tmp_path / "jax.py").write_text("")
    (tmp_path / "careless.py").write_text("import jax")
    assert imports_jax("careless", path=tmp_path)
