"""Which steps overlap communication and computation in the overlap schedule.

`core/train/overlap.py` says which collectives overlap which matmuls; `core/model/overlap/` has the
order.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from megajax.base.errors import Problem
from megajax.core.config.divisors import multiples

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

SPLITS = 'batch_split', 'sequence_split'
PARTS = 2  # halves; `benchmarks/gpu_overlap.py` tries quarters


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How the layers of a step run, and when they gather weights and sum gradients over `data`.

    By default they run in a loop, and XLA orders what a layer does.
    """

    is_split: bool = False  # whether `train.overlap` asks for halves
    splits_tokens: bool = False  # whether these are of the tokens, not of the rows
    in_order: bool = False  # whether the layers run in the overlap schedule
    unroll: bool = False  # whether each layer is compiled on its own
    num_parts: int = 1  # parts of a microbatch, which do not depend on each other in a layer
    # The value of `optim.shard` that says when a step sums gradients. With one microbatch in the
    # overlap schedule, ZeRO-1 sums those of each layer beside the backward pass of the next, as
    # ZeRO-2 does: the bytes are the same.
    shard: str = 'none'
    # Whether the forward pass gathers the weights of layers a little ahead, and keeps them. ZeRO-1
    # and ZeRO-2 do with one microbatch in the overlap schedule, and gather all at first otherwise.
    gathers_ahead: bool = False
    # Whether a step has the matrices that it computes with as an array for each layer: where each
    # is compiled on its own and several microbatches use the same matrices.
    is_apart: bool = False
    # Whether the overlap schedule gathers the head's matrix and sums its gradient, too. A head that
    # is the embedding's table is needed before the layers, and its gradient after them.
    has_head: bool = False
    # Whether full recomputation repeats the last product of a layer, and its reduction. Only a norm
    # of the output reads them, and the overlap schedule keeps them.
    repeats_outputs: bool = False

    @classmethod
    def of(cls, config: 'Config') -> Self:
        """Return what the keys of a config come to; those that are `auto` overlap nothing."""
        train, shard = config.train, config.optim.shard
        is_split, unroll = train.overlap in SPLITS, train.unroll is True
        in_order = _has_order(config) and (is_split or unroll)
        gathers_ahead = shard in ('optimizer', 'gradients') and in_order and train.microbatches == 1
        if shard == 'optimizer' and gathers_ahead:
            shard = 'gradients'
        is_used_again = train.microbatches > 1 and shard in ('none', 'optimizer')
        is_sent = gathers_ahead or shard == 'weights'
        return cls(
            is_split=is_split,
            splits_tokens=train.overlap == 'sequence_split',
            in_order=in_order,
            unroll=unroll,
            # Without tensor parallelism nothing is cut: all products hide what is sent over `data`.
            num_parts=PARTS if is_split and not (in_order and config.mesh.model == 1) else 1,
            shard=shard,
            gathers_ahead=gathers_ahead,
            is_apart=is_used_again and in_order and unroll,
            has_head=is_sent and in_order and unroll and not config.model.tie_embeddings,
            repeats_outputs=config.model.norms_outputs and not in_order,
        )


def resolved(config: 'Config', *, on_gpu: bool) -> 'Config':
    """Return the config with what `auto` stands for in `train.overlap` and `train.unroll`.

    On GPUs the halves of the rows take turns, or those of the tokens where a microbatch has an odd
    number of rows, and each layer is compiled on its own. With dropout of attention neither is so:
    XLA takes six seconds a layer to compile the random numbers of its masks. A deterministic step
    keeps its loop, see `core/train/compiler_options.py`.
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


def in_a_loop(config: 'Config', *, on_gpu: bool) -> 'Config':
    """Return the config with the overlap of `resolved`, in a loop over layers.

    It compiles sooner, and overlaps less.
    """
    return _with(resolved(config, on_gpu=on_gpu), unroll=False)


def without_order(config: 'Config') -> 'Config':
    """Return the config with its layers in a loop that XLA orders."""
    return _with(config, overlap='none', unroll=False)


def _has_order(config: 'Config') -> bool:
    """Whether there is an order of the layers.

    Stages, context shards and grids have loops and placements that it does not know, and so have
    the vectors of images, and adapters.
    """
    has_others = config.vision is not None or config.lora is not None
    return config.mesh.is_one_dimensional and not has_others


def _sends(config: 'Config') -> bool:
    """Whether the layers send something, over `model` or over `data`."""
    mesh = config.mesh
    return mesh.model > 1 or (mesh.data > 1 and config.optim.shard != 'none')


def _fits(config: 'Config') -> bool:
    """Whether the rows or the tokens of a microbatch can be cut in parts."""
    parts, train = config.overlap.num_parts, config.train
    if train.overlap == 'batch_split':
        return config.microbatch_rows % parts == 0
    if config.model.has_dropout:  # whose masks are drawn for all tokens of a row at once
        return False
    return train.seq_len % (parts * _shards_of_tokens(config)) == 0


def _shards_of_tokens(config: 'Config') -> int:
    return config.mesh.model if config.mesh.sequence_parallel else 1


def _with(config: 'Config', **keys: object) -> 'Config':
    return config.model_copy(update={'train': config.train.model_copy(update=keys)})


# The keys, and sections, that `Overlap.num_parts` follows from beside train.overlap.
PARTS_FOLLOW_FROM = (
    'mesh.model',
    'mesh.stages',
    'mesh.context',
    'mesh.model_rows',
    'vision',
    'lora',
)


def length_multiple(config: 'Config') -> int:
    """Return what train.seq_len is a multiple of, for equal shards and halves of a sequence."""
    shards, context = _shards_of_tokens(config), config.mesh.context
    parts = config.overlap.num_parts if config.overlap.splits_tokens else 1
    return math.lcm(parts * shards, context * math.lcm(2, shards) if context > 1 else 1)


def of_halves(config: 'Config') -> Iterator[Problem]:
    """Yield what the halves of a sequence need; those of the rows are a rule of the batch."""
    length, count = config.train.seq_len, PARTS * _shards_of_tokens(config)
    overlap = config.overlap
    if overlap.splits_tokens and overlap.num_parts > 1 and length % count:
        message = (
            f'{length} tokens have no {PARTS} equal parts on each shard, and '
            f'train.overlap=sequence_split needs a multiple of {count}; '
            f'use {multiples(length, count)}, or train.overlap=batch_split'
        )
        others = 'train.overlap', 'mesh.sequence_parallel', *PARTS_FOLLOW_FROM
        yield Problem(path='train.seq_len', message=message, others=others)
