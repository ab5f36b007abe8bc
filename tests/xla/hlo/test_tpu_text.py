"""Forms that XLA for TPUs writes and no other: lines of steps that libtpu 0.0.42 compiled."""

import pytest

from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.cycles import estimated_cycles
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import flops
from megajax.xla.hlo.program import Program

HEADER = 'HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0:T(128)})->f32[]}'
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
# A convolution's operands, result and attributes, and the FLOPs of the matmul: 2 b m n k.
MATMULS = [
    (
        'f32[4,128,128,1,1]', 'bf16[128,4,3,16,1]', 'f32[4,128,4,3,16]',
        'window={size=1x4x3 pad=0_0x3_3x2_2 rhs_reversal=0x1x1}, dim_labels=0bf12_i12o0->0b12f',
        2 * (4 * 128) * (4 * 3 * 16) * 128,
    ),
    (
        'bf16[4,128,4,16]', 'f32[4,128,4,16]', 'f32[4,4,128,128]',
        'window={size=4x4 stride=3x3 lhs_dilate=4x4}, dim_labels=0b1f_0o1i->01bf',
        2 * (4 * 4) * 128 * 128 * 16,
    ),
    (
        'f32[4,128,128]', 'f32[4,128,2048]', 'f32[128,2048,1]',
        'window={size=4}, dim_labels=0fb_0io->bf0',
        2 * 128 * 2048 * (4 * 128),
    ),
    (
        'f32[4,128,128]', 'bf16[2048,128,1]', 'f32[4,128,2048]',
        'window={size=1}, dim_labels=0bf_oi0->0bf',
        2 * (4 * 128) * 2048 * 128,
    ),
]  # fmt: skip


@pytest.mark.parametrize(('left', 'right', 'result', 'attributes', 'wanted'), MATMULS)
def test_a_matmul_as_a_convolution_has_its_flops(left, right, result, attributes, wanted) -> None:
    program = Program(f"""{HEADER}

ENTRY %main (l: {left}, r: {right}) -> {result} {{
  %l = {left} parameter(0)
  %r = {right} parameter(1)
  ROOT %convolution.77 = {result} convolution(%l, %r), {attributes}
}}
""")
    assert flops(program, program.entry, program.entry.root) == wanted


def test_a_convolution_without_labels_is_an_error() -> None:
    program = Program(f"""{HEADER}

ENTRY %main (l: f32[4,8]) -> f32[4,4] {{
  %l = f32[4,8] parameter(0)
  ROOT %convolution.1 = f32[4,4] convolution(%l, %l), window={{size=1}}
}}
""")
    with pytest.raises(HloError, match='without dim_labels'):
        flops(program, program.entry, program.entry.root)


def sums(header: str) -> str:
    """An fp32 sum over `data` between conversions from and to bf16, as XLA for CPUs writes it."""
    return f"""{header}
{ADD}
ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {{
  %p = bf16[8,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %wide = f32[8,128]{{1,0:T(8,128)}} convert(%p)
  %all-reduce.1 = f32[8,128]{{1,0:T(8,128)S(1)}} all-reduce(%wide), channel_id=1, \
replica_groups={{{{0,1}}}}, use_global_device_ids=true, to_apply=%add
  ROOT %narrow = bf16[8,128]{{1,0:T(8,128)(2,1)}} convert(%all-reduce.1)
}}
"""


def test_a_tpu_sends_an_fp32_sum_in_fp32() -> None:
    on_cpu = HEADER.replace(':T(128)', '')
    dtypes = [
        collectives(Program(sums(header)), {'data': 2})[0].operand.dtype
        for header in (HEADER, on_cpu)
    ]
    assert dtypes == ['f32', 'bf16']


def test_cycles_are_multiplied_by_the_steps_of_loops_and_fusions_count_once() -> None:
    config = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
    text = f"""{HEADER}

%fused (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0:T(128)}} parameter(0)
  ROOT %inside = f32[8]{{0:T(128)}} negate(%q), {config % 7}
}}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%b), index=0
  %v = f32[8]{{0:T(128)}} get-tuple-element(%b), index=1
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %fusion.1 = f32[8]{{0:T(128)}} fusion(%v), kind=kLoop, calls=%fused, {config % 100}
  ROOT %both = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next, %fusion.1)
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %five = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[]{{:T(512)}} compare(%j, %five), direction=LT
}}

ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {{
  %p = f32[8]{{0:T(128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %start = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%zero, %p)
  ROOT %while.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) while(%start), \
condition=%condition, body=%body
}}
"""
    assert estimated_cycles(Program(text)) == 5 * 100


def test_a_sum_between_slices_is_an_error_and_a_send_to_the_host_is_none() -> None:
    def sent(handler: str) -> list[Collective]:
        own = f'frontend_attributes={{_xla_host_transfer_handler_name="{handler}",'
        text = f"""{HEADER}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0:T(128)}} parameter(0)
  %t = token[] after-all()
  %send.1 = (f32[8]{{0:T(128)}}, u32[]{{:S(2)}}, token[]) send(%p, %t), channel_id=5, \
is_host_transfer=true, {own}_xla_megascale_transfer_type="ALL_REDUCE"}}
  %done = token[] send-done(%send.1), channel_id=5, is_host_transfer=true
  ROOT %n = f32[8]{{0:T(128)}} negate(%p)
}}
"""
        return collectives(Program(text), {'dcn': 2})

    assert sent('xla_ffi_callback') == []
    with pytest.raises(HloError, match=r'between slices, .* not supported: %send.1 = '):
        sent('xla_megascale_runtime')
