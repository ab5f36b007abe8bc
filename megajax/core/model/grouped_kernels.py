"""Grouped matmuls for Hopper GPUs: kernels in Mosaic GPU (Pallas), one launch for all experts.

A thread block computes a tile of the result with one warpgroup: TMA loads parts of both operands
into a ring of buffers in shared memory, and wgmma multiplies them into fp32 registers. The kernels
in `jax.experimental.pallas.ops.gpu`, in contrast, also compute tiles for rows that no expert has,
and return the gradients of weights in 16 bits. Letters as in `grouped.py`.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.counts.expert_kernels import KERNEL_STEP, missing_for_kernels, smallest_block
from megajax.core.hardware.targets import capability_of, is_nvidia
from megajax.xla.hlo import mosaic

logger = logging.getLogger(__name__)

BUFFERS = 3  # steps in shared memory at once; with more, two thread blocks would not fit


def fewest_rows(x: jax.Array) -> int:
    """Return the fewest rows that a block can have on the device that x is compiled for."""
    device = jax.typeof(x).sharding.mesh.abstract_device
    return smallest_block(capability_of(device) if device and is_nvidia(device) else None)


def has_kernels(x: jax.Array, y: jax.Array, sizes: tuple[int, ...], block: int) -> bool:
    """Whether the kernels run on the GPU that these operands are compiled for.

    `sizes` are the numbers of features before and after the matmul. For each dtype, the log says
    once which code runs.
    """
    device = jax.typeof(x).sharding.mesh.abstract_device
    if device is None or x.dtype != y.dtype:  # without a mesh
        return False
    return _has_kernels(device, str(x.dtype), sizes, block)


@functools.cache
def _has_kernels(device: Any, dtype: str, sizes: tuple[int, ...], block: int) -> bool:
    missing = 'need an NVIDIA GPU'
    if is_nvidia(device):
        missing = missing_for_kernels(dtype, sizes, block, capability_of(device))
    _say(device.device_kind, dtype, missing)
    return not missing


@functools.cache
def _say(device_kind: str, dtype: str, missing: str) -> None:
    logger.info(
        'experts: %s (%s, %s)%s',
        'matmuls of blocks, in a loop' if missing else 'Mosaic GPU kernels',
        device_kind,
        dtype,
        f': kernels {missing}' if missing else '',
    )


def rows_by_expert(
    x_RD: jax.Array, w_XDF: jax.Array, expert_b: jax.Array, rows_b: jax.Array, *, transposed: bool
) -> jax.Array:
    """Return each row times the matrix of its block's expert, transposed if `transposed` is set.

    Block b has `rows_b[b]` rows; the rest of its result is zeros.
    """
    plgpu = _plgpu()
    (rows, inputs), outputs = x_RD.shape, w_XDF.shape[1 if transposed else 2]
    block, width = rows // expert_b.size, _width(outputs)

    def kernel(expert_ref: Any, rows_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        column, b = lax.axis_index('column'), lax.axis_index('block')
        used = rows_ref[b]
        of_w = (
            _spec((width, KERNEL_STEP), lambda k: (column, k), w_XDF.dtype)
            if transposed
            else _spec((KERNEL_STEP, width), lambda k: (k, column), w_XDF.dtype)
        )
        y = _sum(
            (block, width),
            lambda x, w: (x, _transposed(w) if transposed else w),
            inputs // KERNEL_STEP,
            (_spec((block, KERNEL_STEP), lambda k: (b, k), x_RD.dtype), of_w),
            (x_ref, w_ref.at[expert_ref[b]]),
            used > 0,
        )
        row = lax.broadcasted_iota(jnp.int32, (block, width), 0)
        y = jnp.where(plgpu.layout_cast(row, plgpu.Layout.WGMMA) < used, y, 0.0)
        _store(y, y_ref.at[_tile(b, block), _tile(column, width)])

    name = mosaic.ROWS_TRANSPOSED if transposed else mosaic.ROWS
    result = jax.ShapeDtypeStruct((rows, outputs), x_RD.dtype)
    # The first dim runs fastest: neighboring thread blocks read the same rows, and parts of one
    # matrix.
    grid = {'column': outputs // width, 'block': expert_b.size}
    y_RF: jax.Array = _launched(kernel, name, result, grid)(expert_b, rows_b, x_RD, w_XDF)
    return y_RF


def outer_of_experts(
    x_RD: jax.Array, dy_RF: jax.Array, first_X: jax.Array, sizes_X: jax.Array
) -> jax.Array:
    """Return the sum of outer products of each expert's rows, dw_XDF in fp32.

    An expert's rows begin at `first_X`, and there are `sizes_X` of them; both are multiples of
    KERNEL_STEP.
    """
    (_, inputs), outputs = x_RD.shape, dy_RF.shape[1]
    height, width = _width(inputs), _width(outputs)

    def kernel(first_ref: Any, steps_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any) -> None:
        column, row, expert = map(lax.axis_index, ('column', 'row', 'expert'))
        first, steps = first_ref[expert], steps_ref[expert]
        dw = _sum(
            (height, width),
            lambda x, dy: (_transposed(x), dy),
            steps,
            (
                _spec((KERNEL_STEP, height), lambda k: (first + k, row), x_RD.dtype),
                _spec((KERNEL_STEP, width), lambda k: (first + k, column), dy_RF.dtype),
            ),
            (x_ref, dy_ref),
            steps > 0,
        )
        _store(dw, dw_ref.at[expert, _tile(row, height), _tile(column, width)])

    result = jax.ShapeDtypeStruct((sizes_X.size, inputs, outputs), jnp.float32)
    grid = {'column': outputs // width, 'row': inputs // height, 'expert': sizes_X.size}
    launched = _launched(kernel, mosaic.OUTER, result, grid)
    dw_XDF: jax.Array = launched(first_X // KERNEL_STEP, sizes_X // KERNEL_STEP, x_RD, dy_RF)
    return dw_XDF


def _sum(
    shape: tuple[int, int],
    operands: Callable[[Any, Any], tuple[Any, Any]],
    steps: int | jax.Array,
    specs: tuple[Any, Any],
    refs: tuple[Any, Any],
    is_used: jax.Array,
) -> jax.Array:
    """Multiply two operands in steps, and return the sum in fp32; zeros if there are no steps."""
    from jax.experimental import pallas as pl

    plgpu = _plgpu()

    def add(sum_ref: Any) -> jax.Array:
        @pl.when(is_used)
        def _() -> None:
            plgpu.emit_pipeline(
                lambda _, a, b: plgpu.wgmma(sum_ref, *operands(a, b)),
                grid=(steps,),
                in_specs=specs,
                max_concurrent_steps=BUFFERS,
            )(*refs)

        result: jax.Array = sum_ref[...]
        return result

    total: jax.Array = pl.run_scoped(add, plgpu.ACC(shape))
    return total


def _store(tile: jax.Array, place: Any) -> None:
    """Write a tile in registers to memory, through shared memory."""
    from jax.experimental import pallas as pl

    plgpu = _plgpu()

    def store(shared_ref: Any) -> None:
        shared_ref[...] = tile.astype(place.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared_ref, place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    transforms = _transforms(tile.shape[1], place.dtype)
    pl.run_scoped(store, plgpu.SMEM(tile.shape, place.dtype, transforms=transforms))


def _spec(shape: tuple[int, int], index: Callable[[Any], Any], dtype: Any) -> Any:
    """Return how to load an operand; its buffer is free once the following step has begun."""
    transforms = _transforms(shape[1], dtype)
    return _plgpu().BlockSpec(shape, index, delay_release=1, transforms=transforms)


def _transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    """Return the transforms for the shared-memory layout that wgmma and TMA require."""
    plgpu, itemsize = _plgpu(), jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _transposed(ref: Any) -> Any:
    if hasattr(ref, 'transpose'):
        return ref.transpose((1, 0))
    return _plgpu().transpose_ref(ref, (1, 0))  # before jax 0.11


def _tile(place: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(place * size, size)


def _width(features: int) -> int:
    """Return the features of a tile."""
    return 2 * KERNEL_STEP if features % (2 * KERNEL_STEP) == 0 else KERNEL_STEP


def _launched(
    kernel: Callable[..., None], name: str, result: jax.ShapeDtypeStruct, grid: Mapping[str, int]
) -> Callable[..., Any]:
    plgpu = _plgpu()
    launched: Callable[..., Any] = plgpu.kernel(
        kernel,
        out_type=result,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    return launched


def _plgpu() -> Any:
    from jax.experimental.pallas import mosaic_gpu  # imported here, because only kernels need it

    return mosaic_gpu
