"""Move the matrices of layers to devices that have them whole, and back.

Each pool (`core/counts/whole_matrices.py`) is exchanged once each way, by an all-to-all between the
devices that hold pieces of its matrices. Devices that hold the same pieces, such as replicas, each
take a different share of the matrices, and all-gather the results. If too much of that is padding,
they first exchange the matrices for a part of every matrix.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from megajax.core.config import Config, mistake
from megajax.core.config.rules import what_freezes_layers
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dim_sizes
from megajax.core.counts.whole_matrices import Form, Part, parts_of
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Axes, Layout

Pools = dict[Form, jax.Array]


class WholeMatrices:
    """The matrices of a model's layers, whole on the devices of a mesh.

    With `may_turn`, square matrices may be transposed or not, depending on the mesh.
    """

    def __init__(self, config: Config, *, may_turn: bool = True) -> None:
        self._layout = Layout.of(config)
        self._sizes = dim_sizes(config.model)
        self._may_turn = may_turn

    def gather(self, matrices: Any, dtype: DTypeLike) -> Pools:
        """Return the matrices of a tree of parameters in pools [count, rows, columns].

        `count` is sharded over all devices, and padded with zero matrices to a multiple of their
        number.
        """
        found: dict[Form, list[jax.Array]] = {}

        def add(declared: Parameter, x: jax.Array) -> jax.Array:
            for part in self._parts(declared):
                found.setdefault(part.form, []).append(self._pieces(x.astype(dtype), part))
            return x

        map_parameters(add, matrices)
        return {form: self._whole(pieces, form) for form, pieces in found.items()}

    def scatter(self, pools: Pools, like: Any) -> Any:
        """Return the matrices of pools in a tree like `like`, from which they were gathered."""
        counts = dict.fromkeys(pools, 0)

        def count(declared: Parameter, x: jax.Array) -> jax.Array:
            for part in self._parts(declared):
                counts[part.form] += part.count
            return x

        map_parameters(count, like)
        pieces = {form: self._cut(pool, form, counts[form]) for form, pool in pools.items()}
        taken = dict.fromkeys(pools, 0)

        def take(declared: Parameter, _: jax.Array) -> jax.Array:
            parts = []
            for part in self._parts(declared):
                start, stop = taken[part.form], taken[part.form] + part.count
                taken[part.form] = stop
                own = lax.slice_in_dim(pieces[part.form], start, stop, axis=1)
                parts.append(self._stored(own, declared, part))
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, part.fused)

        return map_parameters(take, like)

    def name(self, form: Form) -> str:
        """Return a name for a pool that no other pool has, on this mesh or on a different one."""
        sides = (
            '.'.join(f'{x.size}{"".join(x.axes)}' for x in side)
            for side in (form.rows, form.columns)
        )
        sizes = (f'{axis}{size}' for axis, size in self._layout.sizes if size > 1)
        return '-'.join([*sides, *form.groups, *sizes, f'chunks{self._layout.chunks}'])

    def spread(self, state: Any, form: Form) -> Any:
        """Return a state with one entry per matrix of a pool, each on its matrix's device."""
        every = *form.groups, *self._spread(form)
        return jax.tree.map(lambda x: self._reshard(x, every, *[()] * (x.ndim - 1)), state)

    def _parts(self, declared: Parameter) -> list[Part]:
        return list(parts_of(declared, self._sizes, self._layout, may_turn=self._may_turn))

    def _pieces(self, x: jax.Array, part: Part) -> jax.Array:
        """Return the matrices of a part as [group, matrix, piece, element of the piece]."""
        if part.fused is not None:
            x = lax.slice_in_dim(x, part.start, part.stop, axis=part.fused)
        form, dims = part.form, (*part.batch, *part.form.dims)
        halves = [half for dim in dims for half in zip(dim.split, (dim.axes, ()), strict=True)]
        x = self._reshaped(x.transpose(part.order), *zip(*halves, strict=True))
        x = x.transpose(_apart(len(part.batch), len(form.dims)))
        shape = form.num_groups, part.count, form.num_pieces, -1
        return self._reshaped(x, shape, (form.groups, (), form.pieces, ()))

    def _stored(self, x: jax.Array, declared: Parameter, part: Part) -> jax.Array:
        """Return matrices, given as pieces, as the part of the parameter that they belong to."""
        sides = part.batch, part.form.dims
        shards = [[(dim.shards, dim.axes) for dim in side] for side in sides]
        shares = [[(dim.split[1], ()) for dim in side] for side in sides]
        halves = [*shards[0], *shares[0], *shards[1], *shares[1]]
        x = self._reshaped(x, *zip(*halves, strict=True))
        x = x.transpose(np.argsort(_apart(*map(len, sides))))
        spec = self._layout(''.join(declared.dims[at] for at in part.order), at_rest=True)
        x = x.reshape(part.shape, out_sharding=spec)
        return x.transpose(np.argsort(part.order))

    def _whole(self, pieces: Sequence[jax.Array], form: Form) -> jax.Array:
        """Return pieces [group, matrix, piece, element] as whole matrices [matrix, row, column]."""
        copies, spread, of_groups = form.copies(self._layout), self._spread(form), form.groups
        x = jnp.concatenate(pieces, axis=1)
        more = form.padded(x.shape[1], self._layout) - x.shape[1]
        x = jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)])
        x = self._reshard(x, of_groups, copies, form.pieces, ())
        x = self._reshard(x, of_groups, spread, (), ())  # an all-to-all
        shape = [size for half in (0, 1) for size in (dim.split[half] for dim in form.dims)]
        every = (*of_groups, *spread)
        x = self._reshaped(x, (-1, *shape), (every, *[()] * len(shape)))
        x = x.transpose(np.argsort(_apart(0, len(form.dims), lead=1)))
        x = self._reshaped(x, (-1, *form.padded_shape), (every, (), ()))
        return x[:, : form.shape[0], : form.shape[1]]

    def _cut(self, x: jax.Array, form: Form, count: int) -> jax.Array:
        """Return whole matrices as pieces [group, matrix, piece, element].

        At least the first `count` matrices of each group are among them.
        """
        copies, spread, of_groups = form.copies(self._layout), self._spread(form), form.groups
        more = [a - b for a, b in zip(form.padded_shape, form.shape, strict=True)]
        x = jnp.pad(x, [(0, 0), *((0, count) for count in more)])
        every, halves = (*of_groups, *spread), [size for dim in form.dims for size in dim.split]
        x = self._reshaped(x, (-1, *halves), (every, *[()] * len(halves)))
        x = x.transpose(_apart(0, len(form.dims), lead=1))
        shape = form.num_groups, len(x) // form.num_groups, form.num_pieces, -1
        x = self._reshaped(x, shape, (of_groups, spread, (), ()))
        x = self._reshard(x, of_groups, copies, form.pieces, ())  # an all-to-all
        size = x.shape[-1]
        if form.by_elements(count, self._layout):
            (parts,) = self._layout.sizes_of([copies])
            x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, -size % parts)])
            x = self._reshard(x, of_groups, (), form.pieces, copies)[:, :count]  # an all-to-all
        x = self._reshard(x, of_groups, (), form.pieces, ())  # an all-gather, if there are copies
        return x[..., :size]

    def _spread(self, form: Form) -> Axes:
        """The mesh axes over which the matrices of a group are spread."""
        return *form.copies(self._layout), *form.pieces

    def _reshaped(self, x: jax.Array, shape: Sequence[int], axes: Sequence[Axes]) -> jax.Array:
        return x.reshape(shape, out_sharding=self._layout.stacked('', axes))

    def _reshard(self, x: jax.Array, *axes: Axes) -> jax.Array:
        return jax.reshard(x, self._layout.stacked('', axes))


def _apart(batch: int, matrix: int, *, lead: int = 0) -> tuple[int, ...]:
    """Return the order in which dims, each split into shards and shares, have all shards first.

    Dims of a batch come before dims of a matrix; the order applies to each of the two by itself.
    The first `lead` dims do not move.
    """
    first, last = 2 * batch + lead, 2 * (batch + matrix) + lead
    of_batch = *range(lead, first, 2), *range(lead + 1, first, 2)
    return *range(lead), *of_batch, *range(first, last, 2), *range(first + 1, last, 2)


def on_whole_matrices(
    config: Config, matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an optimizer that gives `matrices` each matrix of the layers whole, on one device.

    `matrices` transforms the gradient [m, n] of one matrix, with m <= n, and `others` transforms
    the gradients of all other parameters. `matrices` gets no parameters: chain weight decay and the
    learning rate after this transformation. The rows are the inputs of the layer's matmul; a matrix
    with more inputs than outputs is transposed. Queries, keys and values are separate matrices, and
    so are gate, up, and the matrices of each expert.

    The state of `matrices` is spread over the devices. A run can resume with this state only on the
    same mesh and with the same ZeRO stage. Raises ConfigError if the config freezes the layers.
    """
    if key := what_freezes_layers(config):
        message = 'freezes the layers, so on_whole_matrices has no matrices to update; remove it'
        raise mistake(key, f'{message}, or use an optimizer without on_whole_matrices')
    # `matrices` may treat rows and columns differently
    whole = WholeMatrices(config, may_turn=False)

    def init(params: Any) -> dict[str, Any]:
        pools = whole.gather(matrices_of(params), jnp.float32)
        of_pools = {
            whole.name(form): whole.spread(jax.vmap(matrices.init)(pool), form)
            for form, pool in pools.items()
        }
        return {'matrices': of_pools, 'others': others.init(others_of(params))}

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        own = matrices_of(gradients)
        moved, of_pools = {}, {}
        for form, pool in whole.gather(own, jnp.float32).items():
            name = whole.name(form)
            moved[form], after = jax.vmap(lambda x, s: matrices.update(x, s))(
                pool, state['matrices'][name]
            )
            of_pools[name] = whole.spread(after, form)
        rest = None if params is None else others_of(params)
        updates, of_others = others.update(others_of(gradients), state['others'], rest)
        updates = nnx.merge_state(updates, whole.scatter(moved, like=own))
        return updates, {'matrices': of_pools, 'others': of_others}

    return optax.GradientTransformation(init, update)


def matrices_of(tree: nnx.State) -> nnx.State:
    """Return the matrices of layers in a tree of parameters."""
    return nnx.filter_state(tree, lambda _, x: x.declared.is_layer_matrix)


def others_of(tree: nnx.State) -> nnx.State:
    """Return the other parameters in a tree."""
    return nnx.filter_state(tree, lambda _, x: not x.declared.is_layer_matrix)
