"""Execute the GPU program of a user's jitted function, and compare its outputs."""

import contextlib
import dataclasses
import functools
import re
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.mesh import empty_concrete_mesh  # jax has no public way to leave jax.set_mesh
from jax.stages import Traced

from megajax.core.hardware.targets import GPUS, check_target, gpu_devices, num_hosts
from megajax.xla.emulate.arguments import (
    AnyMesh,
    context,
    cpu_devices,
    is_of_equinox,
    of_arrays,
    of_jax,
    on_devices,
    simulated_mesh,
    values,
)
from megajax.xla.emulate.bisect import dump_options, first_wrong, modules
from megajax.xla.emulate.compare import (
    LIMIT,
    LIMIT_8_BITS,
    LIMIT_16_BITS,
    LIMIT_EXACT,
    Difference,
    difference,
    inexact,
    nudged,
)
from megajax.xla.emulate.execute import (
    GpuProgram,
    compile_for_gpu,
    num_devices,
    quick,
    run_on_cpu,
    widened,
)
from megajax.xla.emulate.one_device import CpuModule
from megajax.xla.emulate.result import NOT_FOUND, GpuRun, Leaf

_FLOAT_8, _FLOAT_16 = re.compile(r'\bf8\w+\['), re.compile(r'\bb?f16\[')
_PASS_OTHERS = 'pass arguments for which it is (abstract ones are drawn at random)'
_NO_BITS = 'exact=True: the function reads the bits of 8- or 16-bit values as integers'
_ONLY_ON_GPUS = re.compile('UNIMPLEMENTED|not supported by dot_general on CPU')
NUDGES = 4  # random changes of the inputs' last digits
MARGIN = 4  # ratio of an output's limit to its change when the arguments are nudged
Arrays = Sequence[np.ndarray]
Reference = Callable[..., Any] | None


def run(
    fn: Any,
    args: tuple[Any, ...],
    *,
    target: str,
    mesh: AnyMesh | None = None,
    reference: Reference = None,
    exact: bool = False,
    limit: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    bisect: bool = False,
    seed: int = 0,
    detect: Callable[[str], list[str]],
) -> GpuRun:
    """Run the function's GPU program and compare its outputs; see `megajax.inspect.run`."""
    start = time.perf_counter()
    if target not in GPUS:
        raise ValueError(f'target={target!r}: choose among {", ".join(GPUS)}')
    check_target(target)
    if reference is not None and is_of_equinox(fn):
        reference, _ = of_arrays(fn, args, reference)
    function, args = _traceable(fn, args)
    devices_mesh = simulated_mesh(args, mesh)
    with context(args, mesh):
        traced = function.trace(*on_devices(args, devices_mesh))
    if not isinstance(traced, Traced):
        raise _not_traceable(fn)
    step = _Step(traced, args, target, exact, compiler_options or {}, seed)
    expected, compared_with = step.expected(args, reference)
    limit = step.default_limit if limit is None else limit
    limits, culprit = step.limits(limit), None
    leaves = step.leaves(step.program, expected, limits)
    if not all(leaf.ok for leaf in leaves):
        limits = step.limits(limit, step.rounding(args, reference, expected))
        leaves = step.judged(leaves, limits)
    if bisect and not all(leaf.ok for leaf in leaves):
        culprit = step.culprit(expected, limits)
    return GpuRun(
        target=target,
        jax_version=jax.__version__,
        mesh=dict(devices_mesh.shape) if devices_mesh else {},
        compared_with=compared_with,
        exact=exact,
        limit=limit,
        leaves=sorted(leaves, key=lambda leaf: (leaf.ok, -leaf.error)),
        culprit=culprit,
        known_miscompiles=detect(step.program.text),
        seconds=time.perf_counter() - start,
    )


def gpu_text(
    fn: Any, args: tuple[Any, ...], *, target: str, mesh: AnyMesh | None = None
) -> tuple[str, dict[str, int]]:
    """Return the text of the function's GPU program, and the axis sizes of its mesh.

    Raises ValueError if there is no mesh.
    """
    if target not in GPUS:
        raise ValueError(f'target={target!r}: choose among cpu, {", ".join(GPUS)}')
    check_target(target)
    function, args = _traceable(fn, args)
    devices_mesh = simulated_mesh(args, mesh)
    if devices_mesh is None:
        raise ValueError('no mesh: place the arguments on one, call jax.set_mesh or give mesh=')
    with context(args, mesh):
        traced = of_jax(function.trace(*on_devices(args, devices_mesh)))
    count = num_devices(traced)
    hosts = num_hosts(count)
    gpus = gpu_devices(target, hosts=hosts, per_host=count // hosts)
    return compile_for_gpu(traced, gpus, {}).text, dict(devices_mesh.shape)


def _traceable(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the function with `.trace`, and its arguments; a plain function is jitted."""
    if is_of_equinox(fn):
        return of_arrays(fn, args)
    if callable(fn) and hasattr(fn, 'trace'):
        return fn, args
    if isinstance(fn, types.FunctionType | types.MethodType | functools.partial):
        return jax.jit(fn), args
    raise _not_traceable(fn)


def _not_traceable(fn: Any) -> TypeError:
    return TypeError(
        f'a {type(fn).__name__} cannot be traced: pass a function of arrays, plain or from jax.jit '
        '(nnx: of the arrays from nnx.split)'
    )


@contextlib.contextmanager
def _pass_a_reference() -> Iterator[None]:
    """Turn the error of an operation that CPUs do not have into a ValueError with the fix."""
    try:
        yield
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        is_missing = _ONLY_ON_GPUS.search(str(error))
        if not (is_missing or isinstance(error, NotImplementedError)):
            raise
        raise ValueError(f'the function needs a GPU: pass reference= ({error})') from error


class _Step:
    """One traced function, and the arrays on which it is run."""

    def __init__(
        self,
        traced: Traced,
        args: tuple[Any, ...],
        target: str,
        exact: bool,
        options: Mapping[str, Any],
        seed: int,
    ):
        self.traced, self.exact, self.options = traced, exact, options
        self.dtypes = [aval.dtype for aval in traced.jaxpr.in_avals]
        self.inputs = values(args, self.dtypes, seed)
        count = num_devices(traced)
        self.devices, hosts = cpu_devices(count), num_hosts(count)
        self.gpus = gpu_devices(target, hosts=hosts, per_host=count // hosts)
        self.program = compile_for_gpu(traced, self.gpus, options)
        paths, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
        self.has_8_bits = bool(_FLOAT_8.search(self.program.text))
        self.is_narrow = self.has_8_bits or bool(_FLOAT_16.search(self.program.text))
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]

    @property
    def default_limit(self) -> float:
        """The limit that belongs to the coarsest rounding in the program."""
        if not self.is_narrow:
            return LIMIT
        if self.exact:
            return LIMIT_EXACT
        return LIMIT_8_BITS if self.has_8_bits else LIMIT_16_BITS

    def expected(self, args: tuple[Any, ...], reference: Reference) -> tuple[list[np.ndarray], str]:
        """Return the correct outputs and their source. Raises ValueError if one is not a number."""
        if reference is not None:
            outputs = self._of_reference(args, reference, self.inputs)
            source = 'the reference given'
        else:
            outputs, source = self._of_module(self.inputs)
        for name, x in zip(self.names, outputs, strict=True):
            if jnp.issubdtype(x.dtype, jnp.inexact) and np.isnan(x).any():
                raise ValueError(
                    f'the expected output{name} (from {source}) is not a number: {_PASS_OTHERS}'
                )
        return outputs, source

    def rounding(
        self, args: tuple[Any, ...], reference: Reference, expected: Arrays
    ) -> list[float]:
        """Return the error of each expected output when the last digits of the inputs change.

        An output that consists only of rounding errors, such as the gradient of a bias of keys,
        changes by as much as its own size. The largest change of several counts, because chance
        decides which element changes most: Adam divides by gradients that can be almost zero. A
        change to something that is not a number does not count, because it explains no error.
        """
        narrow = jnp.bfloat16 if 'bf16[' in self.program.text else jnp.float16
        rounded_to = narrow if self.is_narrow and not self.exact else jnp.float32
        unit = float(jnp.finfo(rounded_to).eps)
        full = [(slice(None),) * x.ndim for x in expected]
        changes, moving = [], inexact(self.inputs)
        for seed in range(NUDGES):
            inputs = [
                self._nudged(x, 2 * unit, seed) if place in moving else x
                for place, x in enumerate(self.inputs)
            ]
            if reference is not None:
                moved = self._of_reference(args, reference, inputs)
            else:
                moved, _ = self._of_module(inputs)
            named = zip(self.names, full, moved, expected, strict=True)
            changes.append([difference(name, [(at, x)], y).error for name, at, x, y in named])
        by_output = zip(*changes, strict=True)
        return [max(filter(np.isfinite, of_output), default=0.0) for of_output in by_output]

    def _nudged(self, x: np.ndarray, share: float, seed: int) -> np.ndarray:
        return nudged(widened(x) if self.exact else x, share, seed)

    def _of_module(self, inputs: Arrays) -> tuple[list[np.ndarray], str]:
        with _pass_a_reference():
            module = CpuModule(self.traced)
        source = 'one device'
        if module.is_manual and module.num_devices > 1:
            source = f"the CPU's own program on {module.num_devices} simulated devices"
        if self.exact and module.reads_bits:
            raise ValueError(_NO_BITS)
        # If rounded to 16 bits, the sums on one device are no closer to the exact values than the
        # GPU's.
        is_wide = not module.reads_bits
        with _pass_a_reference():
            outputs = module.run(inputs, self.devices, exact=is_wide, rounds_fp32=not self.exact)
        return outputs, source

    def _of_reference(
        self, args: tuple[Any, ...], reference: Any, inputs: Arrays
    ) -> list[np.ndarray]:
        place = functools.partial(_on_one_device, device=self.devices[0], exact=self.exact)
        leaves = map(place, inputs, self.dtypes)
        given = jax.tree.unflatten(jax.tree.structure(args), leaves)
        with jax.set_mesh(empty_concrete_mesh), jax.default_device(self.devices[0]):
            outputs = jax.jit(reference).lower(*given).compile(quick())(*given)
        infos = self.traced.out_info
        wanted, have = (str(jax.tree.structure(tree)) for tree in (infos, outputs))
        if wanted != have:
            raise ValueError(f'the reference returns {have}, but the function returns {wanted}')
        outputs = jax.tree.leaves(outputs)
        for name, info, x in zip(self.names, jax.tree.leaves(infos), outputs, strict=True):
            if info.shape != x.shape or _is_inexact(info) != _is_inexact(x):
                raise ValueError(
                    f'output{name}: the reference returns {x.dtype}{[*x.shape]}, but the function '
                    f'returns {info.dtype}{[*info.shape]}; make the reference return the same'
                )
        return [_stored(x) for x in outputs]

    def limits(self, limit: float, rounding: Sequence[float] | None = None) -> list[float]:
        """Return the outputs' limits: 0 for integers, higher than `limit` if rounding is."""
        infos = jax.tree.leaves(self.traced.out_info)
        moves = rounding or [0.0] * len(infos)
        pairs = zip(infos, moves, strict=True)
        return [max(limit, MARGIN * move) if _is_inexact(info) else 0.0 for info, move in pairs]

    def leaves(self, program: GpuProgram, expected: Arrays, limits: Sequence[float]) -> list[Leaf]:
        """Return the comparison of every output with the expected one, in the order of outputs."""
        results = run_on_cpu(program, self.inputs, self.devices, exact=self.exact)
        differences = starmap(difference, zip(self.names, results, expected, strict=True))
        return self.judged(differences, limits)

    @staticmethod
    def judged(errors: Iterable[Leaf | Difference], limits: Sequence[float]) -> list[Leaf]:
        """Return the outputs' errors, judged by these limits."""
        pairs = zip(errors, limits, strict=True)
        return [
            Leaf(name=each.name, error=each.error, limit=limit, ok=each.error <= limit)
            for each, limit in pairs
        ]

    def culprit(self, expected: Arrays, limits: Sequence[float]) -> str:
        """Return the compiler pass after which the program is wrong, or why none was found."""

        def is_right(text: str) -> bool:
            program = dataclasses.replace(self.program, text=text)
            return all(leaf.ok for leaf in self.leaves(program, expected, limits))

        with tempfile.TemporaryDirectory() as folder:
            dumps = dump_options(Path(folder))
            try:
                compile_for_gpu(self.traced, self.gpus, {**self.options, **dumps})
                return str(first_wrong(modules(Path(folder)), is_right))
            except (ValueError, RuntimeError) as error:
                return f'{NOT_FOUND}{error}'


def _on_one_device(x: np.ndarray, dtype: Any, *, device: jax.Device, exact: bool) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.device_put(x, device), impl=str(dtype._impl.name))
    return jax.device_put(widened(x) if exact else x, device)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _stored(x: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
