"""A traced function's own StableHLO on one CPU device, the reference for every partitioned program.

Shardings are removed from the module, so that the partitioner has nothing to do. A module with a
manual region (`jax.shard_map`) is written in terms of shards and has no meaning on one device, so
it keeps its shardings and runs on as many simulated devices as it needs.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# jax has no public way to change a lowered module, or to compile a module.
from jax._src import config as jax_config
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import hlo as stablehlo  # type: ignore[attr-defined]
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Sharding, SingleDeviceSharding
from jax.stages import Traced

from megajax.xla.emulate.execute import quick, widened

Devices = Sequence[jax.Device]
_CONSTRAINTS = {'sdy.sharding_constraint', 'sdy.reshard', 'sdy.propagation_barrier'}
_DECLARATIONS = {'sdy.mesh', 'sdy.sharding_group'}
_MANUAL = re.compile(r'\bsdy\.manual_computation\b|@SPMDFullToShardShape\b')
_BITS = re.compile(r'\bstablehlo\.bitcast_convert .*(?:b?f16|f8\w+)>')
_NARROW = re.compile(r'tensor<(?:[^<>]*x)?(?:b?f16|f8\w+)(?:,|>)')


class CpuModule:
    """The StableHLO of a traced function, lowered for a CPU."""

    def __init__(self, traced: Traced):
        lowering: Any = traced.lower(lowering_platforms=('cpu',))._lowering
        self.kept = tuple(sorted(lowering.compile_args['kept_var_idx']))
        self.num_devices: int = lowering.compile_args['num_devices']
        module = lowering.stablehlo()
        self._bytecode = mlir.module_to_bytecode(module)
        text = str(module)
        self.is_manual = bool(_MANUAL.search(text))
        self.reads_bits = bool(_BITS.search(text))

    def run(
        self, values: Sequence[Any], devices: Devices, *, exact: bool, rounds_fp32: bool = False
    ) -> list[np.ndarray]:
        """Return the results for all of the function's arguments, computed on one of the devices.

        A module with a manual region runs on all devices. With `exact`, arrays of 8 and 16 bits are
        fp32, and `reduce_precision` has no effect; with `rounds_fp32`, it rounds fp32 arrays.
        """
        used = devices[: self.num_devices if self.is_manual else 1]
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            module = ir.Module.parse(self._bytecode)
            if len(used) == 1:
                _strip_shardings(module)
            if exact:
                _widen(module, rounds_fp32=rounds_fp32)
            module.operation.verify()
            shapes = _result_shapes(module)
            executable = _compiled(mlir.module_to_bytecode(module), used)
        read = [values[place] for place in self.kept]
        return _execute(executable, [widened(x) for x in read] if exact else read, shapes, used)


def _operations(module: ir.Module) -> list[Any]:
    operations = list[Any]()

    def see(operation: Any) -> Any:
        operations.append(operation.opview)
        return ir.WalkResult.ADVANCE

    module.operation.walk(see, ir.WalkOrder.PRE_ORDER)
    return operations


def _strip_shardings(module: ir.Module) -> None:
    module.operation.attributes['mhlo.num_partitions'] = ir.Attribute.parse('1 : i32')
    for operation in _operations(module):
        name, attributes = operation.operation.name, operation.operation.attributes
        if name in _CONSTRAINTS or _is_sharding_call(operation):
            operation.operation.result.replace_all_uses_with(operation.operation.operands[0])
            operation.operation.erase()
        elif name in _DECLARATIONS:
            operation.operation.erase()
        else:
            for key in ('sdy.sharding', 'mhlo.sharding', 'arg_attrs', 'res_attrs'):
                if key in attributes:
                    del attributes[key]


def _is_sharding_call(operation: Any) -> bool:
    name, attributes = operation.operation.name, operation.operation.attributes
    is_call = name == 'stablehlo.custom_call'
    return is_call and ir.StringAttr(attributes['call_target_name']).value == 'Sharding'


def _widen(module: ir.Module, *, rounds_fp32: bool) -> None:
    """Turn arrays of 8 and 16 bits into fp32; constants keep their rounded values."""
    # The types before any of them is widened decide.
    rounded = [each.operation for each in _operations(module) if _rounds(each.operation)]
    for inner in rounded:
        if not rounds_fp32 or _wide(inner.result.type) != inner.result.type:
            inner.result.replace_all_uses_with(inner.operands[0])
            inner.erase()
    for operation in _operations(module):
        inner = operation.operation
        if inner.name == 'stablehlo.constant' and _wide(inner.result.type) != inner.result.type:
            with ir.InsertionPoint(inner):
                copy = inner.clone()
                wide = stablehlo.convert(_wide(inner.result.type), copy.operation.result)
            inner.result.replace_all_uses_with(wide)
            inner.erase()
            continue
        _set_wide_types(inner)


def _rounds(operation: Any) -> bool:
    return str(operation.name) == 'stablehlo.reduce_precision'


def _set_wide_types(operation: Any) -> None:
    for result in operation.results:
        result.set_type(_wide(result.type))
    for region in operation.regions:
        for block in region:
            for argument in block.arguments:
                argument.set_type(_wide(argument.type))
    if operation.name == 'func.func':
        type_ = ir.FunctionType(ir.TypeAttr(operation.attributes['function_type']).value)
        inputs, results = (
            [_wide(element) for element in part] for part in (type_.inputs, type_.results)
        )
        new = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
        operation.attributes['function_type'] = new


def _wide(type_: ir.Type) -> ir.Type:
    if not _NARROW.match(str(type_)):
        return type_
    return ir.RankedTensorType.get(ir.RankedTensorType(type_).shape, ir.F32Type.get())


def _result_shapes(module: ir.Module) -> list[tuple[int, ...]]:
    function_type = ir.SymbolTable(module.operation)['main'].attributes['function_type']
    results = ir.FunctionType(ir.TypeAttr(function_type).value).results
    return [tuple(ir.RankedTensorType(result).shape) for result in results]


def _compiled(bytecode: bytes, devices: Devices) -> Any:
    """Return an executable with one partition per device."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    assignment = np.arange(len(devices), dtype=np.int32)[None]
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    options.env_option_overrides = [*quick().items()]
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = jax_config.use_shardy_partitioner.value
    build.allow_spmd_sharding_propagation_to_output = [True]
    on = xla_client.DeviceList(tuple(devices))
    return devices[0].client.compile_and_load(bytecode, on, options)


def _execute(
    executable: Any,
    values: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    devices: Devices,
) -> list[np.ndarray]:
    """Return the results as full arrays of these shapes."""
    inputs = _shardings(executable.get_parameter_shardings(), devices, len(values))
    arrays = [jax.device_put(x, sharding) for x, sharding in zip(values, inputs, strict=True)]
    pieces = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
    shardings = _shardings(executable.get_output_shardings(), devices, len(shapes))
    return [*map(_whole, pieces, shardings, shapes)]


def _shardings(hlo_shardings: Any, devices: Devices, count: int) -> list[Sharding]:
    if len(devices) == 1:
        return [SingleDeviceSharding(devices[0])] * count
    return [GSPMDSharding(tuple(devices), sharding) for sharding in hlo_shardings or ()]


def _whole(pieces: Sequence[jax.Array], on: Sharding, shape: tuple[int, ...]) -> np.ndarray:
    full = np.zeros(shape, pieces[0].dtype)
    for piece, place in zip(pieces, on.devices_indices_map(shape).values(), strict=True):
        full[place] = np.asarray(piece)
    return full
