"""Render a comparison as text for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.compare.difference import Comparison, Site
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.render.units import count

MAX_WEIGHTS = 3  # names shown of weights that differ
SAME = 'bit-identical'


def to_text(comparison: Comparison, *, every: bool = False) -> RenderableType:
    """Return the report for a rich console.

    A layer takes one row, unless it has the first difference or `every` is set.
    """
    parts: list[RenderableType] = [
        Text(f'{letter}  {side.source}, executed with {side.executed_with} on {side.platform}')
        for letter, side in (('A', comparison.a), ('B', comparison.b))
    ]
    if comparison.keys:
        parts += [Text(), Folded(_keys(comparison))]
    parts += [Text(), Folded(_sites(comparison, every=every)), Text()]
    if comparison.merged:
        parts += [Text(f'adapters: merged into the weights of {" and ".join(comparison.merged)}')]
    return Group(*parts, Text(f'weights: {_weights(comparison)}'), Text(verdict(comparison)))


def verdict(comparison: Comparison) -> str:
    """Return a line that names the first difference, or how close the two are."""
    first, sites = comparison.first, comparison.sites
    if first is not None:
        size = first.note or f'{first.error:.1e} (limit {first.limit:.0e})'
        return f'first difference: {_title(first)}, {size}{_not_finite(sites)}'
    if comparison.same_bits:
        return f'{SAME}: all {len(sites)} sites{_not_finite(sites)}'
    worst = max(sites, key=lambda site: site.error / site.limit if site.limit else site.error)
    same = sum(site.same_bits for site in sites)
    return (
        f'equal within {worst.limit:.0e}: the largest difference is {worst.error:.1e}, '
        f'{_title(worst)}; {same} of {len(sites)} sites {SAME}{_not_finite(sites)}'
    )


def _not_finite(sites: Sequence[Site]) -> str:
    """Return which sites prove little, because both sides have NaN or infinities there."""
    found = [site for site in sites if site.both_not_finite]
    if not found:
        return ''
    more = f' and {count(len(found) - 1, "more site")}' if len(found) > 1 else ''
    return f', but numbers of {_title(found[0])}{more} are NaN or infinite on both sides'


def _title(site: Site) -> str:
    return f'{site.name} forward' if site.phase == 'forward' else f'gradient of {site.name}'


def _weights(comparison: Comparison) -> str:
    different = comparison.different_weights
    if not different:
        return f'all {comparison.weights} {SAME}'
    shown = ', '.join(different[:MAX_WEIGHTS])
    more = f' and {len(different) - MAX_WEIGHTS} more' if len(different) > MAX_WEIGHTS else ''
    return f'{len(different)} of {comparison.weights} differ: {shown}{more}'


def _keys(comparison: Comparison) -> Table:
    table = open_table('differs in', 'A', 'B')
    for row in comparison.keys:
        table.add_row(*map(Text, row))
    return table


def _sites(comparison: Comparison, *, every: bool) -> Table:
    table = open_table(
        'site', *number_columns('difference'), *text_columns('at'), *number_columns('A', 'B')
    )
    for name, site in _rows(comparison, every=every):
        is_first = site is comparison.first
        table.add_row(
            *_cells(name, site), style='' if site.ok else 'bold' if is_first else 'yellow'
        )
    return table


def _cells(name: str, site: Site) -> tuple[Text, ...]:
    if site.note:
        return tuple(map(Text, (name, site.note, '', '', '')))
    place = ', '.join(map(str, site.place))
    size = SAME if site.same_bits else f'{site.error:.1e}' + ('' if site.ok else ' !')
    values = ('', '') if site.same_bits else (f'{site.a:.7g}', f'{site.b:.7g}')
    return tuple(
        map(Text, (name, size, '' if site.same_bits or not place else f'[{place}]', *values))
    )


def _rows(comparison: Comparison, *, every: bool) -> Iterator[tuple[str, Site]]:
    """Yield a name and a site for each row; a layer's row shows its worst site."""
    for (phase, layer), group in groupby(comparison.sites, key=_layer):
        sites = list(group)
        has_first = any(site is comparison.first for site in sites)
        before = '' if phase == 'forward' else 'gradient of '
        if every or has_first or not layer:
            yield from ((f'{before}{site.name}', site) for site in sites)
        else:
            yield f'{before}{layer} ({len(sites)} sites)', _worst(sites)


def _worst(sites: list[Site]) -> Site:
    return max(sites, key=lambda site: (not site.same_bits, site.error))


def _layer(site: Site) -> tuple[str, str]:
    names = site.name.split('.')
    return site.phase, '.'.join(names[:2]) if names[0] == 'layers' else ''
