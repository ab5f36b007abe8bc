"""What kernels do, of instructions written by hand, one for each kind."""

from collections import Counter

import pytest
from schedules import LOOP, body, product, program, start

from megajax.xla.hlo.kernels import KINDS, Kernel, Kind, kernels
from megajax.xla.hlo.program import Program

MASK = 'backend_config={"mask_type":"CAUSAL","intermediate_tensor_shape":{"element_type":"BF16"'
FMHA = MASK + ',"dimensions":["1","2","16","16"]}}'
BODIES = {
    'elementwise': '%m = f32[16]{0} multiply(%x, %x)\n  ROOT %r = f32[16]{0} negate(%m)',
    'reduction': (
        '%z = f32[] constant(0)\n  %s = f32[] reduce(%x, %z), dimensions={0}, to_apply=%add\n'
        '  ROOT %r = f32[16]{0} broadcast(%s), dimensions={}'
    ),
    'cast': 'ROOT %r = bf16[16]{0} convert(%x)',
    'copy': (
        '%w = f32[4,4]{1,0} bitcast(%x)\n  ROOT %r = f32[4,4]{1,0} transpose(%w), dimensions={1,0}'
    ),
    'stack': (
        '%i = s32[] constant(3)\n'
        '  ROOT %r = f32[4]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={4}'
    ),
    'fill': '%z = f32[] constant(0)\n  ROOT %r = f32[16]{0} broadcast(%z), dimensions={}',
    'lookup': (
        '%i = s32[2,1]{1,0} constant({{1}, {2}})\n'
        '  ROOT %r = f32[2]{0} gather(%x, %i), offset_dims={}, collapsed_slice_dims={0}, '
        'start_index_map={0}, index_vector_dim=1, slice_sizes={1}'
    ),
    'random': (
        '%u = u32[16]{0} bitcast-convert(%x)\n  %a = u32[16]{0} shift-left(%u, %u)\n'
        '  %b = u32[16]{0} shift-right-logical(%u, %u)\n  ROOT %r = u32[16]{0} xor(%a, %b)'
    ),
}
CALLS = {
    'matmul': 'f32[4,4]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}',
    'attention': (
        'bf16[1,2,16,8]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"'
        f', {FMHA}'
    ),
    'attention gradient': (
        'bf16[1,2,16,8]{3,2,1,0} custom-call(%q, %q, %q), '
        f'custom_call_target="__cudnn$fmhaSoftmaxBackward", {FMHA}'
    ),
    'library call': 'f32[16]{0} custom-call(%x), custom_call_target="library"',
    'copy': 'f32[16]{0} copy(%x)',
}


def kinds(call: str, fused: str = '') -> list[Kind]:
    return [kernel.kind for kernel in of_call(call, fused)]


def of_call(call: str, fused: str = '') -> list[Kernel]:
    """The kernels of an entry with one call."""
    result = fused.split('ROOT %r = ')[1].split(' ')[0] if fused else call.split(' ')[0]
    inside = (
        f'%fused (x: f32[16]) -> {result} {{\n  %x = f32[16]{{0}} parameter(0)\n  {fused}\n}}\n'
    )
    call = call or f'{result} fusion(%x), kind=kLoop, calls=%fused'
    text = f"""HloModule jit_f, is_scheduled=true

%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}}

{inside if fused else ''}
ENTRY %main (x: f32[16], w: f32[4,4], q: bf16[1,2,16,8]) -> {result} {{
  %x = f32[16]{{0}} parameter(0)
  %w = f32[4,4]{{1,0}} parameter(1)
  %q = bf16[1,2,16,8]{{3,2,1,0}} parameter(2)
  ROOT %out = {call}
}}
"""
    return [*kernels(Program(text))]


@pytest.mark.parametrize('kind', BODIES)
def test_a_fused_kernel_is_of_the_kind_of_what_it_computes(kind: Kind) -> None:
    assert kinds('', BODIES[kind]) == [kind]


@pytest.mark.parametrize('kind', CALLS)
def test_a_call_is_of_the_kind_of_its_target(kind: Kind) -> None:
    assert kinds(CALLS[kind]) == [kind]


@pytest.mark.parametrize(('kind', 'products'), [('attention', 2), ('attention gradient', 5)])
def test_attention_has_the_flops_of_its_scores_wherever_a_compiler_writes_their_sizes(
    kind: Kind, products: int
) -> None:
    later = CALLS[kind].replace('"element_type":"BF16","dimensions"', '"dimensions"')
    later = later.replace('"16"]', '"16"],"element_type":"BF16","layout":{"minor_to_major":["1"]}')
    for call in (CALLS[kind], later):
        (kernel,) = of_call(call)
        assert kernel.flops == products * 2 * (2 * 16 * 16) * 8
    assert later != CALLS[kind]


@pytest.mark.parametrize('kind', ['matmul', 'attention'])
def test_names_of_scopes_do_not_change_what_a_kernel_computes(kind: Kind) -> None:
    scoped = f'{CALLS[kind]}, metadata={{op_name="jit(f)/fmha/Backward/dot_general"}}'
    (kernel,), (plain,) = of_call(scoped), of_call(CALLS[kind])
    assert kernel.kind == kind
    assert kernel.flops == plain.flops > 0


def test_every_kind_has_an_example_here() -> None:
    assert {*BODIES, *CALLS} == {*KINDS}


def test_a_cast_there_and_back_in_a_copy_is_no_cast() -> None:
    there_and_back = '%l = bf16[16]{0} convert(%x)\n  ROOT %r = f32[16]{0} convert(%l)'
    assert kinds('', there_and_back) == ['copy']


def test_zeros_for_several_arrays_are_no_cast_though_nothing_of_their_dtype_is_read() -> None:
    zeros = '%z = f32[] constant(0)\n  %a = f32[16]{0} broadcast(%z), dimensions={}\n'
    two = '  %b = f32[16]{0} copy(%a)\n  ROOT %r = (f32[16]{0},f32[16]{0}) tuple(%a, %b)'
    call = '(f32[16]{0},f32[16]{0}) fusion(), kind=kLoop, calls=%fused'
    assert kinds(call, zeros + two) == ['fill']


def test_kernels_of_a_loop_run_as_often_as_it_and_transfers_are_none() -> None:
    found = [*kernels(program(*LOOP, before=body(start('s'), product('d'))))]
    times = Counter[str]()
    for kernel in found:
        times[kernel.kind] += kernel.times
    assert times['matmul'] == 5
    assert not any(kernel.instruction.name == 's' for kernel in found)


@pytest.mark.parametrize('target', ['library', '__cublas$lt$matmul'])
def test_a_call_that_is_started_is_the_kernel_of_one_that_is_awaited(target: str) -> None:
    call = f'(%x), custom_call_target="{target}", backend_config={{"lhs_contracting_dims":[]}}'
    head = 'HloModule f\n\nENTRY %main (x: f32[64]) -> f32[64] {\n  %x = f32[64] parameter(0)\n'
    awaited = Program(f'{head}  ROOT %c = f32[64] custom-call{call}\n}}\n')
    started = Program(
        f'{head}  %s = ((f32[64]), f32[64], s32[]) custom-call-start{call}\n'
        '  ROOT %d = f32[64] custom-call-done(%s)\n}\n'
    )
    [first], [second] = ([*kernels(each)] for each in (awaited, started))
    assert (second.kind, second.products) == (first.kind, first.products)
    assert second.bytes == first.bytes + 4  # the context
