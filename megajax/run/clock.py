"""Where the seconds of a run go: each belongs to one activity, so that they add up; and what a run directory had of them in all."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args

import jax

Activity = Literal[
    'productive',
    'lost',
    'compile',
    'setup',
    'restore',
    'checkpoint',
    'evaluation',
    'data_wait',
    'other',
]
# productive: steps that count. lost: those skipped, rolled back, or done again by the next start. setup: devices, corpus, first state.
# checkpoint: what saving holds the run up. data_wait: steps that wait for their batch. other: samples, traces, and between the steps.
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

ALWAYS, SMALL = (
    ('compile', 'restore', 'checkpoint', 'data_wait'),
    0.01,
)  # what a line names; others above this share
WIDTH, INDENT = 120, 11  # of the lines on the terminal
SUMMARY = 'summary.json'
EVERY = 10.0  # seconds between two writings of the summary inside a run

logger = logging.getLogger(__name__)


class Clock:
    """Gives each second since it was made to the activity that was begun last."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._activity: Activity = 'setup'
        self._seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)

    def begin(self, activity: Activity) -> float:
        """What follows is `activity`; the time, in seconds, by `time.perf_counter`."""
        now = time.perf_counter()
        self._seconds[self._activity] += now - self._since
        self._since, self._activity = now, activity
        return now

    def lose(self, seconds: float) -> None:
        """So much of what was productive is not any more."""
        seconds = min(seconds, self._seconds['productive'])
        self._seconds['productive'] -= seconds
        self._seconds['lost'] += seconds

    def seconds(self, *activities: Activity) -> float:
        """Those of these activities until now, of all if none is named."""
        self.begin(self._activity)
        return sum(self._seconds[activity] for activity in activities or ACTIVITIES)


class Summary:
    """`summary.json` of a run directory: the seconds of this start, and of all starts. The first process writes it.

    Of a start that was killed it has what was written last, at most EVERY seconds and `train.log_every` steps before the end.
    """

    def __init__(self, folder: Path, clock: Clock):
        self.path, self.clock = folder / SUMMARY, clock
        before = _read(self.path)
        self.step: int | None = None  # until which the run is; None before it has a state
        self.last_step: int = before.get('step', 0)  # the same of the start before
        self._starts = before.get('starts', 0) + 1
        self._before = {
            activity: float(before.get('seconds', {}).get(activity, 0)) for activity in ACTIVITIES
        }
        self._written = time.monotonic()
        self._warned = False

    def begin(self, step: int, *, lost_seconds: float) -> None:
        """From `step` on; so many of the productive seconds of the starts before led to steps that are done again."""
        lost_seconds = min(lost_seconds, self._before['productive'])
        self._before['productive'] -= lost_seconds
        self._before['lost'] += lost_seconds
        self.step = step

    def write(self) -> None:
        """Replace the file; a warning, once, if that cannot be."""
        self._written, this, new = (
            time.monotonic(),
            self._this(),
            self.path.with_name(f'{SUMMARY}.new'),
        )
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
                    '%s cannot be written (%s); the run goes on', SUMMARY, error.strerror
                )
            self._warned = True

    def write_sometimes(self) -> None:
        """Replace the file unless that was done in the last seconds."""
        if time.monotonic() - self._written >= EVERY:
            self.write()

    def __str__(self) -> str:
        """A line for this start, and one for all if there were more."""
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
    """In words: the total, how much of it was productive, and where the rest went; what is no part worth naming is under other."""
    total = sum(seconds.values())
    named = [one for one in ACTIVITIES[1:-1] if one in ALWAYS or seconds[one] > SMALL * total]
    rest = total - seconds['productive'] - sum(seconds[one] for one in named)
    parts = [f'{_short(seconds[one])} {one.replace("_", " ")}' for one in named]
    share = seconds['productive'] / total
    return ', '.join(
        [
            f'{_short(total)}: {_short(seconds["productive"])} productive ({share:.0%})',
            *parts,
            f'{_short(rest)} other',
        ]
    )


def _line(name: str, seconds: Mapping[Activity, float]) -> str:
    return fill(f'{name:<{INDENT}}{describe(seconds)}', WIDTH, subsequent_indent=' ' * INDENT)


def _short(seconds: float) -> str:
    return f'{seconds:.1f}' if seconds < 100 else f'{seconds:,.0f}'


def _rounded(seconds: Mapping[Activity, float]) -> dict[str, float]:
    return {
        **{activity: round(value, 3) for activity, value in seconds.items()},
        'total': round(sum(seconds.values()), 3),
    }


def _read(path: Path) -> dict[str, Any]:
    """What the start before left; nothing if it cannot be read, since it only counts."""
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) and isinstance(found.get('seconds'), dict) else {}
    except (OSError, ValueError):
        return {}
