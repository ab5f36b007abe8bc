"""Samples: windows over the tokens of a part, and several kinds of them in a row. S sequence."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from megajax.data.text.parts import Part


class Samples(Protocol):
    """Numbered samples of S tokens and the one after them."""

    def __len__(self) -> int: ...

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` [S + 1] with sample `index`: how many tokens there are, and where in it a document begins after the first."""
        ...


class Windows:
    """Sample i of a part is its tokens i S to (i + 1) S + 1, so that each token but the first is a label once."""

    def __init__(self, part: Part, *, seq_len: int, find_documents: bool = True):
        self.part, self.seq_len, self.find_documents = part, seq_len, find_documents
        self._start, self._stop = part.start, part.stop

    def __len__(self) -> int:
        return -(-max(self._stop - self._start - 1, 0) // self.seq_len)

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """As `Samples.read`; the last window may be short. Without `find_documents`, where documents begin is not looked up."""
        first = self._start + index * self.seq_len
        found = self.part.sequences.read(first, min(first + len(window), self._stop))
        window[: len(found)] = found
        if not self.find_documents:
            return len(found), []
        return len(found), [
            token - first
            for token in self.part.sequences.document_starts(first, first + len(found))
        ]


class Joined:
    """The samples of several datasets, numbered through."""

    def __init__(self, datasets: Sequence[Samples]):
        self._datasets = datasets
        self.starts = list(accumulate((len(dataset) for dataset in datasets), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """As `Samples.read`."""
        dataset = bisect_right(self.starts, index) - 1
        return self._datasets[dataset].read(index - self.starts[dataset], window)
