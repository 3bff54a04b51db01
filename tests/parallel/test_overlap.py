"""What a TPU's compiler has to compute while tokens travel to their experts: read from its schedule."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs a TPU's compiler: pip install libtpu")
def test_shared_experts_are_computed_while_tokens_travel():
    """At the default level of optimization: O1 schedules no collective beside other work."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_OPTIMIZATION_LEVEL": "UNKNOWN",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, pathlib.Path(__file__).with_name("moe_on_tpu.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    for product in ("btd,df->btf", "btf,df->btd"):
        assert f"gated_ffn/{product}" in run.stdout, run.stdout
