"""Log what evaluations on a blend of corpora leave out."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from megajax.core.config import Config
from megajax.runtime.data.batches import Order
from megajax.runtime.data.samples import Joined
from megajax.runtime.data.text.parts import Part

logger = logging.getLogger(__name__)


def note_unvalidated(config: Config, validation: Sequence[Part]) -> None:
    """Log which corpora of a blend no evaluation reads, because they have no validation part."""
    empty = [part.sequences.name for part in validation if not part.num_tokens]
    if 0 < len(empty) < len(validation):
        logger.warning(
            'data.blend: evaluations do not read %s: data.split=%s leaves no sequence to validate '
            'on; the weights of the other corpora keep their proportions',
            ', '.join(empty),
            config.data.split,
        )


def note_early_end(
    config: Config, validation: Sequence[Part], samples: Joined, order: Order
) -> None:
    """Log that the batches of an evaluation end early, because one corpus of a blend ends.

    This keeps the weights, and reads no sequence twice.
    """
    if len(order) >= min(len(samples), config.train.eval_batches * config.train.batch_size):
        return
    lengths = [stop - start for start, stop in pairwise(samples.starts)]
    parts = zip(lengths, config.data.blend.values(), validation, strict=True)
    _, name = min((size / weight, part.sequences.name) for size, weight, part in parts if size)
    logger.warning(
        'data.blend: an evaluation reads %s of %s sequences to validate on, because %s then ends; '
        'give it a smaller weight, or a larger share in data.split',
        f'{len(order):,}',
        f'{len(samples):,}',
        name,
    )
