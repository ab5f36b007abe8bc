"""The lines of a report on an executed step."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from megajax.analysis.inspect.result import Compared, StepRun
from megajax.xla.emulate.result import NOT_COVERED

SHOWN = 5


def run_lines(runs: Sequence[StepRun]) -> list[Text]:
    """The verdict and the worst results of each run of a step.

    Two more lines list the sizes that were reduced for a CPU, and what an execution does not cover.
    """
    if not runs:
        return []
    sizes = ', '.join(runs[0].shrunk)
    shrunk = [Text(f'made smaller so that a CPU can execute it: {sizes}')] if sizes else []
    return [
        *(line for run in runs for line in _run(run)),
        *shrunk,
        Text(NOT_COVERED, style='dim'),
        Text(),
    ]


def _run(run: StepRun) -> Iterator[Text]:
    kind = 'with fp32 in place of all 16-bit types' if run.exact else 'as compiled'
    wrong = sum(not result.ok for result in run.results)
    verdict = (
        f'{wrong} of {len(run.results)} results are WRONG'
        if wrong
        else f'all {len(run.results)} results agree'
    )
    head = f'executed on simulated CPU devices, {kind}, and compared with one device: {verdict}'
    yield Text(f'{head} ({run.seconds:.0f} s)', style='bold red' if wrong else 'green')
    yield from map(_line, run.results[:SHOWN])
    if run.culprit:
        yield Text(f'right before, wrong after the pass {run.culprit}', style='bold red')
    if run.smallest:
        yield Text(f'the smallest config of the family that is wrong:\n{run.smallest}')


def _line(result: Compared) -> Text:
    text = f'  {result.error:.1e}  {result.name}  (limit {result.limit:.1e})'
    return Text(text, style='' if result.ok else 'bold red')
