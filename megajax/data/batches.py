"""Documents as one row of tokens, and that row as batches: the batch of a step depends on nothing but the config and the step.

B batch, S sequence.
"""

from collections.abc import Sequence

import numpy as np

from megajax.config.check import ConfigError, Problem
from megajax.data.corpus import Document
from megajax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]

DOCUMENTS_AT_ONCE = 64  # tokenizers holds some 90 bytes for each token of a call


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of all documents, each followed by the end-of-document token, as `tokenizer.dtype` [number of tokens]."""
    eod = np.array([tokenizer.eod], tokenizer.dtype)
    pieces = [eod[:0]]
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        texts = [document.text for document in documents[start : start + DOCUMENTS_AT_ONCE]]
        for ids in tokenizer.encode_batch(texts):
            pieces += [ids, eod]
    return np.concatenate(pieces)


class Windows:
    """Sample i is `tokens[i * S : (i + 1) * S + 1]`, as S tokens and their S labels, so that each token but the first is a label once.

    `tokens` and `labels` are int32 [S], `loss_mask` is float32 [S]: 0 past the end of the tokens, where any index may lie.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return -(-max(len(self._tokens) - 1, 0) // self._seq_len)

    def __getitem__(self, index: int) -> Batch:
        start = index * self._seq_len
        window = np.zeros(self._seq_len + 1, np.int32)
        found = self._tokens[start : start + self._seq_len + 1]
        window[: len(found)] = found
        loss_mask = np.zeros(self._seq_len, np.float32)
        loss_mask[: max(len(found) - 1, 0)] = 1
        return {'tokens': window[:-1], 'labels': window[1:], 'loss_mask': loss_mask}


class Batches:
    """`batches[step]` holds `tokens`, `labels` (int32) and `loss_mask` (float32), each [B, S].

    With a seed there is no last step, and every epoch has an order of its own. Without one, the windows come in order and once, and
    loss mask 0 fills the last batch up. `len` is the steps of an epoch, rounded up.
    Raises ConfigError if there is a seed and an epoch is less than a batch.
    """

    def __init__(self, tokens: np.ndarray, *, seq_len: int, batch_size: int, seed: int | None = None) -> None:
        self._batch_size = batch_size
        self._endless = seed is not None
        self._samples = windows = Windows(tokens, seq_len)
        self._steps = -(-len(windows) // batch_size)
        if seed is None:
            return
        if len(windows) < batch_size:
            message = (
                f'{batch_size} is more than the {len(windows)} sequences of train.seq_len={seq_len} in {len(tokens)} tokens; '
                f'use at most {len(windows)}, a shorter train.seq_len or a larger data.corpus'
            )
            raise ConfigError(Problem(path='train.batch_size', message=message, others=('train.seq_len', 'data.corpus')))
        import grain

        self._samples = grain.MapDataset.source(windows).shuffle(seed=seed % 2**32).repeat()  # another order in each epoch

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self._batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of the batch of `step`; no others are read."""
        if step < 0 or (step >= self._steps and not self._endless):
            raise IndexError(f'step {step} of {self._steps}')
        first = step * self._batch_size
        samples = [self._samples[first + row] for row in range(start, stop)]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
