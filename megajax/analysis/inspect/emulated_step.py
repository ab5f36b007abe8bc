"""Execution of a GPU-compiled training step, compared with the step on one device.

Every parameter gets noise first: biases are initialized to zero, which would hide a fault. The
learning rate, Adam's epsilon and gradient clipping are set so that Adam's first moment is a
multiple of the gradient, in fp32, and the update is a smooth function of it. If a step pads a
matrix, the padding must be zero before and after the step. Stages and context shards get layers and
tokens in the order that a run gives them.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megajax.analysis.inspect.one_device import on_one_device, updated
from megajax.analysis.inspect.random_batch import make_batch
from megajax.analysis.inspect.result import Compared
from megajax.analysis.inspect.tolerances import LOSSES, has_16_bits, judged, limits
from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.hardware.targets import gpu_devices
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete, make_mesh, mesh_of
from megajax.core.parallel.placements import parameter_name
from megajax.core.train import feed
from megajax.core.train.feed import abstract_batch, place_batch
from megajax.core.train.first_step import with_scales
from megajax.core.train.optimizer import make_optimizer
from megajax.core.train.step import TrainState, init_state, make_train_step
from megajax.xla.emulate.compare import (
    MARGIN,
    Difference,
    difference,
    difference_in_fp32,
    difference_of_rounded,
    largest,
    nudged,
)
from megajax.xla.emulate.execute import (
    GpuProgram,
    optimized_for_gpu,
    quick,
    run_on_cpu,
    stored_program,
)

NOISE = 0.05
LOSS_SCALE = 64.0  # for fp16
SUM_IN_16_BITS = 2.0**-9  # relative rounding error of a gradient that is summed in bf16
# Relative changes of fp32 parameters: the first shows how much rounding to fp32 matters, the others
# are other points with the same rounding to 16 bits.
NUDGE, NUDGES = 2.0**-22, (2.0**-8, 2.0**-7)
SMOOTH = {
    'grad_clip': 1e9,
    'lr': 1.0,
    'eps': 1.0,
    'warmup_steps': 0,
    'schedule': 'constant',
    'moments_dtype': 'float32',
}
ROUNDING = 0.1  # tolerated rounding, as a share of the limit times the largest of all gradients
# The factor by which the limit grows if tokens choose experts: rounding to 16 bits changes the
# experts of some tokens, and of different tokens in each program.
CHOICES = 2
GRADIENT = 'gradient of '
METRICS = 'loss', 'nll', 'grad_norm'
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


class EmulatedStep:
    """The step of a config, compiled for a GPU; it needs a CPU device for each device of the mesh.

    `stored` is the text of an already compiled program; if it is given, nothing is compiled for a
    GPU.
    """

    def __init__(
        self,
        config: Config,
        target: str,
        options: Mapping[str, Any] | None = None,
        *,
        stored: str | None = None,
    ):
        self.config = updated(config, optim=SMOOTH)
        mesh, count = self.config.mesh, self.config.mesh.num_devices
        devices = (
            gpu_devices(target, hosts=1, per_host=count)
            if stored is None
            else jax.devices('cpu')[:count]
        )
        with jax.set_mesh(mesh_of(devices, mesh.sizes)):
            arguments = (
                concrete(jax.eval_shape(lambda: init_state(self.config))),
                abstract_batch(self.config),
            )
            traced = make_train_step(self.config).trace(*arguments)
            self.program: GpuProgram = (
                optimized_for_gpu(traced, arguments, devices, options or {})
                if stored is None
                else stored_program(traced, arguments, stored)
            )
        self._argument_shapes = [x.shape for x in jax.tree.leaves(arguments)]
        self._results = traced.out_info

    def results(self, *, exact: bool = False, text: str | None = None) -> list[Compared]:
        """Compare loss, gradients and updated parameters with a step on one device, worst first.

        With `exact`, both programs compute in fp32 wherever they use 16-bit types. `text` is a
        different module of the same program to run, such as a dump after an earlier compiler pass.

        If the two best experts of a token nearly tie, rounding to 16 bits decides. A step whose
        tokens choose experts is therefore executed with other parameters too if it is wrong, and is
        right if it is right with some of them.
        """
        is_rounded = has_16_bits(self.config) and not exact
        points = range(1 + len(NUDGES)) if is_rounded and _chooses(self.config) else (0,)
        found = []
        for point in points:
            differences = self.differences(exact=exact, text=text, point=point)
            found.append(judged(differences, self.config, exact=exact))
            if found[-1][0].ok:
                return found[-1]
        return found[0]

    def differences(
        self, *, exact: bool = False, text: str | None = None, point: int = 0
    ) -> list[Difference]:
        """Return the difference of each result, see `results`, at one of the reference's points."""
        expected = self._expected(exact=exact)
        actual = self._executed(exact=exact, text=text, nudge=(0, *NUDGES)[point])
        shapes = _compared(*self._results)
        scale = max(largest(x) for name, x in expected.results.items() if name.startswith(GRADIENT))
        floor, of_loss = limits(self.config, exact=exact)
        # The exact gradient of a bias of keys is zero: the computed one is only rounding error.
        gradient_options = {'scale': scale, 'rounding': ROUNDING * floor}
        of_rounded = {'floor': floor, 'margin': MARGIN * (CHOICES if _chooses(self.config) else 1)}
        is_rounded = has_16_bits(self.config) and not exact
        precise = self._expected(exact=True) if is_rounded else expected

        def compare(name: str, x: Any) -> Difference:
            def own(values: Mapping[str, Any]) -> Any:
                return _padded(self._in_places(name, values[name]), shapes[name].shape)

            wanted = own(expected.points[point])
            options = {**gradient_options} if name.startswith(GRADIENT) else {}
            if not is_rounded:
                options |= {'floor': of_loss if name in LOSSES else floor}
                return difference_in_fp32(name, x, wanted, own(expected.nudged), **options)
            if name in METRICS:
                return difference(name, x, wanted, **options)
            points = zip(expected.points, precise.points, strict=True)
            also = [(own(rounded), own(in_fp32)) for rounded, in_fp32 in points]
            in_fp32 = also.pop(point)[1]
            if self.config.train.dtype == 'float32':
                here = own(expected.results)
                also.append((_summed_in_16_bits(here, own(expected.nudged)), here))
            return difference_of_rounded(
                name, x, wanted, in_fp32, also=also, **of_rounded, **options
            )

        return [compare(name, x) for name, x in actual.items()]

    def pair(self, name: str, *, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return a result of the program, from one device per piece, and the expected result."""
        expected = self._expected(exact=exact).results[name]
        shape = _compared(*self._results)[name].shape
        wanted = _padded(self._in_places(name, expected), shape)
        actual = np.zeros(shape, np.asarray(wanted).dtype)
        for place, piece in self._executed(exact=exact)[name]:
            actual[place] = piece
        return actual, wanted

    def _expected(self, *, exact: bool) -> Reference:
        """Return the results on one device, see `reference`; with `exact`, computed in fp32.

        A program in 16 bits has Muon's coefficients as constants in bf16, also where it is executed
        in fp32.
        """
        rounded_to = None if self.config.train.dtype == 'float32' else jnp.bfloat16
        return reference(on_one_device(self.config, exact=exact), rounded_to)

    def _executed(self, *, exact: bool, text: str | None = None, nudge: float = 0) -> Values:
        """Return the pieces of each result that is compared, by name."""
        program = self.program if text is None else dataclasses.replace(self.program, text=text)
        before = _moved(first_state(on_one_device(self.config, exact=False)), nudge)
        state = jax.tree_util.tree_map_with_path(
            lambda path, x: self._in_places(parameter_name(path), x), before
        )
        batch = {name: self._in_shard_order(x) for name, x in make_batch(self.config).items()}
        values = [
            _padded(x, shape)
            for x, shape in zip(jax.tree.leaves((state, batch)), self._argument_shapes, strict=True)
        ]
        devices = jax.devices('cpu')[: self.config.mesh.num_devices]
        pieces = run_on_cpu(program, values, devices, exact=exact)
        return _compared(*jax.tree.unflatten(jax.tree.structure(self._results), pieces))

    def _in_places(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return a parameter's array with the layers in the order of their stages."""
        if self.config.mesh.virtual_stages == 1 or 'layers.' not in name:
            return x
        return x[np.array(Layout.of(self.config).layer_order(len(x)))]

    def _in_shard_order(self, x: np.ndarray) -> np.ndarray:
        """Return an array [B, S] with the tokens in the order of their context shards."""
        if x.shape[1] == 1:  # a value per sequence
            return x
        order = feed.shard_order(x.shape[1], self.config.mesh.context)
        return x if order is None else x[:, order]


def _chooses(config: Config) -> bool:
    """Return whether each token uses only some of the experts."""
    experts = config.model.experts
    return experts is not None and experts.active < experts.count


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pad an array with zeros at the end of its dims."""
    if np.shape(x) == shape:
        return x
    return np.pad(x, [(0, size - own) for own, size in zip(x.shape, shape, strict=True)])


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
    if state.recent is not None:
        with jax.set_mesh(make_mesh()):
            scaled = with_scales(config, _placed(state, config), place_batch(make_batch(config)))
            state = state._replace(recent=np.array(scaled.recent))
    return state


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
    optimizer = make_optimizer(config, rounded_to=rounded_to)
    first = first_state(config)
    with jax.set_mesh(make_mesh()):
        batch = place_batch(make_batch(config))
        lowered = make_train_step(config, optimizer).lower(_placed(first, config), batch)
        step = lowered.compile(quick())

        def results(nudge: float) -> Values:
            after = step(_placed(_moved(first, nudge), config), batch)
            values: Values = jax.tree.map(np.asarray, _compared(*after))
            return values

        return Reference(results(0), results(NUDGE), tuple(map(results, NUDGES)))


def _moved(state: TrainState, nudge: float) -> TrainState:
    """Change fp32 parameters; in a narrower dtype, the last bit of a number is too much."""
    if not nudge:
        return state
    change = lambda x: nudged(x, nudge) if x.dtype == np.float32 else x  # noqa: E731
    return state._replace(params=jax.tree.map(change, state.params))


def _summed_in_16_bits(x: np.ndarray, nudged: np.ndarray) -> np.ndarray:
    """Return a result with the rounding of sums over a mesh, which one device does not have."""
    return x + (nudged - x) * (SUM_IN_16_BITS / NUDGE)


def _compared(state: TrainState, metrics: Values) -> Values:
    """Return loss, gradients (as Adam's first moments) and updated parameters, by name."""
    is_adam = lambda part: hasattr(part, 'mu')  # noqa: E731
    adam = next(filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam)))
    return (
        {name: metrics[name] for name in METRICS}
        | {f'{GRADIENT}{name}': x for name, x in _by_name(adam.mu).items()}
        | {f'{name} after the step': x for name, x in _by_name(state.params).items()}
    )


def _by_name(tree: Any) -> Values:
    is_leaf = lambda x: isinstance(x, list)  # noqa: E731  (the pieces of an array)
    return {
        parameter_name(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    }
