"""Answer "What did it cost?": device time, throughput, memory, checkpoints."""

from collections.abc import Sequence
from typing import Any

from megajax.analysis.report.chart import Line, chart, chip, spread
from megajax.analysis.report.downsample import thin
from megajax.analysis.report.html import Html, details, element, join, table
from megajax.analysis.report.learning import tokens_of
from megajax.analysis.report.read import Checkpoint, RunData
from megajax.analysis.report.run_facts import Facts, lines_of
from megajax.base.render.units import count, duration, large, rounded, si

SHOWN = 12  # most checkpoints in a table


def headline(facts: Facts) -> str:
    """Return one line about the time, the devices and the tokens of a run."""
    run = facts.run
    seconds = total_seconds(run)
    if seconds is None:
        return 'time unknown: the run wrote no summary.json'
    devices = run.compiled_config.mesh.num_devices
    return (
        f'{duration(seconds)} on {count(devices, "device")}, '
        f'{rounded(seconds * devices / 3600)} device-hours for {large(tokens_of(run))} tokens'
    )


def total_seconds(run: RunData) -> float | None:
    """Return the seconds of all starts of a run; None if the run recorded no time."""
    return run.summary['seconds'].get('total') if run.summary else None


def section(runs: Sequence[Facts], points: int) -> Html:
    """Return a table of rates and memory, charts of throughput and MFU, and the checkpoints."""
    lines = lines_of(runs, 'tokens_per_s', points)
    throughput = chart(
        'Throughput',
        lines,
        y='tokens/s, all devices',
        is_log=spread(lines),
        from_zero=True,
        legend=len(runs) > 1,
    )
    used = [line for facts in runs if (line := _mfu(facts, points))]
    mfu = chart('MFU', used, y='% of peak', from_zero=True, legend=len(runs) > 1)
    figures = element('div', throughput, mfu, class_='figures')
    return join([_rates(runs), figures, *map(_checkpoints, runs)])


def _mfu(facts: Facts, points: int) -> Line | None:
    mfu = facts.run.steps['mfu']
    curve = thin(facts.run.steps.number, 100 * mfu, points)
    return Line(name=facts.run.name, curve=curve, color=facts.color) if len(curve.x) else None


def _rates(runs: Sequence[Facts]) -> Html:
    """Return a table with a row per quantity; with one run, it is narrow enough for a phone."""
    rows = [
        ('devices', [device_of(facts) for facts in runs]),
        ('mesh', [mesh_of(facts.run) for facts in runs]),
        ('median step', [_form(facts.run.steps.median('step_ms'), _ms) for facts in runs]),
        ('tokens/s', [_form(facts.run.steps.median('tokens_per_s'), large) for facts in runs]),
        (
            'TFLOP/s per device',
            [_form(facts.run.steps.median('tflops_per_device'), rounded) for facts in runs],
        ),
        ('MFU', [_form(facts.run.steps.median('mfu'), '{:.1%}'.format) for facts in runs]),
        ('memory per device', [memory_of(facts.run) for facts in runs]),
    ]
    body = [[name, *values] for name, values in rows]
    head = ['median over steps', *(join([chip(facts.color), facts.run.name]) for facts in runs)]
    note = (
        'TFLOP/s and MFU count model FLOPs only, without recomputation. MFU is omitted if the '
        'peak of the device is unknown. Device-hours assume that the whole run had the mesh of '
        'its last compiled step.'
    )
    return join([table(head, body), element('p', note, class_='note')])


def device_of(facts: Facts) -> str:
    """Return the number and the kind of the devices of a run."""
    kept, devices = facts.run.kept, facts.run.compiled_config.mesh.num_devices
    return f'{devices} x {kept.device_kind}' if kept else f'{devices}'


def mesh_of(run: RunData) -> str:
    """Return the axes of a run's mesh and their sizes."""
    return ' x '.join(f'{axis}={size}' for axis, size in run.compiled_config.mesh.sizes.items())


def _ms(milliseconds: float) -> str:
    return duration(milliseconds / 1e3)


def _form(value: float | None, form: Any) -> str:
    return '-' if value is None else form(value)


def memory_of(run: RunData) -> str:
    """Return the peak memory of a device: measured by its allocator, or else planned by XLA."""
    measured, planned = (run.steps.known(name) for name in ('memory_bytes', 'planned_memory_bytes'))
    if len(measured):
        return si(float(measured.max()))
    return f'{si(float(planned.max()))}, planned by XLA' if len(planned) else '-'


def _checkpoints(facts: Facts) -> Html:
    kept = facts.run.checkpoints
    if not kept:
        return element('p', f'{facts.run.name} has no checkpoints.', class_='note')
    head = ['step', 'written (UTC)', 'files', 'size', 'validation loss']
    rows = map(_checkpoint, reversed(kept[-SHOWN:]))
    more = f', the newest {SHOWN} of {len(kept)}' if len(kept) > SHOWN else ''
    return details(f'Checkpoints of {facts.run.name}{more}', table(head, rows, names=3))


def _checkpoint(checkpoint: Checkpoint) -> list[object]:
    record = checkpoint.record
    loss = record.validation_loss if record else None
    return [
        f'{checkpoint.step:,}',
        f'{record.time:%F %T}' if record else '?',
        checkpoint.fault or 'complete',
        si(checkpoint.bytes) if checkpoint.bytes is not None else '?',
        '-' if loss is None else f'{loss:.4f}',
    ]
