"""Execution of a GPU-compiled training step, compared with the step on one device.

The learning rate, Adam's epsilon and gradient clipping are set so that Adam's first moment is a
multiple of the gradient, in fp32, and the update is a smooth function of it. If a step pads a
matrix, the padding must be zero before and after the step. Stages and context shards get layers and
tokens in the order that a run gives them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.analysis.inspect.muon_noise import Noise, noise_of, orthogonalized
from megajax.analysis.inspect.one_device import on_one_device, updated
from megajax.analysis.inspect.random_batch import make_batch
from megajax.analysis.inspect.reference import (
    AFTER,
    EXPONENTS,
    GRADIENT,
    LOAD,
    METRICS,
    NUDGE,
    NUDGES,
    SECOND,
    Reference,
    Values,
    as_magnitudes,
    compared_of,
    exponents_in_fp32,
    first_state,
    moved,
    recompiled,
    reference,
)
from megajax.analysis.inspect.result import Compared
from megajax.analysis.inspect.tolerances import LOSSES, has_16_bits, judged, limits
from megajax.core.config import Config
from megajax.core.counts.relevance import has_choice
from megajax.core.hardware.targets import gpu_devices
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete, mesh_of
from megajax.core.parallel.placements import parameter_name
from megajax.core.train import feed
from megajax.core.train.compiler_options import step_options
from megajax.core.train.feed import abstract_batch
from megajax.core.train.step import init_state, make_train_step
from megajax.xla.emulate.compare import (
    MARGIN,
    Difference,
    difference,
    difference_in_fp32,
    difference_of_rounded,
    largest,
)
from megajax.xla.emulate.execute import (
    GpuProgram,
    optimized_for_gpu,
    run_on_cpu,
    stored_program,
)

SUM_IN_16_BITS = 2.0**-9  # relative rounding error of a gradient that is summed in bf16
SMOOTH = {
    'grad_clip': 1e9,
    'lr': 1.0,
    'eps': 1.0,
    'warmup_steps': 0,
    'warmup_init': None,
    'schedule': 'constant',
    'decay_steps': None,
    'wsd_steps': None,
    'wsd_decay': 'linear',
    'moments_dtype': 'float32',
}
ROUNDING = 0.1  # tolerated rounding, as a share of the limit times the largest of all gradients
# The factor by which the limit grows if tokens choose experts: rounding to 16 bits changes the
# experts of some tokens, and of different tokens in each program.
CHOICES = 2
# An error in fp32 of up to MUCH times its limit could be rounding that changed parameters do not
# show. The step on one device is then compiled once more, which takes longer than the first time.
MUCH = 10


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
            self.options = {**step_options(self.config), **(options or {})}
            traced = make_train_step(self.config).trace(*arguments)
            self.program: GpuProgram = (
                optimized_for_gpu(traced, arguments, devices, options or {})
                if stored is None
                else stored_program(traced, arguments, stored)
            )
        self._argument_shapes = [x.shape for x in jax.tree.leaves(arguments)]
        self._results = traced.out_info
        self._shapes = compared_of(*self._results)

    def results(self, *, exact: bool = False, text: str | None = None) -> list[Compared]:
        """Compare the results with those of a step on one device, worst first.

        The results are the loss, the gradients, each with the worse of its two moments, and the
        updated parameters. In fp32, they are also the loads of the experts and FP8's exponents.

        With `exact`, both programs compute in fp32 wherever they use 16-bit types. `text` is a
        different module of the same program to run, such as a dump after an earlier compiler pass.

        If the two best experts of a token, or two regions of an image, nearly tie, rounding to 16
        bits decides. A step with such choices is therefore executed with other parameters too if it
        is wrong, and is right if it is right with some of them.
        """
        is_rounded = has_16_bits(self.config) and not exact
        chooses = _chooses(self.config) or _chooses_regions(self.config)
        points = range(1 + len(NUDGES)) if is_rounded and chooses else (0,)
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
        """Return the difference of each result, see `results`, at one of the reference's points.

        The difference of a gradient is that of its first or its second moment. What rounding to 16
        bits changes by whole tokens or exponents is only compared in fp32.
        """
        expected = self._expected(exact=exact)
        actual = self._executed(exact=exact, text=text, nudge=(0, *NUDGES)[point])
        scale = _largest_gradient(expected.results)
        floor, of_loss = limits(self.config, exact=exact)
        # The exact gradient of a bias of keys is zero: the computed one is only rounding error.
        gradient_options = {'scale': scale, 'rounding': ROUNDING * floor}
        of_rounded = {'floor': floor, 'margin': MARGIN * (CHOICES if _chooses(self.config) else 1)}
        is_rounded = has_16_bits(self.config) and not exact
        precise = self._expected(exact=True) if is_rounded else expected
        both = expected.points[point], precise.points[point]
        noise = {name: Noise() for name in actual}
        noise |= self._noise(actual, *both, limit=ROUNDING * floor * scale)

        def compare(name: str, other: Values | None = None) -> Difference:
            def own(values: Mapping[str, Any]) -> Any:
                return noise[name].without(self._own(name, values))

            x = [(place, noise[name].without(piece, place)) for place, piece in actual[name]]
            wanted = own(expected.points[point])
            options = {**gradient_options} if name.startswith((GRADIENT, SECOND)) else {}
            if name == EXPONENTS:
                return difference(name, x, wanted)
            if not is_rounded:
                options |= {'floor': of_loss if name in LOSSES else floor}
                nudged, again = own(expected.nudged), own(other) if other is not None else None
                return difference_in_fp32(name, x, wanted, nudged, recompiled=again, **options)
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

        names = [name for name in actual if not (is_rounded and name in (LOAD, EXPONENTS))]
        found = [compare(name) for name in names]
        if not is_rounded and 1 < max(map(_share_of_limit, found)) < MUCH:
            other = recompiled(on_one_device(self.config, exact=exact), self._rounded_to)
            found = [compare(name, other) for name in names]
        return _joined([one._replace(note=noise[one.name].note) for one in found])

    def _noise(
        self, actual: Values, expected: Values, precise: Values, *, limit: float
    ) -> dict[str, Noise]:
        """Return what rounding decides of the updated parameters, by the name of the result."""
        of_fp32, _ = limits(self.config, exact=True)
        bounds = ROUNDING * of_fp32 * _largest_gradient(precise), limit
        found = dict[str, Noise]()
        for name, declared in orthogonalized(self.config).items():
            gradient = f'{GRADIENT}{name}'
            wanted, exact = (self._own(gradient, values) for values in (expected, precise))
            noise = noise_of(self.config, declared, actual[gradient], wanted, exact, bounds)
            if noise.note:
                found[f'{name}{AFTER}'] = noise
        return found

    def pair(self, name: str, *, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return a result of the program, from one device per piece, and the expected result."""
        wanted = self._own(name, self._expected(exact=exact).results)
        actual = np.zeros(wanted.shape, np.asarray(wanted).dtype)
        for place, piece in self._executed(exact=exact)[name]:
            actual[place] = piece
        return actual, wanted

    def _own(self, name: str, values: Mapping[str, Any]) -> np.ndarray:
        """Return a one-device result as the program has it."""
        return _padded(self._in_places(name, values[name]), self._shapes[name].shape)

    def _expected(self, *, exact: bool) -> Reference:
        """Return the results on one device, see `reference`; with `exact`, computed in fp32."""
        found = reference(on_one_device(self.config, exact=exact), self._rounded_to)
        if exact and self.config.train.has_delayed_scales:
            exponents = exponents_in_fp32(on_one_device(self.config, exact=False))
            found = found._replace(results=found.results | {EXPONENTS: exponents})
        return found

    @property
    def _rounded_to(self) -> type | None:
        """The dtype of Muon's coefficients: constants of the program, also in fp32 execution."""
        return None if self.config.train.dtype == 'float32' else jnp.bfloat16

    def _executed(self, *, exact: bool, text: str | None = None, nudge: float = 0) -> Values:
        """Return the pieces of each result that is compared, by name."""
        program = self.program if text is None else dataclasses.replace(self.program, text=text)
        before = moved(first_state(on_one_device(self.config, exact=False)), nudge)
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
        results = jax.tree.unflatten(jax.tree.structure(self._results), pieces)
        return as_magnitudes(compared_of(*results), self.config)

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


def _chooses_regions(config: Config) -> bool:
    """Return whether some regions of an image get more tokens than others."""
    return config.relevance is not None and has_choice(config.relevance)


def _joined(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences with one of each gradient, the worse one of its two moments."""
    found = {one.name: one for one in differences}
    for name in [name for name in found if name.startswith(SECOND)]:
        gradient, second = name.replace(SECOND, GRADIENT, 1), found.pop(name)
        if _share_of_limit(second) > max(1, _share_of_limit(found[gradient])):
            note = "of Adam's second moment"
            found[gradient] = second._replace(name=gradient, note=note)
    return [*found.values()]


def _share_of_limit(found: Difference) -> float:
    return found.error / (found.limit or 1)


def _largest_gradient(results: Values) -> float:
    return max(largest(x) for name, x in results.items() if name.startswith(GRADIENT))


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pad an array with zeros at the end of its dims."""
    if np.shape(x) == shape:
        return x
    return np.pad(x, [(0, size - own) for own, size in zip(x.shape, shape, strict=True)])


def _summed_in_16_bits(x: np.ndarray, nudged: np.ndarray) -> np.ndarray:
    """Return a result with the rounding of sums over a mesh, which one device does not have."""
    return x + (nudged - x) * (SUM_IN_16_BITS / NUDGE)
