"""Which steps overlap communication and computation in the overlap schedule.

`core/train/overlap.py` says which collectives overlap which matmuls; `core/model/overlap/` has the
order.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import multiples

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

SPLITS = 'batch_split', 'sequence_split'
PARTS = 2  # halves; `benchmarks/gpu_overlap.py` tries quarters


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
        is_worth_it = is_ordered and (is_split(config) or not _sends(config))
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
    parts, train = num_parts(config), config.train
    if train.overlap == 'batch_split':
        return config.microbatch_rows % parts == 0
    if config.model.has_dropout:  # whose masks are drawn for all tokens of a row at once
        return False
    return train.seq_len % (parts * _shards_of_tokens(config)) == 0


def _shards_of_tokens(config: 'Config') -> int:
    return config.mesh.model if config.mesh.sequence_parallel else 1


def _with(config: 'Config', **keys: object) -> 'Config':
    return config.model_copy(update={'train': config.train.model_copy(update=keys)})


def is_split(config: 'Config') -> bool:
    """Whether `train.overlap` asks for halves."""
    return config.train.overlap in SPLITS


def in_order(config: 'Config') -> bool:
    """Whether the layers run in the overlap schedule; otherwise XLA chooses one."""
    return _has_order(config) and (is_split(config) or config.train.unroll is True)


def repeats_outputs(config: 'Config') -> bool:
    """Whether full recomputation repeats the last product of a layer, and its reduction.

    Only a norm of the output reads them, and the overlap schedule keeps them.
    """
    return config.model.norm_position == 'after' and not in_order(config)


# The keys, and sections, that `num_parts` follows from beside train.overlap.
PARTS_FOLLOW_FROM = (
    'mesh.model',
    'mesh.stages',
    'mesh.context',
    'mesh.model_rows',
    'vision',
    'lora',
)


def num_parts(config: 'Config') -> int:
    """Return the number of parts of a microbatch, which do not depend on each other in a layer."""
    # Without tensor parallelism nothing is cut: all products hide what is sent over `data`.
    return PARTS if is_split(config) and not (in_order(config) and config.mesh.model == 1) else 1


def rung(config: 'Config') -> str:
    """Return the value of `optim.shard` whose gradients a step sums, and when.

    With one microbatch in the overlap schedule, ZeRO-1 sums the gradients of each layer beside the
    backward pass of the next, as ZeRO-2 does: the bytes are the same.
    """
    shard = config.optim.shard
    return 'gradients' if shard == 'optimizer' and gathers_ahead(config) else shard


def gathers_ahead(config: 'Config') -> bool:
    """Whether the forward pass gathers the weights of layers a little ahead, and keeps them.

    ZeRO-1 and ZeRO-2 do with one microbatch in the overlap schedule, and gather all at first
    otherwise.
    """
    is_gathered_once = config.optim.shard in ('optimizer', 'gradients')
    return is_gathered_once and in_order(config) and config.train.microbatches == 1


def is_apart(config: 'Config') -> bool:
    """Whether a step has the matrices that it computes with as an array for each layer.

    It has where each layer is compiled on its own and several microbatches use the same matrices.
    """
    is_used_again = config.train.microbatches > 1 and rung(config) in ('none', 'optimizer')
    return is_used_again and in_order(config) and config.train.unroll is True


def has_head(config: 'Config') -> bool:
    """Whether the overlap schedule gathers the head's matrix and sums its gradient, too.

    A head that is the embedding's table is needed before the layers, and its gradient after them.
    """
    is_sent = gathers_ahead(config) or config.optim.shard == 'weights'
    is_ordered = in_order(config) and config.train.unroll is True
    return is_sent and is_ordered and not config.model.tie_embeddings


def length_multiple(config: 'Config') -> int:
    """Return what train.seq_len is a multiple of, for equal shards and halves of a sequence."""
    shards, context = _shards_of_tokens(config), config.mesh.context
    parts = num_parts(config) if config.train.overlap == 'sequence_split' else 1
    return math.lcm(parts * shards, context * math.lcm(2, shards) if context > 1 else 1)


def of_halves(config: 'Config') -> Iterator[Problem]:
    """Yield what the halves of a sequence need; those of the rows are a rule of the batch."""
    length, count = config.train.seq_len, PARTS * _shards_of_tokens(config)
    if config.train.overlap == 'sequence_split' and num_parts(config) > 1 and length % count:
        message = (
            f'{length} tokens have no {PARTS} equal parts on each shard, and '
            f'train.overlap=sequence_split needs a multiple of {count}; '
            f'use {multiples(length, count)}, or train.overlap=batch_split'
        )
        others = 'train.overlap', 'mesh.sequence_parallel', *PARTS_FOLLOW_FROM
        yield Problem(path='train.seq_len', message=message, others=others)
