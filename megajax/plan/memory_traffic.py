"""The bytes that a step's operations other than matrix products read and write on a GPU.

t is the number of GPUs of the `model` axis.
"""

import dataclasses
from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.parameters import megatron_counts
from megajax.plan.memory import BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """An operation that is bound by memory."""

    name: str
    bytes: float  # bytes that one run reads and writes
    times: int  # runs in a step


def traffic(config: Config, *, flash: bool, adds_shards: bool = False) -> list[Traffic]:
    """Return the operations of a step that are bound by memory.

    Each fused operation reads its operands once and writes its result once. Gradients of
    microbatches are added up in full or, with `adds_shards` as in FSDP, only the part that a data
    shard keeps.
    """
    return [
        *_of_layers(config, flash=flash),
        *_of_loss(config),
        *_of_weights(config, adds_shards=adds_shards),
    ]


def _of_layers(config: Config, *, flash: bool) -> Iterator[Traffic]:
    model, t = config.model, config.mesh.model
    tokens = config.microbatch_rows * config.train.seq_len
    size = BYTES[config.train.dtype]
    residual = tokens * model.hidden_size * size / (t if config.mesh.sequence_parallel else 1)
    heads = tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * size / t
    ffn = tokens * model.ffn_size * size / t
    gated = model.activation == 'swiglu'
    times = model.num_layers * config.train.microbatches
    forwards = 2 if config.train.recompute == 'full' else 1
    # Norms read and write one array; adding to the residual reads two and writes one. The backward
    # pass reads one array more.
    yield Traffic(name='norms', bytes=2 * (2 * forwards + 3) * residual, times=times)
    yield Traffic(name='residual', bytes=2 * (3 * forwards + 2) * residual, times=times)
    yield Traffic(name='heads', bytes=2 * (forwards + 1) * heads, times=times)
    yield Traffic(
        name='activation',
        bytes=((3 if gated else 2) * forwards + (5 if gated else 3)) * ffn,
        times=times,
    )
    if not flash:
        scores = config.microbatch_rows * model.num_heads / t * config.train.seq_len**2 * size
        again = 1 if config.train.recompute == 'none' else 2
        dropout = 2 if model.dropout else 0
        yield Traffic(
            name='softmax', bytes=((2 + dropout) * again + 3 + dropout) * scores, times=times
        )


def _of_loss(config: Config) -> Iterator[Traffic]:
    tokens = config.microbatch_rows * config.train.seq_len
    logits = 4 * tokens * config.model.padded_vocab_size / config.mesh.model
    # The maximum and the sum read the logits; the gradient is read and written.
    yield Traffic(name='loss', bytes=4 * logits, times=config.train.microbatches)


def _of_weights(config: Config, *, adds_shards: bool) -> Iterator[Traffic]:
    count = megatron_counts(config.model, config.mesh.model).all
    own = count / (config.mesh.data if config.optim.shard else 1)
    microbatches = config.train.microbatches
    if BYTES[config.train.dtype] == 2:
        yield Traffic(name='cast of weights', bytes=6 * count, times=1)
    if microbatches > 1:
        yield Traffic(
            name='gradient accumulation',
            bytes=12 * (own if adds_shards else count),
            times=microbatches,
        )
    yield Traffic(name='gradient norm', bytes=4 * own, times=1)
    # The parameter and both moments are read and written, the gradient is read.
    yield Traffic(name='AdamW', bytes=7 * 4 * own, times=1)
