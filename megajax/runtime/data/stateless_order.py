"""Order samples on the fly: no index files, no memory, no state.

Samples are numbered consecutively over all datasets: dataset d has the numbers `starts[d]` up to
`starts[d + 1]`.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

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


def _mix(datasets: Sequence[grain.MapDataset], weights: Sequence[float]) -> Sequence[int]:
    return datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, weights)


def _seed_of(seed: int, dataset: int) -> int:
    # grain shuffles epoch e with seed + e: seeds far apart keep the epochs of two runs, and of two
    # datasets, different
    return int.from_bytes(sha256(f'{seed} {dataset}'.encode()).digest()[:4], 'little')
