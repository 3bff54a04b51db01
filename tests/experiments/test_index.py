"""What experiments/README.md and LOG.md say of the studies, against their folders."""

import pathlib
import re

from experiments.study import FOLDER

COLUMNS = 7
NOT_RUN = "not run yet"


def problems(folder: pathlib.Path) -> list[str]:
    """What is wrong, a line each: every study has a row; one with results has all cells of it filled, a verdict with a
    number, and an entry in the log."""
    found = []
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| [")]
    rows = {match[1]: row for row in cells if (match := re.search(r"\]\((\w+)/README.md\)", row[0]))}
    log = (folder / "LOG.md").read_text(encoding="utf-8")
    for place in sorted(path.parent for path in folder.glob("*/study.py")):
        name, row = place.name, rows.get(place.name)
        if row is None or len(row) != COLUMNS:
            found.append(f"{name}: README.md has no row of {COLUMNS} cells for it")
        elif not (place / "results.csv").exists():
            found += [] if row[2] == NOT_RUN else [f"{name}: no results.csv, but its row does not say {NOT_RUN!r}"]
        else:
            if NOT_RUN in row or "" in row:
                found.append(f"{name}: results.csv is there, but its row is not filled in: {row}")
            found += _of_study(place, log)
    return found


def _of_study(place: pathlib.Path, log: str) -> list[str]:
    text = (place / "README.md").read_text(encoding="utf-8")
    verdict = re.search(r"^## Verdict\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    found = []
    if verdict is None or not re.search(r"\d", verdict[1]) or NOT_RUN in verdict[1].lower():
        found.append(f"{place.name}: its README has no heading Verdict, or no number under it")
    if not re.search(rf"\b{place.name.partition('_')[0]}(\b|_)", log):
        found.append(f"{place.name}: LOG.md does not name it")
    return found


def test_the_index_is_that_of_the_studies():
    assert problems(FOLDER) == []


def test_what_the_index_must_say(tmp_path):
    for name in ("s01_first", "s02_second", "s03_third", "s04_fourth"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.py").touch()
        (tmp_path / name / "README.md").write_text("# A 1\n\n## Verdict\n\nYes, by 0.1.\n\n## More\n")
        if name != "s04_fourth":
            (tmp_path / name / "results.csv").touch()
    row = "| [{0}]({1}/README.md) | Why? | {2} | 1 | 2 | 3 | {3} |\n".format
    good = row("s01", "s01_first", "yes", "4"), row("s02", "s02_second", "no", "4"), row("s03", "s03_third", "no", "4")
    (tmp_path / "README.md").write_text(
        "".join(good) + "| [s04](s04_fourth/README.md) | Why? | not run yet | | | | |\n"
    )
    (tmp_path / "LOG.md").write_text("## s01 and s02_second\n\n* s03.\n")
    assert problems(tmp_path) == []
    (tmp_path / "s01_first/README.md").write_text("# A 1\n\n## Verdict\n\nYes.\n\n## More 2\n")
    bad = (
        row("s01", "s01_first", "not run yet", "4"),
        row("s02", "s02_second", "no", ""),
        row("s04", "s04_fourth", "no", "4"),
    )
    (tmp_path / "README.md").write_text("".join(bad))
    (tmp_path / "LOG.md").write_text("## s01\n")
    found = [line.partition(", ")[0] for line in problems(tmp_path)]
    assert found == [
        "s01_first: results.csv is there",
        "s01_first: its README has no heading Verdict",
        "s02_second: results.csv is there",
        "s02_second: LOG.md does not name it",
        "s03_third: README.md has no row of 7 cells for it",
        "s04_fourth: no results.csv",
    ]
