"""Divide the consecutive sequences of a corpus into training, validation and test parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from megajax.runtime.data.tokens.indexed import Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The sequences from `first` up to `last`."""

    sequences: Sequences
    first: int
    last: int

    @property
    def start(self) -> int:
        """The part's first token, counted over all sequences."""
        return self.sequences.start(self.first)

    @property
    def stop(self) -> int:
        """The token after the part's last one, counted over all sequences."""
        return self.sequences.start(self.last)

    @property
    def num_tokens(self) -> int:
        """The number of the part's tokens."""
        return self.stop - self.start

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the part's sequences in tokens, int32."""
        return self.sequences.lengths[self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first


def normalized(weights: Iterable[float]) -> list[float]:
    """Return the weights divided by their sum, with Megatron's rounding."""
    array = np.array(list(weights), np.float64)
    return (array / array.sum()).tolist()


def split_sequences(sequences: Sequences, split: str) -> list[Part]:
    """Split sequences into training, validation and test parts, by number, as Megatron does.

    Each bound is rounded to the nearest sequence.
    """
    bounds = [
        round(fraction * float(len(sequences)))
        for fraction in accumulate(normalized(map(float, split.split(','))), initial=0.0)
    ]
    return [Part(sequences=sequences, first=first, last=last) for first, last in pairwise(bounds)]
