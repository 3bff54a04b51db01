"""Where a command writes its file, which is none of those that it reads."""

import pathlib

from k3jax.config import ConfigError


def target(out: str | pathlib.Path, name: str, *sources: str | pathlib.Path | None) -> pathlib.Path:
    """``out``, or ``name`` in it where it is a folder or ends like one (``specs/``), which is made.

    Raises:
      ConfigError: the file is one of the ``sources`` that there are, by whatever path, or the folder cannot be made.
    """
    path = pathlib.Path(out)
    try:
        if str(out).endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        path = path / name if path.is_dir() else path
        taken = path.exists() and any(
            path.samefile(source) for source in sources if source and pathlib.Path(source).exists()
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error}") from error
    if taken:
        raise ConfigError(f"{str(path)!r} is what is read, and would be overwritten; give another file with --out")
    return path


def write(text: str, path: pathlib.Path) -> None:
    """Writes a text.

    Raises:
      ConfigError: the path cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error}") from error
