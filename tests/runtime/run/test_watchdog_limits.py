"""The watchdog is on unless turned off, and grants each phase what it needs."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
from support import make_config

from megajax.core.config import load
from megajax.runtime.checkpoint.orbax_manager import TIMEOUT
from megajax.runtime.run.stall_report import HALF, PAGE, Place, _tell_half, _waited_for, decode
from megajax.runtime.run.watchdog_limits import CHECKPOINT, phase_limits


def test_by_default_every_phase_has_a_limit_of_at_most_an_hour():
    limits = phase_limits(make_config(), 1)
    assert limits is not None
    assert max(limits.values()) <= 3600
    assert limits['step'] <= 600
    assert phase_limits(make_config(run={'watchdog_seconds': None}), 1) is None


def test_a_number_is_the_limit_of_a_step_and_shortens_no_other():
    default = phase_limits(make_config(), 1)
    for seconds in (5.0, 10_000.0):
        limits = phase_limits(make_config(run={'watchdog_seconds': seconds}), 1)
        assert limits is not None
        assert limits.pop('step') == seconds
        assert limits == {kind: max(default[kind], seconds) for kind in limits}


@pytest.mark.parametrize('value', [0, -1, 'off', True, float('inf')])
def test_what_is_no_limit_is_refused_with_what_is_one(value):
    with pytest.raises(ValueError, match='a number above 0 and up to 600000000, auto or null'):
        make_config(run={'watchdog_seconds': value})


def test_a_checkpoint_has_the_time_of_a_slow_disk_for_what_a_process_has_of_it():
    config = load('megatron_8.3b')
    one, many = (phase_limits(config, processes)['checkpoint'] for processes in (1, 512))
    assert one > 12 * 8.3e9 / 50e6 > many


def test_a_process_with_several_devices_has_the_time_to_read_all_of_a_checkpoint():
    config = load('megatron_8.3b', ['mesh.data=2'])
    devices = config.mesh.num_devices
    several, one = (phase_limits(config, devices // n)['checkpoint'] for n in (2, 1))
    assert several > 12 * 8.3e9 / 50e6 > one


def test_a_checkpoint_has_the_time_in_which_each_process_hashes_its_share():
    config = load('gpt3_175b')
    measured = 12 * 175e9 / 0.5e9  # at the slowest rate at which a checkpoint was hashed
    one, many = (phase_limits(config, processes)['checkpoint'] for processes in (1, 512))
    assert 2 * measured < one < TIMEOUT  # Orbax's own, after which a save fails
    assert CHECKPOINT + 2 * measured / 512 < many < CHECKPOINT + 120


def place(index: int, beat: int, phase: str, **other) -> Place:
    return dataclasses.replace(Place(600.0, beat, time.monotonic(), index, 3, phase), **other)


def test_a_place_is_read_as_it_was_written_however_long_its_name():
    one = place(2, 10**9, 'step 1')
    assert decode(one.encode()) == one
    long = dataclasses.replace(one, phase='é' * PAGE)
    assert len(long.encode()) == PAGE
    assert long.phase.startswith(decode(long.encode()).phase.rstrip('\N{REPLACEMENT CHARACTER}'))


@pytest.mark.parametrize('behind', [0, 1, 2])
def test_the_process_that_got_less_far_is_named_as_the_one_that_the_others_wait_for(
    tmp_path: Path, behind: int, capfd
):
    log = tmp_path / 'log'
    places = [
        place(index, 40 if index == behind else 41, 'data' if index == behind else 'step 14')
        for index in range(3)
    ]
    for one in reversed(places):
        shared = os.memfd_create('page')
        os.pwrite(shared, one.encode(), 0)
        _tell_half(
            shared,
            dataclasses.replace(one, limit=1.0),
            f'pid {one.index} on host h{one.index}',
            str(log),
            0,
        )
        os.close(shared)
    assert len(HALF.findall(log.read_text())) == 3
    named = (
        f'the others wait for process {behind} (pid {behind} on host h{behind}), '
        "which is in phase 'data'"
    )
    assert [_waited_for(one, str(log), 0) for one in places] == [named] * 3


LINE = (
    'watchdog: {} process {} of 3 (pid 1 on host a) '
    "has been in phase 'step 14' for 300 s and ends at 600 s [beat {}]\n"
)
TIMES = '2026-11-26T04:30:00Z', '1970-01-01T00:00:09Z', '2038-01-19T03:14:07Z'


def test_where_all_are_at_the_same_place_or_an_earlier_run_was_behind_nobody_is_named(
    tmp_path: Path,
):
    log = tmp_path / 'log'
    earlier = LINE.format(TIMES[0], 1, 7)
    log.write_text(earlier + ''.join(LINE.format(TIMES[0], index, 41) for index in range(3)))
    assert _waited_for(place(0, 41, 'step 14'), str(log), len(earlier)) == ''
    assert _waited_for(place(0, 41, 'step 14'), str(tmp_path / 'none'), 0) == ''


@pytest.mark.parametrize('behind', [1, 2])
def test_who_is_behind_is_named_whatever_the_clocks_of_the_hosts_say(tmp_path: Path, behind: int):
    log = tmp_path / 'log'
    beats = [40 if index == behind else 41 for index in range(3)]
    log.write_text(''.join(map(LINE.format, TIMES, range(3), beats)))
    assert _waited_for(place(0, 41, 'step 14'), str(log), 0).startswith(
        f'the others wait for process {behind} '
    )
