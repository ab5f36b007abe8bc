"""Describe the status of a live run, in the line that SIGUSR2 prints."""

import time
from datetime import timedelta
from pathlib import Path

from megajax.base.errors import RunError, reason
from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.run.clock import RunSummary
from megajax.runtime.run.watchdog import Watchdog


def where_it_stands(folder: Path, steps: int, summary: RunSummary, watchdog: Watchdog) -> str:
    """Return a line with the current step, the phase, the time left and the newest checkpoint.

    The time left assumes that steps, with their evaluations and saves, stay as fast on average as
    they have been since the first step of this start, which may compile. The signal may come at any
    moment, so this function changes nothing.
    """
    phase = f'in phase {watchdog.phase!r} for {time.monotonic() - watchdog.since:.1f} s'
    if summary.step is None:
        return f'{phase}; no step is done yet'
    return '; '.join(
        [
            f'step {summary.step} of {steps} is done',
            phase,
            *_time_left(steps, summary),
            f'newest checkpoint: {_newest(folder / "checkpoints")}',
        ]
    )


def _newest(folder: Path) -> str:
    try:
        saved = find_steps(folder)
    except (RunError, OSError) as error:  # raised in a signal handler, it would end the run
        return f'unknown ({reason(error)})'
    return str(saved[-1]) if saved else 'none'


def _time_left(steps: int, summary: RunSummary) -> list[str]:
    step, first = summary.step, summary.first_step
    if step is None or first is None or step <= first:
        return []
    seconds = (time.monotonic() - summary.began) / (step - first) * (steps - step)
    return [f'about {timedelta(seconds=round(seconds))} left']
