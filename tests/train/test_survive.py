"""Runs that are stopped, killed, moved to other devices, or meet a disk that fails."""

import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from k3jax import config as c
from k3jax import config_io, placement, resume_check, train
from k3jax.checkpoint import CheckpointError, Checkpoints, StorageError
from k3jax.config_data import Mixture, TextFolder, Weighted
from k3jax.data import DataError
from k3jax.data.order import Batches
from k3jax.exits import Exit
from k3jax.loop import Evaluator, Stopped
from k3jax.metrics import read_metrics
from k3jax.run_config import Keep, Stage
from k3jax.run_folder import BusyError, RunLock

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import kill_run  # noqa: E402
import restore_elsewhere  # noqa: E402


@pytest.fixture(scope="module")
def micro(micro):
    """The smallest run in which every kind of optimizer state occurs: nothing here asks for more than one layer."""
    model = c.replace(micro.model, layers=1, full_attention=(), dense_layers=0)
    return c.replace(micro, model=model, sample_tokens=0)


@pytest.fixture(autouse=True, scope="module")
def without_report():
    """Reports have tests of their own, and cost seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.report, "write_report", lambda run: None)
        yield


def environment(devices: int = 1) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(HERE.parent.parent)}


def start(config, run: pathlib.Path, *, before=(), **settings) -> subprocess.Popen:
    path = run.with_suffix(".json")
    config_io.save_json(config, path)
    command = [*before, sys.executable, "-m", "k3jax.train", "--config", str(path), "--run", str(run)]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, **settings)


def wait_for_step(run: pathlib.Path, step: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if any(known >= step for known in kill_run.training_steps(run)):
            return
        time.sleep(0.02)
    raise AssertionError(f"ended with {process.returncode}: {process.stderr.read()}")


def events(run: pathlib.Path) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "event"]


def state_of(run: pathlib.Path):
    with Checkpoints(run, create=False) as checkpoints:
        return checkpoints.load()[1]


def assert_same_state(one: pathlib.Path, other: pathlib.Path) -> None:
    for a, b in zip(jax.tree.leaves(state_of(one)), jax.tree.leaves(state_of(other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_signal_saves_and_the_same_command_goes_on(micro, tmp_path):
    run = tmp_path / "run"
    config = c.replace(micro, steps=100_000, eval_every=100_000, checkpoint_every=100_000)
    for number, code in ((signal.SIGTERM, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED)):
        process = start(config, run)
        reached = max(kill_run.training_steps(run), default=0)
        wait_for_step(run, reached + 2, process)
        with pytest.raises(BusyError, match=rf"in use by process {process.pid} on .*--run"):
            RunLock(run)
        asked = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert time.monotonic() - asked < 30
        assert "saved after step" in errors
        last = events(run)[-1]
        assert (last["event"], last["reason"]) == ("stopped", code.name.lower())
        with Checkpoints(run, create=False) as checkpoints:
            assert checkpoints.latest() == last["step"] == max(kill_run.training_steps(run))
    stopped, _ = [event["step"] for event in events(run) if event["event"] == "stopped"]
    assert [event["step"] for event in events(run) if event["event"] == "resume"] == [stopped]


def test_killed_runs_end_like_one_left_alone(tmp_path):
    """The program with the table, with few kills; it is quoted with twenty."""
    _, differ = kill_run.compare(tmp_path, kills=2, steps=24)
    assert not differ


@pytest.fixture(scope="module")
def halfway(micro, tmp_path_factory):
    """A run with one checkpoint, and what it is part of."""
    run = tmp_path_factory.mktemp("runs") / "halfway"
    train.train(micro, run)
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "summary.json").unlink()
    return run


@pytest.mark.xdist_group("halfway")
def test_a_full_disk_leaves_the_last_good_checkpoint(micro, halfway, tmp_path, monkeypatch):
    """A limit on the size of a file stands for the disk: the system refuses to write in the same place."""
    run = tmp_path / "full"
    shutil.copytree(halfway, run)

    def save(self, *arguments, **settings):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            begin(self, *arguments, **settings)
            self.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    begin = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(StorageError, match=r"checkpoints/6 could not be written: .*checkpoint: .*checkpoints/3$"):
        train.train(micro, run)
    monkeypatch.undo()
    with Checkpoints(run, create=False) as checkpoints:
        assert checkpoints.steps() == [3]
    train.train(micro, run)
    assert int(state_of(run).step) == 6


@pytest.mark.xdist_group("halfway")
def test_a_read_only_folder_is_said_and_changes_nothing(micro, halfway, tmp_path):
    run = tmp_path / "frozen"
    shutil.copytree(halfway, run)
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # Root may write everywhere, unless it gives that right up.
    before = ("setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override") if os.getuid() == 0 else ()
    if before and shutil.which("setpriv") is None:
        pytest.skip("the tests run as root, and setpriv (util-linux) is not installed")
    process = start(micro, run, before=before)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == Exit.STORAGE, errors
    assert "Permission denied" in errors.splitlines()[-1]
    assert str(run) in errors.splitlines()[-1]
    assert int(state_of(run).step) == 3


@pytest.mark.xdist_group("halfway")
def test_data_that_vanishes_leaves_the_last_good_checkpoint(micro, halfway, tmp_path, monkeypatch):
    def vanish(self, step):
        if step >= 4:
            raise DataError("text/3.txt: no such file")
        return read(self, step)

    run = tmp_path / "vanished"
    shutil.copytree(halfway, run)
    read = Batches.__getitem__
    monkeypatch.setattr(Batches, "__getitem__", vanish)
    with pytest.raises(DataError, match=r"text/3\.txt"):
        train.train(micro, run)
    monkeypatch.undo()
    assert int(state_of(run).step) == 3
    train.train(micro, run)


@pytest.mark.xdist_group("halfway")
def test_checkpoints_stay_by_policy(micro, halfway, tmp_path):
    """The last, every multiple of four, and the best by held-out bits, which is that of step two here."""
    run = tmp_path / "kept"
    shutil.copytree(halfway, run)
    shutil.rmtree(run / "checkpoints" / "3")
    (run / "metrics.jsonl").unlink()
    config = c.replace(micro, checkpoint_every=1, eval_every=1, keep=Keep(last=1, every=4, best=1))
    train.train(config, run)
    bits = {
        line["step"]: line["bits_per_byte"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"
    }
    best = min(range(1, 7), key=lambda step: bits[step])
    with Checkpoints(run, create=False) as checkpoints:
        assert checkpoints.steps() == sorted({4, 6, best})


@pytest.mark.xdist_group("halfway")
def test_a_replayed_step_has_the_same_bits(halfway):
    found = resume_check.replay(halfway)
    assert found.step == 4
    assert found.exact, found
    assert {"loss", "grad_norm", "update_rms.experts"} <= found.logged.keys()


@pytest.mark.xdist_group("halfway")
def test_a_replay_finds_what_a_checkpoint_lost(halfway, tmp_path, monkeypatch):
    """Momentum set to zero: the loss is the same, the updates are not."""

    def forgetful(self, *args):
        state = read(self, *args)
        return state._replace(opt_state=jax.tree.map(lambda x: 0 * x, state.opt_state))

    read = Checkpoints._read
    monkeypatch.setattr(Checkpoints, "_read", forgetful)
    found = resume_check.replay(halfway)
    assert not found.exact
    assert found.logged["loss"] == found.seen["loss"]
    assert found.logged["update_rms.experts"] != found.seen["update_rms.experts"]


def test_stages_survive_a_stop_at_and_between_their_boundaries(micro, text, tmp_path):
    """8K, 64K, 256K and 1M in miniature: rows grow, their number shrinks, and the last stage reads a mixture."""
    other = Weighted(source=TextFolder(path=str(text), pattern="*[02468].txt", held_out=0.3), weight=1.0, name="even")
    mixture = Mixture(parts=(Weighted(source=micro.data, weight=1.0, name="all"), other))
    stages = (Stage(2, 40, 4), Stage(4, 80, 2), Stage(6, 160, 1, data=mixture))
    config = c.replace(
        micro, seq_len=20, batch=8, steps=8, stages=stages, checkpoint_every=1, eval_every=100, keep=Keep(last=9)
    )
    whole = tmp_path / "whole"
    train.train(config, whole)
    assert [event["step"] for event in events(whole) if event["event"] == "stage"] == [3, 5, 7]
    with Checkpoints(whole, create=False) as checkpoints:
        position = checkpoints.restore(config).position
    assert position["stage"] == 3
    assert {name: source["rows"] for name, source in position["data"]["sources"].items()} == {"all": 1, "even": 1}
    for kept in (4, 7):
        run = tmp_path / f"from{kept}"
        shutil.copytree(whole, run)
        for step in range(kept + 1, 9):
            shutil.rmtree(run / "checkpoints" / str(step))
        (run / "summary.json").unlink()
        train.train(config, run)
        assert_same_state(whole, run)
        assert [event["step"] for event in events(run) if event["event"] == "stage"] == [3, 5, 7]


def test_stages_that_change_the_tokens_of_a_step_are_refused(micro):
    with pytest.raises(c.ConfigError, match=r"stages\[0\] has batch x seq_len = 3 x 80 = 240 tokens .* 4 x 40 = 160"):
        c.replace(micro, stages=(Stage(3, 80, 3),))
    with pytest.raises(c.ConfigError, match=r"stages\[1\]\.start = 3, but it must lie after 3 and before .* 6"):
        c.replace(micro, stages=(Stage(3, 80, 2), Stage(3, 80, 2)))


@pytest.fixture(scope="module")
def on_eight(micro, tmp_path_factory):
    """A run on eight devices, with its parameters spread over four of them."""
    run = tmp_path_factory.mktemp("runs") / "eight"
    mesh = placement.make_mesh({"data": 2, "fsdp": 4})
    train.train(c.replace(micro, batch=8, steps=2), run, train.Options(mesh=mesh))
    return run


@pytest.fixture(scope="module")
def expected(on_eight):
    """What it looks like from one device."""
    return restore_elsewhere.look(on_eight, None)


@pytest.mark.xdist_group("eight")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_run_goes_on_with_fewer_devices(on_eight, expected, devices):
    sizes = {"fsdp": 4, "data": 2} if devices == 8 else {"fsdp": devices}
    found = restore_elsewhere.look(on_eight, placement.make_mesh(sizes, jax.devices()[:devices]))
    assert found["batch"] == expected["batch"]
    assert found["nats"] == pytest.approx(expected["nats"], rel=1e-6)


@pytest.mark.xdist_group("eight")
def test_a_run_goes_on_in_two_processes(on_eight, expected):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "restore_elsewhere.py", on_eight, "data=2,fsdp=4", coordinator, "2", str(number)],
            env=environment(devices=4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        printed, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        found = json.loads(printed.splitlines()[-1])
        assert found["batch"] == expected["batch"]
        assert found["nats"] == pytest.approx(expected["nats"], rel=1e-6)


@pytest.mark.xdist_group("halfway")
def test_a_longer_run_does_not_take_the_old_summary_for_its_own(micro, halfway, tmp_path):
    run = tmp_path / "longer"
    shutil.copytree(halfway, run)
    (run / "summary.json").write_text(json.dumps({"steps": 3}))
    with pytest.raises(CheckpointError, match=r"past the end of a run of 2 steps"):
        train.train(c.replace(micro, steps=2), run, train.Options(allow=("steps",)))
    assert train.train(micro, run)["steps"] == 6


@pytest.mark.xdist_group("halfway")
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(micro, halfway, tmp_path):
    run = tmp_path / "unmounted"
    shutil.copytree(halfway, run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").write_text(json.dumps({"steps": 6}))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"has come to step 6, but .*checkpoints holds no complete checkpoint"):
        train.train(micro, run)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.xdist_group("halfway")
def test_a_misspelt_path_that_may_change_is_refused(micro, halfway):
    with pytest.raises(c.ConfigError, match=r"--allow_change=optimzer: .*did you mean 'optimizer'"):
        train.train(micro, halfway, train.Options(allow=("optimzer",)))


@pytest.mark.xdist_group("halfway")
@pytest.mark.parametrize("content", ["[]", "{}", '{"state/d": 3}', "no json"])
def test_checksums_that_cannot_be_read_are_damage(micro, halfway, tmp_path, content):
    run = tmp_path / "spoilt"
    shutil.copytree(halfway, run)
    (run / "checkpoints" / "3" / "checksums.json").write_text(content)
    with (
        Checkpoints(run, create=False) as checkpoints,
        pytest.raises(CheckpointError, match=r"3 is damaged: checksums"),
    ):
        checkpoints.load()


@pytest.mark.xdist_group("halfway")
def test_a_checkpoint_under_another_step_is_damage(halfway, tmp_path):
    run = tmp_path / "renamed"
    shutil.copytree(halfway, run)
    (run / "checkpoints" / "3").rename(run / "checkpoints" / "5")
    with (
        Checkpoints(run, create=False) as checkpoints,
        pytest.raises(CheckpointError, match=r"5 is damaged: .* step 3"),
    ):
        checkpoints.load()


@pytest.mark.xdist_group("halfway")
def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(micro, halfway, tmp_path, monkeypatch):
    """The signal comes inside the evaluation of step four; the curve is that of a run left alone."""

    def line(self, *arguments, **settings):
        if settings.get("max_bytes") and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return evaluate(self, *arguments, **settings)

    run, sent, evaluate = tmp_path / "evaluating", [], Evaluator.line
    shutil.copytree(halfway, run)
    monkeypatch.setattr(Evaluator, "line", line)
    with pytest.raises(Stopped, match="saved after step 4"):
        train.train(micro, run)
    train.train(micro, run)
    evals = [[line for line in read_metrics(r / "metrics.jsonl") if line["kind"] == "eval"] for r in (halfway, run)]
    assert [line["step"] for line in evals[1]] == [4, 6]
    assert [line["bits_per_byte"] for line in evals[0]] == [line["bits_per_byte"] for line in evals[1]]
