"""Published rates side by side with what is predicted, as text and as Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from megajax.plan.predictions import TABLES, Prediction, predict, source

COLUMNS = (
    'model',
    'GPUs',
    'model x data',
    'published',
    'predicted',
    'error',
    'efficiencies',
    'products',
    'memory',
    'model',
    'data',
)


class Errors(NamedTuple):
    """Of the predicted over the published TFLOP/s, absolute."""

    mean: float
    largest: float
    rows: int

    def __str__(self) -> str:
        return f'mean error {self.mean:.1%}, largest {self.largest:.1%}'


def errors(predictions: Sequence[Prediction], *, held_out: bool = True) -> Errors | None:
    """Of the rows that are held out, or of those that the efficiencies are fitted on; None without any."""
    found = [abs(one.error) for one in predictions if one.row.held_out == held_out]
    return Errors(sum(found) / len(found), max(found), len(found)) if found else None


def table_of(name: str) -> Table:
    """TFLOP/s of a GPU as published and as predicted, and the predicted shares of the step."""
    predictions = predict(name)
    table = Table(
        box=None, header_style='bold', pad_edge=False, title=source(name), title_justify='left'
    )
    for column in COLUMNS:
        table.add_column(
            column, justify='left' if column in ('model', 'efficiencies') else 'right', no_wrap=True
        )
    for one in predictions:
        table.add_row(*_cells(one))
    table.caption = _caption(predictions)
    table.caption_justify = 'left'
    return table


def summary() -> Table:
    """How well every table is predicted."""
    table = Table(
        box=None,
        header_style='bold',
        pad_edge=False,
        title='TFLOP/s of a GPU, predicted over published',
        title_justify='left',
    )
    for column in ('table', 'GPU', 'rows', 'held out: mean', 'largest', 'fitted: mean', 'largest'):
        table.add_column(
            column, justify='left' if column in ('table', 'GPU') else 'right', no_wrap=True
        )
    for cells in summary_rows():
        table.add_row(*cells)
    return table


def summary_rows() -> list[list[str]]:
    """Of the summary, cell by cell; the last row has the rows of all tables."""
    everything = {name: predict(name) for name in TABLES}
    lines = [[name, _gpus(found), *_both(found)] for name, found in everything.items()]
    return [*lines, ['all', '', *_both([one for found in everything.values() for one in found])]]


def markdown(name: str) -> str:
    """A table for a document."""
    predictions = predict(name)
    lines = [f'{source(name)}.', '', '| ' + ' | '.join(COLUMNS) + ' |', '|' + '---|' * len(COLUMNS)]
    lines += ['| ' + ' | '.join(_cells(one)) + ' |' for one in predictions]
    return '\n'.join([*lines, '', f'{_caption(predictions)}.'])


def _both(predictions: Sequence[Prediction]) -> list[str]:
    cells = [str(len(predictions))]
    for held_out in (True, False):
        found = errors(predictions, held_out=held_out)
        cells += [f'{found.mean:.1%}', f'{found.largest:.1%}'] if found else ['-', '-']
    return cells


def _gpus(predictions: Sequence[Prediction]) -> str:
    return ', '.join(dict.fromkeys(one.row.gpu for one in predictions))


def _caption(predictions: Sequence[Prediction]) -> str:
    parts = []
    for held_out, what in ((True, 'held out'), (False, 'fitted')):
        if found := errors(predictions, held_out=held_out):
            parts.append(f'{found.rows} rows {what}: {found}')
    return '; '.join(parts)


def _cells(one: Prediction) -> list[str]:
    mesh, time = one.row.config.mesh, one.time
    shares = (
        time.products / time.total,
        time.memory_bound / time.total,
        time.share('model'),
        time.share('data'),
    )
    return [
        one.row.name,
        f'{one.row.num_gpus} {one.row.gpu}',
        f'{mesh.model} x {mesh.data}',
        f'{one.row.published:.1f}',
        f'{one.tflops:.1f}',
        f'{one.error:+.1%}',
        'held out' if one.row.held_out else 'fitted',
        *(f'{share:.1%}' for share in shares),
    ]
