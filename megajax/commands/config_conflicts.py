"""`megajax config conflicts`: the settings that cannot be combined, for a terminal or the docs."""

import re
from collections.abc import Iterable
from typing import Annotated

import typer

from megajax.core.config.conflicts import CONFLICTS, FEATURES
from megajax.core.config.pairs import Pair, pairs

_HEAD = """\
# Incompatible settings

Which features run together. `megajax config conflicts` prints the rejected pairs on a terminal.
A combination is rejected before anything compiles, and the message names what to use instead.
Constraints between sizes, such as `model.ffn_size` and `mesh.model`, are not listed here, and
neither are combinations of three features. A key without a value means any value but its default:
`data.order`, for example, means `megatron` or `streamed`.
"""
# a key, or a key or section and its value
_KEY = re.compile(r'\b[a-z]+\.[a-z0-9_]+(=[\w.\[\]]+)?|\b[a-z]+=null')


def conflicts(
    markdown: Annotated[
        bool, typer.Option('--markdown', help='Print all pairs as the page docs/conflicts.md.')
    ] = False,
) -> None:
    """List the settings that cannot be combined.

    For each pair, it gives the reason and says what to use instead.
    """
    if markdown:
        print(_page(pairs()), end='')
        return
    for pair in CONFLICTS:
        print(f'{pair.one} with {pair.other}: {pair.reason}; {pair.instead}')


def _page(found: list[Pair]) -> str:
    allowed = [pair for pair in found if not pair.conflicts]
    follow = len(found) - len(allowed) - len(CONFLICTS)
    counts = (
        f'Of {len(found)} pairs of {len(FEATURES)} features, {len(allowed)} are allowed and '
        f'{len(CONFLICTS)} are rejected for the reasons below.\n'
        f'The other {follow} follow from these: a feature also has the conflicts of the features '
        'that it needs.\nFor example, `vision.deepstack` needs `vision`.'
    )
    return '\n'.join([_HEAD, counts, '', *_rejected(), '', *_allowed(allowed), ''])


def _rejected() -> list[str]:
    rows = [
        f'| `{pair.one}` | `{pair.other}` | {_coded(pair.reason)} | {_coded(pair.instead)} |'
        for pair in CONFLICTS
    ]
    return ['## Rejected', '', '| feature | with | reason | instead |', '|---|---|---|---|', *rows]


def _coded(text: str) -> str:
    """Return the text with its keys as code."""
    return _KEY.sub(r'`\g<0>`', text)


def _allowed(found: list[Pair]) -> list[str]:
    rows = [
        f'| `{feature}` | {", ".join(f"`{x}`" for x in _others(feature, found))} |'
        for feature in FEATURES
    ]
    return ['## Allowed', '', '| feature | with |', '|---|---|', *rows]


def _others(feature: str, found: Iterable[Pair]) -> list[str]:
    """Return the other feature of each pair that contains this feature."""
    return [
        pair.other if feature == pair.one else pair.one
        for pair in found
        if feature in (pair.one, pair.other)
    ]
