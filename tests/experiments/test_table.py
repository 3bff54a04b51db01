"""Statistics, tables and figures from runs that are made up."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from experiments import estimate, ladder, plots, stats, table
from experiments.study import Metric, studies
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
    assert "none of the 1 comparisons is corrected for the others, and of as many, 0.05 are expected to miss" in text
    assert "diverged" not in text and "Not finished" not in text and not table.missing(study, found)
    read = list(csv.DictReader(io.StringIO(table.csv_text(found))))
    assert len(read) == 8 and list(read[0])[:5] == ["study", "rung", "variant", "rate", "seed"]
    assert read[0]["bits_per_byte"] == "2.5" and list(read[0])[-1] == "commit"


def test_figures(study, filled, tmp_path):
    chosen = table.at_best(study, table.rows(study, tmp_path))
    paths = plots.write(study, chosen, tmp_path, tmp_path)
    assert [path.name for path in paths] == ["results.png", "curves.png", "by_length.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_runs_that_diverged_stay_in_tables_and_figures(study, made_up, tmp_path):
    """One seed of the control, one of the other, and one whose last number is no number."""
    values = {"control": (2.0, None, 2.2, 2.4), "swiglu": (2.1, 2.0, None, 2.7)}
    for variant, seeds in values.items():
        made_up(variant, 1e-2, 0, None)
        for seed, value in enumerate(seeds):
            made_up(variant, 1e-3, seed, value)
    made_up("swiglu", 1e-3, 4, float("nan"))
    found = table.rows(study, tmp_path)
    assert set(table.best_rates(study, found).values()) == {1e-3}
    assert table.csv_text(found).count("\n") == 12 and "step 3: the loss is not finite" in table.csv_text(found)
    text = table.markdown(study, found)
    assert "| control | 0.001* | 2.2000 ± 0.1155 (1 of 4 diverged) | 4 |  |" in text
    assert "| swiglu | 0.001* | 2.2667 ± 0.2186 (2 of 5 diverged) | 5 | +0.2000 [-1.0706, +1.4706] (2 pairs) |" in text
    assert "leave out runs that diverged" in text
    paths = plots.write(study, table.at_best(study, found), tmp_path, tmp_path)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_variant_that_always_diverges(study, made_up, tmp_path):
    for seed in range(3):
        made_up("control", 1e-2, seed, 2.0 + seed)
        made_up("swiglu", 1e-2, seed, None)
    for variant in study.variants:
        made_up(variant, 1e-3, 0, None)
    found = table.rows(study, tmp_path)
    text = table.markdown(study, found)
    assert "| swiglu | 0.001* | diverged | 1 | no pair |" in text
    assert "**Not finished**" in text and "small swiglu: no run of seed 1, 2 at its best rate 0.001" in text
    assert plots.write(study, table.at_best(study, found), tmp_path, tmp_path)


def test_what_is_missing(study, made_up, tmp_path):
    for seed in (0, 2):
        made_up("control", 1e-3, seed, 2.0)
    made_up("control", 1e-2, 0, 3.0)
    made_up("swiglu", 1e-2, 1, 3.0)
    found = table.rows(study, tmp_path)
    absent = ["small control: no run of seed 1 at its best rate 0.001", "small swiglu: no run at rate 0.001, 0.01"]
    assert table.missing(study, found) == absent
    text = table.markdown(study, found)
    assert all(line in text for line in absent) and "| swiglu" not in text


def test_runs_that_measured_something_else(study, filled, tmp_path):
    with pytest.raises(ConfigError, match=r"small control lr0.001_seed0 did not measure 'max_logit' \(measured: "):
        table.rows(replace(study, shown=("max_logit",)), tmp_path)
    with pytest.raises(ConfigError, match="did not measure 'accuracy'"):
        table.rows(replace(study, metric=Metric("accuracy", "higher")), tmp_path)


def test_a_curve_that_was_cut_off(study, filled, tmp_path):
    path = tmp_path / "toy/small/swiglu/lr0.01_seed1/metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train", "loss": 2.0}\n{"step": 4, "ki')
    with pytest.raises(ConfigError, match=r"lr0.01_seed1/metrics.jsonl ends at step 1 of 4"):
        plots.write(study, table.at_best(study, table.rows(study, tmp_path)), tmp_path, tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        plots.write(study, table.at_best(study, table.rows(study, tmp_path)), tmp_path, tmp_path)


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


def test_a_baseline_that_hardly_falls_has_an_infinite_ratio():
    """Neither an overflow nor an interval that is no number."""
    control, flat = {1e-6: [2.0, 2.1], 1e-5: [1.8, 1.7]}, {1e-6: [2.0, 2.1], 1e-5: [2.0, 2.1]}
    found = ladder.compare(control, flat, draws=50)
    assert found.ratio == np.inf and found.high == np.inf and not np.isnan(found.low)


def test_published_lines_say_what_is_published():
    """1.16 times the computation for Kimi Linear's, of which this is the range over their runs."""
    published = {one.source: one for one in studies()["s12_ladder"].published}
    one = published["arXiv 2510.26692, KDA hybrid and MLA"]
    control, other = (ladder.Power.of(one.numbers[name]) for name in ("k3", "baseline"))
    ratios = [other.computation(control.loss(C)) / C for C in one.span]
    assert (control, other) == (ladder.Power(2.2879, 0.0527), ladder.Power(2.3092, 0.0536))
    assert ratios[1] < 1.16 < ratios[0] and ratios == pytest.approx([1.18, 1.13], abs=0.01)
    assert ladder.Power.of("1.737") is None
