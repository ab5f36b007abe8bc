"""The results of a training step on one device, with which executed steps are compared.

Every parameter gets noise first: biases are initialized to zero, which would hide a fault. So does
the load of experts, because the balance loss of equal loads has no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megajax.analysis.inspect.one_device import on_one_device
from megajax.analysis.inspect.random_batch import make_batch
from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.mesh import concrete, make_mesh
from megajax.core.parallel.placements import parameter_name
from megajax.core.train.feed import place_batch
from megajax.core.train.first_step import with_scales
from megajax.core.train.optimizer import make_optimizer
from megajax.core.train.step import TrainState, init_state, make_train_step
from megajax.xla.emulate.compare import nudged
from megajax.xla.emulate.execute import quick
from megajax.xla.emulate.one_device import CpuModule

NOISE = 0.05
LOSS_SCALE = 64.0  # for fp16
# Relative changes of fp32 parameters: the first shows how much rounding to fp32 matters, the others
# are other points with the same rounding to 16 bits.
NUDGE, NUDGES = 2.0**-22, (2.0**-8, 2.0**-7)
GRADIENT, SECOND, AFTER = 'gradient of ', 'second moment of ', ' after the step'
METRICS = 'loss', 'nll', 'grad_norm'
# What the next step reads in addition to parameters and moments. Rounding to 16 bits changes some
# of it by whole tokens or exponents.
LOAD, EXPONENTS = f'load of experts{AFTER}', f'fp8 exponents{AFTER}'
Values = dict[str, Any]


class Reference(NamedTuple):
    """The results of a step on one device, by name, from parameters that differ a little.

    The difference of `results` and `nudged` is due to rounding to fp32. `elsewhere` has the results
    at other points, where rounding to 16 bits has other errors.
    """

    results: Values
    nudged: Values
    elsewhere: tuple[Values, ...]

    @property
    def points(self) -> tuple[Values, ...]:
        """The results at all points between which rounding to 16 bits differs."""
        return self.results, *self.elsewhere


@functools.lru_cache(maxsize=32)
def first_state(config: Config) -> TrainState:
    """Return a one-device state before a step as numpy arrays, with noise on every parameter.

    The parameters have the same values in every dtype, except for the rounding to their own dtype.
    """
    random = np.random.default_rng(1)
    with jax.set_mesh(make_mesh()):
        make = jax.jit(functools.partial(init_state, config)).lower().compile(quick())
        state = jax.tree.map(np.array, make())

    lora = config.lora

    def noisy(declared: Parameter, x: np.ndarray) -> np.ndarray:
        noise = NOISE * random.normal(size=x.shape)
        if lora is not None and declared.is_adapter:  # the adapter's output is scaled
            noise /= lora.scale
        if lora is not None and declared.is_frozen:  # their dtype can be bf16
            return np.asarray((x.astype(jnp.bfloat16) + noise).astype(jnp.bfloat16), x.dtype)
        return np.asarray(x + noise, x.dtype)

    # With the noise, gradients would overflow at a run's initial scale.
    if state.loss_scale is not None:
        state = state._replace(loss_scale=state.loss_scale._replace(value=np.float32(LOSS_SCALE)))
    if lora is not None and config.train.dtype != 'float32':
        # Initialized in fp16 and rounded to bf16, frozen weights would be rounded twice.
        precise = first_state(on_one_device(config, exact=True)).params
        params = jax.tree.map(lambda x, own: np.asarray(x, own.dtype), precise, state.params)
    else:
        params = map_parameters(noisy, state.params)
    state = state._replace(params=params)
    if state.load is not None:
        state = state._replace(load=_uneven(state.load))
    if state.recent is not None:
        with jax.set_mesh(make_mesh()):
            scaled = with_scales(config, _placed(state, config), place_batch(make_batch(config)))
            state = state._replace(recent=np.array(scaled.recent))
    return state


def _uneven(load: np.ndarray) -> np.ndarray:
    """Return different shares of the assignments for each expert."""
    parts = np.random.default_rng(2).uniform(0.5, 1.5, load.shape)
    return np.asarray(parts / parts.sum(-1, keepdims=True), load.dtype)


def _placed(state: TrainState, config: Config) -> TrainState:
    """Place a state on the current mesh, as a step expects it."""
    abstract = concrete(jax.eval_shape(lambda: init_state(config)))
    placed: TrainState = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
    return placed


@functools.lru_cache(maxsize=32)
def reference(config: Config, rounded_to: DTypeLike | None) -> Reference:
    """Return the results of a step on one device that are to be compared.

    Muon's coefficients are rounded to `rounded_to`.
    """
    results = _step(config, rounded_to, quick())
    return Reference(results(0), results(NUDGE), tuple(map(results, NUDGES)))


@functools.lru_cache(maxsize=8)
def recompiled(config: Config, rounded_to: DTypeLike | None) -> Values:
    """Return the results of the step on one device if XLA's CPU compiler optimizes it.

    They and the results of `reference` differ by rounding alone. `Reference.nudged` does not show
    the rounding of what is computed from the batch alone, such as the texture of images.
    """
    return _step(config, rounded_to, quick() | {'xla_backend_optimization_level': 1})(0)


@functools.lru_cache(maxsize=8)
def exponents_in_fp32(config: Config) -> np.ndarray:
    """Return fp8's recent exponents after the step on one device, with fp32 in place of fp8."""
    with jax.set_mesh(make_mesh()):
        arguments = _placed(first_state(config), config), place_batch(make_batch(config))
        traced = make_train_step(config).trace(*arguments)
        devices, values = jax.devices('cpu'), jax.tree.leaves(arguments)
        results = CpuModule(traced).run(values, devices, exact=True)
    after, _ = jax.tree.unflatten(jax.tree.structure(traced.out_info), results)
    return np.asarray(after.recent)


def _step(
    config: Config, rounded_to: DTypeLike | None, options: dict[str, Any]
) -> Callable[[float], Values]:
    """Compile a step on one device: a function from the change of parameters to results."""
    optimizer = make_optimizer(config, rounded_to=rounded_to)
    first = first_state(config)
    with jax.set_mesh(make_mesh()):
        batch = place_batch(make_batch(config))
        lowered = make_train_step(config, optimizer).lower(_placed(first, config), batch)
        step = lowered.compile(options)

    def results(nudge: float) -> Values:
        with jax.set_mesh(make_mesh()):
            after = step(_placed(moved(first, nudge), config), batch)
        values: Values = jax.tree.map(np.asarray, compared_of(*after))
        return as_magnitudes(values, config)

    return results


def moved(state: TrainState, nudge: float) -> TrainState:
    """Change fp32 parameters; in a narrower dtype, the last bit of a number is too much."""
    if not nudge:
        return state
    change = lambda x: nudged(x, nudge) if x.dtype == np.float32 else x  # noqa: E731
    return state._replace(params=jax.tree.map(change, state.params))


def compared_of(state: TrainState, metrics: Values) -> Values:
    """Return loss, gradients (as Adam's first moments) and what the step changes, by name."""
    is_adam = lambda part: hasattr(part, 'mu')  # noqa: E731
    adam = next(filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam)))
    others = {LOAD: state.load, EXPONENTS: state.recent}
    return (
        {name: metrics[name] for name in METRICS}
        | {f'{GRADIENT}{name}': x for name, x in _by_name(adam.mu).items()}
        | {f'{SECOND}{name}': x for name, x in _by_name(adam.nu).items()}
        | {f'{name}{AFTER}': x for name, x in _by_name(state.params).items()}
        | {name: x for name, x in others.items() if x is not None}
    )


def as_magnitudes(values: Values, config: Config) -> Values:
    """Return results with Adam's second moments as magnitudes of its first moments."""
    factor = (1 - config.optim.beta1) / (1 - config.optim.beta2) ** 0.5

    def magnitude(x: np.ndarray) -> np.ndarray:
        with np.errstate(invalid='ignore'):  # the root of a negative moment is not a number
            return np.asarray(np.sqrt(x) * factor, x.dtype)

    def of_result(x: Any) -> Any:
        if isinstance(x, list):  # the pieces of an array
            return [(place, magnitude(piece)) for place, piece in x]
        return magnitude(x)

    return {name: of_result(x) if name.startswith(SECOND) else x for name, x in values.items()}


def _by_name(tree: Any) -> Values:
    is_leaf = lambda x: isinstance(x, list)  # noqa: E731  (the pieces of an array)
    return {
        parameter_name(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    }
