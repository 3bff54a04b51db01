"""The commands themselves, on studies of a package of their own: killed and run again, tables, a ladder, bad input."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from k3jax.exits import Exit
from k3jax.metrics import read_metrics

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
MARKERS = "# Study\n\n<!-- table -->\n<!-- end of table -->\n\n## Verdict\n\nNone yet.\n"

# Both variants have one compiled step. KILL ends the session of a process in the middle of its second run.
TOY = """
import os
import signal

from experiments.study import Metric, Rung, Study
from k3jax import config as c
from k3jax.config_data import TextFolder
from k3jax.config_optim import AdamW, Cosine, Optimizer, Tunable
from k3jax.run_config import TrainConfig
from k3jax.telemetry.writers import Writers

MODEL = c.ModelConfig(
    vocab=258, dim=16, layers=1, full_attention=(), dense_layers=1, dense_width=16, dtype="float32", remat="none",
    kda=c.KDA(heads=2, head_dim=8, forget_rank=4), residual=c.PlainResidual(), init_std=0.1,
    mla=c.MLA(heads=2, q_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, v_dim=8),
    moe=c.MoE(experts=4, active=2, width=8, shared=1, latent=c.Latent(8)),
)
RUN = TrainConfig(
    model=MODEL, optimizer=Optimizer(matrices=AdamW(), schedule=Tunable(Cosine(peak=1e-2))),
    data=TextFolder(path="text", held_out=0.2), seq_len=16, batch=2, steps=6, log_every=1, eval_every=6,
    checkpoint_every=2, loss_chunk=16, sample_tokens=0,
)
STUDY = Study(
    name="toy", question="Does it work?", rungs={"small": Rung(RUN)}, control="control", rates=(1e-2,), seeds=2,
    variants={"control": {}, "other": {"data.held_out": 0.4}}, metric=Metric("bits_per_byte", "lower"), rule="lower",
)

if "KILL" in os.environ:
    write, seen = Writers.write, []

    def killing(self, line):
        write(self, line)
        seen.extend([line] if (line["kind"], line["step"]) == ("train", 5) else [])
        if len(seen) == 2:
            os.killpg(0, signal.SIGKILL)

    Writers.write = killing
"""
TYPO = """
from dataclasses import replace

from experiments.toy.study import STUDY

STUDY = replace(STUDY, name="typo", variants={"control": {"model.kda.deccay": 1}})
"""
LINES = """
from dataclasses import replace

from experiments.study import Published, Rung
from experiments.toy.study import RUN, STUDY

LINES = Published("a paper", {"control": "2.3 C^-0.05", "other": "2.4 C^-0.05"}, span=(1.0, 10.0))
STUDY = replace(STUDY, name="lines", rungs={f"r{n}": Rung(RUN) for n in range(4)}, seeds=3, published=(LINES,))
"""
SAME_NAME = "from experiments.toy.study import STUDY\n"
NO_METRIC = TYPO.replace('name="typo", variants={"control": {"model.kda.deccay": 1}}', 'name="bad", shown=("losss",)')


@dataclass
class Commands:
    """The process of `commands.py`, and the folder that its commands run in."""

    process: subprocess.Popen
    folder: pathlib.Path

    def __call__(self, *argv: str, cwd: pathlib.Path | None = None, **env: str) -> tuple[int, str]:
        """The exit code of a command, and what it said."""
        what = {"argv": list(argv), "cwd": str(cwd or self.folder), "env": env}
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return found["code"], found["output"]

    def refused(self, *argv: str, cwd: pathlib.Path | None = None) -> str:
        """What a command says that ends with the code of a bad configuration, without a traceback."""
        code, output = self(*argv, cwd=cwd)
        assert code == Exit.CONFIGURATION and "Traceback" not in output, output
        return output


def package(folder: pathlib.Path, **studies: str) -> pathlib.Path:
    """A folder with the package `experiments`, its studies replaced by these."""
    ignore = shutil.ignore_patterns("s[0-9]*", "__pycache__")
    shutil.copytree(ROOT / "experiments", folder / "experiments", ignore=ignore)
    for name, text in studies.items():
        place = folder / "experiments" / name
        place.mkdir()
        (place / "study.py").write_text(text)
        (place / "README.md").write_text(MARKERS)
    return folder


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = package(tmp_path_factory.mktemp("package"), toy=TOY, typo=TYPO, lines=LINES)
    (folder / "text").mkdir()
    for number in range(6):
        (folder / "text" / f"{number}.txt").write_text("".join(f"line {line} of {number}\n" for line in range(30)))
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, HERE / "commands.py"],
        env={**os.environ, **flags},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield Commands(process, folder)
        process.stdin.close()


@pytest.fixture(scope="module")
def killed(commands):
    """The runs of a study whose processes were all killed at once; one process was in its second run."""
    code, _ = commands("experiments.run", "toy", "--jobs=2", "--root=cut", KILL="1")
    assert code == -9
    return commands.folder / "cut"


@pytest.fixture(scope="module")
def finished(commands, killed):
    """The same after another start, with what was finished before it: {path: content}."""
    root = commands.folder / "runs"
    shutil.copytree(killed, root)
    before = {path: path.read_bytes() for path in root.rglob("result.json")}
    code, output = commands("experiments.run", "toy", "--jobs=2", "--root=runs")
    assert code == 0 and "4 of 4 runs" in output, output
    return root, before


def test_a_study_goes_on_where_it_was_killed(finished):
    root, before = finished
    assert before and all(path.read_bytes() == content for path, content in before.items())
    assert len(list(root.rglob("result.json"))) == 4
    resumed = []
    for path in root.rglob("metrics.jsonl"):
        lines = read_metrics(path)
        assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
        resumed += [line["step"] for line in lines if line.get("event") == "resume"]
    assert resumed and set(resumed) <= {2, 4}


def test_a_run_that_was_cut_ends_like_one_that_was_not(commands, finished):
    """And negative control: of a number that was changed the comparison says so."""
    root, _ = finished
    cut = next(p for p in root.rglob("metrics.jsonl") if any(x.get("event") == "resume" for x in read_metrics(p)))
    variant, seed = cut.parent.parent.name, cut.parent.name.rpartition("seed")[2]
    text = (cut.parent / "result.json").read_text()
    (cut.parent / "result.json").write_text(re.sub(r'"skipped": 0.0', '"skipped": 1.0', text))
    command = "experiments.again", "toy", "small", variant, "--rate=0.01", f"--seed={seed}", "--root=runs"
    code, output = commands(*command)
    (cut.parent / "result.json").write_text(text)
    verdicts = {line[:24].strip(): line.rsplit(None, 1)[-1] for line in output.splitlines() if " kept " in line}
    expected = {"loss of the last step": "equal", "bits_per_byte": "equal", "loss": "equal", "skipped": "DIFFERS"}
    assert code == 1 and verdicts == expected, output
    assert "kept 1.0" in output and "made 0.0" in output


def test_the_table_of_a_study(commands, finished):
    place = commands.folder / "experiments" / "toy"
    code, output = commands("experiments.table", "toy", "--root=runs")
    assert code == 0 and "| control | 0.01 |" in output, output
    readme = (place / "README.md").read_text()
    assert len((place / "results.csv").read_text().splitlines()) == 5
    assert all(
        f"![{name}]({name}.png)" in readme and (place / f"{name}.png").exists() for name in ("results", "curves")
    )
    assert readme.startswith("# Study\n\n<!-- table -->\n") and readme.endswith("\n## Verdict\n\nNone yet.\n")
    assert commands("experiments.table", "toy", "--root=runs")[0] == 0
    assert (place / "README.md").read_text() == readme and "Not finished" not in readme


def test_half_finished_runs_make_no_table(commands, killed):
    said = commands.refused("experiments.table", "toy", "--root=cut")
    assert "study toy is not finished" in said and re.search(r"small \w+: no run (of seed 1|at rate 0.01)", said)
    code, output = commands("experiments.table", "toy", "--root=cut", "--partial")
    assert code == 0 and "**Not finished**" in output and said.strip().rpartition(". ")[2] in output


def test_what_a_dry_run_says(commands, finished):
    code, output = commands("experiments.run", "toy", "--dry-run", "--root=runs")
    assert code == 0 and "minutes in all" in output and len(output.splitlines()) == 5, output


UNKNOWN = {
    ("run", "nosuch"): "there is no study 'nosuch'",
    ("run", "toy", "--rung=small,smaller"): "there is no rung 'small,smaller'",
    ("run", "toy", "--variants=contrl"): "there is no variant 'contrl'; did you mean 'control'?",
    ("run", "toy", "--jobs=0"): "--jobs=0, but it takes at least one process",
    ("run", "toy", "--seeds=1"): "--seeds=1, but an interval needs at least two",
    ("run", "toy", "--seeds=-3"): "--seeds=-3, but",
    ("run", "typo"): "study typo, variant control: model.kda.deccay: KDA has no field 'deccay'; did you mean 'decay'?",
    ("run", "typo", "--dry-run"): "model.kda.deccay",
    ("run",): "give one study, got []",
    ("group", "toy", "small", "nosuch"): "there is no variant 'nosuch'",
    ("group", "toy", "small"): "give a study, a rung and a variant, got ['toy', 'small']",
    ("table", "nosuch"): "there is no study 'nosuch'",
    ("table", "toy", "--root=empty"): "study toy: no finished run in empty/toy",
    ("ladder", "toy", "--root=empty"): "study toy: no finished run in empty/toy",
    ("plan", "toy", "--topology=v5p:2x2x2", "--rung=nosuch"): "there is no rung 'nosuch'",
    ("plan", "toy", "--topology=v9:2x2"): "v9",
    ("plan", "toy", "--layout=fdsp=8"): "there is no axis 'fdsp'; did you mean 'fsdp'?",
    ("again", "toy", "small", "control", "--rate=0.01", "--root=empty"): "holds no finished run to compare with",
    ("again", "toy", "small", "control"): "give a study, a rung, a variant and --rate",
}


def test_bad_commands(commands):
    for (program, *arguments), message in UNKNOWN.items():
        assert message in commands.refused(f"experiments.{program}", *arguments), (program, arguments)


def test_bad_studies(commands, tmp_path):
    twice = package(tmp_path / "twice", toy=TOY, toy_copy=SAME_NAME)
    assert "both hold a study named 'toy'" in commands.refused("experiments.run", "toy", cwd=twice)
    wrong = package(tmp_path / "wrong", toy=TOY, bad=NO_METRIC)
    said = commands.refused("experiments.run", "bad", cwd=wrong)
    assert "study bad: no run measures 'losss'; did you mean 'loss'" in said


def test_bad_folders(commands, finished):
    """A run of another configuration, a result and a curve that were cut off; each made good again."""
    place = finished[0] / "toy/small/control/lr0.01_seed1"
    changes = {
        "config.json": (
            lambda text: text.replace('"batch": 2', '"batch": 4'),
            "holds another run: batch = 4 and not 2",
        ),
        "result.json": (lambda text: text[:100], "result.json is cut off or damaged"),
    }
    for name, (change, message) in changes.items():
        text = (place / name).read_text()
        (place / name).write_text(change(text))
        for program in ("run", "table"):
            assert message in commands.refused(f"experiments.{program}", "toy", "--root=runs")
        (place / name).write_text(text)
    text = (place / "metrics.jsonl").read_text()
    (place / "metrics.jsonl").write_text(text[: text.index('"step":5')])
    assert "metrics.jsonl ends at step 4 of 6" in commands.refused("experiments.table", "toy", "--root=runs")
    (place / "metrics.jsonl").write_text(text)


def made_up(root: pathlib.Path, rung: int, variant: str, seed: int, flops: float, loss: float) -> None:
    place = root / "lines" / f"r{rung}" / variant / f"lr0.01_seed{seed}"
    place.mkdir(parents=True)
    what = dict(study="lines", rung=f"r{rung}", variant=variant, rate=0.01, seed=seed, seconds=1.0, commit="abc")
    metrics, cost = {"bits_per_byte": loss / math.log(2)}, {"flops": flops, "tokens": 10}
    (place / "result.json").write_text(json.dumps({**what, "metrics": metrics, "cost": cost}))


def test_a_ladder_of_known_lines(commands):
    """L = 2 C^-0.06, and a baseline that needs 1.5 times the computation."""
    rng, root = np.random.default_rng(0), commands.folder / "known"
    for rung, C in enumerate((1e-8, 4e-8, 2e-7, 1e-6)):
        for variant, behind in (("control", 1.0), ("other", 1.5)):
            for seed in range(3):
                noise = math.exp(2e-3 * rng.standard_normal())
                made_up(root, rung, variant, seed, C * 1e15 * 86400, 2 * (C / behind) ** -0.06 * noise)
    code, output = commands("experiments.ladder", "lines", "--root=known")
    assert code == 0, output
    ratio, low, high = map(float, re.search(r"equal loss: ([\d.]+) \[([\d.]+), ([\d.]+)\]", output).groups())
    assert low < 1.5 < high and low < ratio < high and high - low < 0.3
    figure = commands.folder / "experiments/lines/ladder.png"
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 20_000
    (root / "lines/r3/other/lr0.01_seed2/result.json").unlink()
    said = commands.refused("experiments.ladder", "lines", "--root=known")
    assert "study lines is not finished. r3 other: no run of seed 2" in said
