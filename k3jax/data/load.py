"""From a source and a tokenizer to training batches and held-out batches."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from k3jax import config_data as c
from k3jax import config_io, config_tasks
from k3jax.data.documents import DataError, Documents, TokenDocuments
from k3jax.data.held_out import HeldOutBatches, compression_baselines
from k3jax.data.order import Batches
from k3jax.data.packing import PackedRows
from k3jax.data.records import RecordDocuments, check_tokenizer, read_manifest
from k3jax.data.tasks import TaskDocuments
from k3jax.data.text import Texts, load_corpus
from k3jax.data.tokenizers import Tokenizer, check_fits, make_tokenizer

_TEXTS_AT_ONCE = 256
_STREAM, _BYTES = c.Stream(), c.Bytes()


@dataclass(frozen=True, eq=False)
class Part:
    """One source of a run, split. `skipped` are the names of documents that are not UTF-8."""

    name: str
    weight: float
    train: Documents
    held_out: Documents
    fingerprint: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Data:
    """What a run reads. `fingerprint` names the exact documents, their tokens and their weights."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    fingerprint: str

    def batches(self, *, length: int, batch: int, seed: int, packing: c.Packing = _STREAM) -> Batches:
        """Endless global batches of `batch` rows of `length` tokens, a pure function of seed and step.

        Raises:
          ValueError: length or batch below 1, or a seed outside 0..2**32-1. DataError: an example of a task is longer
          than the row; see `PackedRows`.
        """
        rows = {part.name: PackedRows(part.train, length, _packing(part, packing, length)) for part in self.parts}
        return Batches(rows, [part.weight for part in self.parts], batch=batch, seed=seed)

    def held_out(
        self, *, length: int, batch: int, packing: c.Packing = _STREAM
    ) -> dict[str, Callable[..., HeldOutBatches]]:
        """For each source by name a function that makes its held-out batches; it takes `max_bytes`."""
        return {part.name: partial(_held_out, part, packing, length, batch) for part in self.parts}

    def skipped(self) -> dict[str, list[str]]:
        """For each source that left some out, the names of the documents that are not UTF-8, which no run reads.

        Token records leave them out when they are made: `k3jax.tokenize` says how many, and so does the manifest.
        """
        return {part.name: list(part.skipped) for part in self.parts if part.skipped}

    def bytes_per_token(self) -> float | None:
        """Of the training text, or None where some of it is no text. EOS is a token without a byte."""
        rates = [part.train.bytes.sum() / part.train.lengths.sum() for part in self.parts]
        return float(np.average(rates, weights=[part.weight for part in self.parts])) if all(rates) else None

    def baselines(self, *, max_bytes: int = 2**25) -> dict[str, dict[str, dict[str, float]]]:
        """What gzip and xz make of the held-out text of each source that is text; see `compression_baselines`.

        At most the first documents that reach `max_bytes` are compressed: xz manages about a megabyte a second.
        """
        found = {}
        for part in self.parts:
            total = int(part.held_out.bytes.sum())
            if total:
                count = int(np.searchsorted(np.cumsum(part.held_out.bytes), min(max_bytes, total))) + 1
                tokens = [part.held_out[i].targets[:-1] for i in range(count)]
                found[part.name] = compression_baselines([self.tokenizer.decode(t).encode() for t in tokens])
        return found


def load_data(source: c.Source, tokenizer: c.Tokenizer = _BYTES, *, vocab: int, seed: int = 0) -> Data:
    """Opens a source. Text is read and tokenized in memory; token records are only opened; tasks are made on demand.

    A part of a mixture has the name that the mixture gives it, any other source that of its class.

    Args:
      vocab: embeddings of the model. seed: of the generated tasks.

    Raises:
      DataError: the source cannot be read, or was tokenized by another tokenizer.
      ConfigError: the tokenizer or a task needs more tokens than the model has.
    """
    made = make_tokenizer(tokenizer)
    parts = (
        source.parts if isinstance(source, c.Mixture) else [c.Weighted(source=source, weight=1.0, name=_name(source))]
    )
    if c.reads_text(source):
        check_fits(made, vocab)
    opened = tuple(_open(part, made, vocab, seed) for part in parts)
    identity = [made.hash, *((part.name, part.weight, part.fingerprint) for part in opened)]
    return Data(opened, made, _digest(json.dumps(identity).encode()))


def _packing(part: Part, wanted: c.Packing, length: int) -> c.Packing:
    """Examples of a task stay whole whatever is wanted for text: an answer must not be cut off from its question."""
    if not isinstance(part.train, TaskDocuments):
        return wanted
    longest = int(part.train.lengths.max())
    if length < longest:
        raise DataError(
            f"{part.name}: the longest example has {longest} tokens, longer than the row of {length}, and is never "
            f"split: raise seq_len to {longest}, or lower the lengths {part.train.task.lengths} of {part.train.name}"
        )
    return c.BestFit(long="refuse")


def _held_out(
    part: Part, packing: c.Packing, length: int, batch: int, *, max_bytes: int | None = None
) -> HeldOutBatches:
    shape = dict(length=length, batch=batch, max_bytes=max_bytes)
    return HeldOutBatches(part.held_out, packing=_packing(part, packing, length), **shape)


def _name(source: c.PlainSource) -> str:
    return type(source).__name__


def _open(part: c.Weighted, tokenizer: Tokenizer, vocab: int, seed: int) -> Part:
    source = part.source
    if isinstance(source, config_tasks.Task):
        config_tasks.check_fits(source, vocab)
        identity = json.dumps([_name(source), config_io.to_dict(source), seed]).encode()
        splits = [TaskDocuments(source, split, seed=seed) for split in ("train", "held_out")]
        return Part(part.name, part.weight, *splits, fingerprint=_digest(identity))
    if isinstance(source, c.TokenRecords):
        manifest = read_manifest(source.path)
        check_tokenizer(source.path, manifest, tokenizer)
        splits = [RecordDocuments(source.path, split, manifest) for split in ("train", "held_out")]
        identity = json.dumps(manifest["splits"], sort_keys=True).encode()
        return Part(part.name, part.weight, *splits, fingerprint=_digest(identity))
    corpus = load_corpus(source)
    splits = [_tokenize(_name(source), texts, tokenizer) for texts in (corpus.train, corpus.held_out)]
    return Part(part.name, part.weight, *splits, fingerprint=corpus.fingerprint, skipped=corpus.skipped)


def _tokenize(name: str, texts: Texts, tokenizer: Tokenizer) -> TokenDocuments:
    ends = dict(bos=tokenizer.bos, eos=tokenizer.eos)
    sizes = np.diff(texts.starts)
    if tokenizer.hash == "bytes":
        return TokenDocuments(name, texts.data, texts.starts, sizes, texts.names, **ends)
    found = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = [texts[i] for i in range(start, min(start + _TEXTS_AT_ONCE, len(texts)))]
        found += [tokens.astype(tokenizer.dtype) for tokens in tokenizer.encode_batch(some)]
    starts = np.cumsum([0] + [len(tokens) for tokens in found], dtype=np.int64)
    return TokenDocuments(name, np.concatenate(found), starts, sizes, texts.names, **ends)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
