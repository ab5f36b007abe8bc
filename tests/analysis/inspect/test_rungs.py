"""Each rung of ZeRO, replicas, padding and grids send what the expected table says, and no more."""

import functools

import pytest
from support import exhaustive, make_config, slow

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
# Rows of a few more bytes than the table's are none of these: each row is equal, or less.
FULL = {'recompute': 'full', 'microbatches': 2, 'dtype': 'bfloat16'}


def case(name: str, mesh: dict, rung: str, train: dict = FULL, **optim: str) -> Config:
    """A config with four rows for each data shard."""
    shards = mesh.get('data', 1)
    mesh = {'sequence_parallel': mesh.get('model', 1) > 1} | mesh
    train = {'batch_size': 4 * shards} | train
    return make_config(
        name, mesh=mesh, train=train, optim={'shard': rung} | optim, model={'dropout': 0.0}
    )


@functools.cache
def inspect_here(config: Config) -> Inspection:
    return audit(config, compile_for(config, 'cpu', 1), 'cpu')


def over(found: Inspection, axis: str) -> dict[tuple[str, str], float]:
    """Our bytes over the table's, by site and phase."""
    return {
        (row.site, row.phase): row.wire_bytes / row.megatron_wire_bytes
        for row in found.rows
        if row.axis == axis and row.megatron_wire_bytes
    }


GRID = {'data': 2, 'model_rows': 2, 'model': 2}


@pytest.mark.parametrize(
    'config',
    [
        exhaustive(case('gpt', {'data': 2, 'model': 2}, 'gradients')),
        slow(
            case(
                'llama', {'data': 4, 'model': 2, 'replicas': 2}, 'weights', reduce_dtype='bfloat16'
            )
        ),
        exhaustive(case('gpt', {'data': 4, 'replicas': 2}, 'optimizer')),
        exhaustive(case('gpt', {'data': 4, 'model': 2, 'replicas': 2}, 'none', {'batch_size': 8})),
        exhaustive(case('bert', {'data': 4, 'model': 2, 'replicas': 2}, 'gradients')),
        exhaustive(case('bert', {'data': 2, 'model': 4}, 'weights', {'recompute': 'selective'})),
        exhaustive(case('llama', {'data': 2, 'model': 4}, 'weights', {'dtype': 'float16'})),
        slow(case('gpt', {'data': 3}, 'gradients', {'microbatches': 2})),
        exhaustive(case('gpt', {'data': 3, 'model': 2}, 'weights')),
        case('gpt', GRID, 'weights'),
        exhaustive(case('gpt', GRID, 'none', {'recompute': 'selective'})),
        exhaustive(case('sinks', GRID, 'none', {'batch_size': 4})),
        exhaustive(case('llama', GRID, 'gradients', {'microbatches': 2}, reduce_dtype='bfloat16')),
        exhaustive(
            case(
                'llama',
                GRID | {'replicas': 2},
                'weights',
                FULL | {'overlap': 'batch_split', 'batch_size': 16},
            )
        ),
    ],
)
def test_no_row_has_more_and_gradients_and_the_grid_are_equal(config: Config) -> None:
    found = inspect_here(config)
    assert found.ok, str(found)
    # Megatron's ranks have entire key/value heads, and BERT's dense layer is summed over `model`
    # before it is scattered over `data`.
    sends_less = config.model.is_bert or config.model.num_kv_heads < config.mesh.model
    axes = {row.axis for row in found.rows if row.wire_bytes and row.site != 'metrics'}
    for axis in axes:
        for (site, _), ratio in over(found, axis).items():
            if site == 'gradients' or (config.mesh.is_grid and axis != 'data'):
                least = 0.6 if sends_less else 1 - 1e-6
                assert least <= ratio <= 1 + 1e-6, (site, axis)
    assert 'other' not in ''.join(row.site for row in found.rows if row.site != 'metrics')


def test_a_report_says_what_it_compares_with_and_names_the_axes() -> None:
    found = inspect_here(case('gpt', GRID, 'weights'))
    text = to_text(found)
    assert text.startswith('data=2 x row=2 x model=2, ')
    assert "ok: no collective sends more than Megatron and Pope et al.'s" in text
    sources = {source for row in found.rows for source in row.sources}
    assert any('AllGatherPipeline.async_bucket_gather' in source for source in sources)
    assert any('Pope et al.' in source for source in sources)
    one_dimension = found.model_copy(update={'mesh': {'data': 2, 'model': 4}})
    assert "no collective sends more than Megatron's" in to_text(one_dimension)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('preset', 'rows', 'model', 'recompute'),
    [
        ('llama3_8b', 2, 2, 'full'),
        ('llama3_8b', 2, 8, 'none'),
        ('gpt3_175b', 4, 16, 'full'),
    ],
)
def test_the_gpus_program_of_a_grid_sends_the_formulas_bytes(preset, rows, model, recompute):
    config = megajax.load(
        preset,
        [
            'mesh.data=1',
            f'mesh.model_rows={rows}',
            f'mesh.model={model}',
            'mesh.sequence_parallel=true',
            'train.batch_size=4',
            'train.microbatches=1',
            'train.seq_len=1024',
            'train.dtype=bfloat16',
            f'train.recompute={recompute}',
            'optim.shard=none',
            'model.num_layers=2',
        ],
    )
    compiled = compile_in_child(config, 'h100', -(-rows * model // 8))
    found = audit(config, compiled, 'h100')
    assert found.ok, str(found)
    for axis in ('row', 'model', 'row+model'):
        assert all(ratio == pytest.approx(1, rel=1e-3) for ratio in over(found, axis).values())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('rung', ['optimizer', 'gradients', 'weights'])
def test_the_gpus_program_of_a_rung_sends_the_tables_bytes_over_data(rung):
    config = megajax.load(
        'llama3_8b',
        [
            'mesh.data=8',
            'mesh.replicas=2',
            'mesh.model=1',
            f'optim.shard={rung}',
            'train.batch_size=16',
            'train.microbatches=2',
            'train.seq_len=1024',
            'train.dtype=bfloat16',
            'train.recompute=full',
            'model.num_layers=2',
        ],
    )
    found = audit(config, compile_in_child(config, 'h100', 1), 'h100')
    assert found.ok, str(found)
    for axis in ('data', 'replica', 'replica+data'):
        assert all(ratio == pytest.approx(1, rel=1e-6) for ratio in over(found, axis).values())
