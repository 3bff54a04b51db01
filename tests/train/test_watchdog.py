"""Signs of life, and a run that stands still: who is named, and when nothing must happen."""

import json
import subprocess
import sys
import threading
import time

import pytest

from k3jax import watchdog
from k3jax.exits import Exit
from k3jax.telemetry.clock import Clock
from k3jax.watchdog import Watchdog, missing, signs, slowest


def sign(process: int, step: int, doing: str, ago: float = 0.0) -> dict:
    return {
        "process": process,
        "host": f"n{process}",
        "step": step,
        "doing": doing,
        "seconds": 5.0,
        "unix": time.time() - ago,
    }


def ended(run, doing: str, seconds: float, limit: float = 0.1) -> list[int]:
    """The codes that a watchdog left with, of a process that does something for so long."""
    codes, clock = [], Clock()
    with clock.book(doing), Watchdog(run, clock, lambda: 7, limit=limit, period=0.02, leave=codes.append):
        time.sleep(seconds)
    return codes


def test_a_step_that_does_not_end(tmp_path, capsys):
    """The process is ended, and where every thread was lies in the run folder."""
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="another")
    thread.start()
    codes = ended(tmp_path, "device", 0.3)
    waiting.set()
    thread.join()
    assert set(codes) == {Exit.HUNG}
    said = capsys.readouterr().err
    assert (
        "process 0" in said
        and "is at step 7, and for 0 s in 'device', over the limit of 0 s; slowest: process 0" in said
    )
    written = (tmp_path / "hangs" / "0.txt").read_text()
    assert "test_watchdog.py" in written and "in ended" in written and written.count("Thread 0x") >= 2


@pytest.mark.parametrize("doing", ["compile", "evaluation", "restore"])
def test_compiling_may_take_as_long_as_it_takes(doing, tmp_path):
    assert ended(tmp_path, doing, 0.3) == []


def test_steps_that_end_in_time(tmp_path):
    codes, clock = [], Clock()
    with Watchdog(tmp_path, clock, lambda: 7, limit=0.2, period=0.02, leave=codes.append), clock.steps():
        for _ in range(10):
            with clock.book("device"):
                time.sleep(0.04)
            clock.settle(useful=True)
    assert codes == []


def test_the_sign_of_life(tmp_path):
    ended(tmp_path, "data", 0.01, limit=0.0)
    (found,) = signs(tmp_path, 1).values()
    assert (found["process"], found["step"], found["doing"]) == (0, 7, "data")
    assert abs(found["unix"] - time.time()) < 5


def test_silent_hosts_are_named():
    now = time.time()
    found = {0: sign(0, 9, "device"), 1: sign(1, 8, "data", ago=75.0), 2: {}, 3: sign(3, 9, "device", ago=5000.0)}
    said = missing(found, began=now - 100, patience=60.0)
    assert said == {
        1: "no sign of life of process 1 (n1) for 75 s, then at step 8 in 'data'",
        2: "no sign of life of process 2 since the start",
        3: "no sign of life of process 3 since the start",
    }
    assert missing(found, began=now - 10, patience=60.0) == {}


@pytest.mark.parametrize(
    "found, text",
    [
        ([sign(0, 9, "device"), sign(1, 8, "device")], "slowest: process 1 (n1) at step 8 in 'device' for 5 s"),
        ([sign(0, 9, "device"), sign(1, 9, "data")], "slowest: process 1 (n1) at step 9 in 'data' for 5 s"),
        ([sign(0, 9, "device"), sign(1, 9, "device")], "all 2 processes are there, at step 9 in 'device': a device or"),
    ],
)
def test_whom_the_others_wait_for(found, text):
    assert slowest(dict(enumerate(found))).startswith(text)


def test_process_0_names_who_is_silent(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "MISSING", 2)
    (tmp_path / "heartbeats").mkdir()
    clock = Clock()
    with Watchdog(tmp_path, clock, lambda: 7, processes=2, period=0.02):
        time.sleep(0.02)
        (tmp_path / "heartbeats" / "1.json").write_text(json.dumps(sign(1, 3, "device")))
        time.sleep(0.4)
    said = capsys.readouterr().err
    assert said.count("no sign of life of process 1 (n1)") == 1, said


DEAF = """
import faulthandler, pathlib, re, sys, time
sys.path.insert(0, ".")
from k3jax.telemetry.clock import Clock
from k3jax.watchdog import Watchdog
clock = Clock()
with Watchdog(pathlib.Path(sys.argv[1]), clock, lambda: 7, limit=0.2, period=0.05), clock.book("device"):
    re.match("(a+)+$", "a" * 40 + "b")  # holds Python's lock for years
"""


def test_a_process_that_cannot_run_python_leaves_all_the_same(tmp_path):
    done = subprocess.run([sys.executable, "-c", DEAF, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout (" in done.stderr and "in <module>" in done.stderr
