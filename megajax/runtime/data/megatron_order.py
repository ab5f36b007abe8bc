"""Read samples in Megatron-LM's order, to continue one of its runs.

The indices are equal to the ones in megatron-core's GPTDataset and BlendedDataset. All are drawn
from one numpy generator with the run's seed, so equal settings give equal samples. Before the
samples are shuffled, sample i of a part has tokens i S to (i + 1) S + 1 of the part's sequences,
which are in a shuffled order themselves.
"""

import math
from collections.abc import Sequence

import numpy as np

from megajax.runtime.data.text.parts import Part, normalized

# if the last epoch is less than this fraction of an epoch, it is shuffled separately
SEPARATE_BELOW = 0.80
SURPLUS = 0.005  # additional samples of each dataset in a blend, as a fraction of its share


class MegatronSamples:
    """At least `num_samples` samples of a part, over as many epochs as necessary.

    `document_index` (int32) holds the sequences in shuffled order, and `shuffle_index` (uint32,
    int64 if necessary) holds the samples. Raises ValueError if the part holds no tokens.
    """

    def __init__(self, part: Part, *, seq_len: int, num_samples: int, seed: int):
        self.part, self.seq_len = part, seq_len
        tokens = int(part.lengths.sum(dtype=np.int64))
        if not tokens:
            raise ValueError(
                f'{part.sequences.name}: sequences {part.first} to {part.last} hold no tokens'
            )
        epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
        separate_from = _separate_from(tokens, epochs, num_samples, seq_len)
        self.passes = epochs, separate_from
        random = np.random.RandomState(seed)
        sequences = np.arange(part.first, part.last, dtype=np.int32)
        if separate_from is None:
            self.document_index = _shuffled(np.tile(sequences, epochs), random)
        else:
            first = _shuffled(np.tile(sequences, epochs - 1), random)
            self.document_index = np.concatenate([first, _shuffled(sequences, random)])
        self._ends = np.cumsum(part.sequences.lengths[self.document_index], dtype=np.int64)
        total = (epochs * tokens - 1) // seq_len
        samples = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max else np.int64)
        cut = total if separate_from is None else separate_from
        self.shuffle_index = np.concatenate(
            [_shuffled(samples[:cut], random), _shuffled(samples[cut:], random)]
        )

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def read(self, index: int, window: np.ndarray) -> tuple[int, list[int]]:
        """Fill `window` [S + 1] with sample `index`.

        Returns the number of tokens, and the indices in `window` at which a sequence begins, except
        the first token.
        """
        start = int(self.shuffle_index[index]) * self.seq_len
        position = int(np.searchsorted(self._ends, start, side='right'))
        filled, begins = 0, []
        while filled < len(window):
            sequence, end = int(self.document_index[position]), int(self._ends[position])
            last = self.part.sequences.start(sequence) + int(self.part.sequences.lengths[sequence])
            count = min(end - start - filled, len(window) - filled)
            first = last - (end - start - filled)
            window[filled : filled + count] = self.part.sequences.read(first, first + count)
            if filled and count:
                begins.append(filled)
            filled, position = filled + count, position + 1
        return filled, begins


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Return how many samples a blend takes from each dataset, and how many to prepare.

    The second numbers are slightly larger.
    """
    shares = [math.ceil(num_samples * weight) for weight in normalized(weights)]
    return shares, [math.ceil(share * (1 + SURPLUS)) for share in shares]


def blend_index(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sample of a blend, int16, and the sample's number in it, int64.

    Each sample comes from the dataset that is furthest behind its weight.
    """
    weights = normalized(normalized(weights))  # normalized twice, to get Megatron's rounding
    counts = [0] * len(weights)
    datasets, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    for sample in range(size):
        deficits = [
            weight * max(sample, 1) - count for weight, count in zip(weights, counts, strict=True)
        ]
        dataset = deficits.index(max(deficits))
        datasets[sample], numbers[sample] = dataset, counts[dataset]
        counts[dataset] += 1
    return datasets, numbers


def _separate_from(tokens: int, epochs: int, num_samples: int, seq_len: int) -> int | None:
    """Return the first sample of the last epoch if that epoch is shuffled separately, else None."""
    if epochs == 1:
        return None
    before = ((epochs - 1) * tokens - 1) // seq_len
    per_epoch = (tokens - 1) // seq_len
    return before if num_samples - before < int(SEPARATE_BELOW * per_epoch) else None


def _shuffled(values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    values = values.copy()
    random.shuffle(values)
    return values
