"""Compare published and predicted throughputs, as text and as Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from megajax.analysis.plan.published.predictions import Prediction, predict
from megajax.analysis.plan.published.tables import OF_2026, TABLES, source
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.units import count
from megajax.core.config import Config

COLUMNS = (
    'model',
    'GPUs',
    'model x data',
    'published',
    'predicted',
    'error',
    'efficiencies',
    'matmul',
    'memory-bound',
    'exposed model',
    'exposed data',
)


class Errors(NamedTuple):
    """Absolute relative errors of predicted TFLOP/s against published ones."""

    mean: float
    largest: float
    rows: int  # number of rows compared

    def __str__(self) -> str:
        return f'mean error {self.mean:.1%}, maximum {self.largest:.1%}'


def errors(predictions: Sequence[Prediction], *, held_out: bool = True) -> Errors | None:
    """Return the errors on the rows that are held out, or that calibration used.

    Return None if there are no such rows.
    """
    relative = [
        abs(prediction.error) for prediction in predictions if prediction.row.held_out == held_out
    ]
    if not relative:
        return None
    return Errors(sum(relative) / len(relative), max(relative), len(relative))


def table_of(name: str) -> Table:
    """Return a table of published and predicted TFLOP/s per GPU, with shares of the step."""
    predictions = predict(name)
    table = open_table(title=source(name))
    for column in COLUMNS:
        table.add_column(
            column, justify='left' if column in ('model', 'efficiencies') else 'right', no_wrap=True
        )
    for prediction in predictions:
        table.add_row(*_cells(prediction))
    table.caption = _caption(predictions)
    table.caption_justify = 'left'
    return table


def summary() -> Table:
    """Return a table that shows how well each published table is predicted."""
    table = open_table(
        *text_columns('table', 'GPU'),
        *number_columns('rows', 'held out: mean', 'max', 'fitted: mean', 'max'),
        title='error of the predicted TFLOP/s per GPU',
    )
    for cells in summary_rows():
        table.add_row(*cells)
    return table


def summary_rows() -> list[list[str]]:
    """Return the cells of the summary, row by row.

    The last rows cover the tables that were published before 2026, and all tables.
    """
    tables = {name: predict(name) for name in TABLES}
    lines = [
        [name, _gpus(predictions), *_both(predictions)] for name, predictions in tables.items()
    ]
    for label, excluded in (('before 2026', OF_2026), ('all', ())):
        chosen = [one for name in TABLES if name not in excluded for one in tables[name]]
        lines.append([label, '', *_both(chosen)])
    return lines


def markdown(name: str) -> str:
    """Return a table as Markdown, with its source and its errors."""
    predictions = predict(name)
    lines = [f'{source(name)}.', '', '| ' + ' | '.join(COLUMNS) + ' |', '|' + '---|' * len(COLUMNS)]
    lines += ['| ' + ' | '.join(_cells(prediction)) + ' |' for prediction in predictions]
    return '\n'.join([*lines, '', f'{_caption(predictions)}.'])


def _both(predictions: Sequence[Prediction]) -> list[str]:
    cells = [str(len(predictions))]
    for held_out in (True, False):
        error = errors(predictions, held_out=held_out)
        cells += [f'{error.mean:.1%}', f'{error.largest:.1%}'] if error else ['-', '-']
    return cells


def _gpus(predictions: Sequence[Prediction]) -> str:
    return ', '.join(dict.fromkeys(prediction.row.gpu for prediction in predictions))


def _caption(predictions: Sequence[Prediction]) -> str:
    parts = []
    for held_out, what in ((True, 'held out'), (False, 'fitted')):
        if error := errors(predictions, held_out=held_out):
            parts.append(f'{count(error.rows, "row")} {what}: {error}')
    return '; '.join(parts)


def _mesh(config: Config) -> str:
    """Return model x data; with a pipeline also stages x virtual stages and the microbatch size."""
    mesh = config.mesh
    group = f'{mesh.model} x {mesh.data}'
    if mesh.stages == 1:
        return group
    return f'{group} x {mesh.stages}x{mesh.virtual_stages}, microbatch {config.microbatch_rows}'


def _cells(prediction: Prediction) -> list[str]:
    row, time = prediction.row, prediction.time
    shares = (
        time.products / time.total,
        time.memory_bound / time.total,
        time.share('model'),
        time.share('data'),
    )
    return [
        row.name,
        f'{row.num_gpus} {row.gpu}',
        _mesh(row.config),
        f'{row.published:.1f}',
        f'{prediction.tflops:.1f}',
        f'{prediction.error:+.1%}',
        'held out' if row.held_out else 'fitted',
        *(f'{share:.1%}' for share in shares),
    ]
