"""Answer "Did it learn?": losses, results on held-out data, samples."""

from base64 import b64encode
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.analysis.report.chart import Line, chart, chip
from megajax.analysis.report.downsample import Curve, Floats, thin
from megajax.analysis.report.html import Html, details, element, join, table
from megajax.analysis.report.read import RunData
from megajax.analysis.report.run_facts import Facts
from megajax.base.render.units import large, rounded
from megajax.runtime.run.log.report import ROUTING

VALIDATION, PER_BYTE = 'validation_loss', 'validation_bits_per_byte'
MAX_CHARACTERS = 2000  # longest text shown of a sample
MAX_PROMPTS, MAX_TIMES = 8, 5  # samples shown: most prompts, and most steps
MOST_TOKENS = 1e12  # most tokens of a step; larger numbers are from damaged metrics
LAST_STEPS = 0.02  # share of the steps over which the final training loss is averaged


def headline(facts: Facts) -> str:
    """Return one line about the losses of a run."""
    run = facts.run
    if not run.last_step:
        return 'no step was taken yet'
    if line := _validated(run):
        return line
    known = _finite(training_losses(run))
    if not len(known):
        return 'no finite loss'
    validation = (
        'no finite validation loss' if len(run.evaluated(VALIDATION)[0]) else 'without validation'
    )
    return f'training loss {known[0]:.3f} → {last_loss(run):.3f}, {validation}'


def _validated(run: RunData) -> str:
    """Return the first, last and best validation loss; empty if none is finite."""
    steps, losses = run.evaluated(VALIDATION)
    known = np.isfinite(losses)
    if not known.any():
        return ''
    since = '' if known[-1] else ', then not finite'
    steps, losses, unit = steps[known], losses[known], unit_of(run)
    if len(losses) == 1:
        return f'validation loss {losses[0]:.3f} {unit} at step {steps[0]:,.0f}{since}'
    line = f'validation loss {losses[0]:.3f} → {losses[-1]:.3f} {unit}'
    bits = run.finite(PER_BYTE)
    line += f' ({bits[0]:.3f} → {bits[-1]:.3f} bits per byte)' if len(bits) > 1 else ''
    best = int(np.argmin(losses))
    is_last = best == len(losses) - 1
    return (
        line + since + ('' if is_last else f', best {losses[best]:.3f} at step {steps[best]:,.0f}')
    )


def unit_of(run: RunData) -> str:
    """Return the unit of a run's losses."""
    return 'nats per masked token' if run.config.model.is_bert else 'nats per token'


def training_losses(run: RunData) -> Floats:
    """Return each step's cross entropy, which is comparable with the validation loss.

    The objective has further terms, such as the z-loss or BERT's loss of sentence order. It is used
    only where a step of an older megajax has no cross entropy.
    """
    return np.where(np.isnan(run.steps['nll']), run.steps['loss'], run.steps['nll'])


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def last_loss(run: RunData) -> float:
    """Return the mean training loss of the last steps, or NaN if there are none."""
    known = _finite(training_losses(run))
    return (
        float(np.mean(known[-max(1, round(LAST_STEPS * len(known))) :])) if len(known) else np.nan
    )


def section(runs: Sequence[Facts], points: int) -> Html:
    """Return charts of the losses, a table of results, and the samples of each run."""
    losses = _losses_per_byte(runs, points) if tokenizers_differ(runs) else _losses(runs, points)
    others = [
        chart(
            title,
            [
                Line(name=facts.run.name, curve=_curve(facts, key, points), color=facts.color)
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
            ('Load of the busiest expert', 'expert_load', 'tokens / mean of the layer', False),
            ('Dropped assignments', 'dropped', 'share of all', False),
            ('Router entropy', 'router_entropy', 'nats', False),
            ('Balance loss', 'balance_loss', 'nats', False),
        )
        if key not in ROUTING or any(len(facts.run.steps.known(key)) for facts in runs)
    ]
    figures = element('div', *losses, *others, class_='figures')
    note = comparison(runs)
    above = element('p', note) if note else Html()
    return join([above, figures, _results(runs), *map(_samples, runs)])


def tokenizers_differ(runs: Sequence[Facts]) -> bool:
    """Return whether the runs' tokenizers differ, or only some of the tokenizers are known."""
    return len({facts.run.tokenizer or facts.run.config.model.vocab_size for facts in runs}) > 1


def comparison(runs: Sequence[Facts]) -> str:
    """Return how to compare runs that have different tokenizers; empty if they have the same."""
    if not tokenizers_differ(runs):
        return ''
    is_known = all(facts.run.tokenizer for facts in runs)
    cause = 'The runs have different tokenizers' if is_known else 'Some tokenizers are unknown'
    rule = f'{cause}, so losses per token are not comparable'
    without = [facts.run.name for facts in runs if not len(facts.run.finite(PER_BYTE))]
    if not without:
        return f'{rule}; compare bits per byte on the same validation text instead.'
    return f'{rule}. No bits per byte were logged for {", ".join(without)}.'


def _losses(runs: Sequence[Facts], points: int) -> list[Html]:
    start = max((facts.run.last_step for facts in runs), default=0) / 2
    return [
        losses_chart('Loss', runs, points, is_log=True),
        losses_chart('Loss in the second half', runs, points, start=start),
    ]


def _losses_per_byte(runs: Sequence[Facts], points: int) -> list[Html]:
    """Return one chart of bits per byte, and a chart of losses per token for each run."""
    lines = [
        Line(
            name=facts.run.name,
            curve=thin(*facts.run.evaluated(PER_BYTE), points // 2),
            color=facts.color,
            is_dotted=True,
        )
        for facts in runs
        if len(facts.run.finite(PER_BYTE))
    ]
    each = [losses_chart(f'Loss of {facts.run.name}', [facts], points) for facts in runs]
    together = [chart('Validation loss', lines, y='bits per byte')] if lines else []
    return [*together, *each]


def losses_chart(
    title: str, runs: Sequence[Facts], points: int, *, start: float = 0, is_log: bool = False
) -> Html:
    """Return a chart of the training and validation losses of all runs from step `start` on."""
    lines = []
    for facts in runs:
        name = f'{facts.run.name}, ' if len(runs) > 1 else ''
        number, losses = facts.run.steps.number, training_losses(facts.run)
        late = number >= start
        curve = thin(number[late], losses[late], points)
        lines.append(Line(name=f'{name}training', curve=curve, color=facts.color))
        steps, validation = facts.run.evaluated(VALIDATION)
        late = steps >= start
        curve = thin(steps[late], validation[late], points // 2)
        lines.append(Line(name=f'{name}validation', curve=curve, color=facts.color, is_dotted=True))
    units = dict.fromkeys(unit_of(facts.run) for facts in runs)
    return chart(title, lines, y=' or '.join(units), is_log=is_log)


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
    head = ['run', 'steps', 'tokens', 'training loss', *(name.replace('_', ' ') for name in names)]
    rows = [
        [
            join([chip(facts.color), facts.run.name]),
            f'{facts.run.last_step:,}',
            large(tokens_of(facts.run)),
            _number(last_loss(facts.run)),
            *(_result(name, *facts.run.evaluated(name)) for name in names),
        ]
        for facts in runs
    ]
    note = 'Results are from the last evaluation; a better earlier result is shown below it.'
    return join([table(head, rows), element('p', note, class_='note') if names else Html()])


def tokens_of(run: RunData) -> int:
    """Return the number of tokens that a run has trained on, even if its batch size has changed."""
    with np.errstate(over='ignore', invalid='ignore'):
        measured = run.steps['tokens_per_s'] * run.steps['step_ms'] / 1e3
    counts = np.rint(np.where((measured > 0) & (measured < MOST_TOKENS), measured, 0))
    is_count = (counts > 0) & np.isclose(counts, measured, rtol=1e-6, atol=0)
    others = max(run.last_step - int(is_count.sum()), 0)
    each = run.config.train.batch_size * run.config.train.seq_len
    return int(counts[is_count].sum()) + others * each


def _number(value: float) -> str:
    return rounded(value, 4) if np.isfinite(value) else '-'


def _best(name: str, values: Floats) -> int | None:
    """Return the index of a result's best finite value; None if neither direction is better."""
    known = np.isfinite(values)
    is_loss = name.endswith('_loss') or name == PER_BYTE
    # A result that is read is the share of images that are transcribed exactly.
    if not known.any() or not (is_loss or name.startswith('validation_read')):
        return None
    return int(np.argmax(np.where(known, -values if is_loss else values, -np.inf)))


def _result(name: str, steps: Floats, values: Floats) -> Html | str:
    """Return the last value of a result, with a better one below it if there was one."""
    if not len(values):
        return '-'
    last = rounded(values[-1], 4) if np.isfinite(values[-1]) else 'not finite'
    best = _best(name, values)
    if best is None or values[best] == values[-1]:
        return last
    below = element('small', f'{rounded(values[best], 4)} at step {steps[best]:,.0f}')
    return join([last, element('br'), below])


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
    """Return the sheet of held-out images with their transcriptions, if the run wrote one."""
    if facts.run.readings is None:
        return Html()
    source = f'data:image/png;base64,{b64encode(facts.run.readings).decode()}'
    sheet = element('img', src=source, alt='held-out images with their transcriptions')
    return details(f'Images transcribed by {facts.run.name}', sheet, is_open=True)


def _continuations(line: dict[str, object]) -> Iterator[Html]:
    prompts = [prompt for prompt in line if prompt != 'step']
    for prompt in prompts[:MAX_PROMPTS]:
        continued = str(line[prompt])
        cut = '…' if len(continued) > MAX_CHARACTERS else ''
        start = element('b', prompt[:MAX_CHARACTERS])
        yield element('pre', start, continued[:MAX_CHARACTERS], cut, class_='sample')
    if rest := len(prompts) - MAX_PROMPTS:
        yield element('p', f'{rest} more in samples.jsonl', class_='note') if rest > 0 else Html()
