"""Answer "Is it as fast as predicted?": plan against measurement, XLA against Megatron."""

from collections.abc import Iterator, Sequence

from megajax.analysis.inspect.report import transfers_cell
from megajax.analysis.inspect.result import Inspection, Row
from megajax.analysis.report.cost import memory_of
from megajax.analysis.report.html import Html, details, element, join, table
from megajax.analysis.report.run_facts import Facts, Prediction
from megajax.base.render.units import count, duration, si


def headline(facts: Facts) -> str:
    """Return the measured and the predicted step time, and the verdict on the collectives."""
    return f'{_speed(facts)}; {_collectives_headline(facts)}'


def section(runs: Sequence[Facts]) -> Html:
    """Return for each run the prediction, and the table of its step's collectives."""
    parts = list[Html]()
    for facts in runs:
        parts += [
            element('h3', facts.run.name) if len(runs) > 1 else Html(),
            _prediction(facts),
            _collectives(facts),
        ]
    return join(parts)


def _speed(facts: Facts) -> str:
    measured, prediction = facts.run.steps.median('step_ms'), facts.prediction
    if measured is None:
        return 'no step time was measured'
    if isinstance(prediction, str):
        return f'{duration(measured / 1e3)} per step; no prediction'
    predicted = prediction.time.total
    return (
        f'{duration(measured / 1e3)} per step, {measured / 1e3 / predicted:.2f}x the predicted '
        f'{duration(predicted)} ({prediction.band})'
    )


def _prediction(facts: Facts) -> Html:
    prediction = facts.prediction
    if isinstance(prediction, str):
        return element('p', f'No prediction: {prediction}.', class_='note')
    steps = facts.run.steps
    measured, mfu = steps.median('step_ms'), steps.median('mfu')
    rows = [[name, duration(seconds), ''] for name, seconds in _predicted_parts(prediction)]
    rows += [
        [
            'step',
            duration(prediction.time.total),
            '-' if measured is None else duration(measured / 1e3),
        ],
        ['MFU', f'{prediction.time.mfu:.1%}', '-' if mfu is None else f'{mfu:.1%}'],
        ['memory per device', si(prediction.bytes), memory_of(facts.run)],
    ]
    head = [f'{prediction.hardware.name}, {prediction.band}', 'predicted by plan', 'measured']
    note = (
        'The measured step time is the median over all steps. To measure its parts, record a '
        'trace (train.profile), then run megajax profile.'
    )
    return join([table(head, rows), element('p', note, class_='note')])


def _predicted_parts(prediction: Prediction) -> Iterator[tuple[str, float]]:
    time = prediction.time
    yield 'matmul', time.products - time.idle
    if time.idle:
        yield 'pipeline bubble', time.idle
    yield 'memory-bound ops', time.memory_bound
    yield 'launch overhead', time.launches
    for axis in time.axes:
        yield f'exposed collectives, {axis}', time.waits(axis)


def _collectives_headline(facts: Facts) -> str:
    inspection = facts.inspection
    if isinstance(inspection, str):
        return 'collectives unknown'
    more = sum(row.verdict == 'MORE' for row in inspection.rows)
    if more:
        sites = count(more, 'site sends', 'sites send')
        return f'{sites} more than {inspection.reference}'
    return f'no collective sends more than in {inspection.reference}'


def _collectives(facts: Facts) -> Html:
    inspection = facts.inspection
    if isinstance(inspection, str):
        return element('p', f'No table of collectives: {inspection}.', class_='note')
    head = ['site', 'phase', 'axis', 'XLA', inspection.reference]
    head += ['XLA bytes', 'Megatron bytes', 'ratio', 'verdict']
    rows = [_row(row) for row in inspection.rows]
    shown = table(head, rows, names=5, wide=True)
    title = f'Collectives per step and device: {_collectives_headline(facts)}'
    return details(title, shown, *_notes(inspection), is_open=True)


def _row(row: Row) -> list[object]:
    ours, theirs = row.wire_bytes, row.megatron_wire_bytes
    return [
        row.site,
        row.phase,
        row.axis or '-',
        transfers_cell(row.placed),
        transfers_cell(row.megatron),
        si(ours),
        si(theirs) if row.megatron else '-',
        f'{ours / theirs:.3f}' if theirs else '-',
        element('b', row.verdict, class_='bad' if row.verdict == 'MORE' else 'good'),
    ]


def _notes(inspection: Inspection) -> Iterator[Html]:
    where = f'target {inspection.target}, jax {inspection.jax_version}'
    ratios = ', '.join(
        f'{axis} {ratio:.3f}' for axis, ratio in inspection.ratios.items() if ratio is not None
    )
    parts = [f'Compiled for {where}; bytes relative to {inspection.reference}: {ratios or "none"}.']
    rates = f' at the rates of {inspection.rates.hardware}' if inspection.rates else ''
    if inspection.compute_seconds is not None and inspection.exposed_seconds is not None:
        parts.append(
            f"Estimated from XLA's schedule{rates}, a step takes "
            f'{duration(inspection.compute_seconds)} '
            f'of kernels and {duration(inspection.exposed_seconds)} of exposed communication.'
        )
    memory = inspection.memory
    parts.append(
        f'XLA planned {si(memory.needed)} per device: {si(memory.arguments)} of state and batch, '
        f'{si(memory.temporaries)} of temporaries.'
    )
    yield element('p', ' '.join(parts), class_='note')
    yield from (
        element('p', f'{finding.level}: {finding.rule}: {finding.message}', class_='note')
        for finding in inspection.findings
    )
