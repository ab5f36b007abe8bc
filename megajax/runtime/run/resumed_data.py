"""The batches of a resumed run, which begin with the first sample that it has not read."""

import logging
from dataclasses import replace
from pathlib import Path

from megajax.core.config import Config
from megajax.runtime.checkpoint.record import (
    OF_ROWS,
    Record,
    config_differences,
    make_record,
    read_record,
)
from megajax.runtime.data import Batches, Data
from megajax.runtime.data.image_text.load import LINES_OF
from megajax.runtime.data.load import VALIDATION_OF
from megajax.runtime.data.streams import Place, StreamedBatches
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.data.tokens.remote_pair import VERSION_OF

# Keys that decide the order of samples, and keys that also decide which samples there are.
OF_ORDER = ('train.seed', 'data.order')
OF_SAMPLES = ('data.corpus', 'data.blend', 'data.split', *OF_ROWS)

logger = logging.getLogger(__name__)


def resumed_data(data: Data, config: Config, there: Record | None, *, batches: int) -> Data:
    """Return data whose next training batch, number `batches`, begins with an unread sample.

    `there` is the record of the restored state, or None for a new run. If the order of samples has
    not changed, the next batch begins with the first unread sample, even if the batch size has
    changed. Samples that are repeated or skipped are logged, in tokens.
    """
    if there is None:
        return data
    before, train = there.config['train'], config.train
    samples = there.samples
    if samples is None:
        samples = batches * before['batch_size']
    if batches and isinstance(data.train, StreamedBatches):
        return replace(data, train=_streamed(data.train, data, config, there, batches, samples))
    if batches:
        samples = _in_new_order(data, config, there, samples)
    # the samples that Megatron-LM consumed count only in Megatron-LM's order
    elif data.train_of is None:
        samples = 0
    elif samples:
        logger.info(
            'start      data.order=megatron: continues with sample %s, the first one that '
            'Megatron-LM had not consumed',
            f'{samples:,}',
        )
    if batches and before['batch_size'] != train.batch_size:
        logger.info(
            'resume     train.batch_size: step %d begins with sample %s of the order, the first '
            'one that the run has not read; train.steps and the learning-rate schedule count '
            'steps, each of which now has %s tokens instead of %s',
            there.step + 1,
            f'{samples:,}',
            f'{train.batch_size * train.seq_len:,}',
            f'{before["batch_size"] * before["seq_len"]:,}',
        )
    batches_of_run = _megatron(data, config, there, samples) if data.train_of else data.train
    return replace(data, train=batches_of_run.going_on(batches, samples))


def imported(start: Path) -> Record | None:
    """Return the record of an import from Megatron-LM that has consumed samples, or None.

    A run that starts from any other checkpoint begins with the first sample.
    """
    record = read_record(start)
    return record if record.step == 0 and record.samples else None


def _streamed(
    train: StreamedBatches, data: Data, config: Config, there: Record, batches: int, samples: int
) -> Batches:
    """Return streams that continue at their next tokens.

    If there are other streams, they begin with their first tokens, which is logged.
    """
    changed = [key for key in _changes(data, config, there) if key not in OF_ROWS]
    if changed or there.streams is None:
        logger.warning(
            'resume     %s: the streams have changed: the corpus is read from its beginning',
            ', '.join(changed) or 'data.order=streamed',
        )
        return train.going_on(batches, 0)
    samples = -(-samples * there.config['train']['seq_len'] // config.train.seq_len)
    return train.continued(batches, samples, [Place(*each) for each in there.streams])


def _changes(data: Data, config: Config, there: Record) -> list[str]:
    """Return the keys that have changed the samples or their order, or 'the corpus'.

    The corpora of a blend also decide the order by their places in it.
    """
    different = set(config_differences(there, make_record(config, there.step)))
    old, new = _contents(there, data)
    before, after = (list(blend.items()) for blend in (_blend(there), config.data.blend))
    if before != after:  # the keys of equal dicts may be in a different order
        different.add('data.blend')
    if old == new and [weight for _, weight in before] == [weight for _, weight in after]:
        different -= {'data.corpus', 'data.blend'}
    changed = [key for key in (*OF_SAMPLES, *OF_ORDER) if key in different]
    return ['the corpus'] if old and old != new and not changed else changed


def _blend(there: Record) -> dict[str, float]:
    blend: dict[str, float] = there.config['data'].get('blend', {})
    return blend


def _contents(there: Record, data: Data) -> tuple[list[str], list[str]]:
    """Return the old and new fingerprints of the corpora to train on, in the order of a blend.

    Of a corpus with images, only the lines count if both are known: images do not decide the order.
    """
    lines = {name for name in there.data.keys() & data.fingerprints if name.startswith(LINES_OF)}
    others = VERSION_OF, VALIDATION_OF, LINES_OF
    old, new = (
        [
            value
            for name, value in fingerprints.items()
            if name in lines or not (name.startswith(others) or f'{LINES_OF}{name}' in lines)
        ]
        for fingerprints in (there.data, data.fingerprints)
    )
    return old, new


def _in_new_order(data: Data, config: Config, there: Record, samples: int) -> int:
    """Return the sample with which a run continues after it has read `samples` in its old order.

    The result is sample `samples`, unless the samples have changed. A change of the samples or of
    their order is logged.
    """
    changed = _changes(data, config, there)
    old, new = _contents(there, data)
    if old and set(old).isdisjoint(new) and {'data.corpus', 'data.blend'} & set(changed):
        logger.warning('resume     the corpus has changed: it is read from its first sample')
        return 0
    old_length, length = there.config['train']['seq_len'], config.train.seq_len
    read = samples * old_length
    if old_length != length and not isinstance(data.train, PictureBatches):
        samples = -(-read // length)
        changed.append('train.seq_len')
    if changed:
        logger.warning(
            'resume     %s: the order of samples has changed; of the %s tokens that the run has '
            'read, up to %s are read again before the next epoch, and as many unread tokens are '
            'not read before it',
            ', '.join(changed),
            f'{read:,}',
            f'{_at_stake(data.train, config, samples) * length:,}',
        )
    elif again := _repeated_by_exact_weights(config, there, samples):
        logger.warning(
            'resume     data.blend: an earlier version rounded the weights, which are now exact: '
            'of the %s tokens that the run has read, %s are read again before the next epoch, and '
            'as many unread tokens are not read before it',
            f'{read:,}',
            f'{again * length:,}',
        )
    return samples


def _repeated_by_exact_weights(config: Config, there: Record, samples: int) -> int:
    """Return how many samples are read again because a blend now has its exact weights."""
    if there.exact_weights or not config.data.blend or config.data.order != 'stateless':
        return 0
    from megajax.runtime.data import stateless_order

    return stateless_order.repeated([*config.data.blend.values()], samples)


def _at_stake(train: Batches, config: Config, samples: int) -> int:
    """Return how many samples the rest of an epoch repeats at most if its order changes."""
    if isinstance(train, PictureBatches) or config.data.blend or config.data.order == 'megatron':
        return samples
    read = samples % train.num_samples
    return min(read, train.num_samples - read)


def _megatron(data: Data, config: Config, there: Record, samples: int) -> Batches:
    """Return batches in Megatron-LM's order, which depends on the number of samples of the run.

    The order is the run's old order if it has enough samples; otherwise it is the order for as many
    samples as the run needs. A difference is logged.
    """
    assert data.train_of is not None
    old, train = there.config, config.train
    needed = samples + (train.steps - there.step) * train.batch_size
    order_of = there.order_of
    if order_of is None and old['data']['order'] == 'megatron' and samples:
        order_of = old['train']['steps'] * old['train']['batch_size']
    wanted = max(needed, order_of or 0)
    batches = data.train if data.train.order_of == wanted else data.train_of(wanted)
    if order_of and wanted > order_of and batches.passes != data.train_of(order_of).passes:
        steps = there.step + (order_of - samples) // train.batch_size
        logger.warning(
            'resume     data.order=megatron: %s samples need other passes through the corpus than '
            'the previous %s, so the order of samples changes: of the %s samples that the run has '
            'read, some are read again, and others are not read; train.steps=%d keeps the order',
            f'{wanted:,}',
            f'{order_of:,}',
            f'{samples:,}',
            steps,
        )
    return batches
