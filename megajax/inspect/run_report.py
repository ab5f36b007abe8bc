"""An executed step as lines of text."""

from rich.text import Text

from megajax.inspect.result import Compared, StepRun

SHOWN = 5
NOT_COVERED = 'not covered: the kernels themselves, the assignment of buffers, streams, the choices of an autotuner, TF32'


def run_lines(run: StepRun) -> list[Text]:
    """The verdict, the worst results and what was made smaller for it."""
    kind = 'everything of 16 bits in fp32' if run.exact else 'as it is'
    wrong = sum(not one.ok for one in run.results)
    verdict = f'{wrong} of {len(run.results)} results are WRONG' if wrong else f'all {len(run.results)} results agree'
    head = f'executed on simulated CPU devices, {kind}, beside one device: {verdict} ({run.seconds:.0f} s)'
    lines = [Text(head, style='bold red' if wrong else 'green')]
    if run.shrunk:
        lines.append(Text(f'made smaller for it: {", ".join(run.shrunk)}'))
    lines += [_line(one) for one in run.results[:SHOWN]]
    if run.culprit:
        lines.append(Text(f'right before, wrong after the pass {run.culprit}', style='bold red'))
    if run.smallest:
        lines.append(Text(f'the smallest config of the family that is wrong:\n{run.smallest}'))
    return [*lines, Text(NOT_COVERED, style='dim')]


def _line(one: Compared) -> Text:
    text = f'  {one.error:.1e}  {one.name}  (limit {one.limit:.0e})'
    return Text(text, style='' if one.ok else 'bold red')
