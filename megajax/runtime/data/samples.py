"""Samples: windows over the tokens of a part, and concatenations of several datasets."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from megajax.runtime.data.text.parts import Part


class Samples(Protocol):
    """Numbered samples of S + 1 tokens: S tokens and the token after them."""

    def __len__(self) -> int: ...

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` [S + 1] with sample `index`.

        Returns the number of tokens, and the indices in `window` at which a document begins, except
        the first token.
        """
        ...


class Windows:
    """The windows of a part: sample i is its tokens i S to (i + 1) S + 1.

    Each token except the first is thus a label exactly once.
    """

    def __init__(self, part: Part, *, seq_len: int, find_documents: bool = True):
        self.part, self.seq_len, self.find_documents = part, seq_len, find_documents
        self._start, self._stop = part.start, part.stop

    def __len__(self) -> int:
        return -(-max(self._stop - self._start - 1, 0) // self.seq_len)

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` as `Samples.read` does; the last window may be short.

        Without `find_documents`, the places where documents begin are not looked up.
        """
        first = self._start + index * self.seq_len
        tokens = self.part.sequences.read(first, min(first + len(window), self._stop))
        window[: len(tokens)] = tokens
        if not self.find_documents:
            return len(tokens), []
        return len(tokens), [
            token - first
            for token in self.part.sequences.document_starts(first, first + len(tokens))
        ]


class Joined:
    """The samples of several datasets, numbered consecutively."""

    def __init__(self, datasets: Sequence[Samples]):
        self._datasets = datasets
        self.starts = list(accumulate((len(dataset) for dataset in datasets), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` as `Samples.read` does."""
        dataset = bisect_right(self.starts, index) - 1
        return self._datasets[dataset].read(index - self.starts[dataset], window)
