"""The placement of arrays: every PartitionSpec of the project follows from the letters of dims.

The name of an array ends in its dims, as in x_BTD. A letter means one thing in all files:

    B rows of the batch             S tokens of a sequence          D model
    R rows of the batch between the two products of a branch, which a 2-D grid shards
    T tokens of a sequence in the residual stream, which sequence parallelism shards
    Y tokens that attention reads keys and values of; slots of the cache
    N query heads                   K key/value heads               G query heads per key/value head
    C columns of a head group: G queries, a key, a value            H head dim
    F feed-forward                  U gate and up                   V vocabulary, padded
    E output of an unsharded square layer                           O BERT's two segments
    L layers                        M microbatches

A lowercase letter is the same dim unsharded in every computation: in `sD` every device has every
position. `-` is a part of the dim before it, where that dim is split in several: `BT-D`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from megajax.config import Config

if TYPE_CHECKING:
    from jax import P

Axes = tuple[str, ...]
BATCH_AXES = 'replica', 'data'  # the mesh axes that shard the rows of a batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that shard each dim, in the computation and, for matrices, between steps.

    `axes` has the mesh axes of each letter; a letter without an entry is unsharded. `at_rest` has
    the axes of a matrix and its moments between steps where they differ (ZeRO). `sizes` has the
    number of devices along each mesh axis, `uneven` the sizes of dims that their shards at rest do
    not divide: at rest they are padded.
    """

    axes: tuple[tuple[str, Axes], ...] = ()
    at_rest: tuple[tuple[str, Axes], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    uneven: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, config: Config) -> 'Layout':
        """Return the layout for `config.mesh` and `config.optim`.

        It is Megatron's: column-parallel weights are sharded over their output dims, row-parallel
        ones over their input dims. With fewer key/value heads than devices along `model`, QKV is
        sharded within each head. A grid (`mesh.model_rows`) also shards the other dim of every
        weight, D, over `row`, and with it the residual stream; the vocabulary is over both axes.
        """
        mesh, model = config.mesh, ('model',)
        batch = BATCH_AXES if mesh.replicas > 1 else BATCH_AXES[1:]
        axes: dict[str, Axes] = {'B': batch, 'R': batch, 'F': model, 'N': model, 'V': model}
        axes |= {'K': model} if config.model.num_kv_heads % mesh.model == 0 else {'H': model}
        if mesh.sequence_parallel and mesh.model > 1:
            axes['T'] = model
        if mesh.is_grid:
            axes |= {'D': ('row',), 'R': (*batch, 'row'), 'V': ('row', 'model')}
        at_rest: dict[str, Axes] = {}
        if config.optim.shard != 'none':
            at_rest = {'D': (*axes.get('D', ()), 'data'), 'd': ('data',)}
        size = config.model.hidden_size
        return cls(
            axes=tuple(axes.items()),
            at_rest=tuple(at_rest.items()),
            sizes=tuple(mesh.sizes.items()),
            uneven=tuple((letter, size) for letter in at_rest if size % mesh.data_shards),
        )

    def __call__(self, dims: str, *, at_rest: bool = False) -> 'P':
        """Return the PartitionSpec of an array with these dims.

        Raises ValueError if a mesh axis would shard two of them.
        """
        from jax import P

        axes = self._axes_at_rest if at_rest else self._axes
        entries = [axes.get(letter, ()) for letter in dims]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f'{dims}: {", ".join(used)}: a mesh axis shards one dim of an array')
        return P(*(entry if len(entry) > 1 else next(iter(entry), None) for entry in entries))

    @cached_property
    def per_shard(self) -> 'Layout':
        """The layout inside a function that is mapped over the data shards: that of its rows."""
        batch = self.mesh_axes('B')
        axes = (
            (letter, tuple(axis for axis in axes if axis not in batch))
            for letter, axes in self.axes
        )
        return dataclasses.replace(
            self, axes=tuple((letter, kept) for letter, kept in axes if kept)
        )

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """The number of shards of each letter's dim in the computation."""
        return MappingProxyType({letter: self._size(axes) for letter, axes in self.axes})

    @cached_property
    def shards_at_rest(self) -> Mapping[str, int]:
        """The number of shards of each letter's dim in a matrix between steps."""
        return MappingProxyType(
            {letter: self._size(axes) for letter, axes in self._axes_at_rest.items()}
        )

    def num_shards(self, letter: str) -> int:
        """Return the number of shards of a letter's dim; 1 if it is not sharded."""
        return self.shards.get(letter, 1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(size for _, size in self.sizes)

    def sizes_of(self, axes: Axes) -> tuple[int, ...]:
        """Return the number of devices along each of some mesh axes."""
        sizes = dict(self.sizes)
        return tuple(sizes[axis] for axis in axes)

    def stacked(self, dims: str, axes: Axes, *, at_rest: bool = False) -> 'P':
        """Return the PartitionSpec of one array with these dims for each device along `axes`.

        Each mesh axis is a dim of its own, before the others.
        """
        from jax import P

        return P(*axes, *self(dims, at_rest=at_rest))

    def padding(self, dims: str) -> tuple[int, ...]:
        """Return the number of elements that are added at rest to each dim of a matrix."""
        shards = self.shards_at_rest
        sizes = (self._uneven.get(letter, 0) for letter in dims)
        return tuple(
            -size % shards[letter] if size else 0 for letter, size in zip(dims, sizes, strict=True)
        )

    def unpadded(self, dims: str) -> tuple[int | None, ...]:
        """Return the size of each dim that is padded at rest, None for the others."""
        return tuple(map(self._uneven.get, dims))

    def is_sharded(self, letter: str) -> bool:
        """Whether the letter has a mesh axis, of any size."""
        return letter in self._axes

    def mesh_axes(self, letter: str) -> Axes:
        """Return the mesh axes that shard a letter."""
        return self._axes.get(letter, ())

    @cached_property
    def _axes(self) -> dict[str, Axes]:
        return dict(self.axes)

    @cached_property
    def _uneven(self) -> dict[str, int]:
        return dict(self.uneven)

    @cached_property
    def _axes_at_rest(self) -> dict[str, Axes]:
        return self._axes | dict(self.at_rest)

    def _size(self, axes: Axes) -> int:
        return prod(self.sizes_of(axes))


def batch_layout(mesh_axes: Sequence[str]) -> Layout:
    """Return the layout of arrays outside a model, on a mesh with these axes: rows are sharded."""
    batch = tuple(axis for axis in mesh_axes if axis in BATCH_AXES)
    return Layout(axes=(('B', batch),))
