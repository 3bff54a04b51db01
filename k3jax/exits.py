"""What the exit code of a training process means, for whatever started it."""

import enum
import sys
from typing import NoReturn


class Exit(enum.IntEnum):
    """Zero is a finished run. The others say whether starting the same command again helps.

    PREEMPTED: asked to stop and saved; start again. INTERRUPTED: the same by Ctrl-C. BUSY: another live process has
    the run. PEERS: not all processes of the run came, or they do not reach each other; start them again. HUNG: a step
    did not end, and the watchdog wrote down where every thread was; start again. CONFIGURATION, DATA, STORAGE,
    CHECKPOINT: the message says what to mend first. NON_FINITE, SPIKE: the run stopped itself; starting again repeats
    the same steps.
    """

    DONE = 0
    CONFIGURATION = 2
    NON_FINITE = 3
    SPIKE = 4
    DATA = 5
    STORAGE = 6
    CHECKPOINT = 7
    BUSY = 8
    PEERS = 9
    HUNG = 10
    PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, as shells say it


# Starting the same command again gives the same answer until somebody has mended something.
FINAL = (
    Exit.CONFIGURATION, Exit.NON_FINITE, Exit.SPIKE, Exit.DATA, Exit.STORAGE, Exit.CHECKPOINT, Exit.BUSY,
)  # fmt: skip


def leave(text: str, code: Exit = Exit.CONFIGURATION) -> NoReturn:
    """Says what is wrong, and ends the process."""
    print(text, file=sys.stderr, flush=True)
    raise SystemExit(int(code))
