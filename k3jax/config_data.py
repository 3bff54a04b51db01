"""What a run reads: one frozen dataclass per kind of source, tokenizer and packing.

A source only says what to read. Row length, batch size and seed belong to the training settings, because the same
source serves runs of every shape.
"""

from dataclasses import dataclass
from typing import Literal

from k3jax.config import require, require_choice, require_positive
from k3jax.config_tasks import Task

LongDocuments = Literal["split", "refuse", "truncate"]


def _check_share(source: "TextSource") -> None:
    share = source.held_out
    require(
        isinstance(share, float) and 0.0 < share < 1.0,
        f"{type(source).__name__}.held_out = {share!r}, but it must be the share of documents kept for evaluation, "
        "strictly between 0 and 1",
    )


def _check_strings(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(
            isinstance(value, str) and value != "",
            f"{type(config).__name__}.{name} = {value!r}, but it must be a non-empty string",
        )


@dataclass(frozen=True, kw_only=True)
class StdlibCorpus:
    """The source code of the Python standard library that runs this program, about 30 MB, present on every machine.

    The files depend on the Python version only (folders of installed packages and files generated for one machine are
    left out), and `k3jax.data.load.Data.fingerprint` says which ones a run has seen.
    """

    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)


@dataclass(frozen=True, kw_only=True)
class TextFolder:
    """Every UTF-8 file below `path` whose name matches `pattern`; hidden files and folders are left out."""

    path: str
    pattern: str = "*"
    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)
        _check_strings(self, "path", "pattern")


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """One document per line: the string in `field` of a JSON object. `path` is a file or a glob; .gz is unpacked."""

    path: str
    field: str = "text"
    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)
        _check_strings(self, "path", "field")


@dataclass(frozen=True, kw_only=True)
class Parquet:
    """One document per row of a string `column`; null and empty rows are left out. `path` is a file or a glob."""

    path: str
    column: str = "text"
    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)
        _check_strings(self, "path", "column")


@dataclass(frozen=True, kw_only=True)
class TokenRecords:
    """A folder that `python -m k3jax.tokenize` made: ArrayRecord files of token ids and a manifest, already split."""

    path: str

    def __post_init__(self):
        _check_strings(self, "path")


TextSource = StdlibCorpus | TextFolder | JsonLines | Parquet
PlainSource = TextSource | TokenRecords | Task


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A part of a mixture: `weight` is its share of the rows, relative to the other parts."""

    source: PlainSource
    weight: float
    name: str

    def __post_init__(self):
        _check_strings(self, "name")
        require(self.weight > 0, f"Weighted.weight = {self.weight} of {self.name!r}, but it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Rows of several sources, interleaved evenly in proportion to the weights; a row holds one source only.

    A source that is used up starts again in another order while the others go on.
    """

    parts: tuple[Weighted, ...]

    def __post_init__(self):
        require(len(self.parts) > 0, "Mixture.parts is empty, but it must name at least one source")
        names = [part.name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"Mixture.parts has {', '.join(twice)} more than once, but every part needs its own name")


Source = PlainSource | Mixture


def reads_text(source: Source) -> bool:
    """Whether any part of a source needs a tokenizer; generated tasks have token ids of their own."""
    plain = [part.source for part in source.parts] if isinstance(source, Mixture) else [source]
    return any(not isinstance(part, Task) for part in plain)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """The bytes of the UTF-8 text, then BOS and EOS: 258 tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenizerJson:
    """A `tokenizer.json`, as the `tokenizers` library writes it. `bos` and `eos` are the text of the tokens that begin
    and end a document; they may be the same one."""

    path: str
    bos: str
    eos: str

    def __post_init__(self):
        _check_strings(self, "path", "bos", "eos")


# The split pattern of Kimi K2 and K3 (tokenization_kimi.py of the release): Han runs, words by case, numbers of up to
# three digits, punctuation, line ends, blanks.
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True, kw_only=True)
class TiktokenRanks:
    """A file of merge ranks in tiktoken's format, one base64 token and its rank per line, as K3's `tiktoken.model`.

    Attributes:
      path: the file.
      pattern: the regular expression that splits text before merging; the default is K3's.
      special: ids that follow the ranks and stand for no text.
      bos, eos: the special ids that begin and end a document; the defaults are K3's.
    """

    path: str
    pattern: str = KIMI_PATTERN
    special: int = 256
    bos: int = 163584
    eos: int = 163586

    def __post_init__(self):
        _check_strings(self, "path", "pattern")
        require_positive(self, "special")


Tokenizer = Bytes | TokenizerJson | TiktokenRanks


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents end to end, cut every row: no padding but in the last row. A document that is cut goes on in the next
    row without its past."""


@dataclass(frozen=True, kw_only=True)
class BestFit:
    """Whole documents, longest first, each into the row that it leaves the least room in; the rest of a row is padding.

    A document longer than the row is split into full rows and a rest ('split'), refused with its name ('refuse': every
    document is kept whole), or cut to the row ('truncate': the only case that drops tokens, and it is reported).
    """

    long: LongDocuments = "split"

    def __post_init__(self):
        require_choice(self, "long", LongDocuments)


Packing = Stream | BestFit
