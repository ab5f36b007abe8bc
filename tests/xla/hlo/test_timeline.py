"""The timeline of schedules written by hand: a transfer takes 3 s, a product 2 s."""

import pytest
from schedules import LOOP, body, done, product, program, start

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


@pytest.mark.parametrize('hides', [True, False])
def test_the_steps_of_a_loop_follow_each_other(hides: bool) -> None:
    inside = [start('s'), product('d'), done('s')] if hides else [start('s'), done('s')]
    found = time(program(*LOOP, before=body(*inside)))
    assert found == (Timeline(10, 5) if hides else Timeline(0, 15))
