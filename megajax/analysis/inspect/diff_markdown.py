"""The difference of two inspections as GitHub-flavored Markdown, for a pull request."""

from collections.abc import Iterator, Sequence

from megajax.analysis.inspect.diff import LEAST, ChangedRow, Difference
from megajax.analysis.inspect.diff_report import NOT_MEASURED, cells
from megajax.analysis.inspect.report import transfers_cell
from megajax.base.render.units import count, si

MOST = 12  # rows and findings that are not folded


def to_markdown(found: Difference) -> str:
    """Return the verdict on one line, then a table for each kind of number that differs.

    The tables list only what differs, the largest change of bytes first. If nothing differs, there
    is only the verdict.
    """
    return '\n\n'.join([_verdict(found), *_blocks(found)]) + '\n'


def _verdict(found: Difference) -> str:
    sent = found.sent
    verdict = 'Same' if not sent.is_change else 'More' if sent.after > sent.before else 'Fewer'
    line = f'**{verdict} bytes**: {si(sent.after)} sent per step and device'
    if sent.is_change:
        change = sent.after - sent.before
        line += f', base {si(sent.before)} ({"-" if change < 0 else "+"}{si(abs(change))}'
        line += ')' if sent.text in ('+0.0%', '-0.0%') else f', {sent.text})'
    changed = [
        f'{change.name} {change.text}'
        for change in found.totals
        if change.is_change and change.name in ('memory', 'matmul work')
    ]
    for word, findings in (('new', found.new), ('resolved', found.gone)):
        errors = sum(finding.level == 'error' for finding in findings)
        changed += [count(errors, f'{word} error')] if errors else []
    is_same = not sent.is_change and not changed and not [*_blocks(found)]
    return '; '.join([line, *(['nothing else differs'] if is_same else changed)]) + '.'


def _blocks(found: Difference) -> Iterator[str]:
    """Yield the paragraphs and tables after the verdict."""
    if found.keys:
        keys = (f'`{key}` {_code(old)} → {_code(new)}' for key, old, new in found.keys)
        yield f'Config: {", ".join(keys)}'
    rows = [_row(row) for row in found.rows]
    if rows:
        yield _collectives(rows)
    totals = [cells(change) for change in found.totals if change.is_change]
    if totals:
        yield _table(('per step and device', 'base', 'head', 'change'), totals)
    findings = [
        f'- {word} {finding.level}: {_escaped(f"{finding.rule}: {finding.message}")}'
        for word, findings in (('new', found.new), ('resolved', found.gone))
        for finding in findings
    ]
    if findings:
        yield '\n'.join(findings)
    yield from found.not_compared
    yield from _details(found)


def _details(found: Difference) -> Iterator[str]:
    """Yield folded tables of kernels and of the arrays in memory."""
    times = [cells(change) for change in found.parts if change.unit == 'ms']
    uses = [cells(change) for change in found.memory if change.is_change]
    arrays = [cells(change) for change in found.arrays]
    columns = 'base', 'head', 'change'
    if times:
        title = f'kernels and hidden communication that differ by more than {LEAST:.1%}'
        yield _details_of(title, _table(('per step and device', *columns), times), NOT_MEASURED)
    if uses or arrays:
        title = f'arrays at the peak that differ by more than {LEAST:.1%}'
        yield _details_of(
            'memory at its peak',
            _table(('use', *columns), uses) if uses else '',
            f'{title}:\n\n{_table(("arrays", *columns), arrays)}' if arrays else '',
        )


def _row(row: ChangedRow) -> tuple[str, ...]:
    change = row.bytes
    sizes = f'{si(change.before)} → {si(change.after)}' if change.is_change else si(change.after)
    ratio = f'{change.after / change.before:.3f}' if change.before else 'new'
    ratio = (ratio if row.after else 'gone') + ', MORE than Megatron' * row.is_more
    arrays = transfers_cell(row.before), transfers_cell(row.after)
    return row.site, row.phase, row.axis or '-', *arrays, sizes, ratio


def _collectives(rows: list[tuple[str, ...]]) -> str:
    """Return a table of the first rows, and the rest folded below it."""
    names = 'site', 'phase', 'axis', 'base', 'head', 'bytes', 'ratio'
    table = _table(names, rows[:MOST], num_left=5)
    if len(rows) <= MOST:
        return table
    rest = _table(names, rows[MOST:], num_left=5)
    return f'{table}\n\n{_details_of(f"{len(rows) - MOST} more collectives", rest)}'


def _details_of(summary: str, *blocks: str) -> str:
    body = '\n\n'.join(block for block in blocks if block)
    return f'<details><summary>{summary}</summary>\n\n{body}\n\n</details>'


def _table(names: Sequence[str], rows: list[tuple[str, ...]], *, num_left: int = 1) -> str:
    ruler = '|'.join('---' if index < num_left else '---:' for index in range(len(names)))
    lines = [f'| {" | ".join(_cell(cell) for cell in cells)} |' for cells in (names, *rows)]
    return '\n'.join([lines[0], f'|{ruler}|', *lines[1:]])


def _cell(text: str) -> str:
    return '<br>'.join(map(_escaped, text.splitlines()))


def _escaped(text: str) -> str:
    """Return text that GitHub shows as it is: no cells, tags, mentions or links to issues."""
    for old, new in (('|', '\\|'), ('<', '&lt;'), ('*', '\\*'), ('\n', ' ')):
        text = text.replace(old, new)
    return text.replace('@', '@&#8203;').replace('#', '#&#8203;')


def _code(value: str) -> str:
    return f'`{value}`'
