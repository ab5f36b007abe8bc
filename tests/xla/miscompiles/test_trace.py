"""Integers that a program computes device by device are those that the devices compute."""

import numpy as np
import pytest
from xla.emulate.texts import executed, module

from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles.trace import Place, integer, trace

LINES = [
    '%x = s32[] parameter(0)',
    '%id = u32[] partition-id()',
    '%i = s32[] convert(%id)',
    '%two = s32[] constant(2)',
    '%less = s32[] constant(-7)',
]

ENTRY = '%y = s32[1]{{0}} dynamic-slice(%table, {}), dynamic_slice_sizes={{1}}'
INSIDE = """%{} (a: s32[], b: s32[]) -> s32[] {{
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %c = {}
}}"""
CALLED = {
    'apart': INSIDE.format('apart', 's32[] subtract(%a, %b)'),
    'swapped': INSIDE.format('swapped', '(s32[], s32[]) tuple(%b, %a)'),
}


def results(text: str, devices: int = 4) -> list[int]:
    [found] = executed(text, np.full((devices, 1), 5, np.int32))
    return [int(x) for x in found.ravel()]


def known(text: str, devices: int = 4) -> list[int | None]:
    program = Program(text)
    place = Place(program.entry, program.entry.root)
    return [integer(program, place, device) for device in range(devices)]


@pytest.mark.parametrize(
    'lines',
    [
        ['%y = s32[] add(%i, %less)'],
        ['%y = s32[] subtract(%i, %two)'],
        ['%y = s32[] multiply(%i, %less)'],
        ['%y = s32[] minimum(%i, %two)'],
        ['%y = s32[] maximum(%i, %two)'],
        ['%one = s32[] constant(1)', '%y = s32[] clamp(%one, %i, %two)'],
        [
            '%table = s32[3]{0} constant({30, -10, 20})',
            '%entry = s32[1]{0} dynamic-slice(%table, %i), dynamic_slice_sizes={1}',
            '%same = s32[1]{0} copy(%entry)',
            '%y = s32[] reshape(%same)',
        ],
        [
            '%table = s32[3]{0} constant({30, -10, 20})',
            '%before = s32[] subtract(%i, %two)',
            '%entry = s32[1]{0} dynamic-slice(%table, %before), dynamic_slice_sizes={1}',
            '%y = s32[] reshape(%entry)',
        ],
        [
            '%pair = (s32[], s32[]) tuple(%i, %two)',
            '%first = s32[] get-tuple-element(%pair), index=0',
            '%second = s32[] get-tuple-element(%pair), index=1',
            '%y = s32[] subtract(%second, %first)',
        ],
        ['%same = s32[] opt-barrier(%i)', '%y = s32[] add(%same, %two)'],
        [
            '%pair = (s32[], s32[]) tuple(%i, %two)',
            '%same = (s32[], s32[]) opt-barrier(%pair)',
            '%first = s32[] get-tuple-element(%same), index=0',
            '%y = s32[] add(%first, %two)',
        ],
        ['%y = s32[] fusion(%two, %i), kind=kLoop, calls=%apart'],
        ['%y = s32[] call(%two, %i), to_apply=%apart'],
        [
            '%both = (s32[], s32[]) fusion(%two, %i), kind=kLoop, calls=%swapped',
            '%y = s32[] get-tuple-element(%both), index=1',
        ],
    ],
    ids=lambda lines: lines[-1].split('= ')[1].split('(')[0] + f' {len(lines)}',
)
def test_a_number_of_a_device_is_the_one_that_it_computes(lines: list[str]) -> None:
    called = [one for name, one in CALLED.items() if f'=%{name}' in ' '.join(lines)]
    text = module([*LINES, *lines], *called)
    assert known(text) == results(text)


@pytest.mark.parametrize(
    'lines',
    [
        ['%y = s32[] add(%i, %x)'],
        ['%y = s32[] copy(%x)'],
        ['%y = s32[2]{0} constant({1, 2})'],
        ['%table = s32[4]{0} constant({...})', ENTRY.format('%i')],
        ['%table = s32[4]{0} constant({1, 2, 3, 4})', ENTRY.format('%x')],
    ],
)
def test_a_number_that_the_text_does_not_say_is_none(lines: list[str]) -> None:
    assert known(module([*LINES, *lines])) == [None] * 4


LOOP = """HloModule m

%goes_on (carried: (s32[], s32[])) -> pred[] {
  %carried = (s32[], s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%body (carried.1: (s32[], s32[])) -> (s32[], s32[]) {
  %carried.1 = (s32[], s32[]) parameter(0)
  %kept = s32[] get-tuple-element(%carried.1), index=0
  %count = s32[] get-tuple-element(%carried.1), index=1
  %next = s32[] add(%count, %kept)
  ROOT %left = (s32[], s32[]) tuple(%kept, %next)
}

ENTRY %main (p: s32[]) -> s32[] {
  %seven = s32[] constant(7)
  %three = s32[] constant(3)
  %start = (s32[], s32[]) tuple(%seven, %three)
  ROOT %loop = (s32[], s32[]) while(%start), condition=%goes_on, body=%body
}
"""


def test_what_no_iteration_changes_is_what_the_loop_begins_with() -> None:
    program = Program(LOOP)
    body = program.computations['body']
    kept, count = (trace(program, Place(body, body.by_name[name])) for name in ('kept', 'count'))
    assert integer(program, kept, 0) == 7
    assert count.instruction.name == 'next'


def test_what_iterations_change_is_no_number() -> None:
    program = Program(LOOP)
    body = program.computations['body']
    assert integer(program, Place(body, body.by_name['count']), 0) is None
    assert integer(program, Place(body, body.by_name['next']), 0) is None


def test_what_two_places_of_a_loop_exchange_is_no_number() -> None:
    program = Program(LOOP.replace('tuple(%kept, %next)', 'tuple(%count, %kept)'))
    body = program.computations['body']
    assert [integer(program, Place(body, body.by_name[name]), 0) for name in ('kept', 'count')] == [
        None,
        None,
    ]
