"""Decide which configs use the overlap schedule, and resolve `auto` in overlap and unroll.

`core/train/overlap.py` describes which collectives overlap which matmuls; `core/model/overlap/`
implements the schedule.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import multiples

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

SPLITS = 'batch_split', 'sequence_split'
PARTS = 2  # parts per microbatch; `benchmarks/gpu_overlap.py` tries 4


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How the layers of a step run, and when they gather weights and reduce gradients over `data`.

    By default the layers are a scan that XLA schedules.
    """

    is_split: bool = False  # whether `train.overlap` splits the microbatch
    splits_tokens: bool = False  # whether it is split by token rather than by sequence
    in_order: bool = False  # whether the layers run in the overlap schedule
    unroll: bool = False  # whether each layer is compiled separately
    num_parts: int = 1  # parts of a microbatch that run independently through the layers
    # The ZeRO stage that decides when a step reduces its gradients. With one microbatch in the
    # overlap schedule, ZeRO-1 reduces the gradients of each layer during the backward pass of the
    # next layer, as ZeRO-2 does; the number of bytes is the same.
    shard: str = 'none'
    # Whether the forward pass prefetches the weights of each layer and keeps them gathered. ZeRO-1
    # and ZeRO-2 do so with one microbatch in the overlap schedule; otherwise they gather all
    # weights before the first layer.
    gathers_ahead: bool = False
    # Whether a step stores its compute-dtype matrices as one array per layer. It does so if each
    # layer is compiled separately and several microbatches use the same matrices.
    is_apart: bool = False
    # Whether the overlap schedule also gathers the LM head and reduces its gradient. A head that is
    # tied to the embedding is needed before the layers, and its gradient is complete after them, so
    # it is not included.
    has_head: bool = False
    # Whether full recomputation repeats the last matmul of a layer, and its reduction. Only a norm
    # on the output reads the result, and the overlap schedule saves it.
    repeats_outputs: bool = False

    @staticmethod
    def of(config: 'Config') -> 'Overlap':
        """Return the overlap that a config asks for; keys that are `auto` request none."""
        train, shard = config.train, config.optim.shard
        is_split, unroll = train.overlap in SPLITS, train.unroll is True
        in_order = (is_split or unroll) and _has_order(config)
        gathers_ahead = shard in ('optimizer', 'gradients') and in_order and train.microbatches == 1
        if shard == 'optimizer' and gathers_ahead:
            shard = 'gradients'
        is_used_again = train.microbatches > 1 and shard in ('none', 'optimizer')
        is_sent = gathers_ahead or shard == 'weights'
        return _overlap(
            is_split=is_split,
            splits_tokens=train.overlap == 'sequence_split',
            in_order=in_order,
            unroll=unroll,
            # Without tensor parallelism, nothing is split, because all matmuls hide traffic over
            # `data`.
            num_parts=PARTS if is_split and not (in_order and config.mesh.model == 1) else 1,
            shard=shard,
            gathers_ahead=gathers_ahead,
            # With LoRA, the frozen weights would be in memory twice.
            is_apart=is_used_again and in_order and unroll and config.lora is None,
            has_head=is_sent and in_order and unroll and not config.model.tie_embeddings,
            repeats_outputs=not in_order and config.model.norms_outputs,
        )


# A search calls this tens of thousands of times, and there are only a few different results.
_overlap = functools.cache(Overlap)


def resolved(config: 'Config', *, on_gpu: bool) -> 'Config':
    """Return the config with `auto` resolved in `train.overlap` and `train.unroll`.

    On GPUs, `auto` chooses batch_split, or sequence_split if a microbatch has an odd number of
    sequences, and compiles each layer separately. With attention dropout, it chooses neither: XLA
    takes six seconds per layer to compile the random numbers of its masks. A deterministic step
    keeps its loop; see `core/train/compiler_options.py`.
    """
    is_ordered = on_gpu and _has_order(config) and config.model.attention_dropout == 0
    if config.train.overlap == 'auto':
        is_worth_it = is_ordered and _sends(config) and config.train.unroll is not False
        splits = (_with(config, overlap=name) for name in SPLITS if is_worth_it)
        config = next(filter(_fits, splits), _with(config, overlap='none'))
    if config.train.unroll == 'auto':
        is_worth_it = is_ordered and (config.overlap.is_split or not _sends(config))
        config = _with(config, unroll=is_worth_it and not config.train.deterministic)
    return config


def resolved_for(config: 'Config', rows: int, length: int, *, on_gpu: bool) -> 'Config':
    """Return the config with `auto` resolved for a batch of `rows` sequences of `length` tokens.

    It is the result of `resolved`, for which the step's options for XLA are chosen, unless this
    batch cannot be split in the same way.
    """
    chosen = resolved(config, on_gpu=on_gpu)
    batch = _with(chosen, batch_size=rows, seq_len=length)
    if batch.overlap.is_split and not _fits(batch):
        chosen = resolved(_with(config, batch_size=rows, seq_len=length), on_gpu=on_gpu)
    return _with(config, overlap=chosen.train.overlap, unroll=chosen.train.unroll)


def in_a_loop(config: 'Config', *, on_gpu: bool) -> 'Config':
    """Return the config with the overlap of `resolved`, but as a scan over the layers.

    The scan compiles faster, but overlaps less.
    """
    return _with(resolved(config, on_gpu=on_gpu), unroll=False)


def without_order(config: 'Config') -> 'Config':
    """Return the config with its layers in a scan that XLA schedules."""
    return _with(config, overlap='none', unroll=False)


def _has_order(config: 'Config') -> bool:
    """Whether the overlap schedule supports this config.

    It supports neither the loops and shardings of pipeline stages, context parallelism, 2-D tensor
    parallelism, vision and experts, nor adapters in fp8, nor current scaling.
    """
    has_others = config.vision is not None or config.model.experts is not None
    has_others = has_others or (config.lora is not None and config.train.dtype == 'fp8')
    has_others = has_others or config.train.has_current_scales
    return config.mesh.is_one_dimensional and not has_others


def _sends(config: 'Config') -> bool:
    """Whether the layers communicate, over `model` or over `data`."""
    mesh = config.mesh
    return mesh.model > 1 or (mesh.data > 1 and config.optim.shard != 'none')


def _fits(config: 'Config') -> bool:
    """Whether the microbatch can be split evenly, by sequence or by token."""
    parts, train = config.overlap.num_parts, config.train
    if train.overlap == 'batch_split':
        return config.microbatch_rows % parts == 0
    if config.model.has_dropout:  # a dropout mask is drawn for an entire sequence
        return False
    return train.seq_len % (parts * _shards_of_tokens(config)) == 0


def _shards_of_tokens(config: 'Config') -> int:
    return config.mesh.model if config.mesh.sequence_parallel else 1


def _with(config: 'Config', **keys: object) -> 'Config':
    train = config.train.changed(**keys)
    return config if train is config.train else config.model_copy(update={'train': train})


# The keys and sections, in addition to train.overlap, that `Overlap.num_parts` depends on.
PARTS_FOLLOW_FROM = (
    'mesh.model',
    'mesh.stages',
    'mesh.context',
    'mesh.model_rows',
    'vision',
    'lora',
    'train.dtype',
    'train.fp8_scaling',
    'model.experts',
)


def length_multiple(config: 'Config') -> int:
    """Return the number that must divide train.seq_len, so that shards and parts are equal."""
    shards, context = _shards_of_tokens(config), config.mesh.context
    parts = config.overlap.num_parts if config.overlap.splits_tokens else 1
    return math.lcm(parts * shards, context * math.lcm(2, shards) if context > 1 else 1)


def of_adapters(config: 'Config') -> Iterator[Problem]:
    """Check that a step with adapters in fp8 does not split its sequences."""
    train = config.train
    if config.lora is not None and train.dtype == 'fp8' and train.overlap == 'sequence_split':
        message = (
            'sequence_split is not supported with LoRA in fp8; use train.overlap=batch_split, or '
            'train.dtype=bfloat16'
        )
        yield Problem('train.overlap', message, others=('lora', 'train.dtype'))


def of_halves(config: 'Config') -> Iterator[Problem]:
    """Check that sequence_split can split the sequence; `rules` checks batch_split."""
    length, count = config.train.seq_len, PARTS * _shards_of_tokens(config)
    overlap = config.overlap
    if overlap.splits_tokens and overlap.num_parts > 1 and length % count:
        message = (
            f'{length} is not a multiple of {count}, which train.overlap=sequence_split needs; '
            f'use {multiples(length, count)}, or train.overlap=batch_split'
        )
        others = 'train.overlap', 'mesh.sequence_parallel', *PARTS_FOLLOW_FROM
        yield Problem('train.seq_len', message, others=others)
