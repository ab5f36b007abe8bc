"""The timeline of schedules written by hand: a transfer takes 3 s, a product 2 s."""

import pytest
from schedules import LOOP, body, done, product, program, start

from megajax.xla.hlo.kernels import kernels
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.schedule import Sent
from megajax.xla.hlo.timeline import Timeline, timeline


def time(program: Program, *links: str) -> Timeline:
    """The timeline, with all transfers on one link or each on its own."""
    opcodes = {
        (computation.name, instruction.name): instruction.opcode
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    places = [
        place for place, name in opcodes.items() if name in ('all-reduce', 'all-reduce-start')
    ]
    seconds = {place: 2.0 for place, name in opcodes.items() if name == 'dot'}
    each = links or ('wire',) * len(places)
    sent = {place: Sent(link, 3.0) for place, link in zip(places, each, strict=True)}
    return timeline(program, sent, seconds)


def test_a_product_hides_as_much_of_a_transfer_as_it_takes() -> None:
    assert time(program(start('s'), product('d'), done('s'))) == Timeline(2, 1)
    assert time(program(start('s'), product('d'), product('e'), done('s'))) == Timeline(4, 0)
    assert time(program(start('s'), done('s'), product('d'))) == Timeline(2, 3)


def test_transfers_of_one_link_wait_for_each_other() -> None:
    lines = start('s'), start('t'), product('d'), product('e'), done('s'), done('t')
    assert time(program(*lines)) == Timeline(4, 2)
    assert time(program(*lines), 'wire', 'network') == Timeline(4, 0)


def test_everything_waits_for_a_synchronous_transfer() -> None:
    sync = '%s = f32[8,16]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add'
    assert time(program(sync, product('d'))) == Timeline(2, 3)


WRAPPED = """%wrapped (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %inside = f32[8,16]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
}
"""
STARTED = '((f32[8,16]{1,0}), f32[8,16]{1,0}, s32[])'
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true}}'


@pytest.mark.parametrize(
    ('started', 'attributes', 'exposed'),
    [
        ('async', '', 1),
        ('async', SYNC, 3),
        ('fusion', ', kind=kCustom', 1),
        ('', ', kind=kCustom', 3),
    ],
)
def test_a_transfer_in_a_fusion_or_an_asynchronous_computation_takes_its_time(
    started: str, attributes: str, exposed: float
) -> None:
    called = f'(%p), calls=%wrapped{attributes}'
    array = 'f32[8,16]{1,0}'
    first = f'%s = {STARTED} {started}-start' if started else f'%s = {array} fusion'
    last = [f'%s.done = {array} {started}-done(%s)'] if started else []
    written = program(f'{first}{called}', product('d'), *last, before=WRAPPED)
    assert time(written) == Timeline(2, exposed)
    assert [kernel.instruction.name for kernel in kernels(written)] == ['d', 'result']


@pytest.mark.parametrize('hides', [True, False])
def test_the_steps_of_a_loop_follow_each_other(hides: bool) -> None:
    inside = [start('s'), product('d'), done('s')] if hides else [start('s'), done('s')]
    found = time(program(*LOOP, before=body(*inside)))
    assert found == (Timeline(10, 5) if hides else Timeline(0, 15))
