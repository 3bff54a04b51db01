"""What the runs of a study found: `results.csv`, a Markdown table, figures, and the README's table.

    python -m experiments.table s01_kda_ancestors
    python -m experiments.table s01_kda_ancestors --partial

The table stands between two markers in the study's README; everything around it is written by a person. A study of
which runs are missing has no table, unless it is asked for with --partial; the table then says what is missing.
"""

import csv
import io
import math
import pathlib
from typing import Any

from absl import app, flags

from experiments import folder, measures, plots, stats
from experiments.folder import Run
from experiments.study import Study, load
from k3jax.config import ConfigError, require
from k3jax.exits import leave
from k3jax.run_folder import write_text

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
Row = dict[str, Any]


def rows(study: Study, root: pathlib.Path = folder.ROOT) -> list[Row]:
    """The results of all finished runs of the study, flat, in the order of rungs, variants, rates and seeds.

    Raises:
      ConfigError: no run is finished, one did not measure what the study decides by, or none what it shows; or a result
        is cut off or of another run.
    """
    found = []
    for rung in study.run_here:
        for variant in study.variants:
            for rate in study.rates:
                place = Run(study, rung, variant, rate, 0).folder(root).parent
                seeds = sorted(_seed(path) for path in place.glob(f"lr{rate:g}_seed*/{folder.RESULT}"))
                results = [folder.result(Run(study, rung, variant, rate, seed), root) for seed in seeds]
                found += [_flat(result) for result in results]
    require(bool(found), f"study {study.name}: no finished run in {root / study.name}")
    lacking = [row for row in found if study.metric.name not in row]
    _require_measured(study, study.metric.name, lacking[:1])
    ended = [row for row in found if "diverged" not in row]
    for name in study.shown:
        _require_measured(study, name, [] if any(name in row for row in ended) else ended[:1])
    return found


def _require_measured(study: Study, name: str, lacking: list[Row]) -> None:
    for row in lacking:
        run = f"{row['rung']} {row['variant']} lr{row['rate']:g}_seed{row['seed']}"
        raise ConfigError(f"study {study.name}: {run} did not measure {name!r} (measured: {', '.join(sorted(row))})")


def missing(study: Study, found: list[Row]) -> list[str]:
    """A line for each rung and variant of which runs are missing: of its search, or of seeds at its best rate."""
    made = {(row["rung"], row["variant"], row["rate"], row["seed"]) for row in found}
    best, lines = best_rates(study, found), []
    for rung in study.run_here:
        for variant in study.variants:
            rates = [f"{rate:g}" for rate in study.rates if (rung, variant, rate, 0) not in made]
            chosen = best.get((rung, variant))
            seeds = [str(seed) for seed in range(study.seeds) if (rung, variant, chosen, seed) not in made]
            if rates:
                lines.append(f"{rung} {variant}: no run at rate {', '.join(rates)}")
            elif seeds:
                lines.append(f"{rung} {variant}: no run of seed {', '.join(seeds)} at its best rate {chosen:g}")
    return lines


def _seed(path: pathlib.Path) -> int:
    return int(path.parent.name.rpartition("seed")[2])


def _flat(found: dict[str, Any]) -> Row:
    names = ("study", "rung", "variant", "rate", "seed")
    return (
        {name: found[name] for name in names}
        | found["metrics"]
        | found["cost"]
        | {
            "seconds": round(found["seconds"], 1),
            "commit": found["commit"],
        }
    )


def best_rates(study: Study, found: list[Row]) -> dict[tuple[str, str], float]:
    """The rate of every (rung, variant) that is best by the metric with the first seed; none without such a run."""
    best = {}
    for rung, variant in dict.fromkeys((row["rung"], row["variant"]) for row in found):
        searched = [row for row in found if (row["rung"], row["variant"], row["seed"]) == (rung, variant, 0)]
        values = [study.metric.of({"metrics": row}) for row in searched]
        if values:
            best[rung, variant] = searched[study.metric.best(values)]["rate"]
    return best


def at_best(study: Study, found: list[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """{(rung, variant): {seed: row}} at the best rates."""
    best = best_rates(study, found)
    chosen: dict[tuple[str, str], dict[int, Row]] = {key: {} for key in best}
    for row in found:
        key = row["rung"], row["variant"]
        if row["rate"] == best.get(key):
            chosen[key][row["seed"]] = row
    return chosen


def csv_text(found: list[Row]) -> str:
    """One line per run. A number that a run does not have is left empty."""
    names = list(dict.fromkeys(name for row in found for name in row))
    ends = [*measures.SIZES, "tokens", "flops", "seconds", "commit"]
    names = [name for name in names if name not in ends] + [name for name in ends if name in names]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _digits(value) for name, value in row.items()} for row in found)
    return text.getvalue()


def markdown(study: Study, found: list[Row]) -> str:
    """One table per rung: the metric at the best rate, its difference to the control over seeds, what else is shown;
    and what the numbers do not say."""
    chosen, parts = at_best(study, found), []
    for rung in dict.fromkeys(rung for rung, _ in chosen):
        variants = {variant: seeds for (where, variant), seeds in chosen.items() if where == rung}
        parts.append("\n".join([f"**{rung}**", "", *_table(study, variants)]))
    compared = sum(variant != study.control for _, variant in chosen)
    notes = [
        "Mean ± standard error over seeds at each variant's best rate. Differences are paired by seed, with their "
        f"95 % interval (Student's t). Each interval stands for itself: none of the {compared} comparisons is corrected"
        f" for the others, and of as many, {0.05 * compared:.2g} are expected to miss the true difference."
    ]
    if not all(math.isfinite(value) for seeds in chosen.values() for value in _values(study, seeds).values()):
        notes.append(
            "Means and differences leave out runs that diverged, which flatters the variants that have some; the cell "
            "says how many."
        )
    if absent := missing(study, found):
        notes.append(f"**Not finished**, so that best rates and intervals may change: {'; '.join(absent)}.")
    if any(_at_end(study, rate) for rate in best_rates(study, found).values()):
        notes.append("A rate with * is at an end of the grid.")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in found))
    minutes = sum(row["seconds"] for row in found) / 60
    notes.append(f"{len(found)} runs, {minutes:.0f} minutes, commit {commits}.")
    return "\n\n".join([*parts, " ".join(notes)])


def _table(study: Study, variants: dict[str, dict[int, Row]]) -> list[str]:
    name = study.metric.name
    head = ["variant", "rate", name, "seeds", f"minus {study.control}", *study.shown]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    control = _values(study, variants.get(study.control, {}))
    for variant, seeds in variants.items():
        values = _values(study, seeds)
        difference = stats.paired(values, control)
        rate = next(iter(seeds.values()))["rate"]
        star = "*" if _at_end(study, rate) else ""
        against = "" if variant == study.control else _difference(difference, len(values))
        shown = [_shown([row.get(extra) for row in seeds.values()]) for extra in study.shown]
        cells = [variant, f"{rate:g}{star}", _mean(list(values.values())), str(len(values)), against, *shown]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _at_end(study: Study, rate: float) -> bool:
    """Whether a search of several rates ended at the smallest or the largest."""
    return len(study.rates) > 1 and rate in (min(study.rates), max(study.rates))


def _values(study: Study, seeds: dict[int, Row]) -> dict[int, float]:
    return {seed: study.metric.of({"metrics": row}) for seed, row in seeds.items()}


def _mean(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "diverged"
    found, lost = stats.mean(finite), len(values) - len(finite)
    error = "" if math.isnan(found.error) else f" ± {found.error:.4f}"
    return f"{found.mean:.4f}{error}" + (f" ({lost} of {len(values)} diverged)" if lost else "")


def _difference(found: stats.Mean | None, seeds: int) -> str:
    if found is None:
        return "no pair"
    few = "" if found.count == seeds else f" ({found.count} pairs)"
    if math.isnan(found.half):
        return f"{found.mean:+.4f}{few}"
    return f"{found.mean:+.4f} [{found.mean - found.half:+.4f}, {found.mean + found.half:+.4f}]{few}"


def _shown(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return f"{sum(numbers) / len(numbers):.4g}" if numbers else ""


def _digits(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def fill(readme: pathlib.Path, text: str) -> None:
    """Puts the table between the markers of a README.

    Raises:
      ConfigError: the README lacks a marker.
    """
    old = readme.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    require(bool(begin and end), f"{readme} needs the lines {BEGIN} and {END}, between which the table goes")
    write_text(readme, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(argv: list[str]) -> None:
    try:
        if len(argv) != 2:
            raise ConfigError(f"give one study, got {argv[1:]}")
        study, place = load(argv[1])
        root = pathlib.Path(flags.FLAGS.root)
        found = rows(study, root)
        absent = missing(study, found)
        require(
            not absent or flags.FLAGS.partial,
            f"study {study.name} is not finished; --partial makes a table all the same. {'; '.join(absent)}",
        )
        text = markdown(study, found)
        write_text(place / "results.csv", csv_text(found))
        pictures = plots.write(study, at_best(study, found), place, root)
        fill(place / "README.md", "\n\n".join([text, *(f"![{p.stem}]({p.name})" for p in pictures)]))
    except ConfigError as error:
        leave(f"experiments.table: {error}")
    print(text)
    print(f"written: {place / 'results.csv'}, {place / 'README.md'}, {', '.join(str(p) for p in pictures)}")


if __name__ == "__main__":
    flags.DEFINE_bool("partial", False, "make a table of what there is, though runs are missing")
    flags.DEFINE_string("root", str(folder.ROOT), "where the folders of runs lie")
    app.run(main)
