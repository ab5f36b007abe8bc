"""Kernels of experts: chosen by the GPU that is compiled for, and equal to loops over blocks."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from support import make_config

from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.core.hardware.targets import has_compiler
from megajax.core.model import grouped, grouped_kernels
from megajax.core.model.grouped import group, outer, rows_by_transposed, rows_by_weights
from megajax.xla.hlo import mosaic

H100 = 'NVIDIA H100 80GB HBM3'


@pytest.mark.parametrize(
    ('kind', 'dtype', 'sizes', 'block', 'expected'),
    [
        (H100, 'bfloat16', (64, 192), 64, 'experts: Mosaic GPU kernels (NVIDIA H100'),
        ('NVIDIA H200', 'float16', (64, 64), 128, 'experts: Mosaic GPU kernels (NVIDIA H200'),
        ('NVIDIA A100-SXM4-80GB', 'bfloat16', (64, 64), 64, 'kernels need compute capability 9.0'),
        ('NVIDIA B200', 'bfloat16', (64, 64), 64, 'kernels need compute capability 9.0'),
        ('AMD Instinct MI300X', 'bfloat16', (64, 64), 64, 'kernels need an NVIDIA GPU'),
        (H100, 'float32', (64, 64), 64, 'kernels need bfloat16 or float16'),
        (H100, 'bfloat16', (64, 96), 64, 'kernels need features that are multiples of 64'),
        (H100, 'bfloat16', (64, 64), 32, 'kernels need at least 64 rows in a block'),
    ],
)
def test_a_run_says_whether_experts_have_kernels_and_why_not(
    kind: str,
    dtype: str,
    sizes: tuple[int, int],
    block: int,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level('INFO', 'megajax')
    grouped_kernels._has_kernels.cache_clear()
    grouped_kernels._say.cache_clear()
    device = AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
    has_kernels = grouped_kernels._has_kernels(device, dtype, sizes, block)
    assert expected in caplog.text
    assert has_kernels == ('Mosaic GPU kernels (' in caplog.text)


@pytest.mark.parametrize(('kind', 'rows'), [(H100, 64), ('NVIDIA A100-SXM4-80GB', 8)])
def test_a_block_has_the_rows_that_kernels_need(kind: str, rows: int) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ('data',), explicit, abstract_device=device)
    sharding = jax.NamedSharding(mesh, jax.P(None))
    with jax.sharding.use_abstract_mesh(mesh):
        expert_n = jax.ShapeDtypeStruct((20,), jnp.int32, sharding=sharding)
        groups = jax.eval_shape(lambda expert_n: group(expert_n, 3, block=8), expert_n)
    assert groups.block == rows


def test_kernels_have_the_shapes_of_their_operands() -> None:
    """A tile that wgmma cannot multiply, or of another place, fails as a kernel is traced."""
    experts, rows, d, f = 3, 256, 64, 128

    def of(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ids, w_XDF = of(2, dtype=jnp.int32), of(experts, d, f)
    for transposed, given, made in ((False, d, f), (True, f, d)):
        multiply = functools.partial(grouped_kernels.rows_by_expert, transposed=transposed)
        y = jax.eval_shape(multiply, of(rows, given), w_XDF, ids, ids)
        assert (y.shape, y.dtype) == ((rows, made), jnp.bfloat16)
    ids = of(experts, dtype=jnp.int32)
    dw = jax.eval_shape(grouped_kernels.outer_of_experts, of(rows, d), of(rows, f), ids, ids)
    assert (dw.shape, dw.dtype) == ((experts, d, f), jnp.float32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels in jax's interpreter, which emulates the shared memory of a GPU on a CPU."""
    plgpu = pytest.importorskip('jax.experimental.pallas.mosaic_gpu')
    if not hasattr(plgpu, 'force_gpu_interpret_mode'):
        pytest.skip('the interpreter of this jax has no transposed operands')
    monkeypatch.setattr(grouped, 'has_kernels', lambda *_: True)
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.mark.slow
@pytest.mark.parametrize('block', [64, 128])
@pytest.mark.usefixtures('interpreted')
def test_kernels_compute_what_loops_over_blocks_do(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, assignments, d, f = 3, 150, 64, 192
    random = np.random.default_rng(0)
    expert_n = jnp.asarray(random.integers(0, experts + 1, assignments), jnp.int32)
    groups = group(expert_n, experts, block=block)
    x_RD, dy_RF, w_XDF = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
        for shape in ((len(groups.source_R), d), (len(groups.source_R), f), (experts, d, f))
    )
    is_row_R1 = (groups.source_R < assignments)[:, None]
    only_rows_RF = jnp.where(is_row_R1, dy_RF, 0)

    def results() -> list[np.ndarray]:
        made = (
            rows_by_weights(x_RD, w_XDF, groups),
            rows_by_transposed(dy_RF, w_XDF, groups),
            outer(x_RD, only_rows_RF, groups),
        )
        assert [x.dtype for x in made] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
        return [np.asarray(x, np.float32) for x in made]

    by_kernels = results()
    monkeypatch.setattr(grouped, 'has_kernels', lambda *_: False)
    for kernel, loop in zip(by_kernels, results(), strict=True):
        np.testing.assert_allclose(kernel, loop, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")
@pytest.mark.parametrize(
    ('mesh', 'shard', 'dtype'),
    [
        ({'data': 2, 'experts': 2}, 'optimizer', 'bfloat16'),
        pytest.param({}, 'none', 'float16', marks=pytest.mark.exhaustive),
        pytest.param(
            {'data': 2, 'experts': 2, 'model': 2, 'sequence_parallel': True},
            *('weights', 'bfloat16'),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_step_with_kernels_computes_what_one_device_does(
    mesh: dict[str, int], shard: str, dtype: str
) -> None:
    config = make_config(
        'experts',
        model={
            **{'num_layers': 1, 'num_heads': 2, 'num_kv_heads': 2, 'max_seq_len': 128},
            **{'hidden_size': 128, 'vocab_size': 512},
            'experts': {'count': 4, 'active': 2, 'ffn_size': 128, 'balance_loss': 0.01},
        },
        mesh=mesh,
        optim={'shard': shard},
        train={'seq_len': 128, 'batch_size': 8, 'dtype': dtype},
    )
    step = EmulatedStep(config, 'h100')
    for name in (mosaic.ROWS, mosaic.ROWS_TRANSPOSED, mosaic.OUTER):
        assert f'{name}_mosaic_gpu' in step.program.text
    for exact in (True, False):
        worst = step.results(exact=exact)[0]
        assert worst.ok, worst
