"""Order samples on the fly: no index files, no memory, no state.

Samples are numbered consecutively over all datasets: dataset d has the numbers `starts[d]` up to
`starts[d + 1]`.
"""

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Any

import grain


def shuffled(starts: Sequence[int], weights: Sequence[float], seed: int) -> Sequence[int]:
    """Return an endless order that mixes datasets by weight, and reshuffles each in every epoch."""
    datasets = [
        grain.MapDataset.range(start, stop).shuffle(seed=_seed_of(seed, i)).repeat()
        for i, (start, stop) in enumerate(pairwise(starts))
    ]
    return _mix(datasets, weights)


def in_order(starts: Sequence[int], weights: Sequence[float]) -> Sequence[int]:
    """Return each number at most once: datasets mixed by weight, in order, until one ends."""
    pairs = [
        (grain.MapDataset.range(start, stop), weight)
        for (start, stop), weight in zip(pairwise(starts), weights, strict=True)
    ]
    filled = [pair for pair in pairs if len(pair[0])]
    return _mix(*zip(*filled, strict=True)) if filled else []


def repeated(weights: Sequence[float], samples: int) -> int:
    """Return how many of the first `samples` samples are read again by a run that resumes.

    This is for runs of earlier versions, in which grain rounded the weights by up to 1%.
    """
    scale = 100 / min(weights)
    rounded = [int(weight * scale) for weight in weights]
    old, new = _counts(samples, rounded), _counts(samples, _integers(weights))
    return sum(max(before - now, 0) for before, now in zip(old, new, strict=True))


class _Mixed(Sequence[int]):
    """The numbers of several datasets, mixed by weight, until one of the datasets ends."""

    def __init__(self, datasets: Sequence[grain.MapDataset], weights: Sequence[float]):
        self._datasets, self._weights = datasets, _integers(weights)
        total = sum(self._weights)
        lengths = (
            len(dataset) * total // weight
            for dataset, weight in zip(datasets, self._weights, strict=True)
        )
        self._length = min(sys.maxsize, *lengths)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: Any) -> Any:
        before = _counts(sample, self._weights)
        after = _counts(sample + 1, self._weights)
        dataset = next(i for i, count in enumerate(before) if count != after[i])
        return self._datasets[dataset][before[dataset]]


def _mix(datasets: Sequence[grain.MapDataset], weights: Sequence[float]) -> Sequence[int]:
    return datasets[0] if len(datasets) == 1 else _Mixed(datasets, weights)


def _counts(samples: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first samples come from each dataset.

    This is how `grain.MapDataset.mix` mixes, which however rounds the weights first.
    """
    counts, total = [], sum(weights)
    for weight in weights:
        rest = samples * (total - weight) // total
        counts.append(samples - rest)
        samples, total = rest, total - weight
    return counts


def _integers(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers with the proportions of the weights, as they are written."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    return [weight // math.gcd(*integers) for weight in integers]


def _seed_of(seed: int, dataset: int) -> int:
    # grain shuffles epoch e with seed + e: seeds far apart keep the epochs of two runs, and of two
    # datasets, different
    return int.from_bytes(sha256(f'{seed} {dataset}'.encode()).digest()[:4], 'little')
