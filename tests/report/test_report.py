"""The report from whole, unfinished, strange and broken run folders, of one run and of several."""

import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from report_runs import ROLES, SUMMARY, evaluation, make_run, train_lines, write_lines

from k3jax.metrics import MetricsWriter
from k3jax.report import ReportError, all_cards, axis, write_report
from k3jax.report.charts import Heat
from k3jax.report.numbers import NUMBERS, status
from k3jax.report.run import read_run, read_runs


class Structure(html.parser.HTMLParser):
    """Open elements, titles, and everything that could make a browser load or run something."""

    EMPTY = frozenset(["meta", "link", "br", "img", "input", "hr", "path"])

    def __init__(self, text):
        super().__init__()
        self.stack, self.loads, self.titles, self.scripts = [], [], [], 0
        self.feed(text)
        assert not self.stack, f"not closed: {self.stack}"

    def handle_starttag(self, tag, attributes):
        assert tag not in ("iframe", "object")
        self.scripts += tag == "script"
        assert not [name for name, _ in attributes if name.startswith("on")]
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("h2", "h3"):
            self.titles.append(data)


def bare(folder, *lines):
    """A folder with nothing but these metrics lines."""
    folder.mkdir(parents=True)
    write_lines(folder, [{"step": i, "kind": "train", "loss": 2.0, **line} for i, line in enumerate(lines, 1)])
    return folder


def cards_of(*folders):
    """Every card of a page by its title."""
    runs = read_runs(list(folders))
    return {card.title: card for card in all_cards(runs, axis.make(runs, "step"))}


def test_a_whole_run(tmp_path):
    page = write_report(make_run(tmp_path / "nano", steps=400), charts=True)
    text = page.read_text()
    structure = Structure(text)
    assert structure.scripts == 1
    assert structure.titles == [
        "Loss", "Loss, bits per byte", "Against gzip and xz",
        "Optimization", "Gradient norm", "Learning rate", "Gradient norm by role", "Parameter norm by role",
        "Update size by role", "Next-token accuracy",
        "Speed and memory", "Tokens per second", "Model FLOP utilization", "Time of a step",
        "Where the wall-clock time went", "Goodput", "Memory", "Wall-clock time",
        "Experts", "Load of the busiest expert", "Experts without a token", "Drift of the router bias", "Router margin",
        "Attention and recurrent state", "Largest attention logit", "Norm of the KDA state", "KDA log-decay, mean",
        "KDA log-decay, lowest", "KDA log-decay, highest",
        "Depth", "Attention residuals before the mixer", "Attention residuals before the feed-forward part",
        "Evaluation", "Held-out bits per byte by source", "Bits per byte by source", "MultiQueryRecall",
        "PermutationTracking", "Needle", "Sample", "Settings and events", "Events", "Configuration", "Environment",
    ]  # fmt: skip
    assert all(re.match("#|data:", value) for value in structure.loads), structure.loads
    assert not re.search(r"@import|url\((?!#)", text)
    assert "15% fewer bits than gzip" in text and "6% more bits than xz" in text and "594 kB" in text
    assert "<b>def </b>f(a, b):" in text and "a &lt; b &amp; &#x27;\u2400&#x27;" in text
    assert ">2.125<" in text and ">5.31 M<" in text and ">6 min 42 s<" in text and ">410 k<" in text
    assert "spike, in a row 1" in text and "<td>preempted</td>" in text and ">skipped step<" in text
    pngs = {path.name: path.read_bytes() for path in [page.parent / "loss.png", *(page.parent / "charts").iterdir()]}
    sections = ("loss", "optimization", "speed", "experts", "attention", "depth", "evaluation")
    assert pngs.keys() == {f"{name}.png" for name in sections}
    assert all(png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 900_000 for png in pngs.values())


def test_a_comparison(tmp_path):
    first = make_run(tmp_path / "x" / "run", steps=40)
    second = make_run(tmp_path / "y" / "run", steps=60, settings=("model.residual=PlainResidual()", "seed=7"), seed=1)
    page = write_report(first, second)
    assert page == tmp_path / "x" / "comparison-run-run" / "report.html"
    text = page.read_text()
    structure = Structure(text)
    assert structure.titles[:3] == ["Results", "Final numbers", "Configuration differences"]
    rows = dict(re.findall(r"<tr><th>([\w.]+)</th><td class=code>(.*?)</td></tr>", text))
    assert rows["seed"] == "0</td><td class=code>7" and rows["steps"] == "40</td><td class=code>60"
    assert rows["model.residual"].startswith("BlockAttnRes(") and rows["model.residual"].endswith("PlainResidual()")
    assert ">x/run<" in text and ">y/run<" in text
    assert re.search(r"<th>steps</th><td>40</td><td>60</td>", text)
    best = re.search(r"<th>training loss, nats per token</th>(<td.*?)</tr>", text)[1]
    assert best.count("class=best") == 1
    cards = cards_of(first, second)
    assert [chart.title for chart in cards["Update size by role"].charts] == list(ROLES)
    assert [line.name for line in cards["Update size by role"].charts[0].lines] == ["x/run", "y/run"]
    heats = [chart for chart in cards["Router margin"].charts if isinstance(chart, Heat)]
    assert [heat.title for heat in heats] == ["x/run", "y/run"] and heats[0].low == heats[1].low
    assert np.isnan(heats[0].grid[0, -1]) and np.isfinite(heats[1].grid).all(), "the shorter run ends earlier"


def test_runs_of_other_versions_are_compared_value_by_value(tmp_path):
    folders = [bare(tmp_path / name, {}) for name in ("a", "b", "c")]
    for folder, width in zip(folders, (1, 2, 2)):
        (folder / "config.json").write_text(json.dumps({"model": {"width": width, "old_name": 3}, "sizes": [1, 2]}))
    text = write_report(*folders, out=tmp_path / "out").read_text()
    assert "<th>model.width</th><td class=code>1</td><td class=code>2</td><td class=code>2</td>" in text
    assert "old_name" not in text
    (folders[1] / "config.json").unlink()
    assert "<td class=code>1</td><td class=code>–</td><td class=code>2</td>" in write_report(*folders).read_text()


def test_metrics_alone_are_enough(tmp_path):
    page = write_report(bare(tmp_path / "run", {}))
    assert Structure(page.read_text()).titles == ["Loss", "Loss, nats per token"]
    assert (page.parent / "loss.png").exists()


def test_a_cut_last_line_and_a_hostile_name(tmp_path):
    folder = bare(tmp_path / "<i>&", {"<b>.x": 1.0, "<b>.y": 2.0})
    (folder / "config.json").write_text(json.dumps({"<b>": "</td><script>alert(1)</script>"}))
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":2,"kind":"tra')
    text = write_report(folder).read_text()
    assert Structure(text).scripts == 1
    assert "&lt;i&gt;&amp;" in text and "&lt;script&gt;" in text and "Against gzip" not in text


def test_numbers_that_are_not_finite(tmp_path):
    nan = float("nan")
    folder = tmp_path / "run"
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in (1, 2, 3):
            lists = {"max_over_mean": [nan] * 5, "dead_share": [nan, 0.1, 0.2, 0.3, 0.4]}
            writer.write({"step": step, "kind": "train", "loss": nan, "grad_norm": nan, "balance": lists})
        writer.write({"step": 3, "kind": "eval", "bits_per_byte": nan, "bytes": 1})
    titles = Structure(write_report(folder).read_text()).titles
    assert "Experts without a token" in titles and "Gradient norm" not in titles


def test_unknown_numbers_are_shown_and_text_is_not(tmp_path):
    line = {"queue": {"full": 1, "empty": 2}, "by_head": [[1.0, 2.0], [3.0]], "phase": "warm", "flags": ["a"], "z": 3}
    folder = bare(tmp_path / "run", line, line)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step":2,"kind":"resources","power":3.5,"by_core":[1,2,3,4]}\n')
        file.write('{"step":2,"kind":"eval","accuracy":{"sums":0.5}}\n')
    cards = cards_of(folder)
    assert list(cards) == [
        "Loss, nats per token",
        "Accuracy",
        "Queue",
        "By head",
        "Z",
        "Resources",
        "Resources, by core",
    ]
    assert [line.name for line in cards["Queue"].charts[0].lines] == ["full", "empty"]
    np.testing.assert_array_equal(cards["By head"].charts[-1].grid, [[1, 3], [2, np.nan]])


def test_a_spike_of_one_step_in_ten_thousand_stays_visible(tmp_path):
    steps = np.arange(1, 10_001)
    losses = np.where(steps == 6_170, 9.0, 2.0)
    folder = bare(tmp_path / "run", *({"loss": float(loss), "n": [float(loss)] * 4} for loss in losses))
    loss, lists = cards_of(folder).values()
    pale = loss.charts[0].lines[0]
    assert len(pale.x) <= 400 and np.nanmax(pale.high) == 9.0 and np.nanmax(pale.y) < 3.0
    place = pale.x[np.argmax(pale.high)]
    assert abs(place - 6_170) < 25
    assert np.nanmax(lists.charts[0].lines[0].high) == 9.0


def test_how_a_run_stands(tmp_path):
    def words(upto=50, *, later=0.0, extra=()):
        lines = train_lines(200, upto=upto)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write_lines(folder, lines + list(extra))
        (folder / "config.json").write_text('{"steps": 200}')
        found = status(read_run(folder), lines[-1]["unix"] + later)
        return f"{found.word} {found.text}"

    assert words(later=12) == "running at step 50 of 200, about 2 min 15 s left, last line 12 s ago"
    assert words(later=7200) == "stopped at step 50 of 200: no line for 2 h 00 min, and no word about an end"
    stop = {"step": 50, "kind": "event", "event": "stopped", "reason": "preempted"}
    assert words(extra=[stop]) == "stopped at step 50 of 200: preempted"
    assert words(extra=[stop | {"reason": "done"}]) == "finished at step 50 of 200"
    again = {"step": 50, "kind": "event", "event": "resumed"}
    assert words(extra=[stop, again]).startswith("running")
    whole = make_run(tmp_path / "whole")
    assert status(read_run(whole)).word == "finished"


def test_final_numbers(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=60))
    shown = {number.name: number.text(run) for number in NUMBERS}
    assert shown["held-out bits per byte"] == "2.125" and shown["best held-out"] == "2.200"
    assert shown["tokens"] == "61.4 k" and shown["FLOP utilization"] == "31 %" and shown["goodput"] == "90 %"
    assert shown["device hours"] == "0.894" and SUMMARY["seconds"] * 8 / 3600 == pytest.approx(0.894)
    assert shown["skipped steps"] == "1" and shown["restarts"] == "1"


def test_older_lines_do_not_count_where_a_file_goes_back(tmp_path):
    folder = bare(tmp_path / "run", {}, {}, {})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step":2,"kind":"train","loss":7.0}\n')
    run = read_run(folder)
    assert run.train["loss"].steps.tolist() == [1, 2] and run.train["loss"].values.tolist() == [2.0, 7.0]


def test_axes_of_tokens_and_seconds(tmp_path):
    runs = [read_run(make_run(tmp_path / "run", steps=30))]
    assert axis.make(runs, "tokens").span == (1024, 30 * 1024)
    clock = [{"seconds": s} for s in (1.0, 3.0, 1.0, 2.0)]
    run = read_run(bare(tmp_path / "clock", *clock))
    np.testing.assert_allclose(axis.make([run], "seconds").places(run, np.arange(1, 5)), [1, 3, 4, 5])
    with pytest.raises(ReportError, match=r"clock.metrics\.jsonl does not say its tokens"):
        axis.make([run], "tokens")


@pytest.mark.parametrize(
    "lines, message",
    [
        ([{"loss": "2.5"}], "line 1: loss must be a number or null, but is '2.5'"),
        ([{}, {"loss": [1.0]}], "line 2: loss must be a number or null, but is [1.0]"),
        ([{"loss": True}], "line 1: loss must be a number or null, but is True"),
        ([{"lr": 1.0}, {"lr": "high"}], "line 2: lr must be a number or null, but is 'high'"),
        ([{"new": 1.0}, {}, {"new": "x"}], "line 3: new must be a number or null, but is 'x'"),
        ([{"new": [1.0]}, {"new": 2}], "line 2: new must be a list of numbers, but is 2"),
        ([{"update_rms": {"norm": 1}}, {"update_rms": {"norm": "1"}}], "line 2: update_rms.norm must be a number"),
        ([{"n": [1, 2]}, {"n": [1, 2, 3]}], "line 2: n holds 3 numbers, but 2 numbers in line 1"),
        ([{"n": [1, 2]}, {"n": [1, "2"]}], "line 2: n must hold numbers or null, but holds '2'"),
        ([{"n": [[1], [2]]}, {"n": [[1], [2, 3]]}], "line 2: n holds 2 lists of several lengths, but 2 lists of 1"),
        ([{"n": [1, [2]]}], "line 1: n must hold numbers or null, but holds [2]"),
        ([{"n": [[1], [[2]]]}], "line 1: n holds lists of numbers beside lists of lists"),
        ([{"n": 10**400}], "lines 1 to 1: n holds an integer of more than 1e308"),
    ],
)
def test_ill_typed_metrics_are_named_by_line(tmp_path, lines, message):
    folder = bare(tmp_path / "run", *lines)
    with pytest.raises(ReportError) as error:
        read_run(folder)
    assert str(error.value).startswith(f"{folder / 'metrics.jsonl'}, {message}") and "\n" not in str(error.value)


def test_broken_folders_are_named(tmp_path):
    def message(*folders):
        with pytest.raises(ReportError) as error:
            write_report(*folders)
        return str(error.value)

    assert "there is no run folder" in message(tmp_path / "absent")
    folder = tmp_path / "run"
    folder.mkdir()
    assert "holds no metrics.jsonl" in message(folder)
    (folder / "metrics.jsonl").write_text("")
    assert "no training step yet (0 lines)" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"eval","bits_per_byte":2.0}\n{"step":7,"ki')
    assert "no training step yet (1 lines)" in message(folder)
    (folder / "metrics.jsonl").write_text('broken\n{"step":7,"kind":"train","loss":2.0}\n')
    assert "line 1 is damaged" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"train"}\n')
    assert "line 1: the training line of step 7 has no loss" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"train","loss":2.0}\n')
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold an object, but holds list" in message(folder)
    (folder / "config.json").write_text("{}")
    for harm in ({"seconds": "1"}, {"baselines": {"gzip": {"whole": 2.0}}}, {"baselines": 3}):
        (folder / "summary.json").write_text(json.dumps(harm))
        assert "summary.json is not what k3jax.train writes" in message(folder)
    (folder / "summary.json").unlink()
    assert "is given twice" in message(folder, tmp_path / "run" / ".." / "run")
    for harm in ({"cells": []}, {"cells": [{"length": 0}]}, {"chance": "low"}, {"task": 3}):
        broken = evaluation(7)
        broken["tasks"][0] |= harm
        (folder / "evaluation.json").write_text(json.dumps(broken))
        assert "evaluation.json is not what k3jax.evaluate writes" in message(folder)
    (folder / "evaluation.json").write_text(json.dumps(evaluation(7)))
    assert read_run(folder).step == 7


def test_the_command(tmp_path):
    def call(*arguments):
        command = [sys.executable, "-m", "k3jax.report", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    first, second = (bare(tmp_path / name, {}) for name in "ab")
    done = call(first, second, "--out", tmp_path / "new" / "folder", "--x", "step")
    names = ["report.html", "loss.png"]
    assert done.returncode == 0 and done.stdout.split() == [str(tmp_path / "new" / "folder" / name) for name in names]
    failed = call(tmp_path / "absent")
    assert failed.returncode == 1 and failed.stderr == f"k3jax.report: there is no run folder {tmp_path / 'absent'}\n"
