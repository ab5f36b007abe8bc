"""An instruction has the Python frames that its program records; damaged tables are refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program

TABLES = """HloModule jit_f, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
PROGRAM = """%main_of_others (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %one = f32[8]{0} negate(%p), metadata={op_name="jit(f)/neg" stack_frame_id=2}
  %two = f32[8]{0} negate(%one), metadata={op_name="a" source_file="old.py" source_line=3}
  ROOT %three = f32[8]{0} negate(%two), metadata={op_name="b" stack_frame_id=9}
}
"""


def frames_of(instruction: str, tables: str = TABLES) -> str:
    program = Program(tables + PROGRAM)
    return program.source(program.entry.by_name[instruction])


def test_an_instruction_has_the_frames_that_the_tables_say() -> None:
    assert frames_of('one') == 'model.py:9 < model.py:7'


def test_the_frames_of_a_compiled_function_are_its_calls() -> None:
    code = """
def sine(x): return jnp.sin(x)
def cosine(x): return jnp.cos(x)
def both(x):
    return sine(x) + cosine(x)
def outer(x): return both(x) @ x
"""
    names: dict[str, Any] = {'jnp': jnp}
    exec(compile(code, 'calls.py', 'exec'), names)
    text = jax.jit(names['outer']).lower(jnp.ones((4, 4))).compile().as_text()
    program = Program(text)
    frames = {
        each.opcode: program.source(each).split(' < tests/')[0].split(' < /')[0]
        for computation in program.computations.values()
        for each in computation.by_name.values()
    }
    assert frames['sine'] == 'calls.py:2 < calls.py:5 < calls.py:6'
    assert frames['cosine'] == 'calls.py:3 < calls.py:5 < calls.py:6'
    assert frames['dot'] == 'calls.py:6'


def test_an_older_text_says_it_in_the_instruction() -> None:
    assert frames_of('two') == 'old.py:3'


def test_what_xla_made_has_none() -> None:
    assert frames_of('p') == frames_of('three') == ''


def test_frames_that_name_each_other_are_said_once() -> None:
    tables = TABLES.replace('id=1 parent_frame_id=1', 'id=1 parent_frame_id=3')
    assert frames_of('one', tables) == 'model.py:9 < model.py:7'


@pytest.mark.parametrize(
    ('old', 'new', 'problem'),
    [
        ('2 {file_name_id=1', '2 {file_name_id=3', '2 is in file 3, which FileNames lacks'),
        ('2 {file_location_id=2', '2 {file_location_id=5', '2 is at location 5, which'),
    ],
)
def test_tables_that_lack_what_they_name_are_refused(old: str, new: str, problem: str) -> None:
    with pytest.raises(HloError, match=re.escape(problem)):
        Program(TABLES.replace(old, new) + PROGRAM)
