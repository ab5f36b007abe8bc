"""Compile a jitted function for GPUs, without a GPU, and run it on simulated CPU devices."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# jax has no public way to compile for other devices than the arguments' devices, or to turn HLO
# text into an executable with replicas.
from jax._src.lib import _jax, hlo, xla_client  # type: ignore[attr-defined]
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Traced

from megajax.core.hardware.targets import compile_without_gpu
from megajax.xla.emulate.last_module import full_text, last_module
from megajax.xla.emulate.translate import for_cpu
from megajax.xla.hlo.dump import without_cache

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuProgram:
    """The last module of the GPU compiler as text, with its inputs and outputs.

    `kept` holds the indices of the arguments that the program reads. The shardings are over the
    devices that the function was traced or compiled for.
    """

    text: str
    kept: tuple[int, ...]
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding | None, ...]
    output_shapes: tuple[tuple[int, ...], ...]


@functools.cache
def quick() -> dict[str, Any]:
    """Return options for a program that runs once on a CPU: quick to compile, slow to run."""
    options: dict[str, Any] = {
        'xla_backend_optimization_level': 0,
        'xla_llvm_disable_expensive_passes': True,
        # Cutting a program into parts for other cores costs a ninth of the time.
        'xla_cpu_parallel_codegen_split_count': 1,
    }
    # With the fusion emitters, compiling takes three times as long.
    older = options | {'xla_cpu_use_fusion_emitters': False}
    try:
        jax.jit(lambda: 0).lower().compile(older)
    except jax.errors.JaxRuntimeError:  # later versions of XLA have no other emitters
        return options
    return older


def compile_for_gpu(
    traced: Traced, devices: Sequence[Any], options: Mapping[str, Any]
) -> GpuProgram:
    """Compile for `devices` (see `core/hardware/targets.py`), whichever devices it was traced
    for.
    """
    computation = _lowered(traced, devices)
    with without_cache():  # jax cannot read back a program for absent GPUs, and would warn
        compiled = compile_without_gpu(
            lambda options: computation.compile(options, device_assignment=tuple(devices)), options
        )
    return GpuProgram(
        text=full_text(compiled.xla_executable.hlo_modules()[0]),
        kept=tuple(sorted(compiled._kept_var_idx)),
        inputs=tuple(compiled._in_shardings),
        outputs=tuple(compiled._out_shardings),
        output_shapes=tuple(_stored_shape(info) for info in jax.tree.leaves(traced.out_info)),
    )


def optimized_for_gpu(
    traced: Traced, arguments: Any, devices: Sequence[Any], options: Mapping[str, Any]
) -> GpuProgram:
    """Compile for `devices` up to the last module, without machine code: in half the time.

    `arguments` are those that the function was traced for. All of them need a `NamedSharding`, and
    results without a sharding must be replicated.
    """
    computation = _lowered(traced, devices)
    with without_cache():
        text = compile_without_gpu(
            lambda options: last_module(
                lambda options: computation.compile(options, device_assignment=tuple(devices)),
                options,
            ),
            options,
        )
    return _program(text, computation, traced, arguments)


def num_devices(traced: Traced) -> int:
    """Return the number of devices that the function was traced for."""
    lowering: Any = traced.lower(lowering_platforms=('cuda',))._lowering
    return lowering.compile_args['num_devices']


def stored_program(traced: Traced, arguments: Any, text: str) -> GpuProgram:
    """Return a program that was compiled earlier from the same function, with its shardings."""
    return _program(text, traced.lower()._lowering, traced, arguments)


def _lowered(traced: Traced, devices: Sequence[Any]) -> Any:
    """Return a lowered function that compiles for `devices`."""
    computation: Any = traced.lower(lowering_platforms=('cuda',))._lowering
    computation._device_list = None
    computation.compile_args['backend'] = devices[0].client
    # jax compares the devices and their memory kinds.
    for part in ('in_shardings', 'out_shardings'):
        computation.compile_args[part] = tuple(
            _on(devices, sharding) if isinstance(sharding, NamedSharding) else sharding
            for sharding in computation.compile_args[part]
        )
    return computation


def _program(text: str, computation: Any, traced: Traced, arguments: Any) -> GpuProgram:
    kept = tuple(sorted(computation.compile_args['kept_var_idx']))
    leaves, results = jax.tree.leaves(arguments), jax.tree.leaves(traced.out_info)
    return GpuProgram(
        text=text,
        kept=kept,
        inputs=tuple(leaves[place].sharding for place in kept),
        outputs=tuple(result.sharding for result in results),
        output_shapes=tuple(_stored_shape(result) for result in results),
    )


def run_on_cpu(
    program: GpuProgram,
    values: Sequence[Any],
    devices: Sequence[jax.Device],
    *,
    exact: bool = False,
) -> list[list[tuple[Index, np.ndarray]]]:
    """Run the program on all of the function's arguments, as full arrays; return results' pieces.

    A piece is one device's part of a result, with its index in the full array; all replicas are
    included. With `exact`, arrays of 8 and 16 bits are fp32 instead, including arguments and
    results.
    """
    executable = compile_on_cpu(for_cpu(program.text, len(devices), exact=exact), devices)
    arrays = [
        jax.device_put(widened(values[place]) if exact else values[place], _on(devices, sharding))
        for place, sharding in zip(program.kept, program.inputs, strict=True)
    ]
    parts = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
    results = []
    for pieces, sharding, shape in zip(parts, program.outputs, program.output_shapes, strict=True):
        places = _on(devices, sharding).devices_indices_map(shape)
        results.append(
            [(places[device], np.asarray(x)) for device, x in zip(devices, pieces, strict=True)]
        )
    return results


def compile_on_cpu(text: str, devices: Sequence[jax.Device]) -> Any:
    """Return an executable with one replica per device."""
    proto = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    assignment = np.arange(len(devices), dtype=np.int32)[:, None]
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    options.env_option_overrides = [*quick().items()]
    module, on = _jax.mlir.hlo_to_stablehlo(proto), xla_client.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(module, on, options)


def _stored_shape(info: Any) -> tuple[int, ...]:
    """Return an argument's shape in the program, in which a typed key is an array of integers."""
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        info = jax.eval_shape(jax.random.key_data, info)
    return info.shape


def _on(devices: Sequence[jax.Device], sharding: Sharding | None) -> Sharding:
    """Return the same sharding on different devices, in their order; None means replicated."""
    if isinstance(sharding, NamedSharding):
        shape = sharding.mesh.shape
        mesh = Mesh(np.array(devices).reshape([*shape.values()]), tuple(shape))
        return NamedSharding(mesh, sharding.spec)
    if isinstance(sharding, GSPMDSharding):
        return GSPMDSharding(tuple(devices), sharding._hlo_sharding)
    assert sharding is None or sharding.is_fully_replicated, sharding
    return GSPMDSharding.get_replicated(tuple(devices))


def widened(x: Any) -> Any:
    """Return the array, cast to fp32 if its dtype has 8 or 16 bits."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits in (8, 16)
    return np.asarray(x, np.float32) if is_narrow else x
