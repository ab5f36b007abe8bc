"""Map tensors of other formats to megajax's parameters, and back.

A parameter of megajax is one array, with its layers stacked and its fused projections together;
other formats store each layer, projection or tensor-parallel rank in a separate array. A `Piece`
maps such an array to its region of a parameter. Import and export share one table, and one device's
shard can be filled alone. "Here" means in megajax, "there" in the other format.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from megajax.core.config import ConfigError, ModelConfig
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.interop.tiles import copy_tiles

THREADS = min(8, os.cpu_count() or 1)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
READABLE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
STACKED = 'LΔΛⓁⒶX'  # dims of layers, of an encoder's layers, of DeepStack's mergers and of experts
VOCABULARY = 'embedding.table', 'head'
ALIGNMENT = 64  # bytes; a CPU device uses a block with this alignment without copying it

NOTHING: Mapping[str, Any] = MappingProxyType({})

Shape = tuple[int, ...]
At = tuple[slice, ...]


class Piece(NamedTuple):
    """An array in the other format, and its region of a parameter here."""

    name: str
    shape: Shape
    split: Shape  # the array's shape, with dims split into the parameter's dims
    order: tuple[int, ...]  # transposition of the split dims into the order of the parameter
    at: At  # the region of the parameter that the array fills
    # An axis, and how many of its first indices form adjacent pairs there and two halves here.
    pairs: tuple[int, int] | None = None

    def view(self, x: np.ndarray) -> np.ndarray:
        """Return a view with the parameter's dims, but pairs as there; padding is beyond `at`."""
        return x.reshape(self.split).transpose(self.order)

    def read(self, x: np.ndarray) -> np.ndarray:
        """Return the array with the parameter's dims and order, as a view if there are no pairs."""
        view = self.view(x)
        return view.take(self._order_of_pairs(view), self.pairs[0]) if self.pairs else view

    def box(self, at: At) -> At:
        """Return the smallest box of the array that contains a region of the parameter."""
        steps = [math.prod(self.split[dim + 1 :]) for dim in self.order]
        first = last = 0
        for axis, (part, step) in enumerate(zip(_shifted(at, self.at), steps, strict=True)):
            if self.pairs and axis == self.pairs[0]:
                part = slice(0, self.split[self.order[axis]])
            first += part.start * step
            last += (part.stop - 1) * step
        corners = (np.unravel_index(index, self.shape) for index in (first, last))
        return tuple(slice(int(a), int(b) + 1) for a, b in zip(*corners, strict=True))

    def write(self, array: np.ndarray, part: np.ndarray) -> None:
        """Fill the array with a region of the parameter."""
        if self.pairs:
            part = part.take(np.argsort(self._order_of_pairs(part)), self.pairs[0])
        copy_tiles(self.view(array)[tuple(map(slice, part.shape))], part)

    def _order_of_pairs(self, x: np.ndarray) -> np.ndarray:
        """Return the position of each index of the axis in the other format."""
        axis, count = self.pairs or (0, 0)
        index = np.arange(x.shape[axis])
        return np.concatenate([index[:count:2], index[1:count:2], index[count:]])


Pieces = Mapping[str, Sequence[Piece]]  # the pieces of each parameter, by its name
Entry = TypeVar('Entry')  # an entry in a table of another format's tensors


def dims_here(model: ModelConfig) -> dict[str, str]:
    """Return the dims of each parameter, in capitals except for the second of two equal dims."""
    return {
        name: ''.join(x if x.upper() in parameter.dims else x.upper() for x in parameter.dims)
        for name, parameter in parameters(model)
    }


def tensors_of(table: Mapping[str, Entry], name: str, of: str) -> Entry:
    """Return a parameter's entry in the table of format `of`.

    Raises ConfigError if the format has no tensor for it.
    """
    if name not in table:
        raise ConfigError(f'{name}: {of} has no tensor for this parameter')
    return table[name]


def make_pieces(
    name: str,
    there: str,
    here: str,
    shape: Shape,
    ranges: Mapping[str, slice] = NOTHING,
    sizes: Mapping[str, int] = NOTHING,
    layers: Sequence[int] | None = None,
) -> list[Piece]:
    """Return the pieces of a parameter: one for each layer, or one if it is not stacked.

    The pieces have the dims `there`, as in '(KCH)D' for [K*C*H, D], and the parameter `shape` and
    the dims `here`, as in 'LDKCH'. In `name`, the index of the layer, or of a different stacked
    module, replaces {}, and the index of the expert replaces the next {}. `layers` lists the layers
    that have the parameter, if not all have it. `ranges` gives a piece's part of a dim, and `sizes`
    gives the length of a dim that is padded there.
    """
    stacked = [dim for dim in STACKED if dim in here and dim not in there]
    pieces = []
    for index in np.ndindex(*(shape[here.index(dim)] for dim in stacked)):
        one = {dim: slice(n, n + 1) for dim, n in zip(stacked, index, strict=True)}
        own = name.format(*index if layers is None else (layers[index[0]], *index[1:]))
        pieces.append(make_piece(own, there, here, shape, {**ranges, **one}, sizes))
    return pieces


def with_pairs(pieces: Sequence[Piece], here: str, model: ModelConfig) -> list[Piece]:
    """Return a parameter's pieces, with rotary pairs that are adjacent there."""
    return [piece._replace(pairs=(here.index('H'), model.rotary_dim)) for piece in pieces]


def make_piece(
    name: str,
    there: str,
    here: str,
    shape: Shape,
    ranges: Mapping[str, slice],
    sizes: Mapping[str, int],
) -> Piece:
    """Return the piece of a parameter that contains these ranges of its dims; see `make_pieces`."""
    lengths = dict(zip(here, shape, strict=True))
    at = {
        dim: slice(*ranges.get(dim, slice(None)).indices(length)[:2])
        for dim, length in lengths.items()
    }
    counts = {dim: sizes.get(dim, part.stop - part.start) for dim, part in at.items()}
    groups = groups_of(there, here)
    # A dim that the piece does not have, such as the layer, gets size 1.
    dims = ''.join(dim for dim in here if dim not in ''.join(groups)) + ''.join(groups)
    return Piece(
        name=name,
        shape=tuple(math.prod(counts[dim] for dim in group) for group in groups),
        split=tuple(counts[dim] for dim in dims),
        order=tuple(dims.index(dim) for dim in here),
        at=tuple(at[dim] for dim in here),
    )


def groups_of(there: str, here: str) -> list[str]:
    """Return, for each dim of the other format, the dims of `here` that it combines."""
    return [''.join(dim for dim in group if dim in here) for group in _groups(there)]


def _groups(there: str) -> Iterator[str]:
    """Split '(KCH)D' into 'KCH' and 'D'."""
    for part in there.replace('(', ' (').replace(')', ' ').split():
        yield from [part[1:]] if part.startswith('(') else part


def check(
    abstract: nnx.State, pieces: Pieces, weights: Mapping[str, Any], *, of: str, keys: str
) -> None:
    """Raise ConfigError unless `weights` are exactly the tensors of `pieces`.

    The error lists all missing and unexpected names and all wrong shapes and dtypes. In the
    message, `of` names the source, and `keys` names the settings that decide which tensors exist.
    """
    dtypes = {*READABLE_DTYPES, *(leaf.dtype for leaf in jax.tree.leaves(abstract))}
    expected = {piece.name: piece for group in pieces.values() for piece in group}
    vocabulary = {piece.name for path in VOCABULARY for piece in pieces.get(path, ())}
    problems = []
    if missing := [name for name in expected if name not in weights]:
        problems.append(
            f'{of}: missing tensors ({len(missing)} of {len(expected)}; {keys}): '
            f'{", ".join(missing)}'
        )
    if unexpected := [name for name in weights if name not in expected]:
        problems.append(
            f'{of}: unexpected tensors ({len(unexpected)}; {keys}): {", ".join(unexpected)}; '
            'remove them, or correct the settings'
        )
    for name, piece in expected.items():
        if name not in weights:
            continue
        x = weights[name]
        if x.shape != piece.shape:
            fix = _fix(piece.shape, x.shape) if name in vocabulary else ''
            problems.append(f'{of}: {name}: expected {piece.shape}, got {x.shape}{fix}')
        if x.dtype not in dtypes:
            problems.append(
                f'{of}: {name}: expected one of {", ".join(map(str, READABLE_DTYPES))}, '
                f'got {x.dtype}'
            )
    if problems:
        raise ConfigError(*problems)


def _fix(expected: Shape, got: Shape) -> str:
    has_more = got[1:] == expected[1:] and got[0] > expected[0]
    return f'; set model.vocab_size={got[0]}, or remove the rows of padding' if has_more else ''


def check_finite(name: str, x: np.ndarray, *, of: str) -> None:
    """Raise ConfigError, with the first position, if a tensor contains NaN or infinity.

    `of` names the tensor's source in the message.
    """
    finite = np.isfinite(x)
    if not finite.all():
        first = tuple(map(int, np.unravel_index(int(np.argmin(finite)), x.shape)))
        count = x.size - int(np.count_nonzero(finite))
        problem = f'{count} of {x.size} numbers are not finite, the first, {x[first]}, at {first}'
        raise ConfigError(
            f'{of}: {name}: {problem}: the weights are unusable, use another checkpoint'
        )


def place(
    abstract: nnx.State, pieces: Pieces, weights: Mapping[str, np.ndarray], *, of: str
) -> nnx.State:
    """Return the parameters assembled from `weights`, with the sharding and dtype of `abstract`.

    Elements that no piece covers, and elements that pad a shard, are zero. Host memory holds one
    shard of one parameter at a time, and a process reads only what its devices need. Raises
    ConfigError for a number that is not finite, with the name of its tensor and its source, `of`.
    """
    flat = nnx.to_flat_state(abstract)
    with ThreadPoolExecutor(THREADS) as pool:
        placed = [
            (
                path,
                param.replace(_place(param.get_value(), pieces[name_of(path)], weights, pool, of)),
            )
            for path, param in flat
        ]
    return nnx.from_flat_state(placed)


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name of a parameter's path, for example `layers.mlp.up.weight`."""
    return '.'.join(map(str, path))


def shapes_of(model: ModelConfig) -> dict[str, Shape]:
    """Return the shape of each parameter of a model, by name."""
    sizes = dim_sizes(model)
    return {name: shape_of(parameter.dims, sizes) for name, parameter in parameters(model)}


def _place(
    param: jax.ShapeDtypeStruct,
    pieces: Sequence[Piece],
    weights: Mapping[str, np.ndarray],
    pool: ThreadPoolExecutor,
    of: str,
) -> jax.Array:
    devices = defaultdict(list)
    for device, index in param.sharding.addressable_devices_indices_map(param.shape).items():
        devices[
            tuple(part.indices(size)[:2] for part, size in zip(index, param.shape, strict=True))
        ].append(device)
    shards = []
    for bounds, holders in devices.items():
        block = _read_block(
            tuple(slice(*bound) for bound in bounds), param.dtype, pieces, weights, pool, of
        )
        shards += [jax.device_put(block, device) for device in holders]
        jax.block_until_ready(shards)  # before the next block is allocated
    return jax.make_array_from_single_device_arrays(param.shape, param.sharding, shards)


def _read_block(
    index: At,
    dtype: np.dtype,
    pieces: Sequence[Piece],
    weights: Mapping[str, np.ndarray],
    pool: ThreadPoolExecutor,
    of: str,
) -> np.ndarray:
    """Return the part of a parameter at `index`."""
    block = _zeros(tuple(part.stop - part.start for part in index), dtype)

    def copy(piece: Piece) -> None:
        both = tuple(
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(index, piece.at, strict=True)
        )
        if any(part.start >= part.stop for part in both):
            return
        x = weights[piece.name]
        array = x.unpack(piece.box(both)) if hasattr(x, 'unpack') else np.asarray(x)
        source = piece.read(array)[_shifted(both, piece.at)]
        if source.dtype == BFLOAT16 and dtype == np.float32:
            # The bits of bf16 are the upper half of the bits of fp32, and the lower half is already
            # zero; numpy's cast is several times slower.
            halves = block.view(np.uint16).reshape(*block.shape, 2)
            copy_tiles(halves[..., 1][_shifted(both, index)], source.view(np.uint16))
        else:
            copy_tiles(block[_shifted(both, index)], source)
        # The check uses the copy, which is in fp32 and in the processor's cache.
        if not np.isfinite(block[_shifted(both, index)]).all():
            check_finite(piece.name, np.asarray(x), of=of)

    list(pool.map(copy, pieces))
    return block


def _zeros(shape: Shape, dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _shifted(at: At, origin: At) -> At:
    return tuple(
        slice(part.start - zero.start, part.stop - zero.start)
        for part, zero in zip(at, origin, strict=True)
    )


def cut(x: np.ndarray, piece: Piece, dtype: np.dtype | None = None) -> np.ndarray:
    """Return a piece of an unsharded parameter as a new array of the other format.

    The other format's padding is zero.
    """
    array = np.zeros(piece.shape, x.dtype)
    piece.write(array, x[piece.at])
    return array if dtype is None else array.astype(dtype, copy=False)
