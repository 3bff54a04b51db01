"""Where text comes from: one frozen dataclass per kind of source.

A source only says what to read. Row length, batch size and seed belong to the training settings, because the same
source serves runs of every shape.
"""

import dataclasses

from k3jax.config import require


def _check_share(source: "Source") -> None:
    share = source.held_out
    require(
        isinstance(share, float) and 0.0 < share < 1.0,
        f"{type(source).__name__}.held_out = {share!r}, but it must be the share of files kept for evaluation, "
        "strictly between 0 and 1",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibCorpus:
    """The source code of the Python standard library that runs this program, about 30 MB, present on every machine.

    The files depend on the Python version only (folders of installed packages and files generated for one machine are
    left out), and `k3jax.data.Corpus.fingerprint` says which ones a run has seen.
    """

    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFolder:
    """Every UTF-8 file below `path` whose name matches `pattern`; hidden files and folders are left out."""

    path: str
    pattern: str = "*"
    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self)
        for name in ("path", "pattern"):
            value = getattr(self, name)
            require(
                isinstance(value, str) and value != "",
                f"TextFolder.{name} = {value!r}, but it must be a non-empty string",
            )


Source = StdlibCorpus | TextFolder
