"""A part of a corpus, for training, validation or test: sequences in a row."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from megajax.data.indexed import Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The sequences from `first` up to `last`."""

    sequences: Sequences
    first: int
    last: int

    @property
    def start(self) -> int:
        """Its first token, counted in all sequences."""
        return self.sequences.start(self.first)

    @property
    def tokens(self) -> np.ndarray:
        """Its token ids, in a row."""
        return self.sequences.tokens[self.start : self.sequences.start(self.last)]

    @property
    def lengths(self) -> np.ndarray:
        """Its sequences' lengths, int32."""
        return self.sequences.lengths[self.first : self.last]

    def __len__(self) -> int:
        return self.last - self.first


def split_weights(split: str) -> list[float]:
    """The fractions of '949,50,1', normalised as Megatron does, for the same rounding."""
    weights = np.array([float(weight) for weight in split.split(',')])
    return (weights / weights.sum()).tolist()


def split_sequences(sequences: Sequences, split: str) -> list[Part]:
    """Training, validation and test parts, by sequence number as Megatron splits: each bound is rounded to the nearest sequence."""
    bounds = [round(fraction * float(len(sequences))) for fraction in accumulate(split_weights(split), initial=0.0)]
    return [Part(sequences=sequences, first=first, last=last) for first, last in pairwise(bounds)]
