"""The compiled step of a shipped layout sends what its golden text says, and docs/layouts.md promises."""

import importlib.metadata
import json
import os
import pathlib
import re

import golden_collectives
import pytest
from golden_collectives import CASES, LIBTPU

from k3jax import layouts

ROOT = pathlib.Path(__file__).parent.parent.parent
FILES = sorted(golden_collectives.GOLDENS.glob("*.txt"))
# What a test run compiles by itself: the quickest. K3JAX_GOLDENS=1 asks for all of the files, which takes minutes.
QUICK = {"nano_8.small"}
NAMES = [path.stem for path in FILES if path.stem in QUICK or os.environ.get("K3JAX_GOLDENS")]
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")


def installed_compiler() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(
    installed_compiler() != LIBTPU, reason=f"goldens are of libtpu {LIBTPU}, and here is {installed_compiler()}"
)
@pytest.mark.parametrize("golden", NAMES)
def test_a_step_sends_what_its_golden_says(golden, tpu_compiler):
    name, size = golden.split(".")
    said = tpu_compiler(pathlib.Path(golden_collectives.__file__), "print", size, name, level="O1")
    assert json.loads(said.splitlines()[-1])[name] == golden_collectives.golden(name, size).read_text()


def promised() -> dict[str, set[tuple[str, str]]]:
    """The table of docs/layouts.md: kinds and axes by layout."""
    found = {}
    for line in (ROOT / "docs" / "layouts.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(KINDS) + 1 and (name := cells[0].strip("`")) in CASES:
            axes = [[one.strip() for one in re.sub("`", "", cell).split(",") if one.strip()] for cell in cells[1:]]
            found[name] = {(kind, one) for kind, group in zip(KINDS, axes) for one in group}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_golden_is_what_the_documentation_promises(path):
    """Without a compiler: no collective that is not promised, and none missing."""
    assert golden_collectives.rows(path.read_text()) == promised()[path.stem.partition(".")[0]]


def test_every_shipped_layout_has_a_golden():
    assert {path.stem.partition(".")[0] for path in FILES} == set(layouts.LAYOUTS) == set(CASES)
