"""Where each array lies: every PartitionSpec of the project follows from the letters of its dims.

Arrays carry their dims in their names, as x_BSD does; a letter means one thing:

    B rows of the batch             S tokens of a sequence          D model
    T tokens of a sequence in the residual stream, which sequence parallelism shards
    Y tokens that attention reads keys and values of; slots of the cache
    N query heads                   K key/value heads               G query heads of a key/value head
    C columns of a head group: G queries, a key, a value            H head dim
    F feed-forward                  U gate and up                   V vocabulary, padded
    E output of an unsharded square layer                           O BERT's two segments
    L layers                        M microbatches

A small letter is the same dim unsharded, whatever the layout: in `sD` every device has every
position. `-` is a part of the dim before it, where that is cut in several: `BT-D`.
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
    """Which axes of the mesh shard which dims: in the computation, and of matrices between steps.

    `axes` has the mesh axes of each letter; a letter that it lacks is unsharded. `at_rest` has
    those of a matrix and its moments between steps where they differ (ZeRO). `sizes` has the
    devices of each mesh axis.
    """

    axes: tuple[tuple[str, Axes], ...] = ()
    at_rest: tuple[tuple[str, Axes], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, config: Config) -> 'Layout':
        """Megatron's layout, as `config.mesh` and `config.optim` ask for it.

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
        """The PartitionSpec of an array with these dims.

        Raises ValueError where a mesh axis would shard two of them.
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
        """The layout inside a function of one data shard's rows, where `data` is mapped over."""
        return dataclasses.replace(
            self, axes=tuple((letter, axes) for letter, axes in self.axes if letter != 'B')
        )

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """Into how many parts the dim of each letter is cut in the computation."""
        return MappingProxyType({letter: self._size(axes) for letter, axes in self.axes})

    @property
    def sizes_at_rest(self) -> tuple[int, ...]:
        """Into how many parts more a matrix is cut between steps, by each letter of `at_rest`."""
        return tuple(self._size(axes) for _, axes in self.at_rest)

    def num_shards(self, letter: str) -> int:
        """Into how many parts the dim of a letter is cut; 1 for a dim that is not sharded."""
        return self.shards.get(letter, 1)

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return prod(size for _, size in self.sizes)

    def is_sharded(self, letter: str) -> bool:
        """Whether there is a mesh axis for the letter, of any size."""
        return letter in self._axes

    def mesh_axes(self, letter: str) -> Axes:
        """The mesh axes that shard a letter."""
        return self._axes.get(letter, ())

    @cached_property
    def _axes(self) -> dict[str, Axes]:
        return dict(self.axes)

    @cached_property
    def _axes_at_rest(self) -> dict[str, Axes]:
        return self._axes | dict(self.at_rest)

    def _size(self, axes: Axes) -> int:
        return prod(dict(self.sizes)[axis] for axis in axes)


BATCH = Layout(axes=(('B', ('data',)),))  # of arrays that no model has: the rows over `data`
