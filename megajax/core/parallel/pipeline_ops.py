"""Move arrays between pipeline stages, and within a stage's part.

The stages are a mapped dim: [stage, data shard, ...]. Every function here works on each device's
part of an array, so nothing moves along other mesh axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax

from megajax.core.parallel.layout import STAGE, STAGES, Layout

BOTH, OF_STAGE, SAME = 'both', 'stage', 'same'


def over_shards(
    function: Callable[..., Any], layout: Layout, in_axes: Any = 0, out_axes: Any = 0
) -> Any:
    """Map a function of one shard's sequences over all data shards.

    `in_axes` and `out_axes` are as in `jax.vmap`, for the data shards of a replica.
    """
    function = jax.vmap(function, in_axes=in_axes, out_axes=out_axes)
    for _ in layout.mapped[:-1]:  # replicas
        function = jax.vmap(function, in_axes=in_axes)
    return function


def over_stages(function: Callable[..., Any], layout: Layout, *kinds: Any) -> Any:
    """Map a function over stages and data shards.

    The kind of an argument says which dims it has: BOTH, only the dim OF_STAGE, or none, so that it
    is the SAME for all. An argument that is a tuple has a kind for each element.
    """
    shards = jax.tree.map(lambda kind: 0 if kind == BOTH else None, kinds)
    stages = jax.tree.map(lambda kind: 0 if kind in (BOTH, OF_STAGE) else None, kinds)
    mapped = over_shards(function, layout, shards)
    return jax.vmap(mapped, in_axes=stages)


def to_stages(x: jax.Array, stages: int) -> jax.Array:
    """Copy x [...] to every stage: [stage, ...]."""
    shape, spec = (stages, *x.shape), STAGES.like(_spec(x), '*->Z*')
    return lax.broadcast_in_dim(x, shape, range(1, x.ndim + 1), out_sharding=spec)


def to_shards(x: jax.Array, count: int, spec: P) -> jax.Array:
    """Return each device's part of x [Z, W, ...] as [Z, W, *shards, ...], with `count` shard dims.

    `spec` is the sharding of the result.
    """
    return _on_devices(lambda x: x.reshape(*x.shape[:2], *(1,) * count, *x.shape[2:]), spec, x)


def on_shards(x_Z: jax.Array, like: jax.Array) -> jax.Array:
    """Copy each stage's number to all elements of an array like `like`."""
    return lax.broadcast_in_dim(x_Z, like.shape, (0,), out_sharding=_spec(like))


def select(condition_Z: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a on the stages where the condition is true, and b on the others."""
    return jnp.where(on_shards(condition_Z, a), a, b)


def send(x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Send each stage's part of x [stage, ...] to a different stage; zeros if nothing arrives."""
    # permute over stage
    return _on_devices(lambda x: lax.ppermute(x, STAGE, pairs), _spec(x), x)


def pick(tree: Any, index_Z: jax.Array) -> Any:
    """Return [stage, ...]: each stage's choice from arrays [choice, ...] that all stages have."""

    def own(tree: Any, index: jax.Array) -> Any:
        return jax.tree.map(lambda x: _at(x, index[0])[None], tree)

    out = jax.tree.map(lambda x: STAGES.like(_spec(x), 'M*->Z*'), tree)
    return _on_devices(own, out, tree, index_Z)


def load(tree: Any, index_Z: jax.Array) -> Any:
    """Return [stage, ...] from arrays [stage, slots, ...]: the contents of one slot per stage.

    A negative index reads the first slot.
    """
    if all(x.shape[1] == 1 for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x: x[:, 0], tree)

    def own(tree: Any, index: jax.Array) -> Any:
        return jax.tree.map(lambda x: _at(x[0], index[0])[None], tree)

    out = jax.tree.map(lambda x: STAGES.like(_spec(x), 'ZW*->Z*'), tree)
    return _on_devices(own, out, tree, index_Z)


def store(tree: Any, values: Any, index_Z: jax.Array) -> Any:
    """Write values [stage, ...] into a slot of arrays [stage, slots, ...].

    A stage with a negative index writes nothing.
    """

    def own(tree: Any, values: Any, index: jax.Array) -> Any:
        def write(x: jax.Array, value: jax.Array) -> jax.Array:
            kept = jnp.where(index[0] >= 0, value, _at(x[0], index[0])[None])
            return _put(x, kept, index[0])

        return jax.tree.map(write, tree, values)

    with jax.named_scope('slots'):
        return _on_devices(own, jax.tree.map(_spec, tree), tree, values, index_Z)


def add(tree: Any, values: Any, index_Z: jax.Array) -> Any:
    """Add values [stage, ...] to a slot of arrays [stage, slots, ...].

    A negative index means the first slot.
    """
    if all(x.shape[1] == 1 for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x, value: x + jnp.expand_dims(value, 1), tree, values)

    def own(tree: Any, values: Any, index: jax.Array) -> Any:
        return jax.tree.map(
            lambda x, value: _put(x, _at(x[0], index[0])[None] + value, index[0]), tree, values
        )

    return _on_devices(own, jax.tree.map(_spec, tree), tree, values, index_Z)


def share_tokens(y: jax.Array, layout: Layout) -> jax.Array:
    """Give each stage its part of the tokens of the last stage: one all-to-all.

    y is [stage, *shards, B, T, D]; the result is [stage, *shards, 1, T, D], with the tokens of all
    sequences joined into one, which is padded on each shard of T to a multiple of the number of
    stages.
    """
    stages, size = y.shape[0], y.shape[-1]

    def own(y: jax.Array) -> jax.Array:
        tokens = _padded(y.reshape(-1, size), stages)
        received = lax.all_to_all(tokens, STAGE, 0, 0, tiled=True)  # all-to-all over stage
        return received[-(len(tokens) // stages) :].reshape(_shape(layout, 1, -1, size))

    return _on_devices(own, _spec(y), y)


def collect_tokens(parts: jax.Array, shape: tuple[int, ...], layout: Layout) -> jax.Array:
    """Undo `share_tokens` for an array of this shape; an all-gather gives each stage all tokens."""
    *_, rows, length, size = shape
    length //= layout.num_shards('T')

    def own(parts: jax.Array) -> jax.Array:
        # all-gather over stage
        tokens = lax.all_gather(parts.reshape(-1, size), STAGE, axis=0, tiled=True)
        return tokens[: rows * length].reshape(_shape(layout, rows, length, size))

    return _on_devices(own, _spec(parts), parts)


def own_tokens(z: jax.Array, layout: Layout) -> jax.Array:
    """Return each stage's part, as in `share_tokens`, of z [*shards, B, S] that all stages have."""
    shards, stages = layout.num_shards('T'), layout.num_shards('L')

    def own(z: jax.Array, stage: jax.Array) -> jax.Array:
        rows, length = z.shape[-2:]
        tokens = jnp.moveaxis(z.reshape(rows, shards, length // shards), 1, 0)
        parts = _padded(tokens.reshape(shards, -1).T, stages)
        part = _at(parts.reshape(stages, -1, shards), stage[0])
        return part.T.reshape(_shape(layout, 1, -1))

    stage_Z = jnp.arange(stages, out_sharding=STAGES('Z'))
    return _on_devices(own, STAGES.like(_spec(z), '*->Z*'), z, stage_Z)


def _on_devices(function: Callable[..., Any], out: Any, *arrays: Any) -> Any:
    """Apply a function to each device's part; `out` is the sharding of the result."""
    specs = jax.tree.map(_spec, arrays)
    return jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)(*arrays)


def _spec(x: jax.Array) -> P:
    return jax.typeof(x).sharding.spec


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, jnp.maximum(index, 0), keepdims=False)


def _put(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Write value [1, ...] at [:, index] of x [1, slots, ...]."""
    return lax.dynamic_update_index_in_dim(x, value, jnp.maximum(index, 0), 1)


def _padded(tokens: jax.Array, multiple: int) -> jax.Array:
    padding = -len(tokens) % multiple
    return jnp.pad(tokens, [(0, padding), *[(0, 0)] * (tokens.ndim - 1)]) if padding else tokens


def _shape(layout: Layout, *dims: int) -> tuple[int, ...]:
    """Return the shape of a device's part of [stage, *shards, ...]."""
    return *(1 for _ in (STAGE, *layout.mapped)), *dims
