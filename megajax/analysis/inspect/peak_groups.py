"""Sum the arrays in memory at the peak, by key."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from megajax.analysis.inspect.kernel_table import own_line
from megajax.analysis.inspect.memory_result import HeldArrays

Key = tuple[str, ...]


def grouped(
    at_peak: Iterable[HeldArrays], key: Callable[[HeldArrays], Key]
) -> dict[Key, list[HeldArrays]]:
    """Return the arrays grouped by key, the largest group first."""
    groups = defaultdict[Key, list[HeldArrays]](list)
    for arrays in at_peak:
        groups[key(arrays)].append(arrays)
    return dict(sorted(groups.items(), key=lambda item: -total_bytes(item[1])))


def total_bytes(arrays: Iterable[HeldArrays]) -> int:
    """Return the total bytes of some arrays."""
    return sum(each.bytes for each in arrays)


def by_source_line(arrays: HeldArrays) -> Key:
    """Return the use of some arrays, the part of the step and the line, or a parameter's name."""
    return arrays.use, arrays.site, own_line(arrays.source)


def by_file(arrays: HeldArrays) -> Key:
    """Return the same key with the file instead of the line."""
    *others, line = by_source_line(arrays)
    return *others, line.partition(':')[0]
