"""All pairs of the features in the table of conflicts, allowed and rejected.

The table lists the pairs that are rejected for a reason of their own. Other rejected pairs follow
from these: for example, a window needs causal attention, and BERT's objective rejects causal
attention.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from megajax.core.config.conflicts import (
    BIDIRECTIONAL,
    CAUSAL,
    CONFLICTS,
    CROSS,
    CURRENT,
    DEEPSTACK,
    FEATURES,
    FP8,
    MASKED,
    NEXT,
    Conflict,
)

NEEDS = {CROSS: 'vision', DEEPSTACK: 'vision', CURRENT: FP8}
# Every config has exactly one feature of each group.
CHOICES = (MASKED, NEXT), (CAUSAL, BIDIRECTIONAL)


class Pair(NamedTuple):
    """Two features, and the conflicts that prevent their combination; () if it is allowed."""

    one: str
    other: str
    conflicts: tuple[Conflict, ...]


def pairs() -> list[Pair]:
    """Return every pair of features that set different keys and do not need each other."""
    return [
        Pair(one, other, _conflicts(one, other))
        for one, other in combinations(FEATURES, 2)
        if _key(one) != _key(other) and other != NEEDS.get(one) and one != NEEDS.get(other)
    ]


def _key(feature: str) -> str:
    return feature.partition('=')[0]


def _conflicts(one: str, other: str) -> tuple[Conflict, ...]:
    """Return the smallest set of conflicts of a config that has both features."""
    return min((_within(features) for features in _sets(one, other)), key=len)


def _sets(one: str, other: str) -> Iterator[set[str]]:
    """Yield each set of features that a config with both can have."""
    both = {one, other} | {NEEDS[x] for x in (one, other) if x in NEEDS}
    for chosen in product(*(tuple({*group} & both) or group for group in CHOICES)):
        yield both | {*chosen}


def _within(features: set[str]) -> tuple[Conflict, ...]:
    return tuple(pair for pair in CONFLICTS if {pair.one, pair.other} <= features)
