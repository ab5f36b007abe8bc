"""The matrices of layers, which Muon needs whole, and the devices that have pieces of them.

ZeRO and tensor parallelism shard each matrix. The devices that hold the pieces exchange them, so
that each device gets its share of the matrices, whole. Matrices of the same form are exchanged
together, in a pool. The query, key and value of a fused QKV are separate matrices, and so are gate
and up, as in Megatron's Muon. Imports no jax.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import NamedTuple

from megajax.core.config import Config
from megajax.core.counts.declaration import OF_LAYERS, Parameter
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.parallel.layout import Axes, Layout

BATCH = f'{OF_LAYERS}X'  # dims of a stack of matrices


class Dim(NamedTuple):
    """A dim as it is stored: its size with padding, and the mesh axes that shard it."""

    size: int
    axes: Axes = ()
    shards: int = 1

    @property
    def split(self) -> tuple[int, int]:
        """The number of shards, and the size of each shard."""
        return self.shards, self.size // self.shards


class Form(NamedTuple):
    """The stored form of the matrices [rows, columns] of a pool.

    Rows and columns are lists of dims, each sharded over at most one group of axes. There are at
    most as many rows as columns.
    """

    shape: tuple[int, int]  # without padding
    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    groups: Axes  # the mesh axes that shard the layers or experts: no matrix leaves its group
    num_groups: int

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The rows and then the columns."""
        return *self.rows, *self.columns

    @property
    def pieces(self) -> Axes:
        """The mesh axes whose devices each hold a piece of a matrix."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def num_pieces(self) -> int:
        """The number of pieces of a matrix."""
        return prod(dim.shards for dim in self.dims)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """The rows and columns as they are stored."""
        return prod(dim.size for dim in self.rows), prod(dim.size for dim in self.columns)

    def copies(self, layout: Layout) -> Axes:
        """Return the mesh axes whose devices hold the same pieces."""
        taken = {*self.groups, *self.pieces}
        return tuple(axis for axis, size in layout.sizes if size > 1 and axis not in taken)

    def padded(self, count: int, layout: Layout) -> int:
        """Return the number of matrices of a group with zeros: a multiple of its devices."""
        (copies,) = layout.sizes_of([self.copies(layout)])
        return count + -count % (copies * self.num_pieces)

    def by_elements(self, count: int, layout: Layout) -> bool:
        """Return whether each device with the same pieces gathers a part of every matrix.

        This sends no zeros, but first takes an exchange. Otherwise, it gathers some matrices of
        each of the others.
        """
        (copies,) = layout.sizes_of([self.copies(layout)])
        padded = self.padded(count, layout)
        return padded + count * copies < padded * copies


@dataclasses.dataclass(frozen=True)
class Part:
    """The matrices of one form in a parameter: one for each layer, and for each expert."""

    form: Form
    batch: tuple[Dim, ...]
    order: tuple[int, ...]  # the parameter's dims, in the order of batch, rows, columns
    fused: int | None  # the dim of the parameter that holds several matrices, such as gate and up
    start: int  # the start of the matrices within that dim
    stop: int
    shape: tuple[int, ...]  # with padding, in `order`

    @property
    def count(self) -> int:
        """The number of matrices in a group."""
        return prod(dim.split[1] for dim in self.batch)


def parts_of(
    declared: Parameter, sizes: Mapping[str, int], layout: Layout, *, may_turn: bool = True
) -> Iterator[Part]:
    """Yield the parts of a matrix parameter of the layers, in their order in the parameter.

    A matrix with more inputs than outputs is transposed. With `may_turn`, a square matrix may be,
    too, depending on the mesh, so that fewer forms are needed.
    """
    dims, axes = declared.dims, layout.axes_at_rest(declared.dims)
    places = range(len(dims))
    batch = [place for place in places if dims[place] in BATCH]
    inputs = [place for place in places if dims[place] in declared.inputs]
    outputs = [place for place in places if place not in (*batch, *inputs)]
    fused = next((place for place in places if dims[place] in 'CU'), None)
    of_fused = {'C': [sizes['G'], 1, 1], 'U': [1, 1]}
    parts = [0] if fused is None else of_fused[dims[fused]]
    for start, length in zip(accumulate(parts, initial=0), parts, strict=False):
        own = [
            length if place == fused else size for place, size in enumerate(shape_of(dims, sizes))
        ]
        stored = [
            _dim(size + more, axes.get(letter, ()), layout)
            for size, more, letter in zip(own, layout.padding(dims), dims, strict=True)
        ]
        sides = [
            (prod(own[place] for place in side), _merged([stored[place] for place in side]), side)
            for side in (inputs, outputs)
        ]
        (rows, of_rows, first), (columns, of_columns, second) = sorted(
            sides, key=None if may_turn else itemgetter(0)
        )
        order = *batch, *first, *second
        groups = [stored[place] for place in batch]
        form = Form(
            shape=(rows, columns),
            rows=of_rows,
            columns=of_columns,
            groups=tuple(axis for dim in groups for axis in dim.axes),
            num_groups=prod(dim.shards for dim in groups),
        )
        shape = tuple(stored[place].size for place in order)
        yield Part(form, tuple(groups), order, fused, start, start + length, shape)


def pools(config: Config) -> dict[Form, list[Part]]:
    """Return the parts of each pool."""
    layout, sizes = Layout.of(config), dim_sizes(config.model)
    found: dict[Form, list[Part]] = {}
    for _, declared in parameters(config.model):
        if declared.is_layer_matrix and not declared.is_frozen:
            for part in parts_of(declared, sizes, layout):
                found.setdefault(part.form, []).append(part)
    return found


def _dim(size: int, axes: Axes, layout: Layout) -> Dim:
    devices = dict(layout.sizes)
    axes = tuple(axis for axis in axes if devices[axis] > 1)
    return Dim(size, axes, prod(devices[axis] for axis in axes))


def _merged(dims: list[Dim]) -> tuple[Dim, ...]:
    """Merge each unsharded dim into the one before it; leave out dims of one element."""
    merged: list[Dim] = []
    for dim in (dim for dim in dims if dim.size > 1):
        if merged and not dim.axes:
            merged[-1] = merged[-1]._replace(size=merged[-1].size * dim.size)
        else:
            merged.append(dim)
    return tuple(merged)
