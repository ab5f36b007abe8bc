"""The continuation of one prompt: its tokens, and the text that is certain so far."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from megajax.runtime.data import Tokenizer
from megajax.runtime.data.text.byte_tokens import UNFINISHED

End = Literal['eod', 'stop', 'length']


class Continuation:
    """Up to `limit` tokens after one prompt, added as they are generated.

    `ids` exclude the token of `ends` that ended the continuation, and end with the token that
    completes a stop. `end` is the reason for the end,
    None until then. `text` is the text of `ids` up to the first of `stops`. Until the end, it omits
    the part that later tokens may still change: an incomplete character, or the beginning of a
    stop.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer | None,
        *,
        limit: int,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
    ):
        self.ids: list[int] = []
        self.text = ''
        self.end: End | None = None
        self.region_tokens: np.ndarray | None = None
        self.limit = limit
        self._prompt, self._tokenizer = list(prompt), tokenizer
        self._ends, self._stops = ends, stops
        self._before = tokenizer.decode(self._prompt) if tokenizer else ''

    def add(self, ids: Sequence[int]) -> None:
        """Add the next tokens."""
        if self.end:
            return
        start = len(self.ids)
        end = next((i for i, token in enumerate(ids) if token in self._ends), None)
        self.ids += ids[:end]
        if end is not None:
            self.end = 'eod'
        elif len(self.ids) == self.limit:
            self.end = 'length'
        if self._tokenizer and self._has_stop(self._decoded(self._tokenizer, self.ids)):
            # The other tokens were generated in the same dispatch.
            self.ids = self._up_to_stop(self._tokenizer, start)

    def _decoded(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        # Decode with the prompt: some tokenizers drop a space at the start of decoded text.
        text, before = tokenizer.decode([*self._prompt, *ids]), self._before
        if not text.startswith(before):  # the prompt's last character is complete now
            before = before.rstrip(UNFINISHED)
        return text[len(before) :]

    def _up_to_stop(self, tokenizer: Tokenizer, start: int) -> list[int]:
        """Return the ids up to the token that completes a stop, which is not before `start`."""
        for count in range(start + 1, len(self.ids)):
            text = self._decoded(tokenizer, self.ids[:count])
            if any(stop in text for stop in self._stops):
                return self.ids[:count]
        return self.ids

    def _has_stop(self, text: str) -> bool:
        """Keep the text up to a stop, and return whether there is one."""
        if not self.end:
            text = text.rstrip(UNFINISHED)
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            text, self.end = text[: min(starts)], 'stop'
        elif not self.end:
            text = text[: len(text) - max((_begun(text, stop) for stop in self._stops), default=0)]
        self.text = text
        return bool(starts)


def _begun(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that begin `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
