"""Grouped matmul kernels, executed and counted as the loops over blocks that they replace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate.texts import executed, module, random

import megajax
from megajax.core.hardware.targets import has_compiler
from megajax.core.model.grouped import group, outer, rows_by_transposed, rows_by_weights
from megajax.xla.hlo import mosaic
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import products
from megajax.xla.hlo.program import Program

EXPERTS, D, F, BLOCK = 3, 16, 24, 64


def call(name: str, result: str, operands: str) -> str:
    """A call as XLA writes it; bytecode may contain brackets, quotes and other attributes."""
    code = r'ML\EFR\01}(\"body=%x\00stable_mosaic_gpu\00' + rf'{name}_mosaic_gpu\00mask\00'
    target = f'custom_call_target="{mosaic.TARGET}"'
    config = f'backend_config={{kernel_hash = "\\22", module = "{code}", use_barrier = false}}'
    return f'%result = {result} custom-call({operands}), {target}, {config}'


def parameters(arrays: list[np.ndarray]) -> list[str]:
    lines = []
    for index, array in enumerate(arrays):
        dtype = {'float32': 'f32', 'int32': 's32'}[str(array.dtype)]
        sizes = ','.join(map(str, array.shape))
        order = ','.join(map(str, reversed(range(array.ndim))))
        lines.append(f'%p{index} = {dtype}[{sizes}]{{{order}}} parameter({index})')
    return lines


def run(name: str, result: tuple[int, ...], *arrays: Any) -> tuple[np.ndarray, int]:
    """Execute a call of a kernel on two devices; return a device's result and its FLOPs."""
    operands = [np.asarray(x) for x in arrays]
    order = ','.join(map(str, reversed(range(len(result)))))
    type_ = f'f32[{",".join(map(str, result))}]{{{order}}}'
    names = ', '.join(f'%p{index}' for index in range(len(operands)))
    text = module([*parameters(operands), call(name, type_, names)])
    [made] = executed(text, *(np.stack([x, x]) for x in operands))
    np.testing.assert_array_equal(made[0], made[1])
    [(product, *_)] = products(Program(text))
    return made[0], product.flops


def test_kernels_of_experts_compute_what_loops_over_blocks_do() -> None:
    expert_n = np.random.default_rng(0).integers(0, EXPERTS + 1, 150).astype(np.int32)
    groups = jax.jit(lambda expert_n: group(expert_n, EXPERTS, block=BLOCK))(expert_n)
    source_R, sizes_X = np.asarray(groups.source_R), np.asarray(groups.sizes_X)
    is_row_R1 = (source_R < 150)[:, None]
    x_RD, dy_RF = (
        np.where(is_row_R1, random(150, size)[np.minimum(source_R, 149)], 0) for size in (D, F)
    )
    w_XDF, rows = random(EXPERTS, D, F), len(x_RD)
    rows_b = is_row_R1.reshape(-1, BLOCK).sum(1, dtype=np.int32)
    of_blocks = np.minimum(groups.expert_b, EXPERTS - 1), rows_b
    first_X = (np.cumsum(sizes_X, dtype=np.int32) - sizes_X) // BLOCK
    with_noise_RD = np.where(is_row_R1, x_RD, np.float32(7))
    for name, made, expected in (
        (
            mosaic.ROWS,
            run(mosaic.ROWS, (rows, F), *of_blocks, with_noise_RD, w_XDF),
            jax.jit(rows_by_weights)(x_RD, w_XDF, groups),
        ),
        (
            mosaic.ROWS_TRANSPOSED,
            run(mosaic.ROWS_TRANSPOSED, (rows, D), *of_blocks, dy_RF, w_XDF),
            jax.jit(rows_by_transposed)(dy_RF, w_XDF, groups),
        ),
        (
            mosaic.OUTER,
            run(mosaic.OUTER, (EXPERTS, D, F), first_X, sizes_X // BLOCK, x_RD, dy_RF),
            jax.jit(outer)(x_RD, dy_RF, groups),
        ),
    ):
        result, flops = made
        np.testing.assert_allclose(result, expected, atol=1e-4, err_msg=name)
        assert flops == 2 * rows * D * F, name


def test_another_kernel_has_no_translation() -> None:
    x = jnp.zeros((2, 2))
    with pytest.raises(HloError, match='no translation for a custom call of mosaic_gpu_v2'):
        run('flash_attention', (2, 2), x, x)


def test_gradients_of_weights_in_jax_are_sums_over_the_rows_of_groups() -> None:
    x_RD, dy_RF, sizes_X = random(20, 3), random(20, 4), np.array([7, 0, 11], np.int32)
    others = [sizes_X] * 4  # where groups and their blocks begin and end
    name = r'a\00/x/jax/experimental/pallas/ops/gpu/transposed_ragged_dot_mgpu.py\00body'
    result, flops = run(name, (3, 3, 4), sizes_X, *others, x_RD, dy_RF)
    of_group_R = np.array([0] * 7 + [2] * 11 + [3] * 2)
    expected = np.einsum('xr,rd,rf->xdf', np.eye(4)[:3, of_group_R], x_RD, dy_RF)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert flops == 2 * 20 * 3 * 4


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")
def test_grouped_kernels_in_jax_are_understood() -> None:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles = {'block_m': 64, 'block_n': 64, 'block_k': 64, 'grid_block_n': 1}
    x_RD, dy_RF, w_XDF = (
        jnp.asarray(random(*shape), jnp.bfloat16) for shape in ((256, 64), (256, 128), (3, 64, 128))
    )
    sizes_X = jnp.array([100, 0, 156], jnp.int32)

    def both(x_RD, dy_RF, w_XDF, sizes_X):
        options = {'group_sizes': sizes_X, 'max_concurrent_steps': 2, **tiles}
        dx_RD = ragged_dot(dy_RF, w_XDF, transpose_rhs=True, **options)
        return ragged_dot(x_RD, w_XDF, **options), dx_RD

    def reference(x_RD, dy_RF, w_XDF, sizes_X):
        return (
            jax.lax.ragged_dot(x_RD, w_XDF, sizes_X),
            jax.lax.ragged_dot(dy_RF, w_XDF.mT, sizes_X),
        )

    arrays = x_RD, dy_RF, w_XDF, sizes_X
    megajax.inspect.run(both, *arrays, reference=reference).raise_if_wrong()
