"""The progress line moves while the main thread is silent, stays out of the way of logs, and never raises."""

import io
import logging
import time

import pytest

from k3jax.progress import Progress, _duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal_type(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_plain_lines_keep_coming_while_the_main_thread_is_silent():
    out = io.StringIO()
    with Progress(total=9, stream=out, interval=0.1) as progress:
        progress.phase("compiling")
        time.sleep(0.55)
    lines = out.getvalue().splitlines()
    assert 4 <= sum("compiling" in line for line in lines) <= 10
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_plain_lines_are_few_however_fast_the_steps():
    out = io.StringIO()
    with Progress(total=20_000, stream=out, interval=60.0) as progress:
        start = time.monotonic()
        for step in range(1, 20_001):
            progress.update(step, loss=2.0, tokens_per_second=1234.5)
        assert time.monotonic() - start < 2.0
    lines = out.getvalue().splitlines()
    assert len(lines) <= 2
    assert "step 20000/20000  loss 2.000  1,234 tokens/s  took" in lines[-1]


def test_eta_counts_only_the_steps_of_this_process():
    progress = Progress(total=100, first=40, stream=io.StringIO())
    assert progress.describe() == "starting 0 s"
    progress.update(41)
    assert progress.describe() == "training  step 41/100"
    progress._pace = (time.monotonic() - 9.0, 41)  # nine seconds for the next nine steps, one per second
    progress.update(50, loss=1.25)
    assert progress.describe() == "training  step 50/100  loss 1.250  ETA 50 s"
    progress.phase("evaluating")
    assert progress.describe().startswith("evaluating  step 50/100")


def test_live_line_moves_while_the_main_thread_is_silent():
    out = Terminal()
    with Progress(total=9, stream=out) as progress:
        progress.phase("compiling")
        time.sleep(1.2)
    assert out.getvalue().count("compiling") >= 4
    assert out.getvalue().rstrip("\x1b[?25h").endswith("\n"), "the shell prompt starts on a line of its own"


def test_logs_and_messages_get_lines_of_their_own():
    out = Terminal()
    handler = logging.StreamHandler(out)
    logging.root.addHandler(handler)
    try:
        with Progress(total=9, stream=out) as progress:
            progress.update(1, loss=1.0)
            time.sleep(0.4)
            logging.getLogger("somewhere").warning("a warning")
            progress.log("held-out 2.1 [not markup]")
    finally:
        logging.root.removeHandler(handler)
    text = out.getvalue()
    assert "\r\x1b[2Ka warning\n" in text
    assert "\x1b[2Kheld-out 2.1 [not markup]\n" in text
    before = list(logging.root.handlers)
    with Progress(total=9, stream=Terminal()):
        assert logging.root.handlers[1:] == before
    assert logging.root.handlers == before


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_that_breaks_does_not_end_the_run(kind):
    out = kind()
    with Progress(total=9, stream=out, interval=0.05) as progress:
        out.close()
        progress.phase("training")
        progress.update(3, loss=1.0)
        progress.log("lost")
        time.sleep(0.1)


def test_durations_and_bad_input():
    assert [_duration(x) for x in (8.9, 185, 7620)] == ["8 s", "3 min 05 s", "2 h 07 min"]
    with pytest.raises(ValueError, match="total 0, first 0"):
        Progress(total=0)
    with pytest.raises(ValueError, match="total 5, first 6"):
        Progress(total=5, first=6)
