"""In fp8 every product of a layer is cuBLAS's of 8-bit numbers, and 8-bit numbers are gathered."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import exhaustive, make_config

import megajax
from megajax.analysis.inspect import inspect, inspect_with_text
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.reference import EXPONENTS
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.targets import has_compiler
from megajax.core.train import scaling
from megajax.xla.hlo.program import Program

SIZE = (
    *('model.num_layers=2', 'model.hidden_size=512', 'model.num_heads=4', 'model.ffn_size=1024'),
    *('model.vocab_size=1000', 'model.max_seq_len=256', 'train.seq_len=256'),
    *('train.recompute=none', 'mesh.data=1'),
)
TENSOR_PARALLEL = 'mesh.model=2', 'mesh.sequence_parallel=true', 'train.batch_size=2'
needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)


def config_of(dtype: str, *overrides: str) -> Config:
    """A small model on tensor-parallel shards of the sequence, or as the overrides have it."""
    return megajax.load('tiny', [*SIZE, *TENSOR_PARALLEL, f'train.dtype={dtype}', *overrides])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('overrides', 'parts'),
    [
        (['train.overlap=none', 'train.unroll=false'], 1),
        (['train.overlap=batch_split'], 2),
        (['mesh.model=1', 'mesh.sequence_parallel=false'], 1),
    ],
    ids=['loop', 'halves', 'one device'],
)
def test_all_twelve_products_of_a_layer_are_of_8_bit_numbers(
    overrides: list[str], parts: int
) -> None:
    config = resolved(config_of('fp8', *overrides), on_gpu=True)
    assert num_products(config) == 12 * parts * config.model.num_layers


@needs_compiler
@pytest.mark.slow
def test_with_adapters_all_eight_products_of_frozen_weights_are_of_8_bit_numbers() -> None:
    config = resolved(config_of('fp8', 'lora.rank=16'), on_gpu=True)
    assert num_products(config) == 8 * config.model.num_layers


def num_products(config: Config) -> int:
    """The matmuls of 8-bit numbers in a step for an H100."""
    # Where Triton's products are allowed, an autotuner may choose them; here there is none.
    text = compile_for(config, 'h100', 1, {'xla_gpu_enable_triton_gemm': False}).text
    program, calls = Program(text), Counter[str]()
    for computation in program.computations.values():
        for instruction in computation.instructions:
            target = re.search(r'custom_call_target="(__cublas[^"]*)"', instruction.attributes)
            if target:
                calls[target[1]] += program.times[computation.name]
    return calls['__cublas$lt$matmul$f8']


@needs_compiler
@pytest.mark.slow
def test_a_step_gathers_8_bit_numbers_and_sends_three_quarters() -> None:
    sent = {}
    for dtype in ('bfloat16', 'fp8'):
        inspection, _ = inspect_with_text(config_of(dtype), target='h100', hosts=None)
        assert inspection.ok
        rows = [row for row in inspection.rows if row.site in ('attention', 'mlp')]
        sent[dtype] = sum(row.wire_bytes for row in rows)
        placed = [transfer for row in rows for transfer in row.placed]
        gathered = {x.array.split('[')[0] for x in placed if x.kind == 'all-gather'}
        assert gathered == ({'f8e4m3fn', 'f8e5m2'} if dtype == 'fp8' else {'bf16'})
    assert sent['fp8'] == pytest.approx(0.75 * sent['bfloat16'])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('scaling', ['delayed', exhaustive('current')])
def test_a_grid_gathers_8_bit_numbers_over_both_axes_and_scatters_each_sum(scaling: str) -> None:
    keys = 'mesh.model_rows=2', f'train.fp8_scaling={scaling}', 'train.overlap=none'
    inspection, _ = inspect_with_text(config_of('fp8', *keys), target='h100', hosts=None)
    assert inspection.ok
    rows = [row for row in inspection.rows if row.site in ('attention', 'mlp')]
    assert {row.axis for row in rows} == {'row', 'model'}
    for row in rows:
        assert row.verdict == 'equal'
        dtypes = {x.kind: x.array.split('[')[0] for x in row.placed}
        narrow = 'f8e5m2' if row.phase == 'backward' else 'f8e4m3fn'
        assert dtypes == {'all-gather': narrow, 'reduce-scatter': 'bf16'}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('overrides', 'times', 'of_megatron'),
    [
        (
            ['optim.shard=weights', 'mesh.data=2', 'train.microbatches=2', 'train.batch_size=4'],
            4,
            2,
        ),
        (['mesh.sequence_parallel=false', 'train.microbatches=2'], 2, 0),
    ],
    ids=['sequence_parallel', 'plain'],
)
def test_with_current_scaling_sharded_operands_wait_for_one_number(
    overrides: list[str], times: int, of_megatron: int
) -> None:
    """`times` operands of a layer are sharded over model in each pass."""
    config = config_of('fp8', 'train.fp8_scaling=current', *overrides)
    inspection, _ = inspect_with_text(config, target='h100', hosts=None)
    assert inspection.ok
    runs = config.model.num_layers * config.train.microbatches
    rows = {row.phase: row for row in inspection.rows if row.site == 'amax' and row.placed}
    for phase in ('forward', 'backward'):
        (placed,) = rows[phase].placed
        assert (placed.kind, placed.times) == ('all-reduce', times * runs)
        assert sum(x.times for x in rows[phase].megatron) == of_megatron * runs
    of_weights = rows['step']
    assert of_weights.axis == ('data+model' if config.mesh.data > 1 else 'model')
    assert of_weights.wire_bytes == of_weights.expected_wire_bytes


def exponents_of_one_shard(patch: Any) -> None:
    """Only the first data shard's exponents count."""
    usual = scaling.largest

    def largest(counts: Any, *rest: Any) -> jax.Array:
        def first(x: jax.Array) -> jax.Array:
            return x * (jnp.arange(len(x)) == 0).reshape(-1, *(1,) * (x.ndim - 1))

        return usual([each.replace(first(each.get_value())) for each in counts], *rest)

    patch(scaling, 'largest', largest)


@needs_compiler
@pytest.mark.slow
def test_exponents_of_one_shard_alone_are_found_where_8_bit_numbers_are_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exponents_of_one_shard(monkeypatch.setattr)
    train = {'dtype': 'fp8', 'batch_size': 8}
    step = EmulatedStep(make_config('llama', 4, 1, train=train), 'h100')
    assert [one.name for one in step.results(exact=True) if not one.ok] == [EXPONENTS]


def test_a_gpu_that_does_not_compute_in_fp8_is_refused() -> None:
    with pytest.raises(ConfigError, match='A100 SXM 80 GB computes in bfloat16'):
        inspect(config_of('fp8'), target='a100')
