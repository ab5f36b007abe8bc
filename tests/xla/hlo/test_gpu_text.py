"""Forms that an XLA for GPUs writes and one for CPUs never does, by hand."""

import pytest

from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program

MESH = {'data': 2, 'model': 4}
GROUPS = 'replica_groups=[2,4]<=[8], use_global_device_ids=true'
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
DOT = 'f32[16,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}'
FLOPS = 2 * 16 * 32 * 64


def read(lines: str, before: str = '') -> list[Collective]:
    """Of an ENTRY with these lines after its parameters, the last of them its ROOT."""
    *body, last = lines.strip().splitlines()
    body = [line.strip() for line in body] + [f'ROOT {last.strip()}']
    text = f"""HloModule jit_f, is_scheduled=true
{ADD}{before}
ENTRY %main (p: f32[8,16], q: bf16[4,2], a: f32[16,64], b: f32[64,32]) -> f32[8,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %q = bf16[4,2]{{1,0}} parameter(1)
  %a = f32[16,64]{{1,0}} parameter(2)
  %b = f32[64,32]{{1,0}} parameter(3)
  {f'{chr(10)}  '.join(body)}
}}
"""
    return collectives(Program(text), MESH)


def test_a_started_all_gather_has_the_operands_and_results_of_its_tuple():
    first, second = read(f"""
        %start = ((f32[8,16]{{1,0}}, bf16[4,2]{{1,0}}), (f32[32,16]{{1,0}}, \
bf16[16,2]{{1,0}})) all-gather-start(%p, %q), {GROUPS}
        %done = (f32[32,16]{{1,0}}, bf16[16,2]{{1,0}}) all-gather-done(%start)
    """)
    assert (str(first.operand), str(first.result)) == ('f32[8,16]', 'f32[32,16]')
    assert (str(second.operand), str(second.result)) == ('bf16[4,2]', 'bf16[16,2]')
    assert {one.kind for one in (first, second)} == {'all-gather'}
    assert (first.wire_bytes, second.wire_bytes) == (3 * 512, 3 * 16)


@pytest.mark.parametrize(
    ('opcode', 'type', 'result', 'sent'),
    [
        ('all-reduce', 'f32[8,16]{1,0}', 'f32[8,16]', 768),
        ('all-gather', '(f32[8,16]{1,0}, f32[8,64]{0,1})', 'f32[8,64]', 1536),
        ('reduce-scatter', '((f32[8,16]{1,0}), f32[2,16]{1,0})', 'f32[2,16]', 384),
        ('reduce-scatter', '((f32[8,16]{1,0}), (f32[2,16]{1,0}), u32[]{:S(2)})', 'f32[2,16]', 384),
        ('all-to-all', '((f32[8,16]{1,0}), f32[8,16]{1,0}, s32[])', 'f32[8,16]', 384),
        ('collective-permute', '(f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[])', 'f32[8,16]', 512),
    ],
)
def test_what_a_start_carries_beside_operand_and_result_is_left_out(opcode, type, result, sent):
    pairs = 'source_target_pairs={{0,1},{1,2},{2,3},{3,0}}'
    [one] = read(f"""
        %start = {type} {opcode}-start(%p), {pairs if opcode == 'collective-permute' else GROUPS}
        %done = {result}{{1,0}} {opcode}-done(%start)
    """)
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == (
        opcode,
        'model',
        'f32[8,16]',
        result,
    )
    assert (one.wire_bytes, one.synchronous) == (sent, False)


WRAPPED = f"""
%wrapped (given: f32[8,16]) -> f32[32,16] {{
  %given = f32[8,16]{{1,0}} parameter(0)
  ROOT %inside = f32[32,16]{{1,0}} all-gather(%given), {GROUPS}, dimensions={{0}}
}}, execution_thread="explicit"
"""
ASYNC = '((f32[8,16]{1,0}), f32[32,16]{1,0}, u32[]) async-start(%p), calls=%wrapped'


@pytest.mark.parametrize(
    ('opcode', 'named_again'), [('async', ''), ('async', ', calls=%wrapped'), ('fusion', '')]
)
def test_a_wrapped_collective_runs_once_in_the_background_from_start_to_done(opcode, named_again):
    [one] = read(
        f"""
        %start = {ASYNC.replace('async', opcode)}
        %product = {DOT}
        %done = f32[32,16]{{1,0}} {opcode}-done(%start){named_again}
        """,
        before=WRAPPED,
    )
    assert (one.kind, one.axis, one.times, str(one.result)) == (
        'all-gather',
        'model',
        1,
        'f32[32,16]',
    )
    assert (one.synchronous, one.overlapped_flops) == (False, FLOPS)


SYNC = ', backend_config={"collective_backend_config":{"is_sync":true,"note":"} \\" {"}}'


def test_a_start_that_says_it_is_synchronous_overlaps_nothing():
    [one] = read(f"""
        %start = f32[8,16]{{1,0}} all-reduce-start(%p), {GROUPS}, to_apply=%add{SYNC}
        %product = {DOT}
        %done = f32[8,16]{{1,0}} all-reduce-done(%start)
    """)
    assert (one.synchronous, one.overlapped_flops) == (True, 0)
    [one] = read(
        f"""
        %start = {ASYNC}{SYNC}
        %product = {DOT}
        %done = f32[32,16]{{1,0}} async-done(%start)
        """,
        before=WRAPPED,
    )
    assert (one.synchronous, one.overlapped_flops) == (True, 0)


FUSED = f"""
%fused (a: f32[16,64], b: f32[64,32]) -> f32[16,32] {{
  %a = f32[16,64]{{1,0}} parameter(0)
  %b = f32[64,32]{{1,0}} parameter(1)
  %product = {DOT}
  ROOT %negated = f32[16,32]{{1,0}} negate(%product)
}}
"""
LOOP = f"""
%body (state: (s32[], f32[16,64], f32[64,32])) -> (s32[], f32[16,64], f32[64,32]) {{
  %state = (s32[], f32[16,64]{{1,0}}, f32[64,32]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f32[16,64]{{1,0}} get-tuple-element(%state), index=1
  %b = f32[64,32]{{1,0}} get-tuple-element(%state), index=2
  %product = {DOT}
  ROOT %next = (s32[], f32[16,64]{{1,0}}, f32[64,32]{{1,0}}) tuple(%i, %a, %b)
}}

%condition (state: (s32[], f32[16,64], f32[64,32])) -> pred[] {{
  %state = (s32[], f32[16,64]{{1,0}}, f32[64,32]{{1,0}}) parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""
CARRIED = '(s32[], f32[16,64]{1,0}, f32[64,32]{1,0})'
GEMM = """(f32[16,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}""".replace(
    '\n', ''
)


@pytest.mark.parametrize(
    ('between', 'flops'),
    [
        ('', 0),
        (f'%product = {DOT}', FLOPS),
        (f'%product = {GEMM}', FLOPS),
        ('%product = f32[16,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused', FLOPS),
        (
            (
                f'%product = {DOT}\n%again = f32[16,32]{{1,0}} fusion(%a, %b), kind=kLoop, '
                'calls=%fused'
            ),
            2 * FLOPS,
        ),
        (
            f'%i = s32[] constant(0)\n%state = {CARRIED} tuple(%i, %a, %b)\n'
            f'%loop = {CARRIED} while(%state), condition=%condition, '
            'body=%body, backend_config={"known_trip_count":{"n":"3"}}',
            3 * FLOPS,
        ),
    ],
)
def test_the_products_between_start_and_done_are_counted_and_no_others(between, flops):
    [one] = read(
        f"""
        %before = {DOT}
        %start = f32[8,16]{{1,0}} all-reduce-start(%p), {GROUPS}, to_apply=%add
        {between or '%copied = f32[8,16]{1,0} copy(%p)'}
        %done = f32[8,16]{{1,0}} all-reduce-done(%start)
        %after = {DOT}
        """,
        before=FUSED + LOOP,
    )
    assert one.overlapped_flops == flops


CONCATENATE = """
%joined (x.1: f32[128], y.1: f32[8]) -> f32[136] {
  %x.1 = f32[128]{0} parameter(0)
  %y.1 = f32[8]{0} parameter(1)
  ROOT %concatenate = f32[136]{0} concatenate(%x.1, %y.1), dimensions={0}
}
"""
BUFFER = f"""
    %first = f32[8,16]{{1,0}} negate(%p), metadata={{op_name="jit(f)/first/neg"}}
    %second = bf16[4,2]{{1,0}} negate(%q), metadata={{op_name="jit(f)/second/neg"}}
    %wide = f32[4,2]{{1,0}} convert(%second)
    %first.flat = f32[128]{{0}} bitcast(%first)
    %second.flat = f32[8]{{0}} bitcast(%wide)
    %buffer = f32[136]{{0}} fusion(%first.flat, %second.flat), kind=kLoop, calls=%joined
    %start = f32[136]{{0}} all-reduce-start(%buffer), {GROUPS}, to_apply=%add
    %done = f32[136]{{0}} all-reduce-done(%start)
"""


def test_a_flat_buffer_that_xla_joined_is_told_apart_by_its_parts():
    first, second = read(BUFFER, before=CONCATENATE)
    assert (str(first.operand), first.op_name) == ('f32[8,16]', 'jit(f)/first/neg')
    assert (str(second.operand), second.op_name) == ('f32[4,2]', 'jit(f)/second/neg')
    assert first.instruction == second.instruction == 'start'
    assert first.wire_bytes + second.wire_bytes == 1.5 * 136 * 4


def test_parts_of_a_flat_buffer_have_the_paths_that_xla_wrote_for_them():
    """Of a pass and its recomputation, XLA can merge the matmuls: both parts then have one path."""
    paths = 'vmap(jvp(layers))/dot_general', 'vmap(transpose(jvp(layers)))/remat/dot_general'
    name = f'to_apply=%add, metadata={{op_name="jit(f)/({":".join(paths)})"}}'
    found = read(BUFFER.replace('to_apply=%add', name), before=CONCATENATE)
    assert [each.op_name for each in found] == [f'jit(f)/{path}' for path in paths]


def test_a_flat_buffer_that_the_author_joined_and_sent_is_one_array():
    by_author = CONCATENATE.replace(
        'dimensions={0}', 'dimensions={0}, metadata={op_name="jit(f)/both/concatenate"}'
    )
    [one] = read(
        BUFFER.replace('to_apply=%add', 'to_apply=%add, metadata={op_name="jit(f)/all/psum"}'),
        before=by_author,
    )
    assert (str(one.operand), one.op_name) == ('f32[136]', 'jit(f)/all/psum')


def test_a_part_of_a_flat_buffer_that_was_reduced_before_keeps_its_name():
    *_, again = read(
        f"""{BUFFER.strip()}
        %part = f32[8]{{0}} slice(%done), slice={{[128:136]}}
        %start.2 = f32[8]{{0}} all-reduce-start(%part), \
replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, to_apply=%add
        %done.2 = f32[8]{{0}} all-reduce-done(%start.2)
        """,
        before=CONCATENATE,
    )
    assert (again.axis, again.op_name) == ('data', 'jit(f)/second/neg')


def test_an_array_that_a_loop_made_has_the_name_that_it_had_in_the_loop():
    loop = LOOP.replace(
        'f32[16,64]{1,0} get-tuple-element(%state), index=1', 'f32[16,64]{1,0} negate(%old)'
    )
    loop = loop.replace(
        '  %a =', '  %old = f32[16,64]{1,0} get-tuple-element(%state), index=1\n  %a ='
    )
    loop = loop.replace(
        'negate(%old)', 'negate(%old), metadata={op_name="jit(f)/while/body/layer/neg"}'
    )
    [one] = read(
        f"""
        %i = s32[] constant(0)
        %state = {CARRIED} tuple(%i, %a, %b)
        %loop = {CARRIED} while(%state), condition=%condition, body=%body, \
metadata={{op_name="jit(f)/while"}}
        %made = f32[16,64]{{1,0}} get-tuple-element(%loop), index=1, \
metadata={{op_name="jit(f)/while"}}
        %start = f32[16,64]{{1,0}} all-reduce-start(%made), {GROUPS}, to_apply=%add
        %done = f32[16,64]{{1,0}} all-reduce-done(%start)
        """,
        before=loop,
    )
    assert one.op_name.startswith('jit(f)/while/body/layer/neg')


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    send = f'  %sent = f32[16,64]{{1,0}} all-reduce(%held), {GROUPS}, to_apply=%add\n  ROOT'
    loop = LOOP.replace(
        '  ROOT', '  %held = f32[16,64]{1,0} get-tuple-element(%state), index=1\n' + send
    )
    found = read(
        f"""
        %i = s32[] constant(0)
        %state = {CARRIED} tuple(%i, %a, %b)
        %loop = {CARRIED} while(%state), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
        """,
        before=loop,
    )
    assert [(one.computation, one.times) for one in found] == [('body', 3), ('condition', 4)]


def test_a_start_without_an_end_raises_with_the_line():
    with pytest.raises(HloError, match=r'no end of start: .*all-reduce-start'):
        read(f'%start = f32[8,16]{{1,0}} all-reduce-start(%p), {GROUPS}, to_apply=%add')


def test_a_sum_that_is_narrowed_after_it_was_sent_on_a_gpu_is_sent_wide():
    config = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    lines = f"""
        %half = bf16[8,16]{{1,0}} convert(%p)
        %wide = f32[8,16]{{1,0}} convert(%half)
        %sum = f32[8,16]{{1,0}} all-reduce(%wide), {GROUPS}, to_apply=%add, \
metadata={{op_name="jit(f)/dot_general"}}CONFIG
        %narrow = bf16[8,16]{{1,0}} convert(%sum)
    """
    assert [read(lines.replace('CONFIG', text))[0].operand.dtype for text in ('', config)] == [
        'bf16',
        'f32',
    ]


RAGGED = '%p, %o, %n, %n, %n, %n), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}'
OPERANDS = (
    '(f32[8,16]{1,0}, f32[32,16]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0})'
)


@pytest.mark.parametrize(
    'exchange',
    [
        f"""%start = ({OPERANDS}, f32[32,16]{{1,0}}) ragged-all-to-all-start({RAGGED}
        %done = f32[32,16]{{1,0}} ragged-all-to-all-done(%start)""",
        f'%sent = f32[32,16]{{1,0:S(7)}} ragged-all-to-all({RAGGED}',
    ],
)
def test_a_ragged_exchange_is_one_that_sends_at_most_all_of_its_array(exchange):
    [one] = read(f"""
        %o = f32[32,16]{{1,0}} iota(), iota_dimension=0, metadata={{op_name="where/it/arrives"}}
        %n = s64[4]{{0}} iota(), iota_dimension=0
        {exchange}
    """)
    assert (one.kind, one.axis, one.times, one.at_most) == ('ragged-all-to-all', 'model', 1, True)
    assert one.op_name != 'where/it/arrives'
    assert (str(one.operand), str(one.result), one.wire_bytes) == ('f32[8,16]', 'f32[32,16]', 512)


@pytest.mark.parametrize(
    ('pairs', 'axis', 'sent'),
    [
        ('{}', '', 0),
        ('{{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}', '', 0),
        ('{{0,1},{1,0},{2,2}}', 'model', 512),
    ],
)
def test_a_permute_that_sends_nothing_is_in_the_list(pairs, axis, sent):
    [one] = read(f"""
        %start = (f32[8,16]{{1,0}}, f32[8,16]{{1,0}}) collective-permute-start(%p), \
source_target_pairs={pairs}
        %done = f32[8,16]{{1,0}} collective-permute-done(%start)
    """)
    assert (one.kind, one.axis, one.times, one.wire_bytes) == ('collective-permute', axis, 1, sent)
