"""What a TPU's compiler has to compute while tokens travel to their experts: read from its schedule."""

import importlib.util
import pathlib

import pytest


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs a TPU's compiler: pip install libtpu")
def test_shared_experts_are_computed_while_tokens_travel(tpu_compiler):
    """At the default level of optimization: O1 schedules no collective beside other work."""
    issued = tpu_compiler(pathlib.Path(__file__).with_name("moe_on_tpu.py"), level="UNKNOWN")
    for product in ("btd,df->btf", "btf,df->btd"):
        assert f"gated_ffn/{product}" in issued, issued
