"""Answer "Did anything go wrong?": skipped and slow steps, restarts, damaged files."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np

from megajax.analysis.report.html import Html, element, join, table
from megajax.analysis.report.learning import VALIDATION
from megajax.analysis.report.read import METRICS, RunData
from megajax.analysis.report.run_facts import Facts
from megajax.base.render.units import count, duration, rounded
from megajax.runtime.checkpoint.record import config_differences
from megajax.runtime.run.clock import SUMMARY
from megajax.runtime.run.log.report import IDLE_STEPS, idle_experts
from megajax.runtime.run.stall_report import NO_PROGRESS
from megajax.runtime.run.watchdog import LOG

SLOW = 2.0  # a step is slow if it takes more than this many times the median
WORTH_SAYING = 0.01  # slow steps that cost more than this share of all step time are reported
BEHIND = 0.1  # a process is reported if it is behind by more than this share of the median step
WORSE = 0.02  # the last validation loss is reported if it exceeds the best by more than this share
NOTHING = 'Nothing: no skipped steps, no restarts, no lost time.'
WITHOUT_SUMMARY = (
    f'Nothing: no skipped steps. There is no {SUMMARY}, so restarts and lost time are unknown.'
)
SHOWN = 8  # most steps in a table
# Most bytes of a line and most lines that are read of the watchdog's log, which has many stacks.
MAX_LINE, MAX_LINES = 4096, 1_000_000


def headline(facts: Facts) -> str:
    """Return the first problem of a run and how many more there are, or 'nothing'."""
    found = [*faults(facts)]
    if not found:
        return 'nothing'
    more = f' (and {len(found) - 1} more)' if len(found) > 1 else ''
    return found[0].rstrip('.') + more


def faults(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing that went wrong, or may have gone wrong."""
    run = facts.run
    yield from run.unreadable
    yield from _end(run)
    yield from _skipped(run)
    yield from _program(facts)
    yield from _checkpoints(run)
    yield from _validation(run)
    yield from _starts(run)
    yield from _slow(run)
    idle = run.steps['idle_experts'][-IDLE_STEPS:]
    if len(idle) == IDLE_STEPS and (idle > 0).all():
        yield f'At the end, {idle_experts(idle.min())}.'
    if _has_stalled(run):
        yield f'The watchdog found no progress; {LOG} has the stack traces.'


def section(runs: Sequence[Facts]) -> Html:
    """Return the problems of each run, its skipped steps and its slowest steps."""
    parts = list[Html]()
    for facts in runs:
        found = [*faults(facts)]
        items = (
            element('ul', *(element('li', fault) for fault in found))
            if found
            else element('p', NOTHING if facts.run.summary else WITHOUT_SUMMARY, class_='good')
        )
        parts += [
            element('h3', facts.run.name) if len(runs) > 1 else Html(),
            items,
            _skipped_table(facts.run),
            _slow_table(facts.run),
        ]
    return join(parts)


def _has_stalled(run: RunData) -> bool:
    """Return whether the watchdog has ended the run; at half of a limit, it only writes a line."""
    try:
        with (run.folder / LOG).open('rb') as file:
            lines = islice(iter(lambda: file.readline(MAX_LINE), b''), MAX_LINES)
            return any(line.startswith(NO_PROGRESS.encode()) for line in lines)
    except OSError:
        return False


def _end(run: RunData) -> Iterator[str]:
    last, steps = run.last_step, run.config.train.steps
    if run.running:
        yield f'The run is still in progress ({run.running}), at step {last:,} of {steps:,}.'
    elif not last:
        yield f'No step has finished: {METRICS} has none.'
    elif not run.is_finished:
        yield f'The run stopped at step {last:,} of {steps:,}.'


def _skipped(run: RunData) -> Iterator[str]:
    taken = run.steps['taken']
    skipped = int(np.sum(taken == 0))
    if not skipped:
        return
    reasons = [
        f'{number:,} for {why}'
        for why, number in (
            ('non-finite loss or gradients', _count(run, finite=0, overflow=0)),
            ('a loss spike', _count(run, spike=1)),
            ('fp16 gradient overflow', _count(run, overflow=1)),
        )
        if number
    ]
    yield f'{count(skipped, "step")} skipped: {", ".join(reasons) or "reason unknown"}.'


def _count(run: RunData, **values: int) -> int:
    wanted = run.steps['taken'] == 0
    for name, value in values.items():
        wanted = wanted & (run.steps[name] == value)
    return int(np.sum(wanted))


def _program(facts: Facts) -> Iterator[str]:
    inspection = facts.inspection
    if isinstance(inspection, str):
        return
    for row in inspection.rows:
        if row.verdict == 'MORE':
            yield (
                f'XLA sends more than {inspection.reference} at {row.site}, {row.phase}, over '
                f'{row.axis}.'
            )
    for finding in inspection.findings:
        if finding.level == 'error':
            yield f'{finding.rule}: {finding.message}'


def _checkpoints(run: RunData) -> Iterator[str]:
    for checkpoint in run.checkpoints:
        if checkpoint.fault:
            yield f'Checkpoint {checkpoint.step:,} is damaged: {checkpoint.fault}.'
    if not run.last_step or run.running:
        return
    intact = [checkpoint.step for checkpoint in run.checkpoints if not checkpoint.fault]
    if not intact:
        yield 'There is no complete checkpoint.'
    elif (newest := intact[-1]) < run.last_step:
        lost = count(run.last_step - newest, 'step')
        yield f'The newest complete checkpoint is of step {newest:,}; a resume repeats {lost}.'


def _validation(run: RunData) -> Iterator[str]:
    steps, losses = run.evaluated(VALIDATION)
    if not len(losses):
        if run.last_step:
            yield 'No validation loss was measured, so overfitting would go unnoticed.'
        return
    if not np.isfinite(losses[-1]):
        yield f'The last validation loss, at step {steps[-1]:,.0f}, is not finite.'
        return
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    best = int(np.argmin(losses))
    if losses[-1] > (1 + WORSE) * losses[best]:
        yield (
            f'The validation loss rose from its best of {losses[best]:.3f} at step '
            f'{steps[best]:,.0f} to {losses[-1]:.3f}.'
        )


def _starts(run: RunData) -> Iterator[str]:
    starts = run.summary.get('starts', 1)
    lost = run.summary.get('seconds', {}).get('lost', 0)
    if starts > 1:
        yield f'The run was started {starts} times.'
    if lost:
        yield f'{duration(lost)} of training was lost to steps skipped, rolled back or repeated.'
    records = [checkpoint.record for checkpoint in run.checkpoints if checkpoint.record]
    for before, after in pairwise(records):
        for key, (old, new) in config_differences(before, after).items():
            yield f'{key} was changed from {old} to {new} after step {before.step:,}.'


def _slow(run: RunData) -> Iterator[str]:
    slow = slow_steps(run)
    if len(slow):
        extra = float(np.sum(run.steps['step_ms'][slow] - run.steps.median('step_ms')))
        share = extra / float(np.sum(run.steps.known('step_ms')))
        if share > WORTH_SAYING:
            yield (
                f'{count(len(slow), "step")} took more than {SLOW:g}x the median, '
                f'{duration(extra / 1e3)} longer in total ({share:.1%} of all step time).'
            )
    behind, median = run.steps.known('slowest_process_behind_ms'), run.steps.median('step_ms')
    if len(behind) and median and np.median(behind) > BEHIND * median:
        process = run.steps.known('slowest_process')
        usual = int(np.bincount(process.astype(int)).argmax())
        yield (
            f'Process {usual} is most often the slowest, usually '
            f'{duration(float(np.median(behind)) / 1e3)} behind the median process.'
        )


def slow_steps(run: RunData) -> np.ndarray:
    """Return the indices of slow steps, slowest first; the first step connects the devices."""
    times, median = run.steps['step_ms'], run.steps.median('step_ms')
    if median is None:
        return np.array([], int)
    slow = np.flatnonzero((times > SLOW * median) & (run.steps.number > run.steps.number[0]))
    return slow[np.argsort(-times[slow])]


def _slow_table(run: RunData) -> Html:
    slow, median = slow_steps(run)[:SHOWN], run.steps.median('step_ms')
    if not len(slow) or not median:
        return Html()
    columns = {name: run.steps[name][slow] for name in ('step_ms', 'data_wait_ms', 'checkpoint_ms')}
    rows = [
        [
            f'{run.steps.number[place]:,.0f}',
            f'{columns["step_ms"][row]:,.1f}',
            f'{columns["step_ms"][row] / median:.1f}',
            f'{columns["data_wait_ms"][row]:,.1f}',
            f'{columns["checkpoint_ms"][row]:,.1f}',
        ]
        for row, place in enumerate(slow)
    ]
    head = ['slowest steps', 'ms', 'x median', 'data wait ms', 'checkpoint ms before it']
    return table(head, rows)


def _skipped_table(run: RunData) -> Html:
    places = np.flatnonzero(run.steps['taken'] == 0)
    if not len(places):
        return Html()
    rows = [
        [
            f'{run.steps.number[place]:,.0f}',
            _or_not_finite(run.steps['loss'][place]),
            _or_not_finite(run.steps['grad_norm'][place]),
        ]
        for place in places[-SHOWN:]
    ]
    name = 'skipped steps' if len(places) <= SHOWN else f'last {SHOWN} skipped steps'
    return table([name, 'loss', 'gradient norm'], rows)


def _or_not_finite(value: float) -> str:
    return rounded(value, 4) if np.isfinite(value) else 'not finite'
