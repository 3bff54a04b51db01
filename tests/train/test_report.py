"""The report from whole, unfinished, strange and broken run folders."""

import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from k3jax.metrics import MetricsWriter
from k3jax.report import ReportError, write_report
from k3jax.report.charts import thin
from k3jax.report.run import read_run

CONFIG = {
    "batch": 4,
    "seq_len": 32,
    "sample_prompt": "def ",
    "model": {"dim": 64, "layers": [{"type": "Kda"}], "x": None},
}
SUMMARY = {
    "bits_per_byte": 2.125,
    "held_out_bytes": 593_526,
    "seconds": 402.3,
    "parameters": 5_312_448,
    "baselines": {"gzip": {"whole": 2.5, "per_file": 2.75}, "xz": {"whole": 2.0, "per_file": 2.625}},
}


def _line(step, layers=5):
    rng = np.random.default_rng(step)
    loss = 1.5 + 4.0 / step
    return {
        "step": step,
        "kind": "train",
        "loss": loss,
        "bits_per_byte": loss / np.log(2.0),
        "grad_norm": float(rng.uniform(0.5, 2.0)),
        "update_rms": {"embedding": 1e-3, "expert": 2e-3},
        "lr": 1e-3,
        "tokens_per_second": 1e4,
        "balance": {"max_over_mean": rng.uniform(1, 4, layers), "dead_share": rng.uniform(0, 0.2, layers)},
        "seconds": float(step),
    }


def _make(folder, *, steps=60, whole=True, config=CONFIG, sample="def f(a, b):\n    return a < b & '\x00'\n"):
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            writer.write(_line(step))
            if step % 20 == 0:
                writer.write({"step": step, "kind": "eval", "bits_per_byte": 3.0 - step / 100, "bytes": 4096})
    (folder / "config.json").write_text(json.dumps(config))
    if whole:
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "environment.json").write_text(json.dumps({"python": "3.12", "device": "1 x cpu"}))
        (folder / "sample.txt").write_text(sample)
    return folder


class Structure(html.parser.HTMLParser):
    """Open elements, and everything that could make a browser load or run something."""

    EMPTY = frozenset(["meta", "link", "br", "img", "input", "hr"])

    def __init__(self, text):
        super().__init__()
        self.stack, self.loads, self.headings = [], [], []
        self.feed(text)
        assert not self.stack, f"not closed: {self.stack}"

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "iframe", "object")
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
        if self.stack and self.stack[-1] == "h2":
            self.headings.append(data)


def test_a_whole_run(tmp_path):
    page = write_report(_make(tmp_path / "nano"))
    text = page.read_text()
    structure = Structure(text)
    assert structure.headings == [
        "Against gzip and xz", "Loss", "Gradient norm", "Update size by role", "Learning rate", "Tokens per second",
        "Expert balance", "Experts without a token", "Sample", "Configuration", "Environment",
    ]  # fmt: skip
    assert all(re.match("#|data:", value) for value in structure.loads), structure.loads
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(text) < 1_000_000
    assert "15% fewer bits than gzip" in text and "6% more bits than xz" in text and "594 kB" in text
    assert "<b>def </b>f(a, b):" in text and "a &lt; b &amp; &#x27;\u2400&#x27;" in text
    assert ">2.125<" in text and ">5.31 M<" in text and ">6 min 42 s<" in text and ">7,680<" in text
    assert "<th>model.layers[0].type</th><td>Kda</td>" in text and "<th>model.x</th><td>none</td>" in text
    assert not re.search(r"#2563c9(?!;)", text), "every color of a chart follows the theme"
    png = (page.parent / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 300_000


def test_an_unfinished_run_with_one_line_and_a_hostile_name(tmp_path):
    folder = _make(tmp_path / "<i>&", steps=1, whole=False, config={"<b>": "</td><script>alert(1)</script>"})
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":2,"kind":"tra')
    text = write_report(folder).read_text()
    Structure(text)
    assert "&lt;i&gt;&amp;" in text and "&lt;script&gt;" in text
    assert "had not finished" in text
    assert "Against gzip" not in text and "Sample" not in text


def test_numbers_that_are_not_finite_and_missing_fields(tmp_path):
    folder = _make(tmp_path / "run", steps=3, whole=False)
    nan = float("nan")
    with MetricsWriter(folder / "metrics.jsonl", resume_step=3) as writer:
        balance = {"max_over_mean": [nan] * 5, "dead_share": [nan] * 5}
        writer.write({"step": 4, "kind": "train", "loss": nan, "seconds": 4.0, "grad_norm": nan, "balance": balance})
        writer.write({"step": 4, "kind": "eval", "bits_per_byte": nan, "bytes": 1})
    Structure(write_report(folder).read_text())
    (folder / "metrics.jsonl").write_text('{"step":1,"kind":"train","loss":null,"seconds":1.0}\n')
    assert Structure(write_report(folder).read_text()).headings == ["Loss", "Configuration"]


def test_thinning_keeps_means_and_both_ends():
    steps, values = np.arange(1000.0), np.arange(1000.0) * 2
    values[10] = np.nan
    few, means = thin(steps, values, 300)
    assert len(few) == 250 and few[0] == 1.5 and few[-1] == 997.5
    assert means[0] == 3.0 and means[2] == np.mean([16, 18, 22])
    assert thin(steps[:5], np.stack([values[:5]] * 2), 300)[1].shape == (2, 5)
    layers = np.stack([values, values + 1])
    np.testing.assert_allclose(thin(steps, layers, 300)[1][1] - means, 1.0)


def test_broken_folders_are_named(tmp_path):
    def message(folder):
        with pytest.raises(ReportError) as error:
            read_run(folder)
        return str(error.value)

    assert "there is no run folder" in message(tmp_path / "absent")
    folder = tmp_path / "run"
    folder.mkdir()
    assert "holds no metrics.jsonl" in message(folder)
    (folder / "metrics.jsonl").write_text("")
    assert "no training step yet (0 lines)" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"eval","bits_per_byte":2.0}\n')
    assert "no training step yet (1 lines)" in message(folder)
    (folder / "metrics.jsonl").write_text('broken\n{"step":7,"kind":"train","loss":2.0}\n')
    assert "line 1 is damaged" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"train"}\n')
    assert "step 7 has no loss" in message(folder)
    (folder / "metrics.jsonl").write_text('{"step":7,"kind":"train","loss":2.0}\n')
    assert "holds no config.json" in message(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold an object, but holds list" in message(folder)
    (folder / "config.json").write_text("{}")
    assert read_run(folder).train[0]["step"] == 7


def test_the_command(tmp_path):
    def call(*arguments):
        command = [sys.executable, "-m", "k3jax.report", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    done = call(_make(tmp_path / "nano", steps=2, whole=False))
    assert done.returncode == 0 and done.stdout.split() == [
        str(tmp_path / "nano" / "report.html"),
        str(tmp_path / "nano" / "loss.png"),
    ]
    failed = call(tmp_path / "absent")
    assert failed.returncode == 1 and failed.stderr == f"k3jax.report: there is no run folder {tmp_path / 'absent'}\n"
