"""From a source to batches: what a run gets for each kind of source, and what does not fit is refused."""

import ast
import pathlib

import numpy as np
import pytest

import k3jax.data
from k3jax import config_data as c
from k3jax.config import ConfigError
from k3jax.config_tasks import Copy
from k3jax.data.documents import DataError
from k3jax.data.load import load_data
from k3jax.data.tokenizers import ByteTokenizer

COPY = Copy(vocab=16, lengths=(8, 12), examples=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> c.TextFolder:
    path = tmp_path_factory.mktemp("folder")
    for number in range(12):
        (path / f"{number}.txt").write_text(f"file {number}: " + "words and words " * number)
    return c.TextFolder(path=str(path), held_out=0.3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> c.TiktokenRanks:
    """Bytes and one word."""
    import base64

    path = tmp_path_factory.mktemp("ranks") / "ranks"
    tokens = [bytes([i]) for i in range(256)] + [b"wo", b"wor"]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    return c.TiktokenRanks(path=str(path), special=2, bos=258, eos=259)


def mixture(folder, *, weight=3.0) -> c.Mixture:
    parts = (c.Weighted(source=folder, weight=weight, name="text"), c.Weighted(source=COPY, weight=1.0, name="copying"))
    return c.Mixture(parts=parts)


def test_a_single_source_has_the_name_of_its_class(folder):
    data = load_data(folder, vocab=258)
    (make,) = (data.held_out(length=64, batch=2)[name] for name in ("TextFolder",))
    assert make(max_bytes=10).bytes < make().bytes == data.parts[0].held_out.bytes.sum()
    assert set(data.baselines()["TextFolder"]) == {"gzip", "xz"}


def test_text_through_another_tokenizer_keeps_its_bytes(folder, ranks):
    data, plain = load_data(folder, ranks, vocab=260), load_data(folder, vocab=258)
    for split in ("train", "held_out"):
        ours, theirs = getattr(data.parts[0], split), getattr(plain.parts[0], split)
        assert ours.bytes.tolist() == theirs.bytes.tolist() and ours.lengths.sum() < theirs.lengths.sum()
        for i in range(len(ours)):
            assert data.tokenizer.decode(ours[i].targets) == plain.tokenizer.decode(theirs[i].targets)
            assert (ours[i].inputs[0], ours[i].targets[-1]) == (258, 259) and ours[i].bytes == theirs[i].bytes
    assert data.baselines() == plain.baselines()


def test_a_mixture_of_text_and_a_task(folder):
    data = load_data(mixture(folder), vocab=258)
    batches = data.batches(length=24, batch=4, seed=0, packing=c.BestFit())
    rows = np.concatenate([batches[n].targets_BT for n in range(25)])
    assert sum((row < 16).all() for row in rows) == 25, "a quarter of the rows are of the task"
    held = data.held_out(length=24, batch=4, packing=c.BestFit())
    assert held["text"]().bytes > 0 == held["copying"]().bytes
    few = held["copying"](max_bytes=1)
    assert (few.bytes, len(few)) == (0, 1) and len(held["copying"]()) == 2
    assert set(data.baselines()) == {"text"}


def test_examples_longer_than_the_row_say_what_helps_a_task(folder):
    data = load_data(mixture(folder), vocab=258)
    advice = r"copying: the longest example has 24 .* row of 23,.*raise seq_len to 24, .*lengths \(8, 24\) of Copy"
    longer = c.Mixture(parts=(c.Weighted(source=Copy(vocab=16, lengths=(8, 24)), weight=1.0, name="copying"),))
    for make in (lambda data, n: data.batches(length=n, batch=1, seed=0), held_out_of_copying):
        make(data, 23)
        make(load_data(longer, vocab=258), 24)
        with pytest.raises(DataError, match=advice):
            make(load_data(longer, vocab=258), 23)


def held_out_of_copying(data, length: int):
    return data.held_out(length=length, batch=1)["copying"]()


def test_documents_that_are_not_utf8_are_listed_by_source(folder, tmp_path):
    assert load_data(mixture(folder), vocab=258).skipped() == {}
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("words")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    latin = c.Weighted(source=c.TextFolder(path=str(tmp_path)), weight=1.0, name="latin")
    data = load_data(c.Mixture(parts=(*mixture(folder).parts, latin)), vocab=258)
    assert data.skipped() == {"latin": ["latin.txt"]}


def test_the_fingerprint_names_text_tokenizer_weights_and_tasks(folder, ranks):
    found = [
        load_data(folder, vocab=260),
        load_data(folder, ranks, vocab=260),
        load_data(mixture(folder), vocab=260),
        load_data(mixture(folder, weight=2.0), vocab=260),
        load_data(mixture(folder), vocab=260, seed=1),
    ]
    assert len({data.fingerprint for data in found}) == 5
    assert load_data(mixture(folder), vocab=260).fingerprint == found[2].fingerprint
    path = pathlib.Path(folder.path, "3.txt")
    before = path.read_text()
    path.write_text(before.replace("3", "4"))
    assert load_data(folder, vocab=260).fingerprint != found[0].fingerprint
    path.write_text(before)


def test_what_the_model_cannot_hold_is_refused(folder, ranks):
    with pytest.raises(ConfigError, match="the tokenizer has 258 tokens but the model's vocabulary is only 257"):
        load_data(folder, vocab=257)
    with pytest.raises(ConfigError, match="the tokenizer has 260 tokens but the model's vocabulary is only 259"):
        load_data(folder, ranks, vocab=259)
    assert load_data(COPY, vocab=16).parts[0].train.name == "Copy"
    with pytest.raises(ConfigError, match="Copy uses 16 tokens, but the model's vocabulary is only 15"):
        load_data(COPY, vocab=15)


def test_the_data_names_no_jax():
    for path in pathlib.Path(k3jax.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "jax"], path


def test_byte_tokens_are_the_bytes(folder):
    part = load_data(folder, vocab=258).parts[0]
    text = pathlib.Path(folder.path, part.train.title(0)).read_bytes()
    assert part.train[0].inputs.tolist() == [ByteTokenizer.bos, *text]
