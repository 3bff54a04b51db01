"""Reading a compiled program: how often, along which axes, how many bytes, hidden or not."""

import numpy as np
import pytest

from k3jax.plan import chips, cost, hlo

MESH = {"fsdp": 2, "expert": 2, "tensor": 2}

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  %b = bf16[]{:T(256)} parameter(1)
  ROOT %sum = bf16[]{:T(256)} add(%a, %b)
}

%all-reduce-scatter.1 (input: bf16[2,256,512]) -> bf16[2,128,512] {
  %input = bf16[2,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[2,256,512]{2,1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %slice.1 = bf16[2,128,512]{2,1,0:T(8,128)(2,1)} slice(%all-reduce.1), slice={[0:2], [0:128], [0:512]}
}

%body (p: (s32[], bf16[2,128,512])) -> (s32[], bf16[2,128,512]) {
  %p = (s32[]{:T(128)}, bf16[2,128,512]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[2,128,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %gather-start.1 = (bf16[2,128,512]{2,1,0}, bf16[2,256,512]{2,1,0}) all-gather-start(%x), replica_groups=[4,2]<=[2,2,2]T(2,1,0), dimensions={1}, metadata={op_name="jit(step)/gather"}
  %work = bf16[2,128,512]{2,1,0:T(8,128)(2,1)} fusion(%x), kind=kLoop, calls=%add, backend_config={"window_config":{"estimated_cycles":"700"}}
  %gather-done.1 = bf16[2,256,512]{2,1,0} all-gather-done(%gather-start.1)
  %scatter = bf16[2,128,512]{2,1,0:T(8,128)(2,1)} fusion(%gather-done.1), kind=kCustom, calls=%all-reduce-scatter.1
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[2,128,512]{2,1,0}) tuple(%i, %scatter)
}

%condition (p: (s32[], bf16[2,128,512])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, bf16[2,128,512]{2,1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(6)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: bf16[2,128,512]) -> bf16[2,128,512] {
  %x.1 = bf16[2,128,512]{2,1,0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, /*index=1*/bf16[2,128,512]{2,1,0}) tuple(%zero, %x.1)
  %loop = (s32[]{:T(128)}, bf16[2,128,512]{2,1,0}) while(%start), condition=%condition, body=%body
  %y = bf16[2,128,512]{2,1,0} get-tuple-element(%loop), index=1
  %moved = bf16[2,128,512]{2,1,0} all-to-all(%y), replica_groups=mesh['fsdp'=2,'expert'=2,'tensor'=2] {'expert'}, dimensions={0}
  %shifted = bf16[2,128,512]{2,1,0} collective-permute(%moved), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  ROOT %total = bf16[2,128,512]{2,1,0} all-reduce(%shifted), replica_groups={}, to_apply=%add
}
"""  # noqa: E501 (lines as the compiler writes them)

BYTES = 2 * 128 * 512 * 2


def test_collectives_have_their_axes_bytes_and_counts():
    found = hlo.collectives(hlo.Program.parse(PROGRAM), MESH)
    assert [(one.kind, one.axes, one.size, one.payload, one.times) for one in found] == [
        ("all-gather", ("fsdp",), 2, 2 * BYTES, 6),
        ("reduce-scatter", ("tensor",), 2, 2 * BYTES, 6),
        ("all-to-all", ("expert",), 2, BYTES, 1),
        ("collective-permute", ("fsdp",), 2, BYTES, 1),
        ("all-reduce", ("fsdp", "expert", "tensor"), 8, BYTES, 1),
    ]
    assert [one.sent for one in found] == [BYTES, BYTES, BYTES / 2, BYTES, 2 * BYTES * 7 / 8]


def test_what_stands_between_start_and_end_is_counted():
    gather, *others = hlo.collectives(hlo.Program.parse(PROGRAM), MESH)
    assert gather.asynchronous and gather.between == 700
    assert not any(one.asynchronous for one in others)


def test_estimated_cycles_are_multiplied_by_the_loops_trips():
    chip = chips.CHIPS["v5p"]
    assert cost.fused_seconds(hlo.Program.parse(PROGRAM), chip) == pytest.approx(6 * 700 / chip.clock)


OFFLOADED = """
%sent (x: bf16[8,64]) -> bf16[16,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  ROOT %g = bf16[16,64]{1,0} all-gather(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}

%exchanged (y: bf16[16,64]) -> bf16[16,64] {
  %y = bf16[16,64]{1,0} parameter(0)
  ROOT %r = bf16[16,64]{1,0} ragged-all-to-all(%y), replica_groups={{0,2},{1,3},{4,6},{5,7}}
}

ENTRY %main (a: bf16[8,64]) -> bf16[16,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %s = ((bf16[8,64]), bf16[16,64], u32[]) call-start(%a), async_execution_thread="sparsecore", to_apply=%sent
  %w = bf16[8,64]{1,0} fusion(%a), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"500"}
  %d = bf16[16,64]{1,0} call-done(%s)
  %c = ((), (), (s32[8])) custom-call-start(), async_execution_thread="sparsecore", called_computations={%exchanged}
  %u = ((bf16[16,64]), bf16[16,64], (s32[8])) custom-call-update(%c, %d)
  %v = bf16[8,64]{1,0} fusion(%w), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"300"}
  ROOT %e = bf16[16,64]{1,0} custom-call-done(%u)
}
"""


def test_what_a_sparse_core_sends_is_asynchronous():
    found = hlo.collectives(hlo.Program.parse(OFFLOADED), MESH)
    assert [(one.kind, one.axes, one.asynchronous, one.between) for one in found] == [
        ("all-gather", ("tensor",), True, 500),
        ("ragged-all-to-all", ("expert",), True, 300),
    ]


PRODUCTS = """
%inside (a: bf16[24,64,16], b: bf16[24,32,16]) -> f32[24,64,32] {
  %a = bf16[24,64,16]{2,1,0} parameter(0)
  %b = bf16[24,32,16]{2,1,0} parameter(1)
  ROOT %c = f32[24,64,32]{2,1,0} convolution(%a, %b), window={size=24 stride=23 lhs_dilate=24}, dim_labels=0bf_0oi->0bf
}

ENTRY %main (x: bf16[24,64,16], w: bf16[24,32,16], y: bf16[64,24,16], v: bf16[32,24,16]) -> f32[64,32] {
  %x = bf16[24,64,16]{2,1,0} parameter(0)
  %w = bf16[24,32,16]{2,1,0} parameter(1)
  %y = bf16[64,24,16]{2,1,0} parameter(2)
  %v = bf16[32,24,16]{2,1,0} parameter(3)
  %f = f32[24,64,32]{2,1,0} fusion(%x, %w), kind=kOutput, calls=%inside, backend_config={"estimated_cycles":"1000000"}
  ROOT %d = f32[64,32]{1,0} convolution(%y, %v), window={size=24}, backend_config={"estimated_cycles":"3"}
}
"""


def test_products_of_matrices_count_by_their_operations_where_the_compiler_did_not_look_for_tiles():
    program, chip = hlo.Program.parse(PRODUCTS), chips.CHIPS["v5p"]
    operations = {one.name: program.matmul_operations("main", one) for one in program.computations["main"]}
    # Batched over heads, in a fusion; and summed over heads.
    assert operations["f"] == pytest.approx(2 * 24 * 64 * 32 * 16) == operations["d"]
    estimated = cost.fused_seconds(program, chip, quick=False)
    assert estimated == pytest.approx(1000003 / chip.clock)
    quick = operations["f"] / chip.flops / cost.MATMULS_REACH + 3 / chip.clock
    assert cost.fused_seconds(program, chip, quick=True) == pytest.approx(quick)


def test_the_summary_adds_by_kind_and_axes():
    rows = hlo.summary(hlo.collectives(hlo.Program.parse(PROGRAM), MESH))
    assert rows["all-gather", ("fsdp",)] == dict(
        static=1, executed=6, payload=12 * BYTES, sent=6 * BYTES, asynchronous=12 * BYTES
    )


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
    ],
)
def test_every_form_of_replica_groups(text, groups):
    np.testing.assert_array_equal(hlo.replica_groups(text, 4), groups)


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.Program.parse("not a program")


KERNELS = """ENTRY %main (x: bf16[1,512,8,128]) -> bf16[1,512,8,128] {
  %jvp_kda_forward_.1 = (bf16[1,512,8,128]{3,2,1,0}, f32[1,1,8,128,128]{4,3,2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[1,8]{1,0}, bf16[1,512,8,128]{3,2,1,0}}, x=1
  %ragged-dot-none.1 = bf16[1024,512]{1,0} custom-call(%y), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[1]{0}, bf16[1024,256]{1,0}, bf16[8,256,512]{2,1,0}}
  %jvp_jit_gmm__.2 = bf16[1024,512]{1,0} custom-call(%y), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[9]{0}, s32[]{0}, bf16[1024,256]{1,0}, bf16[8,256,512]{2,1,0}}
  %transpose_jvp_jit_tgmm___.2 = bf16[8,256,512]{2,1,0} custom-call(%y), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[9]{0}, bf16[256,1024]{1,0}, bf16[1024,512]{1,0}}
  %mystery.3 = bf16[8]{0} custom-call(%y), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8]{0}}
}
"""  # noqa: E501


def test_kernels_cost_what_was_counted_and_unknown_ones_are_named():
    program, chip = hlo.Program.parse(KERNELS), chips.CHIPS["v5p"]
    kda = cost.KDA_CYCLES["TPU v5"][0] * 512 * 8 / chip.clock
    assert cost.kernel_seconds(program, chip) == pytest.approx(kda + 3 * 2 * 1024 * 256 * 512 / chip.flops)
    assert cost.unknown_kernels(program, chip) == ["mystery"]
