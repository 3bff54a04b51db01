"""Reading a program compiled for GPUs, and the real step compiled for GPUs that are not here."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from k3jax.plan import chips, hlo, roofline
from k3jax.plan.cost import MATMULS_REACH
from k3jax.plan.roofline import Roofline

ROOT = pathlib.Path(__file__).parent.parent.parent
MESH = {"fsdp": 2, "expert": 2}

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm (p0: bf16[512,256], p1: bf16[256,128]) -> f32[512,128] {
  %p0 = bf16[512,256]{1,0} parameter(0)
  %p1 = bf16[256,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[512,128]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%layer_of (stack: f32[24,64,32], i: s32[]) -> f32[64,32] {
  %stack = f32[24,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %one = f32[1,64,32]{2,1,0} dynamic-slice(%stack, %i, %zero.1, %zero.1), dynamic_slice_sizes={1,64,32}
  ROOT %flat = f32[64,32]{1,0} bitcast(%one)
}

%keep (kept: f32[24,64,32], new: f32[1,64,32], j: s32[]) -> f32[24,64,32] {
  %kept = f32[24,64,32]{2,1,0} parameter(0)
  %new = f32[1,64,32]{2,1,0} parameter(1)
  %j = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  ROOT %updated = f32[24,64,32]{2,1,0} dynamic-update-slice(%kept, %new, %j, %zero.2, %zero.2)
}

%scatter (x: f32[64,32]) -> f32[32,32] {
  %x.1 = f32[64,32]{1,0} parameter(0)
  ROOT %rs = f32[32,32]{1,0} reduce-scatter(%x.1), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
}

%body (p: (s32[], f32[24,64,32], f32[64,32])) -> (s32[], f32[24,64,32], f32[64,32]) {
  %p = (s32[], f32[24,64,32]{2,1,0}, f32[64,32]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %all = f32[24,64,32]{2,1,0} get-tuple-element(%p), index=1
  %layer = f32[64,32]{1,0} fusion(%all, %n), kind=kLoop, calls=%layer_of
  %gs = (f32[64,32]{1,0}, f32[128,32]{1,0}) all-gather-start(%layer), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, metadata={op_name="jit(step)/gather"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %next = f32[24,64,32]{2,1,0} fusion(%all, %layer, %n), kind=kLoop, calls=%keep
  %gd = f32[128,32]{1,0} all-gather-done(%gs)
  %ss = ((f32[64,32]{1,0}), f32[32,32]{1,0}) async-start(%layer), calls=%scatter
  %sd = f32[32,32]{1,0} async-done(%ss)
  %ks = (f32[64,32]{1,0}, f32[128,32]{1,0}) all-gather-start(%layer), replica_groups={{0,2},{1,3}}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}
  %kd = f32[128,32]{1,0} all-gather-done(%ks)
  ROOT %out = (s32[], f32[24,64,32]{2,1,0}, f32[64,32]{1,0}) tuple(%n, %next, %layer)
}

%condition (p: (s32[], f32[24,64,32], f32[64,32])) -> pred[] {
  %p.1 = (s32[], f32[24,64,32]{2,1,0}, f32[64,32]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(24)
  ROOT %less = pred[] compare(%n.1, %limit), direction=LT
}

ENTRY %main (x: bf16[512,256], w: bf16[256,128], s: (s32[], f32[24,64,32], f32[64,32])) -> f32[512,128] {
  %x = bf16[512,256]{1,0} parameter(0)
  %w = bf16[256,128]{1,0} parameter(1)
  %s = (s32[], f32[24,64,32]{2,1,0}, f32[64,32]{1,0}) parameter(2)
  %loop = (s32[], f32[24,64,32]{2,1,0}, f32[64,32]{1,0}) while(%s), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"24"}}
  %call = (f32[512,128]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}
  %mystery = f32[8]{0} custom-call(%x), custom_call_target="someone$elses"
  ROOT %f = f32[512,128]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
}
"""  # noqa: E501 (lines as the compiler writes them)

LAYER = 64 * 32 * 4
KEEP = 2 * LAYER + 4  # a layer's slice is read and written; and its number


@pytest.fixture(scope="module")
def program() -> hlo.Program:
    return hlo.Program.parse(PROGRAM)


def test_collectives_in_starts_and_in_what_they_call(program):
    chip = chips.CHIPS["h100"]
    found = hlo.collectives(program, MESH, Roofline(program, chip).cycles)
    assert [(one.kind, one.axes, one.payload, one.times, one.asynchronous) for one in found] == [
        ("all-gather", ("fsdp",), 2 * LAYER, 24, True),
        ("reduce-scatter", ("expert",), LAYER, 24, True),
        ("all-gather", ("fsdp",), 2 * LAYER, 24, False),  # awaited as soon as it is started
    ]
    assert [one.between for one in found] == [pytest.approx(KEEP / chip.hbm_bandwidth * chip.clock), 0, 0]


def test_a_kernel_takes_its_products_or_its_bytes(program):
    chip = chips.CHIPS["h100"]
    product, moved = 2 * 512 * 256 * 128, 2 * 512 * 256 + 2 * 256 * 128 + 4 * 512 * 128
    others = 24 * 2 * KEEP + 2 * 512 * 256 + 4 * 8  # slices of the stack and not all of it, the unknown call
    assert Roofline(program, chip).total() == pytest.approx((others + 2 * moved) / chip.hbm_bandwidth)
    fast = dataclasses.replace(chip, hbm_bandwidth=1e15)
    expected = others / 1e15 + 2 * product / (chip.flops * MATMULS_REACH)
    assert Roofline(program, fast).total() == pytest.approx(expected)


def test_calls_of_which_no_operations_are_known_are_named(program):
    assert Roofline(program, chips.CHIPS["h100"]).unknown() == ["someone$elses"]


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax[cuda13] is not installed")
def test_the_step_compiles_for_gpus_that_are_not_here(tmp_path):
    """In a process of its own: the tests' eight devices are CPUs."""
    command = "-m k3jax.plan --config tiny --topology h100:1x2 --layout fsdp=2".split()
    command += ["--set", "model.layers=2", "--set", "model.full_attention=(2,)"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_OPTIMIZATION_LEVEL": "O1", "XLA_FLAGS": ""}
    command = [sys.executable, *command, "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["memory"]["fits"] and plan["seconds"]["fused"] > 0 and plan["fused_source"] == roofline.SOURCE
    assert ("all-gather", ["fsdp"]) in [(one["kind"], one["axes"]) for one in plan["collectives"]]
