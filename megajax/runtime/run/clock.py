"""Account for the seconds of a run, in this start and in all starts of a run directory.

Each second belongs to exactly one activity, so the activities add up to the total.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from megajax.base.files.json_file import parse_json
from megajax.base.render.text import INDENT

Activity = Literal[
    'productive',
    'lost',
    'compile',
    'setup',
    'restore',
    'checkpoint',
    'evaluation',
    'replay',
    'data_wait',
    'other',
]
# productive: steps that count. lost: steps that are skipped, rolled back, or repeated by the next
# start. setup: devices, corpus, first state. checkpoint: time for which saving blocks the run.
# replay: steps that are repeated for a comparison (`replay.py`), and the comparison. data_wait:
# time for which steps wait for their batch. other: samples, traces, and time between steps.
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

# The summary line always names these activities; it names the others if their share of the total is
# larger.
ALWAYS, SMALL = ('compile', 'restore', 'checkpoint', 'data_wait'), 0.01
SUMMARY = 'summary.json'
EVERY = 10.0  # minimum seconds between two writes of the summary during a run

logger = logging.getLogger(__name__)


class Clock:
    """A clock that assigns each second since its creation to the current activity."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._activity: Activity = 'setup'
        self._seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)

    def begin(self, activity: Activity) -> float:
        """Begin an activity, and return the time in seconds by `time.perf_counter`."""
        now = time.perf_counter()
        self._seconds[self._activity] += now - self._since
        self._since, self._activity = now, activity
        return now

    def lose(self, seconds: float) -> None:
        """Move this many productive seconds to `lost`."""
        self.move(seconds, 'productive', 'lost')

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Move this many seconds from an activity that has ended to another one."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self, *activities: Activity) -> float:
        """Return the seconds of these activities until now; without names, of all activities."""
        self.begin(self._activity)
        return sum(self._seconds[activity] for activity in activities or ACTIVITIES)


class RunSummary:
    """The `summary.json` of a run directory: the seconds of this start, and of all starts.

    The first process writes it. If a start is killed, the file contains the last state that it
    wrote, at most EVERY seconds before the activity that was killed began.
    """

    def __init__(self, folder: Path, clock: Clock):
        self.path, self.clock = folder / SUMMARY, clock
        before = _read(self.path)
        # the step that the run has reached; None before it has a state
        self.step: int | None = None
        self.dispatched = 0  # the newest step that was dispatched to the devices
        # The first step of this start and the time of its end, from which the speed is measured.
        self.first_step: int | None = None
        self.began = time.monotonic()
        self.last_step: int = before.get('step', 0)  # the step that the previous start reached
        self._starts = before.get('starts', 0) + 1
        self._before = {
            activity: float(before.get('seconds', {}).get(activity, 0)) for activity in ACTIVITIES
        }
        self._written = time.monotonic()
        self._warned = False

    def begin(self, step: int, *, lost_seconds: float) -> None:
        """Begin at `step`, and write the file.

        `lost_seconds` are the productive seconds of earlier starts in steps that are now repeated.
        They are written at once, because the lines of these steps are no longer in the metrics.
        """
        lost_seconds = min(lost_seconds, self._before['productive'])
        self._before['productive'] -= lost_seconds
        self._before['lost'] += lost_seconds
        self.step = step
        self.write()

    def roll_back(self, step: int, *, lost_seconds: float) -> None:
        """Return to `step`, count these productive seconds of this start as lost, and write."""
        self.clock.lose(lost_seconds)
        self.step = step
        self.write()

    def reach(self, step: int) -> None:
        """Note that `step` is done.

        The first one took longer than the others: everything before it was compiled.
        """
        self.step = step
        if self.first_step is None:
            self.first_step, self.began = step, time.monotonic()

    def write(self) -> None:
        """Replace the file; if that fails, log a warning, once."""
        self._written = time.monotonic()
        this, new = self._this(), self.path.with_name(f'{SUMMARY}.new')
        seconds = {'seconds': _rounded(self._total(this)), 'seconds_of_last_start': _rounded(this)}
        try:
            if jax.process_index() == 0:
                new.write_text(
                    json.dumps({'step': self.step, 'starts': self._starts, **seconds}, indent=2)
                    + '\n'
                )
                os.replace(new, self.path)
        except OSError as error:
            if not self._warned:
                logger.warning(
                    '%s cannot be written (%s); the run continues', SUMMARY, error.strerror
                )
            self._warned = True

    def write_sometimes(self) -> None:
        """Replace the file unless that was done in the last EVERY seconds."""
        if time.monotonic() - self._written >= EVERY:
            self.write()

    def __str__(self) -> str:
        """Return a line for this start and, if there were earlier starts, a line for all starts."""
        this = self._this()
        lines = [_line('seconds', this)]
        if self._starts > 1:
            lines.append(_line(f'{self._starts} starts', self._total(this)))
        return '\n'.join(lines)

    def _this(self) -> dict[Activity, float]:
        return {activity: self.clock.seconds(activity) for activity in ACTIVITIES}

    def _total(self, this: Mapping[Activity, float]) -> dict[Activity, float]:
        return {activity: self._before[activity] + this[activity] for activity in ACTIVITIES}


def describe(seconds: Mapping[Activity, float]) -> str:
    """Describe the total, its productive share, and the other activities.

    Activities below the share SMALL count as other, except for those in ALWAYS.
    """
    total = sum(seconds.values())
    named = [name for name in ACTIVITIES[1:-1] if name in ALWAYS or seconds[name] > SMALL * total]
    rest = total - seconds['productive'] - sum(seconds[name] for name in named)
    parts = [f'{_short(seconds[name])} {name.replace("_", " ")}' for name in named]
    share = seconds['productive'] / total
    return ', '.join(
        [
            f'{_short(total)}: {_short(seconds["productive"])} productive ({share:.0%})',
            *parts,
            f'{_short(rest)} other',
        ]
    )


def _line(name: str, seconds: Mapping[Activity, float]) -> str:
    return f'{name:<{INDENT}}{describe(seconds)}'


def _short(seconds: float) -> str:
    return f'{seconds:.1f}' if seconds < 100 else f'{seconds:,.0f}'


def _rounded(seconds: Mapping[Activity, float]) -> dict[str, float]:
    return {
        **{activity: round(value, 3) for activity, value in seconds.items()},
        'total': round(sum(seconds.values()), 3),
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the previous start's summary; {} if it is unreadable, because it is informational."""
    try:
        summary = parse_json(path.read_bytes())
        is_valid = isinstance(summary, dict) and isinstance(summary.get('seconds'), dict)
        return summary if is_valid else {}
    except (OSError, ValueError):
        return {}
