"""Check that tokens count in the loss, before a run takes its first step."""

import logging
from collections.abc import Iterable

import numpy as np

from megajax.core.config import Config, mistake
from megajax.runtime.data.batches import Batches
from megajax.runtime.data.image_text.load import ImageTextBatches
from megajax.runtime.data.text.tokenizer import Tokenizer

ONLY_SPECIAL = 'only special tokens count in the loss, so bits per byte cannot be computed'

logger = logging.getLogger(__name__)


def check_counted(
    config: Config, tokenizer: Tokenizer | None, train: Batches, validation: Batches
) -> None:
    """Raise ConfigError if no token counts in the loss of training, or of an evaluation.

    Logs a warning if only special tokens count. Sequences are read up to the first one with a text
    token that counts.
    """
    order, fix = validation.order, 'give messages of the assistant that the chat template writes'
    if not isinstance(train, ImageTextBatches):
        fix = 'give documents of two tokens or more, or use data.document_mask=false'
    evaluated = min(len(order), config.train.eval_batches * config.train.batch_size)
    more = f'{fix}, or a larger train.eval_batches' if evaluated < len(order) else fix
    token_bytes = None if tokenizer is None or config.model.is_bert else tokenizer.token_bytes
    for use, fixes, rows in (
        ('to train on', fix, map(train.counted, range(train.num_samples))),
        ('of an evaluation', more, (validation.counted(order[i]) for i in range(evaluated))),
    ):
        count, special = _without_text(rows, token_bytes)
        if special:
            logger.warning('data.corpus: in the %s rows %s, %s', f'{count:,}', use, ONLY_SPECIAL)
        elif count:
            message = f'no token counts in the loss of the {count:,} rows {use}; {fixes}'
            keys = 'data.chat_template', 'data.document_mask', 'train.eval_batches'
            raise mistake('data.corpus', message, *keys)


def _without_text(rows: Iterable[np.ndarray], token_bytes: np.ndarray | None) -> tuple[int, int]:
    """Return the number of sequences and of their labels, or zeros if any label stands for text.

    Without `token_bytes`, every label stands for text.
    """
    count = special = 0
    for labels in rows:
        if len(labels) and (token_bytes is None or token_bytes[labels].any()):
            return 0, 0
        count, special = count + 1, special + len(labels)
    return count, special
