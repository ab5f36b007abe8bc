"""An executed step as lines of text."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from megajax.emulate.result import NOT_COVERED
from megajax.inspect.result import Compared, StepRun

SHOWN = 5


def run_lines(runs: Sequence[StepRun]) -> list[Text]:
    """The verdict and the worst results of each run of a step, what was made smaller for it and what it leaves out."""
    if not runs:
        return []
    shrunk = [Text(f'made smaller for it: {", ".join(runs[0].shrunk)}')] if runs[0].shrunk else []
    return [
        *(line for run in runs for line in _run(run)),
        *shrunk,
        Text(NOT_COVERED, style='dim'),
        Text(),
    ]


def _run(run: StepRun) -> Iterator[Text]:
    kind = 'everything of 16 bits in fp32' if run.exact else 'as it is'
    wrong = sum(not one.ok for one in run.results)
    verdict = (
        f'{wrong} of {len(run.results)} results are WRONG'
        if wrong
        else f'all {len(run.results)} results agree'
    )
    head = f'executed on simulated CPU devices, {kind}, beside one device: {verdict} ({run.seconds:.0f} s)'
    yield Text(head, style='bold red' if wrong else 'green')
    yield from map(_line, run.results[:SHOWN])
    if run.culprit:
        yield Text(f'right before, wrong after the pass {run.culprit}', style='bold red')
    if run.smallest:
        yield Text(f'the smallest config of the family that is wrong:\n{run.smallest}')


def _line(one: Compared) -> Text:
    text = f'  {one.error:.1e}  {one.name}  (limit {one.limit:.0e})'
    return Text(text, style='' if one.ok else 'bold red')
