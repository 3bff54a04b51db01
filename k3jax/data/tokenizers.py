"""Text to token ids and back: bytes, a `tokenizer.json`, or ranks in tiktoken's format.

All have the attributes ``bos`` and ``eos`` (ids), ``size`` (ids run from 0 to size - 1), ``dtype`` (the smallest that
stores what ``encode`` gives) and ``hash`` (names the exact mapping from text to ids), and the methods of
:class:`Tokenizer`. Text is only ever text: what looks like a special token is encoded letter by letter.
"""

import base64
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tiktoken
import tokenizers

from k3jax import config_data as c
from k3jax.config import ConfigError, require
from k3jax.data.documents import DataError


class Tokenizer(Protocol):
    bos: int
    eos: int
    size: int
    dtype: np.dtype
    hash: str

    def encode(self, text: str | bytes) -> np.ndarray:
        """int32 tokens of `text`, without BOS or EOS."""
        ...

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each, faster where the library has threads."""
        ...

    def decode(self, tokens) -> str:
        """Text of `tokens`, without special tokens; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for an id outside 0..size-1.
        """
        ...


def make_tokenizer(config: c.Tokenizer) -> Tokenizer:
    """Reads the file a tokenizer is in, if it has one.

    Raises:
      DataError: the file is missing or not of its format. ConfigError: BOS or EOS is no token of it.
    """
    match config:
        case c.Bytes():
            return ByteTokenizer()
        case c.TokenizerJson():
            return JsonTokenizer(config)
        case c.TiktokenRanks():
            return RankTokenizer(config)
    raise TypeError(f"a tokenizer is a Bytes, TokenizerJson or TiktokenRanks, got {type(config).__name__}")


def check_fits(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Raises ConfigError when a model with `vocabulary` embeddings cannot hold every token."""
    require(
        vocabulary >= tokenizer.size,
        f"the tokenizer has {tokenizer.size} tokens but the model's vocabulary is only {vocabulary}",
    )


class ByteTokenizer:
    """One token per byte (0..255), then BOS (256) and EOS (257). Round trips any text; `decode` skips BOS and EOS."""

    bos = 256
    eos = 257
    size = 258
    dtype = np.dtype(np.uint8)
    hash = "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens) -> str:
        tokens = _checked(tokens, self.size, "the byte tokenizer")
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """Any tokenizer that the `tokenizers` library reads from a `tokenizer.json`."""

    def __init__(self, config: c.TokenizerJson):
        content = _read(config.path)
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{config.path}: not a tokenizer.json: {error}") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self._path = config.path
        self.bos, self.eos = self._special("bos", config.bos), self._special("eos", config.eos)
        self.size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = _smallest(self.size)
        self.hash = _digest(content, config.bos, config.eos)

    def _special(self, field: str, token: str) -> int:
        found = self._inner.token_to_id(token)
        known = [added.content for added in self._inner.get_added_tokens_decoder().values()]
        if found is None:
            raise ConfigError(
                f"TokenizerJson.{field} = {token!r}, but {self._path} has no such token; "
                f"its special tokens are: {', '.join(known) or 'none'}"
            )
        return found

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        found = self._inner.encode_batch_fast([_text(text) for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    def decode(self, tokens) -> str:
        tokens = _checked(tokens, self.size, self._path)
        keep = tokens[(tokens != self.bos) & (tokens != self.eos)]
        return self._inner.decode(keep.tolist(), skip_special_tokens=True)


class RankTokenizer:
    """Byte-pair merges in tiktoken's format, with `special` ids after the ranks that stand for no text."""

    def __init__(self, config: c.TiktokenRanks):
        content = _read(config.path)
        ranks = _parse_ranks(config.path, content)
        self._ranks = len(ranks)
        self.size = self._ranks + config.special
        for field in ("bos", "eos"):
            value = getattr(config, field)
            require(
                self._ranks <= value < self.size,
                f"TiktokenRanks.{field} = {value}, but {config.path} has {self._ranks} ranks: "
                f"special ids are {self._ranks}..{self.size - 1}",
            )
        try:
            self._inner = tiktoken.Encoding("ranks", pat_str=config.pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise ConfigError(f"TiktokenRanks.pattern = {config.pattern!r}: {error}") from error
        self._path = config.path
        self.bos, self.eos = config.bos, config.eos
        self.dtype = _smallest(self._ranks)
        self.hash = _digest(content, config.pattern, config.special, config.bos, config.eos)

    def encode(self, text: str | bytes) -> np.ndarray:
        return self._inner.encode_to_numpy(_text(text), disallowed_special=()).astype(np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens) -> str:
        tokens = _checked(tokens, self.size, self._path)
        data = self._inner.decode_bytes(tokens[tokens < self._ranks].tolist())
        return data.decode("utf-8", errors="replace")


def _parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """{token: rank}; ranks must be 0, 1, 2 and so on, and hold every byte, so that any text can be encoded."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{path}:{number}: not a base64 token and its rank: {line[:60]!r}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path}: {len(ranks)} different tokens, but their ranks are not 0..{len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path}: no rank for the bytes {missing[:5]}{'...' if len(missing) > 5 else ''}")
    return ranks


def _read(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path}: {error.strerror or error}") from error


def _checked(tokens, size: int, what: str) -> np.ndarray:
    tokens = np.asarray(tokens).reshape(-1)
    unknown = tokens[(tokens < 0) | (tokens >= size)]
    if unknown.size:
        raise ValueError(f"token {unknown[0]} is not one of the {size} tokens of {what}")
    return tokens.astype(np.int64)


def _text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8")


def _smallest(size: int) -> np.dtype:
    return np.min_scalar_type(size - 1)


def _digest(content: bytes, *settings) -> str:
    return hashlib.blake2b(content + repr(settings).encode(), digest_size=8).hexdigest()
