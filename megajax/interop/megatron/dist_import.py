"""Read parameters from a `torch_dist` checkpoint, no matter which ranks wrote its chunks."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from flax import nnx

from megajax.core.config import Config, ConfigError
from megajax.core.parallel.layer_order import tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.interop.megatron.dist_checkpoint import DistCheckpoint, open_chunks
from megajax.interop.megatron.dist_metadata import Chunk
from megajax.interop.megatron.weights import KEYS, NAMES, TABLE, megatron_pieces
from megajax.interop.pieces import (
    Piece,
    check,
    dims_here,
    groups_of,
    make_piece,
    place,
    shapes_of,
    tensors_of,
)
from megajax.runtime.checkpoint.open import abstract_params

Block = tuple[slice, ...]


def merge_chunks(config: Config, checkpoint: DistCheckpoint) -> nnx.State:
    """Assemble the parameters from the chunks of a checkpoint.

    The chunks are views of mapped files, and host memory holds one shard of one parameter at a
    time. Raises ConfigError with all missing and unexpected tensors, and for damaged files.
    """
    model, of = config.model, str(checkpoint.folder)
    abstract, shapes, dims = abstract_params(config), shapes_of(model), dims_here(model)
    whole = megatron_pieces(model, shapes, vocab_rows=_vocab_rows(config, checkpoint))
    stored = {
        name: np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
        for name, tensor in checkpoint.tensors.items()
    }
    check(abstract, whole, stored, of=of, keys=KEYS)
    places = {piece.name: (path, piece) for path, group in whole.items() for piece in group}
    pieces: dict[str, list[Piece]] = defaultdict(list)
    arrays: dict[str, np.ndarray] = {}
    for name, chunk, x in open_chunks(checkpoint.folder, checkpoint.tensors):
        path, piece = places[name]
        there = tensors_of(NAMES, path, 'Megatron-LM')[1]
        for part, at in _parts(piece, chunk, there, dims[path], shapes[path]):
            pieces[path].append(part)
            arrays[part.name] = x[at]
    return tree_on_stages(place(abstract, pieces, arrays, of=of), Layout.of(config))


def _vocab_rows(config: Config, checkpoint: DistCheckpoint) -> int:
    """Return the number of the vocabulary's rows in the checkpoint, padding included."""
    table = checkpoint.tensors.get(NAMES[TABLE][0])
    rows = table.shape[0] if table and table.shape else config.model.vocab_size
    if rows < config.model.vocab_size:
        raise ConfigError(
            f'{checkpoint.folder}: the embedding has {rows} rows, '
            f'but model.vocab_size is {config.model.vocab_size}; set model.vocab_size to the '
            f'number of tokens, at most {rows}'
        )
    return rows


def _parts(
    piece: Piece, chunk: Chunk, there: str, here: str, shape: Sequence[int]
) -> Iterator[tuple[Piece, Block]]:
    """Yield the pieces of a tensor's chunk, and their positions in the chunk.

    A chunk that does not end at the boundary of a head or a gate consists of several pieces.
    """
    groups, lengths = groups_of(there, here), dict(zip(here, shape, strict=True))
    ends = {dim: at.stop for dim, at in zip(here, piece.at, strict=True)}
    fixed = {dim: at for dim, at in zip(here, piece.at, strict=True) if dim not in ''.join(groups)}
    sides = [
        list(_blocks(_sizes(group, lengths, rows), start, start + size))
        for group, rows, start, size in zip(
            groups, piece.shape, chunk.offsets, chunk.sizes, strict=True
        )
    ]
    for blocks in product(*sides):
        ranges = dict(zip(''.join(groups), sum((block for block, _ in blocks), ()), strict=True))
        sizes = {dim: part.stop - part.start for dim, part in ranges.items()}
        ranges = {dim: _within_end(part, ends[dim]) for dim, part in ranges.items()}
        at = tuple(rows for _, rows in blocks)
        where = [start + rows.start for start, rows in zip(chunk.offsets, at, strict=True)]
        name = f'{piece.name} at {where} in {chunk.entry.file}'
        yield make_piece(name, there, here, tuple(shape), {**fixed, **ranges}, sizes), at


def _sizes(group: str, lengths: Mapping[str, int], rows: int) -> list[int]:
    """Return the sizes of a group's dims; the vocabulary has as many rows as in the checkpoint."""
    return [rows] if len(group) == 1 else [lengths[dim] for dim in group]


def _within_end(part: slice, end: int) -> slice:
    """Return the part of a range before `end`, after which a vocabulary has padding."""
    return slice(min(part.start, end), min(part.stop, end))


def _blocks(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[Block, slice]]:
    """Split a range of flattened dims into blocks that are one range in every dim.

    Yields each block's ranges, and its rows counted from `start`.
    """
    begin = 0
    for block in _ranges(sizes, start, stop):
        end = begin + math.prod(part.stop - part.start for part in block)
        yield block, slice(begin, end)
        begin = end


def _ranges(sizes: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    if len(sizes) == 1:
        yield (slice(start, stop),)
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        yield from _within(sizes, last, start, stop)
        return
    if start < first * inner:
        yield from _within(sizes, first - 1, start, first * inner)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in sizes[1:]))
    if last * inner < stop:
        yield from _within(sizes, last, last * inner, stop)


def _within(sizes: Sequence[int], index: int, start: int, stop: int) -> Iterator[Block]:
    """Split a range that is within one index of the first dim."""
    origin = index * math.prod(sizes[1:])
    for block in _ranges(sizes[1:], start - origin, stop - origin):
        yield (slice(index, index + 1), *block)
