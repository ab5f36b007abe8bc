"""The tables of `megajax inspect --memory`."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from megajax.analysis.inspect.memory_result import HeldArrays, Memory
from megajax.analysis.inspect.peak_groups import Key, by_source_line, grouped, total_bytes
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.render.units import si

LARGEST = 20  # groups of arrays that are listed one by one
LEAST = 5e-4  # share of the memory: smaller uses share one row


def memory_tables(memory: Memory) -> RenderableType:
    """Return tables of the memory at the peak: by use, and the largest arrays by source line."""
    by_use = grouped(memory.at_peak, lambda arrays: (arrays.use,))
    uses = open_table(
        *text_columns('use'),
        *number_columns('bytes', 'share'),
        title='memory per device at its peak',
    )
    for key, size in _shown(by_use, memory):
        uses.add_row(*key, *_numbers(size, memory))
    by_line = grouped(memory.at_peak, by_source_line)
    largest = [(key, arrays) for key, arrays in by_line.items() if key[-1] != '-'][:LARGEST]
    lines = open_table(
        *text_columns('use', 'site', 'line', 'arrays'),
        *number_columns('bytes', 'share'),
        title=f'the {len(largest)} source lines with the largest arrays',
    )
    for key, arrays in largest:
        lines.add_row(*key, _arrays(arrays), *_numbers(total_bytes(arrays), memory))
    for table, empty in ((uses, 0), (lines, 3)):
        table.add_row('total', *[''] * empty, *_numbers(memory.needed, memory), style='bold')
    return Group(Folded(uses), '', Folded(lines))


def _shown(groups: Mapping[Key, list[HeldArrays]], memory: Memory) -> Iterator[tuple[Key, int]]:
    """Yield the bytes of each group, then the sum of all groups below LEAST of the memory."""
    sizes = {key: total_bytes(arrays) for key, arrays in groups.items()}
    yield from ((key, size) for key, size in sizes.items() if size >= LEAST * memory.needed)
    if rest := sum(size for size in sizes.values() if size < LEAST * memory.needed):
        yield ('other',), rest


def _numbers(size: int, memory: Memory) -> list[str]:
    return [si(size), f'{size / memory.needed:.1%}']


def _arrays(arrays: Sequence[HeldArrays]) -> str:
    """Return the largest of some arrays, and how many more there are."""
    first, others = arrays[0], sum(each.count for each in arrays[1:])
    return f'{first.count} {first.array}' + (f' and {others} more' if others else '')
