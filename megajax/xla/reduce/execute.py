"""Compile a partitioned module for GPUs, and compare what it computes before and after."""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# jax has no public way to compile HLO text.
from jax._src.interpreters import mlir
from jax._src.lib import _jax, hlo, xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.sharding_impls import GSPMDSharding

from megajax.core.hardware.targets import compile_without_gpu, gpu_devices
from megajax.xla.emulate.arguments import cpu_devices
from megajax.xla.emulate.compare import difference, inexact, nudged
from megajax.xla.emulate.execute import compile_on_cpu
from megajax.xla.emulate.last_module import last_module
from megajax.xla.emulate.shapes import shapes, split
from megajax.xla.emulate.translate import for_cpu
from megajax.xla.hlo.dump import without_cache
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program
from megajax.xla.reduce.cut import REPLICATED, sharding

# A module of the partitioner has one device's shapes: it must not be partitioned again.
PARTITIONER = 'spmd-partitioning'
LIMIT = 1e-4  # relative error; everything is computed in fp32
# An error may be MARGIN times the largest change of a result when the inputs change by up to
# ROUNDING of themselves, NUDGES times.
ROUNDING, NUDGES, MARGIN = 2.0**-22, 4, 4
_CONSTRAINT = re.compile(
    r'custom-call\((%\S+)\), custom_call_target="(?:Sharding|LayoutConstraint)"'
    r'(?:, operand_layout_constraints=\{\S+\})?'
)
MOST_CHARACTERS = 600  # of an error
Values = list[list[np.ndarray]]  # [value][device]


class Compiler:
    """XLA's compiler for a GPU that you may not have."""

    def __init__(self, target: str, num_devices: int, options: Mapping[str, Any] | None = None):
        self.target, self.num_devices = target, num_devices
        self.options = dict(options or {})
        self.devices = gpu_devices(target, hosts=1, per_host=num_devices)

    def optimized(self, text: str, options: Mapping[str, Any] | None = None) -> str:
        """Return the last module that the compiler makes of a module of the partitioner."""

        def compile_with(options: dict[str, Any]) -> Any:
            executable = self._compile(text, options)
            return SimpleNamespace(xla_executable=executable)

        with without_cache():
            return compile_without_gpu(
                lambda options: last_module(compile_with, options),
                {**self.options_for(text), **(options or {})},
            )

    def options_for(self, text: str) -> dict[str, Any]:
        """Return the options with which a module is compiled."""
        done = '' if is_sharded(text) else PARTITIONER
        disabled = filter(None, (self.options.get('xla_disable_hlo_passes'), done))
        return self.options | {'xla_disable_hlo_passes': ','.join(disabled)}

    def _compile(self, text: str, options: Mapping[str, Any]) -> Any:
        proto = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        settings = xla_client.CompileOptions()
        settings.num_replicas, settings.num_partitions = 1, self.num_devices
        ids = np.arange(self.num_devices, dtype=np.int32)[None]
        settings.device_assignment = xla_client.DeviceAssignment.create(ids)
        settings.executable_build_options.use_spmd_partitioning = True
        settings.executable_build_options.use_shardy_partitioner = True
        settings.env_option_overrides = [*options.items()]
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto))
            on = xla_client.DeviceList(tuple(self.devices))
            return self.devices[0].client.compile(module, on, settings)


def is_sharded(text: str) -> bool:
    """Whether the partitioner has still to run."""
    return ', sharding={' in text


def executable(text: str, num_devices: int) -> Callable[[Values], Values]:
    """Return a function that returns the results of a module on each device.

    The module has fp32 instead of 8 and 16 bits.
    """
    devices = cpu_devices(num_devices)
    text = _CONSTRAINT.sub(r'reshape(\1)', text)
    entry = Program(text).entry
    types = [shapes(entry.parameters[place].type)[0].dims for place in sorted(entry.parameters)]
    compiled = compile_on_cpu(for_cpu(text, num_devices, exact=True), devices)

    def execute(inputs: Values) -> Values:
        if types != [values[0].shape for values in inputs]:  # XLA would read past the arrays
            raise HloError(f'the parameters have shapes {types}')
        arrays = [_placed(values, devices) for values in inputs]
        results = compiled.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [[np.asarray(piece) for piece in pieces] for pieces in results]

    return execute


def _placed(values: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> jax.Array:
    full, on = values[0].shape, GSPMDSharding.get_replicated(tuple(devices))
    if full:
        tiles = xla_client.HloSharding.iota_tile((len(devices), *(1 for _ in full[1:])))
        full, on = (full[0] * len(devices), *full[1:]), GSPMDSharding(tuple(devices), tiles)
    pieces = [jax.device_put(x, device) for x, device in zip(values, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(full, on, pieces)


class Execution:
    """A module, executed as it is on random inputs, and its later forms on the same inputs.

    If the module has shardings, it is executed on one device; otherwise, on all of them, with
    different inputs. Floating-point inputs are positive and in fp32; scalars are equal everywhere.
    """

    def __init__(self, text: str, num_devices: int, seed: int = 0):
        self.text, self.num_devices = text, num_devices
        self._shardings = _shardings(text) if is_sharded(text) else None
        random = np.random.default_rng(seed)
        entry = Program(text).entry
        types = [shapes(entry.parameters[place].type)[0] for place in sorted(entry.parameters)]
        count = num_devices if self._shardings is None else 1
        self.inputs = self._drawn = [_drawn(each, count, random) for each in types]
        self._execute = executable(text, count)
        self.expected = self._computed = self._execute(self.inputs)
        if self._shardings:
            self.inputs, self.expected = (
                [self._split(x, each) for (x,), each in zip(values, shardings, strict=True)]
                for values, shardings in zip(
                    (self.inputs, self.expected), self._shardings, strict=True
                )
            )

    def _split(self, x: np.ndarray, sharding: str) -> list[np.ndarray]:
        """Return the piece of each device."""
        devices = tuple(cpu_devices(self.num_devices))
        on = GSPMDSharding(devices, xla_client.HloSharding.from_string(sharding))
        places = on.devices_indices_map(x.shape)
        return [x[places[device]] for device in devices]

    def actual(self, later: str) -> Values:
        """Return the results of a later form of the module."""
        return executable(later, self.num_devices)(self.inputs)

    @functools.cached_property
    def limits(self) -> list[float]:
        """The limit of each result: LIMIT, or more if rounding of the inputs changes it as much."""
        moving, limits = (
            inexact([values[0] for values in self._drawn]),
            [LIMIT] * len(self.expected),
        )
        for seed in range(NUDGES):
            inputs = [
                [nudged(x, ROUNDING, seed) for x in values] if place in moving else values
                for place, values in enumerate(self._drawn)
            ]
            pairs = zip(self._execute(inputs), self._computed, strict=True)
            changes = [max(map(_error, *pair)) for pair in pairs]
            limits = [
                max(limit, MARGIN * change) if np.isfinite(change) else limit
                for limit, change in zip(limits, changes, strict=True)
            ]
        return limits

    def is_wrong(self, later: str) -> bool:
        """Return whether a later form has a larger error than rounding explains."""
        errors = self.errors(later)
        return max(errors, default=0) > LIMIT and any(map(operator.gt, errors, self.limits))

    def errors(self, later: str) -> list[float]:
        """Return the error of each result; 0 for one that is not finite to begin with."""
        pairs = zip(self.actual(later), self.expected, strict=True)
        return [max(map(_error, *pair)) for pair in pairs]


def _shardings(text: str) -> tuple[list[str], list[str]]:
    """Return the shardings of the parameters and of the results."""
    entry = Program(text).entry
    inputs = [sharding(entry.parameters[place]) for place in sorted(entry.parameters)]
    given = sharding(entry.root)
    if not given:
        return inputs, [REPLICATED] * len(entry.root.results)
    return inputs, split(given[1:-1]) if given.startswith('{{') else [given]


def _drawn(shape: Any, num_devices: int, random: np.random.Generator) -> list[np.ndarray]:
    dtype = shape.abstract().dtype
    size = (num_devices if shape.dims else 1, *shape.dims)
    if jnp.issubdtype(dtype, jnp.inexact):
        # Rows have norm 1 or so: matmuls of larger rows would overflow or saturate later functions.
        scale = (shape.dims[-1] or 1) ** -0.5 if shape.dims else 1.0
        values = (scale * random.uniform(0.5, 1.5, size)).astype(np.float32)
    else:
        values = random.integers(0, 2, size).astype(dtype)
    return [*values] if shape.dims else [*values] * num_devices


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    if not actual.size or not np.isfinite(expected).all():
        return 0.0
    return difference('', [((), actual)], expected).error


# Errors of modules that cannot be compiled or executed.
FAILURES = HloError, ValueError, IndexError, AssertionError, jax.errors.JaxRuntimeError


class Differs:
    """Whether the compiler's last module computes something else than the module it was given."""

    def __init__(self, compiler: Compiler, say: Callable[[str], None] = lambda line: None):
        self.compiler, self.say = compiler, say

    def __call__(self, text: str) -> bool:
        try:
            last = self.compiler.optimized(text)
            return Execution(text, self.compiler.num_devices).is_wrong(last)
        except FAILURES as failure:
            self.say(f'not executed: {str(failure)[:MOST_CHARACTERS]}')
            return False
