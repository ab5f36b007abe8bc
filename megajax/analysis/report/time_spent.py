"""Answer "Where did the time go?": seconds by activity, and the time of each step."""

from collections.abc import Mapping, Sequence

from megajax.analysis.report.chart import chart, chip, spread
from megajax.analysis.report.html import Html, element, join, table
from megajax.analysis.report.run_facts import Facts, lines_of
from megajax.base.render.units import duration
from megajax.runtime.run.clock import ACTIVITIES

MEANINGS = {
    'productive': 'training steps that were kept',
    'lost': 'steps skipped, rolled back or repeated',
    'compile': 'compiling the programs',
    'setup': 'starting devices, reading the corpus, initializing',
    'restore': 'reading a checkpoint',
    'checkpoint': 'saving, while training waits',
    'evaluation': 'validation',
    'replay': 'repeating steps to detect silent data corruption',
    'data_wait': 'waiting for batches',
    'other': 'samples, traces, time between steps',
}


def headline(facts: Facts) -> str:
    """Return the share of the time that productive steps take, and the largest other activity."""
    seconds = seconds_of(facts)
    total = sum(seconds.values())
    if not total:
        return 'time unknown: the run wrote no summary.json'
    others = {name: value for name, value in seconds.items() if name != 'productive'}
    largest = max(others, key=lambda name: others[name])
    return (
        f'{seconds["productive"] / total:.0%} in productive steps; next: '
        f'{largest.replace("_", " ")} {others[largest] / total:.0%}'
    )


def seconds_of(facts: Facts) -> Mapping[str, float]:
    """Return the seconds of each activity over all starts of a run; zeros if none are recorded."""
    seconds = facts.run.summary.get('seconds', {})
    return {name: float(seconds.get(name, 0)) for name in ACTIVITIES}


def section(runs: Sequence[Facts], points: int) -> Html:
    """Return a bar and a table of the activities, and charts of step times and data waits."""
    lines = lines_of(runs, 'step_ms', points)
    times = chart(
        'Step time', lines, y='ms', is_log=spread(lines), from_zero=True, legend=len(runs) > 1
    )
    waits = lines_of(runs, 'data_wait_ms', points)
    waiting = chart(
        'Waiting for data', waits, y='ms per step', from_zero=True, legend=len(runs) > 1
    )
    figures = element('div', times, waiting, class_='figures')
    return join([*map(_bar, runs), _table(runs), figures])


def _bar(facts: Facts) -> Html:
    seconds = seconds_of(facts)
    total = sum(seconds.values())
    if not total:
        return Html()
    parts = [
        element(
            'span',
            style=f'width:{100 * value / total:.2f}%',
            class_=f'a{place}',
            title=f'{name.replace("_", " ")}: {duration(value)} ({value / total:.1%})',
        )
        for place, (name, value) in enumerate(seconds.items())
        if value
    ]
    name = f'{facts.run.name}: {duration(total)}'
    return join([element('p', name, class_='bar-name'), element('div', *parts, class_='bar')])


def _table(runs: Sequence[Facts]) -> Html:
    all_seconds = [seconds_of(facts) for facts in runs]
    rows = [
        [
            join([element('i', class_=f'chip a{place}'), name.replace('_', ' ')]),
            element('small', MEANINGS[name], class_='aside'),
            *(_share(seconds, name) for seconds in all_seconds),
        ]
        for place, name in enumerate(ACTIVITIES)
        if any(seconds[name] for seconds in all_seconds)
    ]
    if not rows:
        return element('p', 'No run wrote summary.json.', class_='note')
    head = ['activity', '', *(join([chip(facts.color), facts.run.name]) for facts in runs)]
    return table(head, rows, names=2)


def _share(seconds: Mapping[str, float], name: str) -> str:
    total = sum(seconds.values())
    return f'{duration(seconds[name])} ({seconds[name] / total:.1%})' if seconds[name] else '-'
