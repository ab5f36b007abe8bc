"""The placement of arrays: every PartitionSpec of the project follows from the letters of dims.

The name of an array ends in its dims, as in x_BTD. A letter means one thing in all files:

    B rows of the batch             S tokens of a sequence          D model
    T tokens of a sequence in the residual stream, which sequence parallelism shards
    Y tokens that attention reads keys and values of; slots of the cache
    N query heads                   K key/value heads               G query heads per key/value head
    C columns of a head group: G queries, a key, a value            H head dim
    F feed-forward                  U gate and up                   V vocabulary, padded
    E output of an unsharded square layer                           O BERT's two segments
    L layers                        M microbatches

A lowercase letter is the same dim unsharded in every layout: in `sD` every device has every
position. `-` is a part of the dim before it, where that dim is split in several: `BT-D`.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from megajax.config import Config

if TYPE_CHECKING:
    from jax import P

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that shard each dim, in the computation and, for matrices, between steps.

    `axes` has the mesh axes of each letter; a letter without an entry is unsharded. `at_rest` has
    the axes of a matrix and its moments between steps where they differ (ZeRO). `sizes` has the
    number of devices along each mesh axis.
    """

    axes: tuple[tuple[str, Axes], ...] = ()
    at_rest: tuple[tuple[str, Axes], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, config: Config) -> 'Layout':
        """Return Megatron's layout for `config.mesh` and `config.optim`.

        Column-parallel weights are sharded over their output dims, row-parallel ones over their
        input dims. With fewer key/value heads than devices along `model`, QKV is sharded within
        each head.
        """
        mesh, model = config.mesh, ('model',)
        axes: dict[str, Axes] = {'B': ('data',), 'F': model, 'N': model, 'V': model}
        axes |= {'K': model} if config.model.num_kv_heads % mesh.model == 0 else {'H': model}
        if mesh.sequence_parallel and mesh.model > 1:
            axes['T'] = model
        at_rest = {'D': ('data',)} if config.optim.shard else {}
        sizes = {'data': mesh.data, 'model': mesh.model}
        return cls(tuple(axes.items()), tuple(at_rest.items()), tuple(sizes.items()))

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
        """The layout inside a function that is mapped over `data`: that of a data shard's rows."""
        return dataclasses.replace(
            self, axes=tuple((letter, axes) for letter, axes in self.axes if letter != 'B')
        )

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """The number of shards of each letter's dim in the computation."""
        return MappingProxyType({letter: self._size(axes) for letter, axes in self.axes})

    @property
    def sizes_at_rest(self) -> tuple[int, ...]:
        """The number of further shards of a matrix between steps, for each letter of `at_rest`."""
        return tuple(self._size(axes) for _, axes in self.at_rest)

    def num_shards(self, letter: str) -> int:
        """Return the number of shards of a letter's dim; 1 if it is not sharded."""
        return self.shards.get(letter, 1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(size for _, size in self.sizes)

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
    def _axes_at_rest(self) -> dict[str, Axes]:
        return self._axes | dict(self.at_rest)

    def _size(self, axes: Axes) -> int:
        return prod(dict(self.sizes)[axis] for axis in axes)


# For arrays outside a model: rows sharded over `data`.
BATCH = Layout(axes=(('B', ('data',)),))
