"""What is wrong with arguments, flags and files is said in a line or two, with exit code 2."""

import logging
import re
import runpy
import sys

import absl.app  # noqa: F401 (its own flags are defined when it is imported, and stay)
import pytest
from absl import flags

from k3jax.exits import Exit

WRONG = {
    "no argument": (["render", "--to", "slurm"], "one spec is needed, got none", "SPEC --to ENGINE [--out FILE]"),
    "two": (["preflight", "a", "b", "--to", "gke"], "one spec is needed, got 'a' and 'b'", "SPEC --to ENGINE"),
    "no engine": (["render", "a.json"], "flag --to=None: Flag --to must have a value other than None.", "SPEC --to"),
    "an engine": (["render", "a", "--to", "pbs"], "flag --to=pbs: value should be one of <local|slurm", "SPEC --to"),
    "a flag": (["collect", "a.json", "--into", "x"], "Unknown command line flag 'into'", "SPEC [SPEC ...]"),
    "no spec": (["collect"], "one spec or more are needed, got none", "SPEC [SPEC ...] [--to FOLDER] [--checkpoints]"),
    "no runs": (["from_plan", "plan.json"], "flag --runs=None: Flag --runs must have a value", "PLAN.json --runs"),
    "no command": (["local", "--logs", "x"], "there is no command to run", "--processes N --logs FOLDER -- COMMAND"),
    "no such file": (["render", "/a.json", "--to", "gke"], "configuration file '/a.json': [Errno 2] No such file", ""),
    "no such plan": (["from_plan", "/a", "--runs", "r"], "'/a' is no plan.json of k3jax.plan: [Errno 2] No such", ""),
    "not from here": (["render", "/a", "--to", "gke", "--run"], "--run with --to gke: only local runs are started", ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def left_as_it_was():
    """Flags and the handler of absl."""
    names, handlers = set(flags.FLAGS), logging.root.handlers[:]
    yield
    for name in set(flags.FLAGS) - names:
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    logging.root.handlers[:] = handlers


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("arguments, message, usage", WRONG.values(), ids=WRONG)
def test_bad_arguments(arguments, message, usage, monkeypatch, capsys):
    module = f"launch.{arguments[0]}"
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    assert left.value.code == Exit.CONFIGURATION
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{module}: {message}")
    expected = [rf"usage: python -m {re.escape(f'{module} {usage}')}.*; --help lists the flags"] if usage else []
    assert len(rest) == len(expected) and all(map(re.fullmatch, expected, rest))
