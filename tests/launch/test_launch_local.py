"""The launcher of this machine, with shell scripts for processes: who is told what, and what is started again."""

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from k3jax.config import ConfigError
from k3jax.exits import Exit
from launch import local, preflight, render
from launch.local import Group
from launch.spec import RunSpec, Study, Train

ROOT = pathlib.Path(__file__).parent.parent.parent
# Each start of each process leaves a line in `starts`; all wait until both are up, with their traps set.
HEAD = """cd "$0"; n=${@: -1}; echo "$@" >> starts; %s
touch ready$n; until [[ -e ready0 && -e ready1 ]]; do sleep 0.01; done
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(local, "PATIENCE", 0.3)
    monkeypatch.setattr(local, "PAUSE", 0.1)


def start(folder: pathlib.Path, script: str, traps: str = "", **fields) -> int:
    command = ["bash", "-c", HEAD % traps + script, str(folder)]
    return local.run(Group(command, folder / "logs", **{"processes": 2, "retries": 0, "grace": 5.0} | fields))


def starts(folder: pathlib.Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def test_each_process_is_told_who_it_is_and_has_a_log(tmp_path, capsys):
    assert start(tmp_path, 'echo "I am $n"; echo "with errors" >&2', gpus=4) == 0
    for number in (0, 1):
        (line,) = [line for line in starts(tmp_path) if line.endswith(f"--processes 2 --process {number}")]
        assert line.startswith("--coordinator localhost:")
        assert (tmp_path / "logs" / f"{number}.log").read_text() == f"I am {number}\nwith errors\n"
    screen = capsys.readouterr().out.splitlines()
    assert {f"[{n}] {text}" for n in (0, 1) for text in (f"I am {n}", "with errors")} <= set(screen)


def test_one_process_needs_no_coordinator(tmp_path):
    assert local.run(Group(["bash", "-c", 'echo "$#" > "$0"', str(tmp_path / "count")], tmp_path)) == 0
    assert (tmp_path / "count").read_text() == "0\n"


def test_gpus_are_shared_out(tmp_path):
    script = 'echo "$CUDA_VISIBLE_DEVICES" > gpus$n'
    start(tmp_path, script, gpus=2)
    assert [(tmp_path / f"gpus{n}").read_text() for n in (0, 1)] == ["0,1\n", "2,3\n"]


@pytest.mark.parametrize("code", [Exit.DATA, Exit.BUSY])
def test_the_first_failure_stops_the_rest_and_a_final_one_is_final(code, tmp_path, capsys):
    """The other process hears SIGTERM; its own exit code does not count."""
    script = f"[[ $n == 1 ]] && exit {int(code)}; sleep 20 & wait"
    assert start(tmp_path, script, "trap 'echo told to stop; exit 75' TERM", retries=5) == code
    assert len(starts(tmp_path)) == 2
    assert "told to stop" in (tmp_path / "logs" / "0.log").read_text()
    assert f"process 1 left with exit code {int(code)}: stopping the others" in capsys.readouterr().out


def test_a_killed_process_takes_a_deaf_one_with_it(tmp_path, capsys):
    """A process that waits in a collective hears nothing."""
    began = time.monotonic()
    assert start(tmp_path, "[[ $n == 0 ]] && kill -9 $$; sleep 20", "trap '' TERM") == 128 + signal.SIGKILL
    assert time.monotonic() - began < 5
    assert "process 1 did not leave in time: killed" in capsys.readouterr().out


@pytest.mark.parametrize("code, retries, expected", [(1, 1, 0), (1, 0, 1), (Exit.PEERS, 1, 0), (Exit.PREEMPTED, 0, 0)])
def test_what_is_started_again(code, retries, expected, tmp_path):
    """All are, on a new port; a preempted run has saved, and is not counted."""
    script = f"[[ -e again$n ]] && exit 0; touch again$n; exit {int(code)}"
    assert start(tmp_path, script, "trap '' TERM", retries=retries) == expected
    ports = {line.split()[1] for line in starts(tmp_path)}
    assert len(ports) == (2 if expected == 0 else 1)


def after_both_are_up(folder: pathlib.Path, action) -> None:
    def wait():
        while not all((folder / f"ready{n}").exists() for n in (0, 1)):
            time.sleep(0.01)
        time.sleep(0.1)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_started_again(number, tmp_path):
    after_both_are_up(tmp_path, lambda: os.kill(os.getpid(), number))
    assert start(tmp_path, "sleep 20 & wait", "trap 'echo told; exit 75' TERM INT", retries=5) == Exit.PREEMPTED
    assert all((tmp_path / "logs" / f"{n}.log").read_text() == "told\n" for n in (0, 1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_interrupt_kills(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    after_both_are_up(tmp_path, twice)
    assert start(tmp_path, "sleep 20", "trap '' INT", grace=20.0) == 128 + signal.SIGKILL


def test_what_a_process_left_behind_is_ended(tmp_path):
    began = time.monotonic()
    assert start(tmp_path, "sleep 20 & echo $! > pid$n") == 0
    assert time.monotonic() - began < 5
    for n in (0, 1):
        state = pathlib.Path(f"/proc/{(tmp_path / f'pid{n}').read_text().strip()}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_run_goes_on_as_the_script(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execvp", lambda *arguments: called.append(arguments))
    render.run_here(render.make(RunSpec("one", Train("nano"), "cpu:1x8", 1, 8, "nano_8", "runs"), "local", tmp_path))
    assert called == [("bash", ["bash", str(tmp_path / "one.local.sh")])]


def test_a_preflight_is_a_job_of_its_own():
    spec = RunSpec("two", Train("nano"), "cpu:2x4", 2, 4, "nano_8", "/runs", setup=("true",))
    found = preflight.preflight_of(spec)
    assert (found.name, found.retries, found.hosts) == ("two-preflight", 0, 2)
    for engine in ("local", "slurm"):
        text = render.ENGINES[engine](found).text
        assert "--run /runs/two-preflight --preflight_only --expect cpu:4" in text
        assert "--preflight_only" not in render.ENGINES[engine](spec).text
    with pytest.raises(ConfigError, match="is a study"):
        preflight.preflight_of(RunSpec("ratio", Study("s02_hybrid_ratio"), "cpu:1x1", 1, 1, "", "runs"))


def test_a_run_that_was_killed_ends_like_one_left_alone(tmp_path, monkeypatch):
    """Real processes that wait for each other in a collective. `kill_local.py` does the same with training runs."""
    monkeypatch.setattr(local, "PATIENCE", 10.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    for name, dies in (("whole", 0), ("killed", 3)):
        (tmp_path / name).mkdir()
        command = [sys.executable, str(ROOT / "tests/launch/adding_up.py"), str(tmp_path / name), "8", str(dies)]
        assert local.run(Group(command, tmp_path / name / "logs", processes=2, retries=1)) == 0
    log = (tmp_path / "killed" / "logs" / "0.log").read_text()
    assert "begins after step 0" in log and ("begins after step 3" in log or "begins after step 4" in log)
    for step in range(1, 9):
        assert (tmp_path / "whole" / f"{step}.npy").read_bytes() == (tmp_path / "killed" / f"{step}.npy").read_bytes()
