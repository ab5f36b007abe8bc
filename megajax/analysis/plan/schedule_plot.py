"""Plot a pipeline schedule: the passes of each stage and the microbatches in flight.

Needs matplotlib. A backward pass is drawn twice as long as a forward pass, three times with full
recomputation. All stages are in the same tick at the same time.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megajax.analysis.plan.describe import mesh_name
from megajax.analysis.plan.layouts import Mesh
from megajax.analysis.plan.plot import new_figure
from megajax.core.config import Config, ConfigError
from megajax.core.counts.schedule import IDLE, Schedule, schedule_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD, NOTHING = 'Blues', 'Greens', '#eeeeee'
NUMBERED = 1100  # most passes that are drawn with a number in their box
MOST = 200_000  # most passes that are drawn


class Box(NamedTuple):
    """A pass of a stage, or idle time."""

    stage: int
    start: float
    width: float
    microbatch: int  # IDLE if the stage is idle
    chunk: int
    is_forward: bool


def schedule(config: Config) -> 'Figure':
    """Plot the schedule of a config's training step, with the chunks in flight below.

    Raises ConfigError if there is no pipeline, or if the schedule is too long to draw.
    """
    mesh = config.mesh
    if mesh.stages == 1:
        raise ConfigError(
            'mesh.stages: 1 has no schedule to draw (the planned layout is '
            f'{mesh_name(Mesh.of(config))}); use at least 2, without --gpus, which searches'
        )
    plan = schedule_of(config)
    passes = 2 * mesh.stages * plan.passes
    if passes > MOST:
        raise ConfigError(f'train.microbatches: {passes} passes are too many to draw; use fewer')
    figure = new_figure()
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    lengths = list(_lengths(plan, 3.0 if config.train.recompute == 'full' else 2.0))
    ends = np.cumsum([first + second for first, second in lengths])
    width = min(30.0, max(8.0, ends[-1] * 0.16))
    figure.set_size_inches(width, 2.4 + 0.32 * mesh.stages)
    _draw_passes(above, plan, lengths, has_numbers=passes <= NUMBERED)
    _draw_slots(below, plan, lengths)
    above.set_title(_title(config, plan), fontsize=10)
    return figure


def _title(config: Config, plan: Schedule) -> str:
    mesh = config.mesh
    chunks = f' of {plan.chunks} chunks' if plan.chunks > 1 else ''
    return (
        f'{config.train.schedule}, {mesh.stages} stages{chunks}, {plan.microbatches} microbatches: '
        f'a bubble of {plan.bubble:.1%}, at most {plan.num_slots} chunks in flight on a stage'
    )


def _lengths(plan: Schedule, backward: float) -> Iterator[tuple[float, float]]:
    """Yield the lengths of the forward and of the backward half of each tick."""
    for phase in plan.phases:
        halves = float(phase.forward), backward * phase.backward
        yield from [halves] * phase.ticks


def boxes(plan: Schedule, lengths: list[tuple[float, float]]) -> Iterator[Box]:
    """Yield what each stage does in each half of a tick."""
    start = 0.0
    for tick, halves in enumerate(lengths):
        for table, width in zip((plan.forward, plan.backward), halves, strict=True):
            if width:
                for stage in range(plan.stages):
                    microbatch, chunk, _ = map(int, table[tick, stage])
                    yield Box(stage, start, width, microbatch, chunk, table is plan.forward)
            start += width


def _draw_passes(
    axes: 'Axes', plan: Schedule, lengths: list[tuple[float, float]], *, has_numbers: bool
) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    drawn = list(boxes(plan, lengths))
    patches = [Rectangle((box.start, box.stage - 0.45), box.width, 0.9) for box in drawn]
    colors = [_color(box, plan.chunks) for box in drawn]
    edges = 'white' if has_numbers else 'none'
    axes.add_collection(
        PatchCollection(patches, facecolors=colors, edgecolors=edges, linewidths=0.5)
    )
    if has_numbers:
        for box in drawn:
            if box.microbatch != IDLE:
                place = box.start + box.width / 2, box.stage
                axes.text(*place, str(box.microbatch), ha='center', va='center', fontsize=6)
    end = max(box.start + box.width for box in drawn)
    axes.set(xlim=(0, end), ylim=(plan.stages - 0.4, -0.6), ylabel='stage')
    axes.set_yticks(range(plan.stages) if plan.stages <= 16 else range(0, plan.stages, 8))
    kinds = [('forward', True), ('backward', False)]
    handles = [
        Patch(
            color=_color(Box(0, 0.0, 0.0, 0, chunk, is_forward), plan.chunks),
            label=name + (f', chunk {chunk}' if plan.chunks > 1 else ''),
        )
        for name, is_forward in kinds
        for chunk in range(plan.chunks)
    ]
    handles.append(Patch(color=NOTHING, label='idle'))
    axes.legend(handles=handles, loc='lower left', bbox_to_anchor=(1.0, 0.0), fontsize=7)


def _color(box: Box, chunks: int) -> 'tuple[float, float, float, float] | str':
    from matplotlib import colormaps

    if box.microbatch == IDLE:
        return NOTHING
    shade = 0.3 + 0.35 * box.chunk / max(1, chunks - 1)
    return colormaps[FORWARD if box.is_forward else BACKWARD](shade)


def in_flight(plan: Schedule) -> np.ndarray:
    """Return the chunks in flight [tick, stage]: those whose backward pass is not yet done."""
    is_made, is_done = (table[:, :, 0] != IDLE for table in (plan.forward, plan.backward))
    made, done = (np.cumsum(x, axis=0) for x in (is_made, is_done))
    before = np.vstack([np.zeros_like(done[:1]), done[:-1]])  # the memory is free in the next tick
    return made - before


def _draw_slots(axes: 'Axes', plan: Schedule, lengths: list[tuple[float, float]]) -> None:
    edges = np.concatenate([[0.0], np.cumsum([first + second for first, second in lengths])])
    counts = in_flight(plan)
    for stage, style in ((0, 'solid'), (plan.stages - 1, 'dashed')):
        axes.stairs(counts[:, stage], edges, color='black', ls=style, label=f'stage {stage}')
    axes.set(ylim=(0, None), xlabel='time, in forward passes of a chunk', ylabel='in flight')
    axes.legend(loc='lower left', bbox_to_anchor=(1.0, 0.0), fontsize=7)
