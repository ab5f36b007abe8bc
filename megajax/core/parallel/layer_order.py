"""The order of layers on pipeline stages, and the conversion from and to the order of a model.

A stage stores its chunks of layers next to each other, while the model's layers pass through chunk
0 of all stages first, then chunk 1 of all stages, and so on. Everything that leaves or enters the
memory of a run (checkpoints, other formats, other meshes) has the layers in the order of the model.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from megajax.core.config import ConfigError
from megajax.core.parallel.layout import STAGE, UNSHARDED, Layout


def in_model_order(x: jax.Array, layout: Layout, *, donate: bool = False) -> jax.Array:
    """Return a stacked parameter in the order of the model, with its sharding.

    Each stage sends each of its chunks once. With `donate` the argument is consumed.
    """
    return _moved(x, layout, to_model=True, donate=donate)


def on_stages(x: jax.Array, layout: Layout, *, donate: bool = False) -> jax.Array:
    """Return a stacked parameter, given in the order of the model, in the order of the stages."""
    return _moved(x, layout, to_model=False, donate=donate)


def small_in_model_order(x: jax.Array, layout: Layout) -> jax.Array:
    """Return a small array, of which each stage has its own layers, in the order of the model.

    Without stages, return the array unchanged.
    """
    if not layout.mesh_axes('L'):
        return x
    order = np.argsort(layout.layer_order(len(x)))
    return jax.reshard(x, UNSHARDED('-' * x.ndim))[order]  # all-gather over stage


def small_on_stages(x: jax.Array, layout: Layout) -> jax.Array:
    """Return each stage's layers of a small array that every device has in the order of the model.

    Without stages, return the array unchanged.
    """
    if not layout.mesh_axes('L'):
        return x
    order = np.array(layout.layer_order(len(x)))
    return jax.reshard(x[order], layout('L' + '-' * (x.ndim - 1)))


def tree_on_stages(tree: Any, layout: Layout) -> Any:
    """Return a state, given in the order of the model, in the order of the stages; consume it.

    Only one parameter at a time exists twice.
    """

    def move(x: jax.Array) -> jax.Array:
        # After 32 programs that have not ended, XLA's simulated CPU devices wait for each other.
        return jax.block_until_ready(on_stages(x, layout, donate=True))

    return map_stacked(move, tree, layout)


def tree_on_host(tree: Any, layout: Layout) -> Any:
    """Return a state in the order of the model, for saving.

    Arrays that were in a different order are returned in host memory. Each device moves its part
    there before the next parameter is reordered, so only one parameter at a time exists twice on
    the devices.
    """

    def move(x: jax.Array) -> jax.Array:
        ordered = in_model_order(x, layout)
        return jax.block_until_ready(
            jax.device_put(ordered, ordered.sharding.with_memory_kind('pinned_host'))
        )

    return map_stacked(move, tree, layout)


def map_stacked(function: Any, tree: Any, layout: Layout) -> Any:
    """Apply a function to the arrays of a state that are not in the model's order of layers.

    The state of an optimizer that is not shaped like its parameter is left alone, because nothing
    says which of its dims holds the layers (`without_known_order`).
    """
    if layout.chunks == 1:
        return tree

    def apply(x: Any) -> Any:
        if not (_is_stacked(x) and _is_shaped_like_parameter(x)):
            return x
        return x.replace(function(x.get_value()))

    return jax.tree.map(apply, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def without_known_order(tree: Any) -> list[Any]:
    """Return the arrays of several layers of which nothing says which dim holds the layers.

    Only the state of an optimizer that is not shaped like its parameters contains such arrays.
    """
    variables = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [
        value
        for x in variables
        if _is_stacked(x) and not _is_shaped_like_parameter(x)
        for value in jax.tree.leaves(x.get_value())
        if value.size > 1
    ]


def _is_stacked(x: Any) -> bool:
    return isinstance(x, nnx.Variable) and x.declared.is_stacked


def _is_shaped_like_parameter(x: nnx.Variable) -> bool:
    shape: tuple[int, ...] = getattr(x.get_value(), 'shape', ())
    return len(shape) == len(x.declared.dims) and shape[0] > 1


def _moved(x: jax.Array, layout: Layout, *, to_model: bool, donate: bool) -> jax.Array:
    if layout.chunks == 1:
        return x
    return _mover(layout.num_shards('L'), layout.chunks, to_model, donate)(x)


@functools.cache
def _mover(stages: int, chunks: int, to_model: bool, donate: bool) -> Any:
    rounds = _rounds(stages, chunks)
    if not to_model:
        rounds = [[(there, here) for here, there in moves] for moves in rounds]

    def own(x: jax.Array) -> jax.Array:
        parts, stage = x.reshape(chunks, -1, *x.shape[1:]), lax.axis_index(STAGE)
        result = jnp.zeros_like(parts)
        for moves in rounds:
            places = [[0] * stages, [0] * stages]
            for move in moves:
                for end, (at, place) in zip(places, move, strict=True):
                    end[at] = place
            source, target = (jnp.array(end)[stage] for end in places)
            pairs = [(here, there) for (here, _), (there, _) in moves]
            received = lax.ppermute(  # permute over stage
                lax.dynamic_index_in_dim(parts, source, keepdims=False), STAGE, pairs
            )
            result = lax.dynamic_update_index_in_dim(result, received, target, 0)
        return result.reshape(x.shape)

    def move(x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec
        return jax.shard_map(own, in_specs=spec, out_specs=spec, check_vma=False)(x)

    return jax.jit(move, donate_argnums=0 if donate else ())


Move = tuple[tuple[int, int], tuple[int, int]]  # stage and place of a chunk, before and after


def _rounds(stages: int, chunks: int) -> list[list[Move]]:
    """Return the moves of each round, in which every stage sends and receives one chunk."""
    rounds: list[list[Move]] = [[] for _ in range(chunks)]
    for chunk in range(stages * chunks):
        turn = (chunk + chunk // math.lcm(stages, chunks)) % chunks
        held, wanted = (chunk % stages, chunk // stages), (chunk // chunks, chunk % chunks)
        rounds[turn].append((held, wanted))
    return rounds


def require_model_order(layout: Layout) -> None:
    """Raise ConfigError if a layout has layers or tokens in a different order from the model's."""
    keys = {'stages': 'L', 'context': 'S'}
    axes = [f'mesh.{key}' for key, dim in keys.items() if layout.num_shards(dim) > 1]
    if axes:
        raise ConfigError(
            f'a model cannot be called with {" and ".join(axes)}: use '
            f'{" ".join(f"{axis}=1" for axis in axes)}, or megajax.loss, megajax.gradients or '
            'megajax.make_train_step, which know the order of layers and tokens there'
        )
