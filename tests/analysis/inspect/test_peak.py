"""What a device holds when a step needs the most memory: nothing is lost, and each has its use."""

from collections import Counter
from pathlib import Path

import pytest
from support import make_config

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.inspect.compile import CompiledStep, compile_for
from megajax.analysis.inspect.memory_result import Memory
from megajax.analysis.inspect.memory_table import memory_tables
from megajax.analysis.inspect.peak import _Step
from megajax.analysis.inspect.peak_groups import by_file, by_source_line, grouped, total_bytes
from megajax.analysis.inspect.report import to_text
from megajax.base.render.console import as_text
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler
from megajax.xla.hlo.buffers import Buffer
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program

ROOT = Path(megajax.__file__).parent
LAYERS = 3
# XLA does not print `gather`, the collective that `start` and `done` stand for.
GATHERED = """HloModule step

ENTRY %main (x: f32[2]) -> f32[4] {
  %x = f32[2]{0} parameter(0)
  %start = ((f32[2]{0}), f32[4]{0}) all-gather-start(%x), dimensions={0}
  ROOT %done = f32[4]{0} all-done(%start), metadata={op_name="jit(f)/jvp(mlp)/dot"}
}
"""


def step(**train: object) -> tuple[Config, CompiledStep]:
    config = make_config('llama', 2, 2, model={'num_layers': LAYERS}, train=train)
    return config, compile_for(config, 'cpu', 1, buffers=True)


@pytest.fixture(scope='module')
def whole() -> tuple[Config, CompiledStep]:
    return step(recompute='none')


def memory(compiled: tuple[Config, CompiledStep], target: str = 'cpu') -> Memory:
    return audit(*compiled, target).memory


def uses(found: Memory) -> Counter[str]:
    return Counter({use: total_bytes(x) for (use,), x in grouped(found.at_peak, use_of).items()})


def use_of(arrays) -> tuple[str]:
    return (arrays.use,)


def test_the_bytes_add_up_to_all_that_is_reserved(whole) -> None:
    found = memory(whole)
    by_use = uses(found)
    assert by_use.total() == found.needed
    assert by_use['unused'] <= 0.01 * found.temporaries
    _, compiled = whole
    placed = {'parameters': compiled.parameters, 'optimizer state': compiled.optimizer}
    for use, arrays in placed.items():
        assert by_use[use] == sum(each.bytes_per_device for each in arrays)


def test_the_key_that_would_make_it_fit_is_told(whole) -> None:
    found, key = audit(*whole, 'cpu'), 'use train.recompute=full, predicted to'
    with_key = found.memory.model_copy(update={'remedy': key})
    assert key in to_text(found.model_copy(update={'memory': with_key}))


def test_what_is_inside_an_asynchronous_collective_is_told_by_its_end() -> None:
    step = _Step(make_config('llama'), Program(GATHERED))
    end = Buffer(names=(('done', ''),), array='tuple', bytes=16, last='done')
    inside = end._replace(names=(('gather', ''),))
    assert step.describe(inside) == step.describe(end)
    assert step.describe(inside)[1] == 'mlp'
    with pytest.raises(HloError, match='does not have gather, which has memory'):
        step.describe(inside._replace(last='x'))


def test_a_table_has_its_numbers_below_each_other(whole) -> None:
    by_use = as_text(memory_tables(memory(whole)), width=100).split('\n\n')[0].splitlines()
    shares = [line.rstrip() for line in by_use if line.rstrip().endswith('%')]
    assert len(shares) > 3
    assert len({len(line) for line in shares}) == len({line.index('B ') for line in shares}) == 1


@pytest.mark.slow
def test_full_recomputation_keeps_the_inputs_of_the_layers_and_little_else(whole) -> None:
    kept, few = uses(memory(whole)), uses(memory(step(recompute='full')))
    config, _ = whole
    numbers = config.microbatch_rows * config.train.seq_len * config.model.hidden_size
    assert few['activations'] >= 4 * LAYERS * numbers
    assert few['activations'] < kept['activations'] / 3
    assert few['parameters'] == kept['parameters']


def test_activations_name_the_lines_of_the_model_that_make_them(whole) -> None:
    found = [arrays for arrays in memory(whole).at_peak if arrays.use == 'activations']
    large = [by_source_line(arrays) for arrays in found if arrays.bytes > 10_000]
    assert {site for _, site, _ in large} >= {'attention', 'mlp'}
    for _, _, line in large:
        name, _, number = line.partition(':')
        assert int(number) <= len((ROOT / name).read_text().splitlines())
    assert all(by_file(arrays)[-1].endswith('.py') for arrays in found if arrays.bytes > 10_000)


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.parametrize('overrides', [(), ('optim.shard=weights', 'train.microbatches=2')])
def test_the_same_holds_for_the_program_of_a_gpu(overrides) -> None:
    size = 'model.num_layers=2', 'model.vocab_size=1000', 'train.dtype=bfloat16'
    config = megajax.load('tiny', [*size, *overrides])
    found = memory((config, compile_in_child(config, 'h100', 1)), 'h100')
    by_use = uses(found)
    assert by_use.total() == found.needed
    assert 0 <= by_use['unused'] <= 0.1 * found.temporaries
    assert by_use['activations'] > by_use['forward']
    unplaced = [x for x in found.at_peak if x.source == '-' and x.use != 'unused']
    assert total_bytes(unplaced) <= 0.01 * found.needed
