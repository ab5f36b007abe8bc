"""A compiled step has the products that its config computes, in every family; more are an error."""

import dataclasses
import functools
import re

import pytest
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import CompiledStep, compile_step
from megajax.analysis.inspect.products import count_products, padding
from megajax.core.config import Config
from megajax.core.hardware.targets import gpu_devices, has_compiler
from megajax.core.parallel.mesh import axis_sizes, make_mesh, mesh_of
from megajax.xla.hlo.program import Program

NEEDS = "needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
# With 64 columns a head XLA's GPU compiler finds tiles for a fused QKV.
WIDE = {'num_layers': 3, 'hidden_size': 256, 'head_dim': 64, 'max_seq_len': 128, 'dropout': 0.0}
CASES = [
    exhaustive('gpt', 2, 4, {'recompute': 'full'}, {'sequence_parallel': True}),
    exhaustive('llama', 2, 4, {'microbatches': 2}, {'optim': {'shard': True}}),
    exhaustive('gpt', 2, 4, {'recompute': 'selective'}, {'sequence_parallel': True}),
    exhaustive('gpt', 2, 4, {'recompute': 'full'}, {'model': {'dropout': 0.1}}),
    exhaustive('gpt', 2, 4, {'recompute': 'none', 'overlap': 'batch_split'}, {}),
    slow(
        'llama', 2, 4, {'recompute': 'full', 'overlap': 'batch_split'}, {'sequence_parallel': True}
    ),
    exhaustive(
        'llama', 2, 4, {'recompute': 'full', 'dtype': 'float32'}, {'sequence_parallel': True}
    ),
    exhaustive('llama', 1, 1, {'recompute': 'full'}, {}),
    exhaustive('llama', 4, 2, {'recompute': 'none'}, {'optim': {'shard': True}}),
    exhaustive('bert', 2, 4, {'recompute': 'none'}, {}),
    exhaustive(
        'bert', 2, 4, {'recompute': 'selective', 'microbatches': 2}, {'sequence_parallel': True}
    ),
    exhaustive('bert', 2, 4, {'recompute': 'full'}, {'sequence_parallel': True}),
    exhaustive('windows', 2, 2, {'recompute': 'full'}, {'model': {'num_layers': 7}}),
    exhaustive('windows', 2, 2, {'overlap': 'batch_split'}, {'sequence_parallel': True}),
]


def config_of(name: str, data: int, model: int, train: dict, others: dict) -> Config:
    sections = others | {'model': WIDE | others.get('model', {})}
    sections['train'] = {'seq_len': 128, 'dtype': 'bfloat16'} | train
    return make_config(name, data, model, **sections)


def small(name: str, data: int, model: int, train: dict, others: dict) -> Config:
    """The same for a CPU, which is slow in bf16."""
    sections = others | {'model': {'dropout': 0.0} | others.get('model', {})}
    return make_config(name, data, model, **sections | {'train': train | {'dtype': 'float32'}})


@functools.cache
def compiled_here(config: Config) -> CompiledStep:
    data, model = config.mesh.data, config.mesh.model
    return compile_step(config, make_mesh(data, model), data * model)


def of_three_layers() -> tuple[Config, CompiledStep]:
    """A step with tensor, sequence and data parallelism, which test_audit.py compiles too."""
    layers = {'model': {'num_layers': 3}}
    config = small('gpt', 2, 4, {'recompute': 'none'}, {'sequence_parallel': True, **layers})
    return config, compiled_here(config)


@pytest.mark.parametrize(('name', 'data', 'model', 'train', 'others'), CASES)
def test_a_cpu_computes_what_the_config_says(name, data, model, train, others):
    config = small(name, data, model, train, others)
    products = count_products(config, Program(compiled_here(config).text), 'cpu')
    assert products.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason=NEEDS)
@pytest.mark.parametrize('triton', [True, exhaustive(False)])
@pytest.mark.parametrize(('name', 'data', 'model', 'train', 'others'), CASES)
def test_a_gpu_computes_what_the_config_says(name, data, model, train, others, triton):
    config = config_of(name, data, model, train, others)
    mesh = mesh_of(gpu_devices('h100', hosts=1, per_host=data * model), axis_sizes(data, model))
    step = compile_step(config, mesh, data * model, {'xla_gpu_enable_triton_gemm': triton})
    products = count_products(config, Program(step.text), 'h100')
    assert products.compiled >= (1 - 1e-3) * products.expected
    assert products.compiled - padding(config) <= (1 + 1e-3) * products.expected


def test_what_xla_computes_again_to_save_memory_is_no_error_but_a_note():
    config, step = of_three_layers()
    again = dataclasses.replace(step, text=with_second_product(step.text, '.remat'))
    found = audit(config, again, 'h100')
    assert not [one for one in found.findings if one.rule == 'matmuls run twice']
    [note] = [one.message for one in found.findings if one.rule == 'matmuls rematerialized']
    assert 'does not fit' in note
    assert found.products.rematerialized > 0.01 * found.products.expected


def test_a_product_that_runs_twice_is_an_error_that_names_it():
    config, step = of_three_layers()
    assert not errors(config, step)
    twice = dataclasses.replace(step, text=with_second_product(step.text))
    [error] = errors(config, twice)
    assert re.search(r'GFLOP of matmuls more .* duplicated: \S*mlp', error)
    assert audit(config, twice, 'cpu').products.ratio > 1.01


def test_seconds_are_summed_by_axis_and_said_at_their_rates():
    config, step = of_three_layers()
    found = audit(config, step, 'h100')
    for axis in ('data', 'model'):
        on_axis = [one.seconds for one in found.schedule if axis in one.axis.split('+')]
        assert sum(on_axis) > 0
        assert found.wire_seconds[axis] == pytest.approx(sum(on_axis))
        assert found.hidden_seconds[axis] == 0  # nothing runs in the background on a CPU
    assert re.search(r'\(overlapping matmuls\)  data: [\d.]+ \(0.00, 0%\);', str(found))
    assert re.search(r'step ms  [\d.]+ kernels \+ [\d.]+ exposed communication', str(found))
    assert 'rates  395.8 TFLOP/s float32 matmul, 247.3 attention; ' in str(found)


def errors(config: Config, step: CompiledStep) -> list[str]:
    """The messages of the rule, where the text is read as a GPU's."""
    findings = audit(config, step, 'h100').findings
    return [one.message for one in findings if one.rule == 'matmuls run twice']


def with_second_product(text: str, suffix: str = '') -> str:
    """The text with a copy of the first dot of an MLP after it, its name ending as given."""
    line = next(one for one in text.splitlines() if re.search(r' dot\(.*/mlp/', one))
    copy = re.sub(r'^(\s+)(?:ROOT )?%?\S+ =', rf'\1%again{suffix} =', line)
    if line.strip().startswith('ROOT'):
        return text.replace(line, f'{copy}\n{line}')
    return text.replace(line, f'{line}\n{copy}')


@pytest.mark.parametrize(('rows', 'added'), [(8, 8 * 6), (6, 2 * 64 + 8 * 8 - 6 * 2)])
def test_the_rows_and_columns_that_cublas_is_given_beyond_berts_are_allowed(rows, added):
    config = make_config('bert', train={'batch_size': rows, 'dtype': 'bfloat16', 'microbatches': 1})
    assert config.model.hidden_size == 64
    assert padding(config) == 3 * 2 * 64 * added  # three products of an input, two FLOPs each
    assert padding(make_config('bert', train={'batch_size': rows})) == 0
    assert padding(make_config('gpt', train={'dtype': 'bfloat16'})) == 0


def test_a_loop_over_periods_with_windows_in_blocks_computes_and_sends_what_the_config_says():
    two = {'window': 4}, {'window': 6, 'position': 'none'}  # in two periods and a half
    config = make_config(
        'windows',
        2,
        2,
        sequence_parallel=True,
        model={'num_layers': 5, 'layers': two, 'activation': 'geglu'},
        train={'recompute': 'full'},
    )
    found = audit(config, compile_step(config, make_mesh(2, 2), 4), 'cpu')
    assert found.ok
    assert 'MORE' not in {row.verdict for row in found.rows}
    assert found.products.compiled == found.products.expected
