"""The papers' tables side by side with what is predicted, as text and as Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from megajax.plan.predictions import BASELINE, TABLES, Prediction, predict, source

COLUMNS = ('params', 'model x data', 'published', 'predicted', 'error', 'efficiencies', 'products', 'memory', 'model', 'data')


class Errors(NamedTuple):
    """Of the predicted over the published TFLOP/s, absolute."""

    mean: float
    largest: float
    rows: int


def errors(predictions: Sequence[Prediction]) -> Errors:
    """Of rows that the efficiencies were not fitted on."""
    found = [abs(one.error) for one in predictions if not one.row.fitted]
    return Errors(sum(found) / len(found), max(found), len(found))


def table_of(name: str) -> Table:
    """TFLOP/s of a GPU as published and as predicted, and the predicted shares of the step."""
    predictions = predict(name)
    table = Table(box=None, header_style='bold', pad_edge=False, title=source(name), title_justify='left')
    for column in COLUMNS:
        table.add_column(column, justify='left' if column in ('params', 'efficiencies') else 'right', no_wrap=True)
    for one in predictions:
        table.add_row(*_cells(name, one))
    mean, largest, rows = errors(predictions)
    table.caption = f'{rows} rows held out: mean error {mean:.1%}, largest {largest:.1%}'
    table.caption_justify = 'left'
    return table


def markdown(name: str) -> str:
    """The same for a document."""
    predictions = predict(name)
    lines = [f'{source(name)}.', '', '| ' + ' | '.join(COLUMNS) + ' |', '|' + '---|' * len(COLUMNS)]
    lines += ['| ' + ' | '.join(_cells(name, one)) + ' |' for one in predictions]
    mean, largest, rows = errors(predictions)
    return '\n'.join([*lines, '', f'{rows} rows held out: mean error {mean:.1%}, largest {largest:.1%}.'])


def _cells(name: str, one: Prediction) -> list[str]:
    mesh, time = one.row.config.mesh, one.time

    def rate(tflops: float) -> str:
        return f'{tflops:.1f} ({tflops / BASELINE:.0%})' if TABLES[name][1] == 'v100' else f'{tflops:.1f}'

    shares = (time.products / time.total, time.memory_bound / time.total, time.share('model'), time.share('data'))
    return [
        f'{one.row.params_b}B',
        f'{mesh.model} x {mesh.data}',
        rate(one.row.published),
        rate(one.tflops),
        f'{one.error:+.1%}',
        'fitted' if one.row.fitted else 'held out',
        *(f'{share:.1%}' for share in shares),
    ]
