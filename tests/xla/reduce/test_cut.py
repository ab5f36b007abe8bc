"""A part of a module is a module of its own, and a search finds the smallest faulty part."""

import jax
import numpy as np
import pytest

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program
from megajax.xla.reduce.cut import Cut, count, whole, without_shardings
from megajax.xla.reduce.execute import LIMIT, Execution, executable, is_sharded
from megajax.xla.reduce.search import reduced

CHAIN = """HloModule chain, num_partitions=2

ENTRY %main (x: f32[4,8], y: f32[4,8]) -> (f32[4,8], f32[8,8]) {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[4,8]{1,0} parameter(1)
  %sum = f32[4,8]{1,0} add(%x, %y)
  %sine = f32[4,8]{1,0} sine(%sum)
  %gathered = f32[8,8]{1,0} all-gather(%sine), channel_id=1, replica_groups=[1,2]<=[2], \
dimensions={0}, use_global_device_ids=true, metadata={op_name="f/gather" stack_frame_id=3}
  %doubled = f32[8,8]{1,0} add(%gathered, %gathered)
  %cosine = f32[4,8]{1,0} cosine(%sum)
  ROOT %results = (f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%cosine, %doubled)
}
"""
LOOP = """HloModule loop

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %index = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%index, %one)
  %value = f32[4]{0} get-tuple-element(%state), index=1
  %sine = f32[4]{0} sine(%value)
  %tanh = f32[4]{0} tanh(%sine)
  ROOT %new = (s32[], f32[4]{0}) tuple(%next, %tanh)
}

%condition (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %index.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%index.1, %limit), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[4]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{0}) while(%first), condition=%condition, body=%body
  ROOT %last = f32[4]{0} get-tuple-element(%loop), index=1
}
"""
SHARDED = """HloModule sharded, num_partitions=2

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}
  %copy = f32[4,8]{1,0} copy(%x), sharding={replicated}
  ROOT %sine = f32[4,8]{1,0} sine(%copy), sharding={devices=[2,1]<=[2]}
}
"""


def opcodes(text: str) -> list[str]:
    return [each.opcode for each in Program(text).entry.instructions]


def cut(text: str, *names: str) -> Cut:
    program = Program(text)
    return Cut.of(program, program.entry, names)


def test_a_part_reads_parameters_and_returns_all_that_is_read_outside():
    part = cut(CHAIN, 'sum', 'sine')
    assert part.results == ('sum', 'sine')
    assert opcodes(part.text()) == ['parameter', 'parameter', 'add', 'sine', 'tuple']


def test_a_single_result_is_the_root_and_keeps_its_path_and_its_groups():
    text = cut(CHAIN, 'gathered').text()
    assert opcodes(text) == ['parameter', 'all-gather']
    assert 'replica_groups={{0,1}}' in text
    assert 'op_name="f/gather"' in text
    assert 'stack_frame_id' not in text


@pytest.mark.parametrize('replicas', ['{{0}}', '{}'])
def test_a_group_of_replicas_is_written_as_one_of_devices(replicas):
    """XLA would read the devices in it as replicas."""
    written = CHAIN.replace('[1,2]<=[2]', replicas).replace('use_global_device_ids=true, ', '')
    found, expected = (cut(text, 'gathered').text() for text in (written, CHAIN))
    assert sorted(found.split(', ')) == sorted(expected.split(', '))


def test_without_an_instruction_its_value_is_a_parameter_and_a_removed_result_its_operands():
    part = cut(CHAIN, 'sum', 'sine', 'gathered', 'doubled')
    assert opcodes(part._replace(results=('doubled',)).without(['sine']).text()) == [
        'parameter', 'all-gather', 'add'
    ]  # fmt: skip
    assert part._replace(results=('doubled',)).without(['doubled']).results == ('gathered',)
    assert part._replace(results=('doubled',)).without(['sine'], returning=True).results == (
        'sum', 'doubled'
    )  # fmt: skip


def test_a_loop_is_kept_whole_or_its_body_is_the_module():
    program = Program(LOOP)
    assert count(whole(program, program.entry).text()) == count(LOOP)
    body = whole(program, program.computations['body'])
    assert opcodes(body.text()) == [
        'parameter', 'constant', 'add', 'parameter', 'sine', 'tanh', 'tuple'
    ]  # fmt: skip
    assert cut(LOOP, 'last').kept == frozenset()


def test_a_part_that_would_read_a_tuple_is_refused():
    text = LOOP.replace('tuple(%zero, %x)', 'custom-call(%x), custom_call_target="f"')
    with pytest.raises(HloError, match='reads a tuple'):
        cut(text, 'loop').text()


@pytest.mark.parametrize(
    ('text', 'opcode', 'smallest'),
    [
        (CHAIN, 'all-gather', ['parameter', 'all-gather']),
        (CHAIN, 'cosine', ['parameter', 'cosine']),
        (LOOP, 'tanh', ['parameter', 'tanh']),
        (LOOP, 'while', ['constant', 'parameter', 'tuple', 'while', 'get-tuple-element']),
    ],
)
def test_the_search_finds_the_faulty_instruction_alone(text, opcode, smallest):
    found = reduced(text, lambda tried: f' {opcode}(' in tried)
    assert found is not None
    assert sorted(opcodes(found)) == sorted(smallest)


def test_two_instructions_that_are_faulty_together_are_kept_with_what_is_between():
    def is_faulty(tried: str) -> bool:
        return ' all-gather(%sine)' in tried and ' add(%gathered' in tried and ' sine(' in tried

    found = reduced(CHAIN, is_faulty)
    assert found is not None
    assert opcodes(found) == ['parameter', 'sine', 'all-gather', 'add']


def test_without_a_faulty_part_there_is_no_result():
    assert reduced(CHAIN, lambda tried: False) is None


def test_a_sharded_copy_is_a_constraint_and_parameters_keep_their_shardings():
    text = cut(SHARDED, 'sine').text()
    assert '%copy = f32[4,8]{1,0} parameter(0), sharding={replicated}' in text
    assert 'custom_call_target="Sharding"' in cut(SHARDED, 'copy', 'sine').text()
    assert not is_sharded(without_shardings(SHARDED))


def test_attributes_of_shardy_are_dropped_and_functions_with_its_name_are_called():
    text = SHARDED.replace('copy(%x)', 'call(%x), to_apply=%xla.sdy.body').replace(
        'parameter(0)', 'parameter(0), frontend_attributes={xla.sdy.sharding="#sdy.sharding<@m>"}'
    )
    body = '%xla.sdy.body (y: f32[4,8]) -> f32[4,8] {\n  ROOT %y = f32[4,8]{1,0} parameter(0)\n}\n'
    found = cut(text.replace('ENTRY', f'{body}\nENTRY'), 'copy').text()
    assert 'to_apply=%xla.sdy.body' in found
    assert 'xla.sdy.sharding' not in found


def test_a_later_form_that_computes_the_same_has_no_error_and_another_one_has():
    given = cut(CHAIN, 'sum', 'gathered').text()
    execution = Execution(given, 2)
    assert max(execution.errors(given)) == 0
    other = given.replace('add(', 'multiply(')
    assert max(execution.errors(other)) > LIMIT
    assert len(execution.inputs[0]) == 2
    assert not np.array_equal(*execution.inputs[0])


def test_a_sharded_module_runs_on_one_device_and_its_later_form_on_all():
    text = cut(SHARDED, 'copy', 'sine').text()
    execution = Execution(text, 2)
    partitioned = 'HloModule later, num_partitions=2\n\n' + (
        'ENTRY %main (x: f32[2,8]) -> f32[2,8] {\n'
        '  %x = f32[2,8]{1,0} parameter(0)\n'
        '  ROOT %y = f32[2,8]{1,0} sine(%x)\n}\n'
    )
    assert max(execution.errors(partitioned)) < LIMIT
    assert max(execution.errors(partitioned.replace('sine', 'cosine'))) > LIMIT


def test_arrays_of_other_shapes_than_the_parameters_are_refused():
    with pytest.raises(HloError, match='shapes'):
        executable(cut(CHAIN, 'sum').text(), 2)([[np.zeros(3, np.float32)] * 2] * 2)
    assert jax.device_count() >= 2
