"""Make BERT's batches: pairs of segments of one document, half of them swapped, with masks."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from megajax.core.config import mistake
from megajax.runtime.data.batches import Batch, Batches, Order
from megajax.runtime.data.samples import Samples
from megajax.runtime.data.text.parts import Part
from megajax.runtime.data.text.tokenizer import Tokenizer

CLS, SEP, MASK, PAD = SPECIAL = '[CLS]', '[SEP]', '[MASK]', '[PAD]'
NUM_SPECIAL = 3  # special tokens in a sequence: [CLS] first [SEP] second [SEP]
MASKED = 0.15  # fraction of a sequence's tokens to mask, as in BERT (Devlin et al., 2019)
# of these, the fractions that become [MASK] and any token; the rest stay unchanged
AS_MASK, AS_ANY = 0.8, 0.1
SHORTEST = 4  # minimum number of tokens of a document; shorter documents are skipped


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The ids of the special tokens, and of all other tokens."""

    cls: int
    sep: int
    mask: int
    pad: int
    others: np.ndarray  # ids from which a random replacement of a masked token is drawn

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the vocabulary of a tokenizer that has the special tokens `SPECIAL`."""
        ids = {
            name.strip('[]').lower(): i
            for name in SPECIAL
            if (i := tokenizer.token_id(name)) is not None
        }
        return cls(**ids, others=np.flatnonzero(tokenizer.token_bytes))


class DocumentPieces:
    """Samples of one document each, of at most `length` tokens.

    Longer documents are cut into equal pieces. A cut moves back to the start of a sentence (a
    sequence of the document) if one starts less than half a piece before the cut; tokens in excess
    of `length` are then dropped. `eod` is dropped, too, because it would reveal which segment came
    last.
    """

    def __init__(self, part: Part, *, length: int, eod: int):
        self._sequences, self._eod = part.sequences, eod
        self._bounds = _document_bounds(part)
        tokens = np.diff(self._bounds)
        pieces = np.where(tokens < SHORTEST, 0, -(-tokens // length))
        # number of each document's first piece
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` with sample `index`.

        Returns the number of tokens, and the indices in `window` at which a sentence begins, except
        the first token.
        """
        document = int(np.searchsorted(self._first, index, side='right')) - 1
        number = index - int(self._first[document])
        start, stop = self._cut(document, number), self._cut(document, number + 1)
        tokens = self._sequences.read(start, min(stop, start + len(window)))
        if tokens[-1] == self._eod:
            tokens = tokens[:-1]
        window[: len(tokens)] = tokens
        return len(tokens), [
            token - start for token in self._sequences.sequence_starts(start, start + len(tokens))
        ]

    def _cut(self, document: int, number: int) -> int:
        """Return the token with which piece `number` of a document begins."""
        start, stop = (int(bound) for bound in self._bounds[document : document + 2])
        count = int(self._first[document + 1] - self._first[document])
        cut = start + (stop - start) * number // count
        if number in (0, count):
            return cut
        pointers, size = self._sequences.pointers, self._sequences.tokens.itemsize
        sentence = self._sequences.start(bisect_right(pointers, cut * size) - 1)
        return sentence if 2 * count * (cut - sentence) < stop - start else cut


def _document_bounds(part: Part) -> np.ndarray:
    """Return the index of the first token of each document, and the end of the part, int64."""
    sequences, documents = part.sequences, np.asarray(part.sequences.documents)
    inside = documents[(documents > part.first) & (documents < part.last)]
    begins = (
        np.unique(np.concatenate([[part.first], inside])) if len(part) else np.zeros(0, np.int64)
    )
    return np.append(
        np.asarray(sequences.pointers)[begins] // sequences.tokens.itemsize,
        sequences.start(part.last),
    )


class MaskedBatches(Batches):
    """Batches for the masked-LM objective; a sample has a different mask each time it is read.

    A sequence is [CLS] first [SEP] second [SEP] [PAD] ... The segments are two parts of a piece,
    which is cut at the start of one of its sentences, or in the middle if it has only one sentence.
    Half of the time, the segments are swapped. In addition to the arrays of `Batches`, a batch has
    int32 `token_types` [B, S], 1 in the second segment, `segment_ids` [B, S], 1 in the padding, and
    `swapped` [B, 1], 1 if the segments are swapped. `loss_mask` is 1 where `labels` holds a masked
    token.
    """

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        vocabulary: Vocabulary,
    ):
        super().__init__(samples, order, seq_len=seq_len, batch_size=batch_size)
        self._seed, self._vocabulary = seed, vocabulary

    def _rows(self, places: range, count: int) -> Batch:
        shape = count, self._seq_len
        batch: Batch = {name: np.zeros(shape, np.int32) for name in ('labels', 'token_types')}
        batch |= {
            'tokens': np.full(shape, self._vocabulary.pad, np.int32),
            'segment_ids': np.ones(shape, np.int32),
        }
        batch |= {
            'loss_mask': np.zeros(shape, np.float32),
            'swapped': np.zeros((count, 1), np.int32),
        }
        for row, index in enumerate(places):
            self._fill({name: x[row] for name, x in batch.items()}, index)
        return batch

    def _fill(self, row: Batch, index: int) -> None:
        """Fill a sequence from an index of the order; this index and the seed decide all
        randomness.
        """
        random = np.random.default_rng([self._seed, index])
        piece_S = np.empty(self._seq_len - NUM_SPECIAL, np.int32)
        num_tokens, sentences = self._samples.read(self.order[index], piece_S)
        cut = sentences[int(random.random() * len(sentences))] if sentences else num_tokens // 2
        segments = [piece_S[:cut], piece_S[cut:num_tokens]]
        swapped = random.random() < 0.5
        first, second = reversed(segments) if swapped else segments
        vocabulary = self._vocabulary
        token_S = np.concatenate(
            [[vocabulary.cls], first, [vocabulary.sep], second, [vocabulary.sep]]
        )
        places = np.delete(np.arange(1, len(token_S) - 1), len(first))  # all but special tokens
        num_masked = max(1, round(MASKED * num_tokens))
        places = places[np.argsort(random.random(num_tokens), kind='stable')[:num_masked]]
        row['tokens'][: len(token_S)] = token_S
        row['tokens'][places] = self._hide(token_S[places], random)
        row['labels'][places], row['loss_mask'][places], row['swapped'][0] = (
            token_S[places],
            1,
            swapped,
        )
        row['token_types'][len(first) + 2 : len(token_S)] = 1
        row['segment_ids'][: len(token_S)] = 0

    def _hide(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        share = random.random(len(tokens))
        others = self._vocabulary.others
        anything = others[(random.random(len(tokens)) * len(others)).astype(np.int64)]
        return np.where(
            share < AS_MASK,
            self._vocabulary.mask,
            np.where(share < AS_MASK + AS_ANY, anything, tokens),
        )


def check_documents(
    parts: Sequence[Part], datasets: Sequence[DocumentPieces], *, validation: bool
) -> None:
    """Raise ConfigError for a part to train on, or parts to validate on, with no long document."""
    short = [part for part, pieces in zip(parts, datasets, strict=True) if not len(pieces)]
    if not any(part.num_tokens for part in short) or (validation and len(short) < len(parts)):
        return
    use, names = 'validate' if validation else 'train', ', '.join(x.sequences.name for x in short)
    message = f'no document to {use} on has {SHORTEST} tokens, so none can be masked, in {names}'
    raise mistake('data.corpus', f'{message}; give longer documents', 'data.blend')
