"""Statistics, tables and figures from runs that are made up."""

import csv
import io

import numpy as np
import pytest

from experiments import estimate, ladder, plots, stats, table
from k3jax.config import ConfigError


def test_means_and_intervals():
    """Against numbers of a textbook: four values, 3.182 standard errors."""
    found = stats.mean([4.0, 6.0, 5.0, 9.0])
    assert found.mean == 6.0 and found.error == pytest.approx(np.sqrt(14 / 3) / 2)
    assert found.half == pytest.approx(3.182 * found.error) and found.count == 4
    alone = stats.mean([1.0])
    assert np.isnan(alone.error) and np.isnan(alone.half)
    with pytest.raises(ValueError, match="no values"):
        stats.mean([])


def test_differences_are_paired_by_seed():
    """A difference that is the same for every seed has no error, however far the seeds are apart."""
    values, control = {0: 1.0, 1: 5.0, 2: 9.0}, {0: 2.0, 1: 6.0, 2: 10.0, 3: 50.0}
    found = stats.paired(values, control)
    assert (found.mean, found.error, found.count) == (-1.0, 0.0, 3)
    assert stats.paired({7: 1.0}, control) is None


@pytest.fixture
def filled(made_up):
    for variant, shift in (("control", 0.0), ("swiglu", 0.1)):
        for rate, worse in ((1e-3, 0.5), (1e-2, 0.0)):
            made_up(variant, rate, 0, 2.0 + shift + worse, **{"accuracy@8": 0.5, "accuracy@16": 0.25})
        for seed in (1, 2):
            made_up(variant, 1e-2, seed, 2.0 + shift + seed, **{"accuracy@8": 0.5, "accuracy@16": 0.25})


def test_table_of_a_study(study, filled, tmp_path):
    found = table.rows(study, tmp_path)
    assert len(found) == 8 and table.best_rates(study, found) == {("small", "control"): 1e-2, ("small", "swiglu"): 1e-2}
    text = table.markdown(study, found)
    assert "| control | 0.01* | 3.0000 ± 0.5774 | 3 |  | 1 | 10 |" in text
    assert "| swiglu | 0.01* | 3.1000 ± 0.5774 | 3 | +0.1000 [+0.1000, +0.1000] | 1 | 10 |" in text
    assert "8 runs, 0 minutes, commit abc." in text and "at an end of the grid" in text
    read = list(csv.DictReader(io.StringIO(table.csv_text(found))))
    assert len(read) == 8 and list(read[0])[:5] == ["study", "rung", "variant", "rate", "seed"]
    assert read[0]["bits_per_byte"] == "2.5" and list(read[0])[-1] == "commit"


def test_figures(study, filled, tmp_path):
    chosen = table.at_best(study, table.rows(study, tmp_path))
    paths = plots.write(study, chosen, tmp_path, tmp_path)
    assert [path.name for path in paths] == ["results.png", "curves.png", "by_length.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_run_that_diverged_stays_in_the_table(study, made_up, tmp_path):
    made_up("control", 1e-2, 0, None)
    made_up("control", 1e-3, 0, 2.0)
    found = table.rows(study, tmp_path)
    assert table.best_rates(study, found) == {("small", "control"): 1e-3}
    assert table.csv_text(found).count("\n") == 3


def test_the_readme_keeps_what_a_person_wrote(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Study\n\n{table.BEGIN}\nold\n{table.END}\n\n## Verdict\n\nYes.\n")
    table.fill(readme, "new")
    table.fill(readme, "newer")
    assert readme.read_text() == f"# Study\n\n{table.BEGIN}\n\nnewer\n\n{table.END}\n\n## Verdict\n\nYes.\n"
    readme.write_text("# Study\n")
    with pytest.raises(ConfigError, match="needs the lines <!-- table -->"):
        table.fill(readme, "new")


def test_nothing_to_show(study, made_up, tmp_path):
    with pytest.raises(ConfigError, match="study toy: no finished run"):
        table.rows(study, tmp_path)


def test_estimates_come_from_finished_runs(study, filled, tmp_path):
    known = estimate.speeds(tmp_path)
    assert {speed.flops_per_second for speed in known} == {250.0}
    text = estimate.table(study, [("small", "control"), ("published", "control")], seeds=3, root=tmp_path)
    flops = estimate.measures.sizes(study.config("small", "control"))["flops_per_token"] * 4 * 2 * 16
    assert f"{4 * flops / 250 / 60:.1f}" in text and "planned" in text and "minutes in all" in text


def test_a_ladder_finds_the_lines_that_its_points_lie_on():
    """Two lines 1.3 apart in computation, with noise that the interval covers."""
    rng = np.random.default_rng(0)
    line = ladder.Power(2.0, 0.05)
    sizes = [1e-6, 4e-6, 2e-5, 1e-4]
    control = {C: [line.loss(C) * np.exp(1e-4 * rng.standard_normal()) for _ in range(3)] for C in sizes}
    other = {C: [line.loss(C / 1.3) * np.exp(1e-4 * rng.standard_normal()) for _ in range(3)] for C in sizes}
    found = ladder.compare(control, other, draws=200)
    assert pytest.approx(2.0, rel=0.01) == found.control.A and found.control.a == pytest.approx(0.05, rel=0.01)
    assert (
        found.low < 1.3 < found.high and found.high - found.low < 0.05 and found.ratio == pytest.approx(1.3, rel=0.02)
    )
    assert ladder.compare(control, control, draws=50).ratio == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="a line needs two sizes"):
        ladder.fit({1e-6: [2.0]})
