"""The schedule of a pipeline: each pass once, inputs one tick old, the bubble of the formula."""

import itertools
from collections.abc import Iterator

import pytest

from megajax.core.counts.schedule import IDLE, Schedule, make_schedule

Pass = tuple[int, int, int]  # stage, microbatch, chunk
SIZES = [
    (stages, chunks, microbatches)
    for stages, chunks, microbatches in itertools.product(range(1, 9), range(1, 5), range(1, 33))
    if chunks == 1 or (stages > 1 and microbatches % stages == 0)
]


def schedules(gpipe: bool) -> Iterator[Schedule]:
    for size in SIZES:
        yield make_schedule(*size, gpipe=gpipe)


def ticks_of(table) -> dict[Pass, int]:
    ticks = {
        (stage, int(entry[0]), int(entry[1])): tick
        for tick, entries in enumerate(table)
        for stage, entry in enumerate(entries)
        if entry[0] != IDLE
    }
    assert len(ticks) == (table[..., 0] != IDLE).sum()  # no pass twice
    return ticks


@pytest.mark.parametrize('gpipe', [False, True])
def test_every_microbatch_passes_each_chunk_of_each_stage_once_in_both_directions(gpipe):
    for schedule in schedules(gpipe):
        shape = schedule.stages, schedule.microbatches, schedule.chunks
        everything = set(itertools.product(*map(range, shape)))
        assert ticks_of(schedule.forward).keys() == everything
        assert ticks_of(schedule.backward).keys() == everything
        assert sorted(schedule.head[schedule.head != IDLE]) == list(range(schedule.microbatches))


@pytest.mark.parametrize('gpipe', [False, True])
def test_the_input_of_a_pass_was_made_by_a_neighbor_one_tick_before(gpipe):
    for schedule in schedules(gpipe):
        last, chunks = schedule.stages - 1, schedule.chunks
        forward, backward = ticks_of(schedule.forward), ticks_of(schedule.backward)
        for (stage, microbatch, chunk), tick in forward.items():
            if stage > 0:
                assert forward[stage - 1, microbatch, chunk] == tick - 1
            elif chunk > 0:
                assert forward[last, microbatch, chunk - 1] == tick - 1
        for (stage, microbatch, chunk), tick in backward.items():
            if stage < last:
                assert backward[stage + 1, microbatch, chunk] == tick - 1
            elif chunk < chunks - 1:
                assert backward[0, microbatch, chunk + 1] == tick - 1
            else:  # the head is between the two
                head = int((schedule.head == microbatch).nonzero()[0][0])
                assert forward[stage, microbatch, chunk] == head
                assert head <= tick if gpipe else head == tick


@pytest.mark.parametrize('gpipe', [False, True])
def test_a_slot_is_kept_until_the_backward_pass_and_no_two_passes_share_one(gpipe):
    for schedule in schedules(gpipe):
        forward, backward = ticks_of(schedule.forward), ticks_of(schedule.backward)
        taken: dict[tuple[int, int], int] = {}  # (stage, slot) -> tick until which it is taken
        for key in sorted(forward, key=forward.__getitem__):
            stage, begin, end = key[0], forward[key], backward[key]
            slot = int(schedule.forward[begin, stage, 2])
            assert slot == schedule.backward[end, stage, 2]
            assert taken.get((stage, slot), -1) < begin
            assert slot < schedule.num_slots
            taken[stage, slot] = end


def test_in_flight_are_the_numbers_of_megatron_with_one_for_each_direction_of_a_neighbor():
    for schedule in schedules(gpipe=False):
        stages, chunks, microbatches = schedule.stages, schedule.chunks, schedule.microbatches
        assert schedule.num_slots == min(stages * (chunks + 1) - 1, microbatches * chunks)
    for schedule in schedules(gpipe=True):
        assert schedule.num_slots == schedule.microbatches * schedule.chunks


@pytest.mark.parametrize('gpipe', [False, True])
def test_the_bubble_is_that_of_the_formula(gpipe):
    for schedule in schedules(gpipe):
        expected = (schedule.stages - 1) / (schedule.chunks * schedule.microbatches)
        assert round(schedule.bubble, 4) == round(expected, 4)


@pytest.mark.parametrize('gpipe', [False, True])
def test_phases_cover_all_ticks_and_leave_out_only_what_no_stage_does(gpipe):
    for schedule in schedules(gpipe):
        covered = [tick for phase in schedule.phases for tick in range(phase.start, phase.stop)]
        assert covered == list(range(len(schedule.forward)))
        for phase in schedule.phases:
            part = slice(phase.start, phase.stop)
            assert phase.forward == (schedule.forward[part, :, 0] != IDLE).any()
            assert phase.backward == (schedule.backward[part, :, 0] != IDLE).any()
            assert phase.head == (schedule.head[part] != IDLE).any()


def test_an_evaluation_may_have_fewer_microbatches_than_stages():
    schedule = make_schedule(4, 2, 3)
    assert len(ticks_of(schedule.forward)) == 4 * 2 * 3
