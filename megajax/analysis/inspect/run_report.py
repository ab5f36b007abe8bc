"""Render the executions of a step as lines of the report."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from megajax.analysis.inspect.result import Compared, StepRun
from megajax.xla.emulate.result import NOT_COVERED, culprit_line

SHOWN = 5


def run_lines(runs: Sequence[StepRun]) -> list[Text]:
    """Return the verdict and the worst results of each execution.

    Two more lines list the sizes that were reduced for a CPU, and what the execution does not
    cover.
    """
    if not runs:
        return []
    sizes = ', '.join(runs[0].shrunk)
    shrunk = [Text(f'reduced so that a CPU can execute it: {sizes}')] if sizes else []
    return [
        *(line for run in runs for line in _run(run)),
        *shrunk,
        Text(NOT_COVERED, style='dim'),
        Text(),
    ]


def _run(run: StepRun) -> Iterator[Text]:
    wrong = sum(not result.ok for result in run.results)
    verdict = (
        f'{wrong} of {len(run.results)} results are WRONG'
        if wrong
        else f'all {len(run.results)} results agree'
    )
    head = f'executed on simulated CPU devices, {run.mode}, and compared with one device: {verdict}'
    yield Text(f'{head} ({run.seconds:.0f} s)', style='bold red' if wrong else 'green')
    yield from map(_line, run.results[:SHOWN])
    yield from (Text(f'  {each.name}: {each.note}') for each in run.results if each.note)
    if run.culprit:
        yield Text(culprit_line(run.culprit, 'compiler pass '), style='bold red')
    if run.smallest:
        yield Text(f'smallest wrong config of this family:\n{run.smallest}')


def _line(result: Compared) -> Text:
    text = f'  {result.error:.1e}  {result.name}  (limit {result.limit:.1e})'
    return Text(text, style='' if result.ok else 'bold red')
