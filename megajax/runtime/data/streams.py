"""Read a corpus as streams of tokens, each from shares of its own, without reading it whole.

Sample n of L streams is window n // L of stream n % L. With as many streams as sequences in a
batch, each sequence has its own stream, so a process reads and tokenizes only the shares of its own
sequences, and batches do not depend on the mesh.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from threading import Lock
from typing import Any, NamedTuple, Self, SupportsInt

import numpy as np

from megajax.base.errors import mistake, problems_at
from megajax.runtime.data.batches import Batch, Batches
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.sources.shares import Shares
from megajax.runtime.data.text.tokenizer import Tokenizer, encode_documents

BLOCK = 1 << 17  # number of characters that are tokenized at once
BEHIND = 32  # number of windows that a stream keeps for threads that are behind others
# Maximum number of times that a stream reads as many shares as there are without finding text. If
# one share has text, a stream misses it in 1 of exp(16) corpora, as its shares are shuffled.
MOST_EPOCHS = 16
ENDLESS = range(1 << 62)


class Place(NamedTuple):
    """A position in a stream: a token, counted from the beginning of a document of a share."""

    share: int = 0  # counted over the shares of the stream
    document: int = 0  # counted from the beginning of the share
    token: int = 0


class Block(NamedTuple):
    """The tokens of consecutive documents of a share."""

    share: int
    document: int  # number of the first document in the share
    tokens: np.ndarray
    begins: np.ndarray  # the token with which each document begins


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """The documents of the shares `numbers`, in the order of `order`, which may be endless."""

    shares: Shares
    numbers: np.ndarray
    order: Sequence[int]
    tokenizer: Tokenizer

    def blocks(self, stream: int, streams: int, share: int, document: int) -> Iterator[Block]:
        """Yield the blocks of a stream from a document on.

        Raises ConfigError if a text cannot be read, or if many shares in a row have none.
        """
        empty = 0
        for place in count(share):
            index = stream + place * streams
            if index >= len(self.order):
                return
            number = int(self.numbers[self.order[index]])
            texts = islice(self.shares.texts(number), document, None)
            empty += 1
            while some := _some(texts):
                empty = 0
                with problems_at(self.shares.place(number)):
                    tokens, lengths = encode_documents(some, self.tokenizer)
                begins = np.cumsum(lengths, dtype=np.int64) - lengths
                yield Block(place, document, tokens, begins)
                document += len(some)
            document = 0
            if empty > MOST_EPOCHS * len(self.numbers):
                raise mistake(
                    'data.corpus', f'{self.shares.place(number)} and all before it have no text'
                )


def _some(texts: Iterator[str]) -> list[str]:
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= BLOCK:
            break
    return some


class Stream:
    """Windows of `seq_len` tokens and the token after them, in the order of a stream.

    `blocks(share, document)` yields the blocks of the stream from a document on. `window` is the
    number of the window that begins at `place`; the stream has no earlier ones. With `keep`, the
    tokens of earlier windows stay in memory.
    """

    def __init__(
        self,
        blocks: Callable[[int, int], Iterator[Block]],
        seq_len: int,
        *,
        window: int = 0,
        place: Place = Place(),  # noqa: B008 (immutable)
        keep: bool = False,
    ) -> None:
        self._blocks, self._seq_len, self._keep = blocks, seq_len, keep
        self._lock = Lock()
        begin = window * seq_len
        # The first token, the share and the document of each block that was read; tokens are
        # counted from window 0.
        self._known = [(begin - place.token, place.share, place.document)]
        self._loaded = deque[tuple[int, Block]]()  # blocks in memory, and their first tokens
        self._next: Iterator[Block] = iter(())  # the blocks after those in memory
        self._end = 0  # the token after the last one in memory
        self._reached = begin  # the token after the last one that was read

    def read(self, window: int, row: np.ndarray) -> tuple[int, list[int]]:
        """Fill `row` [S + 1] with a window, as `Samples.read` does.

        At the end of the stream, the number of tokens is smaller than S + 1.
        """
        first, last = window * self._seq_len, window * self._seq_len + len(row)
        begins: list[int] = []
        with self._lock:
            self._load(first, last)
            for start, block in self._loaded:
                low, high = max(first, start), min(last, start + len(block.tokens))
                if low < high:
                    row[low - first : high - first] = block.tokens[low - start : high - start]
                    inside = slice(*np.searchsorted(block.begins, (low - start, high - start)))
                    begins += (block.begins[inside] + (start - first)).tolist()
            return max(min(last, self._end) - first, 0), [begin for begin in begins if begin]

    def place(self, window: int) -> Place | None:
        """Return the place at which a window begins, or None if it was not reached."""
        token = window * self._seq_len
        with self._lock:
            if not self._known[0][0] <= token <= self._reached:
                return None
            start, share, document = self._block_at(token)
            return Place(share, document, token - start)

    def _block_at(self, token: int) -> tuple[int, int, int]:
        if token < self._known[0][0]:
            raise IndexError(f'token {token} is before the first, {self._known[0][0]}')
        return self._known[bisect_right(self._known, token, key=lambda known: known[0]) - 1]

    def _load(self, first: int, last: int) -> None:
        """Read blocks up to token `last`, and drop those well before token `first`."""
        if not self._loaded or first < self._loaded[0][0]:
            self._loaded.clear()
            self._end, share, document = self._block_at(first)
            self._next = self._blocks(share, document)
        while self._end < last:
            try:
                block = next(self._next, None)
            except BaseException:  # so that the next read does not take the error for the end
                self._loaded.clear()
                raise
            if block is None:
                break
            if self._end > self._known[-1][0]:
                self._known.append((self._end, block.share, block.document))
            self._loaded.append((self._end, block))
            self._end += len(block.tokens)
            self._reached = max(self._reached, self._end)
        while (
            not self._keep
            and len(self._loaded) > 1
            and self._loaded[1][0] <= first - (BEHIND * self._seq_len)
        ):
            self._loaded.popleft()


class StreamSamples:
    """The windows of several streams in turn; how many there are is known only at the end."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = streams

    def __len__(self) -> int:
        return len(self.streams)

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` as `Samples.read` does."""
        turn, stream = divmod(index, len(self.streams))
        return self.streams[stream].read(turn, window)

    def places(self, sample: int) -> list[Place | None]:
        """Return where each stream continues after `sample` samples; None if it is not known."""
        return [
            stream.place(_windows_before(sample, number, len(self.streams)))
            for number, stream in enumerate(self.streams)
        ]


def _windows_before(sample: int, stream: int, streams: int) -> int:
    return -(-(sample - stream) // streams)


class StreamedBatches(Batches):
    """Batches of the windows of streams; a checkpoint also records the place of each stream."""

    def __init__(
        self,
        documents: Documents,
        *,
        streams: int,
        steps: int | None = None,
        shape: RowShape | None = None,
        **settings: Any,
    ) -> None:
        """Make batches of `streams` streams: endless ones, or of so many steps.

        `shape` is for a vision-language model; `settings` are the keywords of `Batches`.
        """
        self._documents, self._keep, self._shape = documents, steps is not None, shape
        order = ENDLESS if steps is None else range(steps * settings['batch_size'])
        super().__init__(StreamSamples([]), order, **settings)
        self._open([Place()] * streams, samples=0)

    def _open(self, places: Sequence[Place], *, samples: int) -> None:
        """Open streams whose windows after the first `samples` samples begin at these places."""
        self._samples = StreamSamples(
            [
                Stream(
                    partial(self._documents.blocks, number, len(places)),
                    self._seq_len,
                    window=_windows_before(samples, number, len(places)),
                    place=place,
                    keep=self._keep,
                )
                for number, place in enumerate(places)
            ]
        )

    def _rows(self, places: range, count: int) -> Batch:
        batch = super()._rows(places, count)
        return batch if self._shape is None else self._shape.with_empty_slots(batch)

    def continued(self, step: int, samples: int, places: Sequence[Place]) -> Self:
        """Return `going_on(step, samples)`, with streams that continue at these places."""
        batches = self.going_on(step, samples)
        batches._open(places, samples=samples)
        return batches

    def place(self, step: SupportsInt) -> dict[str, Any]:
        """Return the position before the batch of `step`, as a checkpoint records it.

        `streams` has the places of the streams that this process has read, and None for others.
        """
        place = super().place(step)
        assert isinstance(self._samples, StreamSamples)
        return {**place, 'streams': self._samples.places(self.samples_before(int(step)))}
