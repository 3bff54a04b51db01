"""Runs commands one after the other, each in a forked process and a session of its own, so that the imports, which take
seconds, are paid once. A line of JSON in is {"argv", "cwd", "env"}, a line out {"code", "output"}.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback

import matplotlib.figure  # noqa: F401
import rich.live  # noqa: F401

import k3jax.diagnose
import k3jax.evaluate
import k3jax.plan.compiled
import k3jax.train  # noqa: F401


def become(argv: list[str], cwd: str, env: dict[str, str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.update(env)
    sys.path.insert(0, cwd)
    sys.argv, code = argv, 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def run(argv: list[str], cwd: str, env: dict[str, str]) -> dict:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            become(argv, cwd, env)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "output": output.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
