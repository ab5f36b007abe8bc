"""Reject passes whose results at all sites do not fit in the host's memory."""

from collections.abc import Sequence
from math import lcm

from megajax.analysis.compare.site_names import site_names
from megajax.base.render.units import count, si
from megajax.core.config import Config, mistake
from megajax.core.config.rules import batch_multiple
from megajax.core.hardware.memory import host_memory

FP32 = 4  # bytes of a number in a recording


def check_site_memory(configs: Sequence[Config], *, num_executed: int) -> None:
    """Raise ConfigError if the recordings of all sides do not fit in the host's memory.

    Each side has one of `configs`, and all have the same shapes. `num_executed` of them are to be
    executed; the others belong to dumps. The results of the forward sites are counted, which all
    sides keep in fp32 until they are compared; weights and gradients are not. If the kernel had to
    kill the process, it would do so without a message.
    """
    train, have = configs[0].train, host_memory()
    rows, length = train.batch_size, train.seq_len
    each = len(configs) * _bytes_of_sequence(configs[0])
    if not num_executed or have is None or rows * each <= have:
        return
    fewest = lcm(*map(batch_multiple, configs))
    # the batch of a dump does not change
    verb = 'set' if num_executed == len(configs) else 'dump again with'
    fix = f'{verb} train.batch_size={fewest}'
    if fewest * each > have:
        fix += f' and train.seq_len below {max(1, length * have // (fewest * each)):,}'
    raise mistake(
        'train.batch_size',
        f'the results of all sites for {count(rows, "sequence")} of {count(length, "token")} need '
        f'at least {si(rows * each)}, and this host has {si(have)}: {fix}',
    )


def _bytes_of_sequence(config: Config) -> int:
    model = config.model
    *hidden, _ = site_names(model)  # the last site is the logits
    return FP32 * config.train.seq_len * (len(hidden) * model.hidden_size + model.vocab_size)
