"""The answer to "did it learn?": losses, results on held-out data, samples."""

from base64 import b64encode
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.report.chart import Line, chart, chip
from megajax.report.facts import Facts
from megajax.report.html import Html, details, element, join, table
from megajax.report.read import RunData
from megajax.report.thin import Curve, Floats, thin
from megajax.report.words import large

VALIDATION = 'validation_loss'
MAX_CHARACTERS = 2000  # of a sample
MAX_PROMPTS, MAX_TIMES = 8, 5  # samples that are shown: of these prompts, at so many steps
MOST_TOKENS = 1e12  # of a step, so that damaged metrics are not counted
LAST_STEPS = 0.02  # share of the steps whose mean is the training loss at the end


def headline(facts: Facts) -> str:
    """Return one line on how far a run has learned."""
    run = facts.run
    if not run.last_step:
        return 'no step was taken yet'
    steps, losses = run.evaluated(VALIDATION)
    losses = losses[np.isfinite(losses)]
    unit = 'nats per masked token' if run.config.model.is_bert else 'nats per token'
    if len(losses) > 1:
        line = f'validation loss {losses[0]:.3f} → {losses[-1]:.3f} {unit}'
        best = int(np.argmin(losses))
        return line + (
            ''
            if best == len(losses) - 1
            else f', best {losses[best]:.3f} at step {steps[best]:,.0f}'
        )
    known = run.steps.known('loss')
    if not len(known):
        return 'no loss was finite'
    return f'training loss {known[0]:.3f} → {last_loss(run):.3f}, without validation'


def last_loss(run: RunData) -> float:
    """The mean loss of the last steps; NaN without any."""
    known = run.steps.known('loss')
    return (
        float(np.mean(known[-max(1, round(LAST_STEPS * len(known))) :])) if len(known) else np.nan
    )


def section(runs: Sequence[Facts], points: int) -> Html:
    """Return the pictures of the losses, a table of results, and the samples of each run."""
    whole = losses_chart('Loss', runs, points, is_log=True)
    start = max((facts.run.last_step for facts in runs), default=0) / 2
    late = losses_chart('Loss in the second half', runs, points, start=start)
    others = [
        chart(
            title,
            [
                Line(name=facts.run.name, curve=_curve(facts, key, points), colour=facts.colour)
                for facts in runs
            ],
            y=y,
            is_log=is_log,
            from_zero=not is_log,
            legend=len(runs) > 1,
        )
        for title, key, y, is_log in (
            ('Gradient norm', 'grad_norm', 'norm, before clipping', True),
            ('Learning rate', 'lr', 'learning rate', False),
        )
    ]
    figures = element('div', whole, late, *others, class_='figures')
    return join([figures, _results(runs), *map(_samples, runs)])


def losses_chart(
    title: str, runs: Sequence[Facts], points: int, *, start: float = 0, is_log: bool = False
) -> Html:
    """Return the losses of all runs from a step on, in training and on validation data."""
    lines = []
    for facts in runs:
        name = f'{facts.run.name}, ' if len(runs) > 1 else ''
        number, losses = facts.run.steps.number, facts.run.steps['loss']
        late = number >= start
        curve = thin(number[late], losses[late], points)
        lines.append(Line(name=f'{name}training', curve=curve, colour=facts.colour))
        steps, validation = facts.run.evaluated(VALIDATION)
        late = steps >= start
        curve = thin(steps[late], validation[late], points // 2)
        lines.append(
            Line(name=f'{name}validation', curve=curve, colour=facts.colour, is_dotted=True)
        )
    return chart(title, lines, y='nats per token', is_log=is_log)


def _curve(facts: Facts, name: str, points: int) -> Curve:
    return thin(facts.run.steps.number, facts.run.steps[name], points)


def _results(runs: Sequence[Facts]) -> Html:
    names = dict.fromkeys(
        name
        for facts in runs
        for line in facts.run.evaluations
        for name in line
        if name.startswith(('validation_', 'budget_'))
    )
    head = ['run', 'steps', 'tokens', 'training loss', *(_result_name(name) for name in names)]
    rows = [
        [
            join([chip(facts.colour), facts.run.name]),
            f'{facts.run.last_step:,}',
            large(tokens_of(facts.run)),
            _number(last_loss(facts.run)),
            *(_result(*facts.run.evaluated(name)) for name in names),
        ]
        for facts in runs
    ]
    note = 'Each result is that of the last evaluation; the best one stands below it if it differs.'
    return join([table(head, rows), element('p', note, class_='note') if names else Html()])


def tokens_of(run: RunData) -> int:
    """The tokens of the steps that a run has taken, whose batches may have had several sizes."""
    with np.errstate(over='ignore', invalid='ignore'):
        measured = run.steps['tokens_per_s'] * run.steps['step_ms'] / 1e3
    counts = np.rint(np.where((measured > 0) & (measured < MOST_TOKENS), measured, 0))
    is_count = (counts > 0) & np.isclose(counts, measured, rtol=1e-6, atol=0)
    others = max(run.last_step - int(is_count.sum()), 0)
    each = run.config.train.batch_size * run.config.train.seq_len
    return int(counts[is_count].sum()) + others * each


def _result_name(name: str) -> str:
    return name.replace('_', ' ')


def _number(value: float) -> str:
    return f'{value:.4g}' if np.isfinite(value) else '-'


def _result(steps: Floats, values: Floats) -> Html | str:
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if not len(values):
        return '-'
    last = f'{values[-1]:.4g}'
    best = int(np.argmin(values))
    if values[0] > values[-1] and best < len(values) - 1:
        below = element('small', f'{values[best]:.4g} at step {steps[best]:,.0f}')
        return join([last, element('br'), below])
    return last


def _samples(facts: Facts) -> Html:
    lines = facts.run.samples
    if not lines:
        return _readings(facts)
    places = sorted({*np.linspace(0, len(lines) - 1, MAX_TIMES).astype(int)}, reverse=True)
    shown = [
        details(
            f'Samples of {facts.run.name} after step {lines[place]["step"]:,}',
            *_continuations(lines[place]),
            is_open=place == len(lines) - 1,
        )
        for place in places
    ]
    return join([*shown, _readings(facts)])


def _readings(facts: Facts) -> Html:
    """The sheet of held-out pictures with what was read in them, of a run on pictures."""
    if facts.run.readings is None:
        return Html()
    source = f'data:image/png;base64,{b64encode(facts.run.readings).decode()}'
    sheet = element('img', src=source, alt='held-out pictures, and what was read in them')
    return details(f'Pictures that {facts.run.name} has read', sheet, is_open=True)


def _continuations(line: dict[str, object]) -> Iterator[Html]:
    prompts = [prompt for prompt in line if prompt != 'step']
    for prompt in prompts[:MAX_PROMPTS]:
        continued = str(line[prompt])
        cut = '…' if len(continued) > MAX_CHARACTERS else ''
        start = element('b', prompt[:MAX_CHARACTERS])
        yield element('pre', start, continued[:MAX_CHARACTERS], cut, class_='sample')
    if rest := len(prompts) - MAX_PROMPTS:
        yield element('p', f'{rest} more in samples.jsonl', class_='note') if rest > 0 else Html()
