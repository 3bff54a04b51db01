"""Where text comes from: one frozen dataclass per kind of source.

A source only says what to read. Row length, batch size and seed belong to the training settings, because the same
source serves runs of every shape.
"""

import dataclasses


def _check_share(held_out: float) -> None:
    if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) or not 0.0 < held_out < 1.0:
        raise ValueError(
            f"held_out is the share of files kept for evaluation, between 0 and 1 exclusive; got {held_out!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibCorpus:
    """The source code of the Python standard library that runs this program, about 30 MB, present on every machine.

    The files depend on the Python version only (folders of installed packages and files generated for one machine are
    left out), and `k3jax.data.Corpus.fingerprint` says which ones a run has seen.
    """

    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self.held_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFolder:
    """Every UTF-8 file below `path` whose name matches `pattern`; hidden files and folders are left out."""

    path: str
    pattern: str = "*"
    held_out: float = 0.03

    def __post_init__(self):
        _check_share(self.held_out)
        for name in ("path", "pattern"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} of TextFolder must be a non-empty string, got {getattr(self, name)!r}")


Source = StdlibCorpus | TextFolder
