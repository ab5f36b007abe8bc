"""FP8 scales per operand, from the amax history of recent steps (delayed scaling).

Each matmul counts the exponents of its operands (`core/model/fp8.py`), and one max-reduction over
all devices finds the largest per operand. The state stores, for each exponent, how many more steps
it counts as recent; the highest recent exponent sets the next step's scale. The history starts with
the exponents of the first batch, computed in 16 bits, so no scale is guessed.
"""

from collections.abc import Iterable, Sequence
from itertools import count, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.core.config import Config, ModelConfig
from megajax.core.counts.declaration import Parameter, Role
from megajax.core.counts.layers import layer
from megajax.core.counts.parameters import dim_sizes, shape_of
from megajax.core.model import fp8
from megajax.core.parallel.layout import Layout

# Number of steps for which an exponent is remembered, as in Transformer Engine's recipe.
WINDOW = 1024


def linears(model: ModelConfig) -> list[tuple[str, str]]:
    """Return the sublayer and the name of each linear layer of a transformer layer."""
    return [(x.name, linear.name) for x in layer(model) for linear in (x.first, x.second)]


def init_recent(config: Config) -> jax.Array | None:
    """Return the state before the first step; None unless in fp8 with delayed scaling."""
    return nothing_seen(config) if config.train.has_delayed_scales else None


def nothing_seen(config: Config) -> jax.Array:
    """Return a state [layer, linear, operand, exponent] in which no exponent is recent."""
    layers, model = shape_of('L', dim_sizes(config.model)), config.model
    shape = *layers, len(linears(model)), len(fp8.FORMATS), fp8.NUM_EXPONENTS
    return jnp.zeros(shape, jnp.int32)


def scales_of(recent: jax.Array) -> jax.Array:
    """Return the scales [layer, linear, operand], which are powers of two."""
    is_recent = recent > 0
    highest = fp8.NUM_EXPONENTS - 1 - jnp.argmax(is_recent[..., ::-1], axis=-1)
    tops = jnp.broadcast_to(jnp.array([form.top for form in fp8.FORMATS]), highest.shape)
    scales = jnp.ldexp(jnp.float32(1), tops - highest - fp8.FIRST_EXPONENT)
    return jnp.where(is_recent.any(-1), scales, 1)  # an operand that was all zeros is not scaled


def has_scale(recent: np.ndarray) -> np.ndarray:
    """Return whether each operand [layer, linear, operand] of a state has a recent exponent."""
    return np.asarray(recent.any(-1))


def are_all_finite(recent: np.ndarray) -> bool:
    """Whether every operand in the recent steps of a state was finite."""
    return not recent[..., -1].any()


def remember(recent: jax.Array, places: jax.Array) -> jax.Array:
    """Return the state after a step with these `places`, the indices of its largest exponents."""
    is_seen = jax.nn.one_hot(places, fp8.NUM_EXPONENTS) > 0
    return jnp.where(is_seen, WINDOW, jnp.maximum(recent - 1, 0))


def are_finite(places: jax.Array) -> jax.Array:
    """Whether every operand was finite. FP8 conversion would hide a NaN or infinity."""
    return jnp.all(places < fp8.NUM_EXPONENTS - 1)


def current(params: nnx.State, config: Config, layout: Layout) -> jax.Array:
    """Return the scales [layer, linear, operand] of a step with current scaling.

    Only the scales of weights are used. The layers are in the order in which they are stored.
    """

    def of_weight(weight: nnx.Variable[jax.Array]) -> jax.Array:
        x = weight.get_value()
        # all-reduce over the shards of a weight
        return fp8.scale_of(fp8.amax(x, tuple(range(1, x.ndim))), fp8.E4M3)

    with jax.named_scope('parameters'):
        weights = _of_linears(params, 'weight', config.model)
        of_weights = jnp.stack([*map(of_weight, weights)], axis=1)
    ones = jnp.ones_like(of_weights)
    operands = {fp8.X: ones, fp8.W: of_weights, fp8.DY: ones}
    return jnp.stack([operands[which] for which in range(len(operands))], axis=-1)


def narrowed(params: nnx.State, scales: jax.Array | None, config: Config) -> nnx.State:
    """Return parameters with the layers' matrices in FP8 or, without scales, in 16 bits."""

    def narrow(index: int, weight: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        x = weight.get_value()
        if scales is None:
            return weight.replace(x.astype(config.train.compute_dtype))
        of_layers = scales[:, index, fp8.W].reshape(-1, *(1,) * (x.ndim - 1))
        return weight.replace(fp8.quantize(x, of_layers, fp8.E4M3))

    weights = _of_linears(params, 'weight', config.model)
    return _merged(params, 'weight', starmap(narrow, enumerate(weights)), config.model)


def attached(
    weights: Any,
    primals: Any,
    scales: jax.Array | None,
    model: ModelConfig,
    layout: Layout,
    *,
    is_current: bool,
) -> tuple[nnx.State, nnx.State]:
    """Return the weights with the scales of each linear layer, and the primals with its counts.

    The counts are zeros to differentiate with respect to; there are none with current scaling.
    """
    shape = *shape_of('L', dim_sizes(model)), len(linears(model)), len(fp8.FORMATS)
    scales = jnp.ones(shape, out_sharding=layout('L--')) if scales is None else scales
    counts = jnp.zeros((*shape, fp8.NUM_EXPONENTS), out_sharding=layout('L---'))

    def attach(params: nnx.State, values: jax.Array, declared: Parameter) -> nnx.State:
        parts = (nnx.Param(values[:, i], declared=declared) for i in range(values.shape[1]))
        return _merged(params, 'scales', parts, model)

    if is_current:
        return attach(weights, scales, fp8.CURRENT), primals
    return attach(weights, scales, fp8.SCALES), attach(primals, counts, fp8.COUNTS)


def detached(
    params: nnx.State, model: ModelConfig
) -> tuple[nnx.State, list[nnx.Variable[jax.Array]]]:
    """Return parameters and, separately, the scales or counts of each linear layer, if any."""
    found, rest = nnx.split_state(params, lambda _, x: x.declared.role is Role.SCALES, ...)
    return (rest, _of_linears(found, 'scales', model)) if found else (params, [])


def largest(
    counts: Sequence[nnx.Variable[jax.Array]],
    narrow: nnx.State,
    scales: jax.Array | None,
    layout: Layout,
    model: ModelConfig,
) -> jax.Array:
    """Return the indices [layer, linear, operand] of the largest exponents, -1 for zeros.

    `counts` has the counts of every linear layer from all devices, except the counts of weights.
    These are the same for the whole batch, and are in `narrow`, the result of `narrowed`.
    """
    places = jnp.arange(fp8.NUM_EXPONENTS, dtype=jnp.float32)

    def of_linear(
        index: int, counts: nnx.Variable[jax.Array], weight: nnx.Variable[jax.Array]
    ) -> jax.Array:
        own = jnp.where(counts.get_value() > 0, places, -1).max(-1)
        kept = [len(layout.mapped), len(layout.mapped) + 1]
        highest = own.max([dim for dim in range(own.ndim) if dim not in kept])
        x = weight.get_value().astype(jnp.float32)
        of_weight = jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim)))
        if scales is not None:
            of_weight = of_weight / scales[:, index, fp8.W]
        return highest.astype(jnp.int32).at[:, fp8.W].set(fp8.place(of_weight))

    weights = _of_linears(narrow, 'weight', model)
    return jnp.stack([*map(of_linear, count(), counts, weights)], axis=1)


def _of_linears(params: Any, name: str, model: ModelConfig) -> list[nnx.Variable[jax.Array]]:
    return [params['layers'][sublayer][linear][name] for sublayer, linear in linears(model)]


def _merged(
    params: nnx.State, name: str, values: Iterable[nnx.Variable[jax.Array]], model: ModelConfig
) -> nnx.State:
    sublayers: dict[str, dict[str, dict[str, nnx.Variable[jax.Array]]]] = {}
    for (sublayer, linear), value in zip(linears(model), values, strict=True):
        sublayers.setdefault(sublayer, {})[linear] = {name: value}
    merged: nnx.State = nnx.merge_state(params, nnx.State({'layers': sublayers}))
    return merged
