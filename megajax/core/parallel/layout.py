"""The sharding of arrays: every PartitionSpec of the project follows from the letters of dims.

The name of an array ends in its dims, as in x_BTD. A letter means one thing in all files:

    B sequences of the batch        S tokens of a sequence          D model
    R sequences of the batch between the two matmuls of a sublayer, which 2-D TP shards
    T tokens of a sequence in the residual stream, which sequence parallelism shards
    Y tokens that attention reads keys and values of; slots of the cache; vectors of images
    N query heads                   K key/value heads               G query heads per key/value head
    C columns of a head group: G queries, a key, a value            H head dim
    F feed-forward                  V vocabulary, padded
    X experts                       A hidden dim of an expert
    U gate and up, key and value, or the gates of a layer's two sublayers
    E output of an unsharded square layer                           O BERT's two segments
    M hidden dim of the shared expert
    L layers                        J layers of cross-attention
    Δ layers with an MLP, and       Λ layers with experts, of a model that has both
    I image slots of the rows       P patches of an image
    Q rank of adapters              W chunks of layers of a stage
    Z stages of the pipeline, or the shards of an adapter's dim

A circled letter is a dim of the modules that process images. In the encoder's layers it means the
encoder's own dim of that letter, so Ⓓ is its D; the others are:

    Ⓘ copies of a parameter, one for each shard of the images       Ⓐ mergers of DeepStack
    Ⓨ channels of a patch           Ⓠ its frames                    Ⓧ its pixels in a frame
    Ⓦ width of merged patches       Ⓔ D of the model                Ⓢ places of the position table
    Ⓖ scorers of relevance          Ⓟ their slots                   Ⓡ hidden units of a slot
    Ⓩ features of a region          Ⓣ channels of texture           Ⓜ summaries of scores
    Ⓑ hidden units of relevance's other networks

The files of the encoder and of relevance write these without the circle. Images in `data` are HWC:
pixel rows, columns and colors.

A lowercase letter is the same dim unsharded in every computation: in `sD` every device has every
position. `-` is an unsharded dim without a letter, which comments call by a word, as in [region,
channel], or a part of the dim before it, where that is split in several: `BT-D`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megajax.core.config import Config, MeshConfig
from megajax.core.config.vision import RelevanceConfig, VisionConfig

if TYPE_CHECKING:
    from jax import P

Axes = tuple[str, ...]
BATCH_AXES = 'replica', 'data', 'expert'  # the mesh axes that shard the sequences of a batch
STAGE, CONTEXT, EXPERT = 'stage', 'context', 'expert'


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that shard each dim, in the computation and, for matrices, between steps.

    `axes` has the mesh axes of each letter; a letter without an entry is unsharded. `at_rest` has
    the axes of a matrix and its moments between steps, if they differ (ZeRO). `sizes` has the
    number of devices along each mesh axis, `uneven` the sizes of dims that their stored shards do
    not divide: they are stored padded. `chunks` is the number of chunks of layers of each stage.
    """

    axes: tuple[tuple[str, Axes], ...] = ()
    at_rest: tuple[tuple[str, Axes], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    uneven: tuple[tuple[str, int], ...] = ()
    chunks: int = 1

    @classmethod
    def of(cls, config: Config) -> 'Layout':
        """Return the layout for `config.mesh` and `config.optim`.

        The layout is Megatron's: column-parallel weights are sharded over their output dims, and
        row-parallel weights over their input dims. With fewer key/value heads than devices along
        `model`, QKV is sharded within each head. 2-D tensor parallelism (`mesh.model_rows`) also
        shards the other dim of every weight, D, over `row`, and with it the residual stream; the
        vocabulary is sharded over both axes. Layers are sharded over `stage`. ZeRO also shards over
        `context`, whose devices have the same weights, and shards parameters outside the layers
        over `stage`.
        """
        model, others = config.model, (config.vision, config.relevance)
        return _layout(
            config.mesh, config.optim.shard, model.num_kv_heads, model.hidden_size, *others
        )

    def __call__(self, dims: str, *, at_rest: bool = False) -> 'P':
        """Return the PartitionSpec of an array with these dims.

        Raises ValueError if a mesh axis would shard two of the dims.
        """
        from jax import P

        axes = self.axes_at_rest(dims) if at_rest else self._axes
        entries = [axes.get(letter, ()) for letter in dims]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f'{dims}: {", ".join(used)}: a mesh axis shards one dim of an array')
        return P(*map(_entry, entries))

    def like(self, spec: 'P | Sequence[Any]', dims: str) -> 'P':
        """Return the PartitionSpec of an array that shares dims with one sharded as `spec`.

        `dims` has the dims of both: in `*RSNH->*RNS-`, R, N and S are sharded like the other
        array's dims, and so are the dims that `*` stands for. A letter that occurs only after the
        arrow has this layout's axes.
        """
        from jax import P

        before, after = dims.split('->')
        first, _, last = before.partition('*')
        start, stop = len(first), len(spec) - len(last)
        named = zip(first + last, (*spec[:start], *spec[stop:]), strict=True)
        entries = {'*': spec[start:stop]} | {letter: (entry,) for letter, entry in named}
        return P(*chain.from_iterable(entries.get(letter, self(letter)) for letter in after))

    @cached_property
    def per_shard(self) -> 'Layout':
        """The layout inside a function that is mapped over stages and data shards."""
        mapped = {*self.mesh_axes('B'), STAGE, CONTEXT}
        # Experts' weights are not mapped, so their dim keeps its axis.
        axes = (
            (letter, tuple(axis for axis in axes if axis not in mapped or letter == 'X'))
            for letter, axes in self.axes
        )
        return dataclasses.replace(
            self, axes=tuple((letter, kept) for letter, kept in axes if kept)
        )

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """The number of shards of each letter's dim in the computation."""
        return MappingProxyType({letter: self._size(axes) for letter, axes in self.axes})

    def shards_at_rest(self, dims: str) -> Mapping[str, int]:
        """Return the number of shards of each letter of a matrix with these dims between steps."""
        return {letter: self._size(axes) for letter, axes in self.axes_at_rest(dims).items()}

    def axes_at_rest(self, dims: str) -> Mapping[str, Axes]:
        """Return the mesh axes of each letter of a matrix between steps.

        Other dims are not sharded over the axes of layers and experts.
        """
        taken = [axis for letter in 'LΔΛX' if letter in dims for axis in self.mesh_axes(letter)]
        rest = {
            letter: tuple(axis for axis in axes if axis not in taken)
            for letter, axes in self.at_rest
        }
        return self._axes | rest

    def num_shards(self, letter: str) -> int:
        """Return the number of shards of a letter's dim; 1 if it is not sharded."""
        return self.shards.get(letter, 1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(size for _, size in self.sizes)

    @cached_property
    def mapped(self) -> tuple[Axes, ...]:
        """The mesh axes of each of the dims by which a step maps its data shards.

        With ZeRO, there is a dim of replicas, if there are several, and a dim of the data shards of
        a replica. Without it, replicas store the same as data shards, and all are one dim. Each
        context shard of a data shard counts as a data shard.
        """
        *replicas, data = ((axis,) for axis in self.mesh_axes('B') if axis != EXPERT)
        shards = *data, *self.mesh_axes('X'), *self.mesh_axes('S')
        if 'D' in dict(self.at_rest):
            return *replicas, shards
        return ((*chain.from_iterable(replicas), *shards),)

    def sizes_of(self, entries: Sequence[Axes]) -> tuple[int, ...]:
        """Return the number of devices along each of some groups of mesh axes."""
        return tuple(map(self._size, entries))

    def stacked(self, dims: str, entries: Sequence[Axes], *, at_rest: bool = False) -> 'P':
        """Return the PartitionSpec of stacked arrays with these dims, one per device of `entries`.

        Each group of mesh axes in `entries` adds a leading dim.
        """
        from jax import P

        return P(*map(_entry, entries), *self(dims, at_rest=at_rest))

    def of_own_experts(self, shape: Sequence[int], dims: str) -> 'tuple[tuple[int, ...], P]':
        """Return the shape and the sharding of a data shard's part of an array with a dim X.

        The data shards along `expert` hold different experts.
        """
        at, own = dims.index('X'), self.num_shards('X')
        part = *shape[:at], shape[at] // own, *shape[at + 1 :]
        return part, self(dims.replace('X', 'x'))

    def at_rest_over(self, axes: Axes) -> 'Layout':
        """Return the layout whose matrices are sharded over only these axes between steps."""
        kept = ((x, tuple(axis for axis in every if axis in axes)) for x, every in self.at_rest)
        return dataclasses.replace(self, at_rest=tuple(kept))

    def layer_order(self, num_layers: int) -> Sequence[int]:
        """Return the layer at each place of a stacked parameter between steps.

        The chunks of a stage have adjacent places. In the order of the model, the first chunks of
        all stages come first, then the second ones, and so on.
        """
        return [self.layer_at(place, num_layers) for place in range(num_layers)]

    def layer_at(self, place: Any, num_layers: int) -> Any:
        """Return the layer at a place, or the layers at places, of a stacked parameter."""
        stages = self.num_shards('L')
        size = num_layers // (stages * self.chunks)
        stage, chunk = place // (size * self.chunks), place // size % self.chunks
        return (chunk * stages + stage) * size + place % size

    def padding(self, dims: str) -> tuple[int, ...]:
        """Return the number of elements by which each dim of a matrix is padded in storage."""
        shards = self.shards_at_rest(dims)
        sizes = (self._uneven.get(letter, 0) for letter in dims)
        return tuple(
            -size % shards[letter] if size else 0 for letter, size in zip(dims, sizes, strict=True)
        )

    def unpadded(self, dims: str) -> tuple[int | None, ...]:
        """Return the size of each dim that is stored with padding, None for other dims."""
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

    def _size(self, axes: Axes) -> int:
        return prod(map(self._sizes.__getitem__, axes))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.sizes)


UNSHARDED = Layout()  # for arrays that each device has in full
STAGES = Layout(axes=(('Z', (STAGE,)),))  # for arrays that have a dim of stages


def batch_layout(mesh_axes: Sequence[str]) -> Layout:
    """Return the layout of a batch [B, S], outside a model, on a mesh with these axes."""
    batch = tuple(axis for axis in mesh_axes if axis in BATCH_AXES)
    sequence = tuple(axis for axis in mesh_axes if axis == CONTEXT)
    return Layout(axes=(('B', batch), ('S', sequence)))


def spread(spec: 'P', shape: Sequence[int], sizes: Mapping[str, int]) -> 'P':
    """Return a PartitionSpec that also uses the mesh axes over which `spec` replicates an array.

    `sizes` has the devices along each mesh axis. The axes shard the first dim whose shards they
    divide evenly; if there is none, `spec` is returned.
    """
    from jax import P

    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    used = {*chain.from_iterable(entries)}
    free = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
    for dim, axes in enumerate(entries):
        shards = prod(sizes[axis] for axis in (*axes, *free))
        if free and shape[dim] % shards == 0:
            return P(*map(_entry, (*entries[:dim], (*axes, *free), *entries[dim + 1 :])))
    return spec


def _widths(
    hidden_size: int, vision: VisionConfig | None, relevance: RelevanceConfig | None
) -> dict[str, int]:
    """Return the size of each letter that ZeRO shards."""
    widths = dict.fromkeys('Dd', hidden_size)
    if vision is not None:
        widths |= {'Ⓓ': vision.hidden_size, 'Ⓦ': vision.merged_size}
    if relevance is not None:
        widths['Ⓡ'] = relevance.scorer_size // relevance.scorer_shards
    return widths


@cache  # a search asks many thousands of times for the same few layouts
def _layout(
    mesh: MeshConfig,
    shard: str,
    num_kv_heads: int,
    hidden_size: int,
    vision: VisionConfig | None,
    relevance: RelevanceConfig | None,
) -> Layout:
    """Return the layout of a mesh."""
    sizes, model, letters = mesh.sizes, ('model',), _widths(hidden_size, vision, relevance)
    batch = tuple(axis for axis in BATCH_AXES if axis in sizes)
    axes: dict[str, Axes] = dict.fromkeys('BR', batch) | dict.fromkeys('FAMNV', model)
    if mesh.experts > 1:
        axes['X'] = (EXPERT,)
    axes |= {'K': model} if num_kv_heads % mesh.model == 0 else {'H': model}
    if mesh.sequence_parallel and mesh.model > 1:
        axes['T'] = model
    if mesh.is_grid:
        axes |= {'D': ('row',), 'R': (*batch, 'row'), 'V': ('row', 'model')}
    if mesh.stages > 1:
        axes |= dict.fromkeys('LΔΛ', (STAGE,))
    if mesh.context > 1:
        axes['S'] = (CONTEXT,)
    at_rest: dict[str, Axes] = {}
    if shard != 'none':
        shards = (*axes.get('L', ()), 'data', *axes.get('X', ()), *axes.get('S', ()))
        at_rest = {'D': (*axes.get('D', ()), *shards), 'd': shards}
    if 'Ⓓ' in letters:
        axes |= {'I': model, 'Ⓘ': model}
        every = (*model, *shards) if at_rest else model
        at_rest |= {letter: every for letter in letters if letter not in 'Dd'}
    counts = {
        letter: prod(sizes.get(axis, 1) for axis in every if axis != 'row')
        for letter, every in at_rest.items()
    }
    return Layout(
        axes=tuple(axes.items()),
        at_rest=tuple(at_rest.items()),
        sizes=tuple(sizes.items()),
        uneven=tuple((x, letters[x]) for x, count in counts.items() if letters[x] % count),
        chunks=mesh.virtual_stages,
    )


def _entry(axes: Axes) -> 'Axes | str | None':
    """Return the entry of a PartitionSpec for a dim that these mesh axes shard."""
    return axes if len(axes) > 1 else next(iter(axes), None)
