"""Run the layers of a model, in training and in evaluation."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config import ModelConfig
from megajax.core.counts.layers import num_before
from megajax.core.model.attention import attention_core
from megajax.core.model.block import Block
from megajax.core.model.computation import Computation
from megajax.core.model.residuals import on_views
from megajax.core.model.rows import Rows
from megajax.core.parallel.layout import UNSHARDED

# the value passed from layer to layer: the residual stream, or one per part of the batch
Carry = Any
# (block, its weights in the compute dtype or None, carry, index of the layer) -> carry
LayerFn = Callable[[Block, Block | None, Carry, jax.Array], Carry]
# A function of a carry and of one group's entry of some arrays; and these arrays.
AfterGroups = tuple[Callable[[Carry, Any], Carry], Any]


def run_layers(
    layer_fn: LayerFn,
    x: Carry,
    layers: Block,
    weights: Block | None = None,
    first: jax.Array | int = 0,
    *,
    recompute: str = 'none',
    unroll: bool = False,
    after_groups: AfterGroups | None = None,
) -> Carry:
    """Apply `layer_fn` to every layer in turn, in a loop whose body is a period of the pattern.

    Return the last carry. Each block gets the config of its layer. Layers after the last whole
    period are compiled on their own, after the loop. If `layers` contains gradient slots
    (`fp32_gradients.py`) or ZeRO-sharded matrices (`zero_sharding.py`), `weights` are the layers'
    weights to compute with. `first` is the index, in the model, of the first of `layers`. With
    `after_groups`, the layers are divided into equal groups, and its function runs after each
    group.
    """
    model = layers.attention.config
    are_alike = len(model.pattern) == 1 and not model.first_dense
    apply = _in_turn if are_alike else _in_periods
    run = partial(apply, layer_fn, recompute=recompute, unroll=unroll)
    each = layers, weights, first + jnp.arange(count_layers(layers))
    if after_groups is None:
        return run(x, each)
    after, arrays = after_groups

    def group(x: Carry, group: tuple[Any, Any]) -> tuple[Carry, None]:
        return after(run(x, group[0]), group[1]), None

    groups = _in_groups(each, count_layers(arrays)), arrays
    return lax.scan(group, x, groups, unroll=unroll)[0]


def _in_periods(layer_fn: LayerFn, x: Carry, each: Any, *, recompute: str, unroll: bool) -> Carry:
    """Apply stacked layers (blocks, weights and indices) in a loop over periods.

    Layers of a different kind before the first whole period are compiled separately, like those
    after the last one.
    """
    model, count = each[0].attention.config, count_layers(each)
    first, period = model.first_dense, len(model.pattern)

    def of_layer(block: Block, given: Any, x: Carry) -> Carry:
        return layer_fn(block, given[0], x, given[1])

    if recompute == 'full':
        # A layer is recomputed only when its backward pass begins (`prevent_cse`), so only one
        # layer of a period has its activations in memory.
        of_layer = jax.checkpoint(of_layer, prevent_cse=True)

    def run(block: Block, given: Any, x: Carry, start: int) -> Carry:
        for place in range(count_layers(block)):
            view = partial(_layer_of, model, start=start, place=place)
            x = on_views(of_layer, view)(block, given, x)
        return x

    def of_all(block: Any, given: Any, x: Carry) -> Carry:
        before, inside, after = zip(block, given, strict=True)
        x = run(*before, x, 0)
        if period == 1:
            alike = inside[0], *inside[1]
            return _in_turn(layer_fn, x, alike, start=first, recompute=recompute, unroll=unroll)
        if count - first >= period:
            x, _ = lax.scan(lambda x, each: (run(*each, x, first), None), x, inside, unroll=unroll)
        return run(*after, x, first)

    block, *given = each
    return on_views(of_all, partial(_divide, model, count))(block, tuple(given), x)


def _divide(model: ModelConfig, count: int, layers: Any) -> tuple[Any, Any, Any]:
    """Return layers before the loop over periods, [periods, period, ...] in it, and after it.

    If all layers in the loop are of one kind, they are not divided.
    """
    first, period = model.first_dense, len(model.pattern)
    periods = (count - first) // period
    ends = itertools.pairwise((0, first, first + periods * period, count))
    before, inside, after = (_between(model, layers, *each) for each in ends)
    return before, _in_groups(inside, periods) if period > 1 and periods else inside, after


def _in_turn(
    layer_fn: LayerFn, x: Carry, each: Any, *, start: int = 0, recompute: str, unroll: bool
) -> Carry:
    """Apply stacked layers of one kind; the first of them is layer `start`."""
    if recompute == 'full':
        # In a loop, no operation of the forward pass is in the same computation as its repetition.
        layer_fn = jax.checkpoint(layer_fn, prevent_cse=unroll)
    block, weights, index = each

    def of_each(x: Carry, each: Any) -> tuple[Carry, None]:
        block, weights, index = each
        return layer_fn(block, weights, x, index), None

    weights = None if weights is None else at_place(weights, start)
    return lax.scan(of_each, x, (at_place(block, start), weights, index), unroll=unroll)[0]


def layer_of(layers: Block, index: int) -> Block:
    """Return the block of the layer with this index, given all layers of a model."""
    return _layer_of(layers.attention.config, layers, start=0, place=index)


def at_place(block: Block, index: int) -> Block:
    """Return the block with the config of the layer at this index."""
    return block.at_layer(index, lambda _, x: x)


def _layer_of(model: ModelConfig, layers: Any, *, start: int, place: int) -> Any:
    """Return one of stacked layers (blocks or indices); the first of them is layer `start`."""
    at = start + place

    def take(name: str, x: jax.Array) -> jax.Array:
        return x[num_before(model, name, at) - num_before(model, name, start)]

    return _of_stacks(lambda block: block.at_layer(at, take), take, layers)


def _between(model: ModelConfig, layers: Any, start: int, stop: int) -> Any:
    """Return the layers from `start` up to `stop` of all layers (blocks or indices)."""

    def cut(name: str, x: jax.Array) -> jax.Array:
        return x[num_before(model, name, start) : num_before(model, name, stop)]

    return _of_stacks(lambda block: block.each(cut), cut, layers)


def _of_stacks(
    of_block: Callable[[Block], Block], of_array: Callable[[str, jax.Array], jax.Array], layers: Any
) -> Any:
    """Map blocks, and arrays with an entry for each layer, as attention's arrays have."""
    return jax.tree.map(
        lambda x: of_block(x) if isinstance(x, Block) else of_array('attention', x),
        layers,
        is_leaf=lambda x: isinstance(x, Block),
    )


def count_layers(layers: Any) -> int:
    """Return the number of layers of stacked parameters: the first dim of attention's arrays."""
    return len(jax.tree.leaves(layers)[0])


def run_layer(
    block: Block,
    x_BTD: jax.Array,
    rows: Rows,
    index: jax.Array | int,
    computation: Computation,
) -> jax.Array:
    """Return the residual stream after the layer with this index, as in training and evaluation."""
    own, attention = rows.at_layer(index), block.attention
    core = attention_core(
        attention.config,
        attention.layout,
        own,
        recompute=computation.recompute == 'selective',
        exchange=computation.exchange,
    )
    x_BTD, _ = block(x_BTD, core, own)
    return x_BTD if own.deep_BTAD is None else add_deep(x_BTD, own.deep_BTAD, index)


def add_deep(x_BTD: jax.Array, deep_BTAD: jax.Array, index: jax.Array | int) -> jax.Array:
    """Add DeepStack's vectors for the layer with this index; later layers have none."""
    if not (taps := deep_BTAD.shape[2]):
        return x_BTD

    def add(x_BTD: jax.Array, deep_BTAD: jax.Array) -> jax.Array:
        at = jnp.minimum(index, taps - 1)
        return x_BTD + lax.dynamic_index_in_dim(deep_BTAD, at, 2, keepdims=False)

    with jax.named_scope('deepstack'):
        return lax.cond(index < taps, add, lambda x_BTD, _: x_BTD, x_BTD, deep_BTAD)


def _in_groups(layers: Any, groups: int) -> Any:
    """Return stacked arrays [L, ...] as [groups, L / groups, ...]."""

    def divide(x: jax.Array) -> jax.Array:
        spec = UNSHARDED.like(jax.typeof(x).sharding.spec, '*->-*')
        return x.reshape(groups, -1, *x.shape[1:], out_sharding=spec)

    return jax.tree.map(divide, layers)
