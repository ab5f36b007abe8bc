"""The H100's program of a step, executed without a GPU, computes what one device computes."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import exhaustive, make_config
from vlm import relevant

from megajax.analysis.inspect import emulated_step
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.minimize import smallest
from megajax.analysis.inspect.one_device import updated
from megajax.analysis.inspect.result import Compared
from megajax.analysis.inspect.shrink import shrink
from megajax.analysis.inspect.tolerances import judged, limits
from megajax.core.config import Config
from megajax.core.counts import chunks
from megajax.core.hardware.targets import has_compiler
from megajax.core.model import linear
from megajax.core.parallel.layout import Layout
from megajax.core.train import feed, pipeline
from megajax.core.train import step as train_step
from megajax.core.train.optimizer import make_schedule
from megajax.xla.emulate.compare import Difference
from megajax.xla.miscompiles import ask
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
# XLA's Triton cannot tile every product of smaller heads.
HEAD = {'head_dim': 64}
# Of several layouts, those that `make test-slow` emulates.
SLOW = 'gradients-padded', 'grid-weights', 'interleaved', 'ring'
EVERYTHING = {'microbatches': 2, 'recompute': 'full', 'overlap': 'batch_split', 'batch_size': 16}


def step(
    name: str, data: int, model: int, /, *, sequence_parallel: bool = False, **sections: dict
) -> Config:
    sections['model'] = {'dropout': 0.0} | HEAD | sections.get('model', {})
    return make_config(name, data, model, sequence_parallel=sequence_parallel, **sections)


def compared(config: Config, *, exact: bool = False, **options: object) -> list[Compared]:
    return EmulatedStep(config, 'h100', options).results(exact=exact)


def wrong(results: list[Compared]) -> dict[str, float]:
    return {one.name: one.error for one in results if not one.ok}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('config', 'options'),
    [
        (step('gpt', 2, 4, sequence_parallel=True, model={'dropout': 0.1}), {}),
        exhaustive(
            step('gpt', 4, 2, train=EVERYTHING, optim={'shard': True}),
            {'xla_gpu_enable_triton_gemm': False},
        ),
        exhaustive(step('llama', 2, 4, sequence_parallel=True), {}),
        (step('llama', 4, 2, sequence_parallel=True, train=EVERYTHING, optim={'shard': True}), {}),
        exhaustive(
            step('bert', 2, 4, sequence_parallel=True, train={'recompute': 'selective'}), {}
        ),
        (step('bert', 4, 2, train=EVERYTHING), {'xla_gpu_enable_triton_gemm': False}),
    ],
    ids=[
        'gpt-sp-dropout',
        'gpt-tp-everything-cublas',
        'llama-sp',
        'llama-sp-everything',
        'bert-sp',
        'bert-tp-cublas',
    ],
)
def test_every_gradient_is_that_of_one_device(config, options, monkeypatch):
    monkeypatch.setattr(
        chunks, 'GPU_CHUNK_BYTES', 2**17
    )  # so that the loss has several chunks, as large models' have
    results = compared(config, **options)
    assert not wrong(results)
    assert max(one.error for one in results) > 0  # it was another program


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('config', 'options'),
    [
        (
            step('llama', 2, 2, sequence_parallel=True, train={'dtype': 'fp8'}),
            {'xla_gpu_enable_triton_gemm': False},
        ),
        exhaustive(
            step('gpt', 2, 2, train=EVERYTHING | {'dtype': 'fp8'}, optim={'shard': True}), {}
        ),
        exhaustive(
            step('llama', 4, 1, train={'dtype': 'fp8'}, optim={'shard': 'weights'}),
            {'xla_gpu_enable_triton_gemm': False},
        ),
    ],
    ids=['llama-sp-cublas', 'gpt-tp-everything', 'llama-weights-cublas'],
)
def test_without_rounding_a_step_in_fp8_has_the_gradients_of_fp32(config, options):
    step = EmulatedStep(config, 'h100', options)
    for exact in (False, True):
        assert not wrong(step.results(exact=exact))


RUNGS = {
    'weights-sp': step(
        'llama', 4, 2, sequence_parallel=True, train=EVERYTHING, optim={'shard': 'weights'}
    ),
    'weights-without-recompute': step('gpt', 4, 2, optim={'shard': 'weights'}),
    'gradients-padded': step(
        'gpt', 3, 1, train={'batch_size': 12, 'microbatches': 2}, optim={'shard': 'gradients'}
    ),
    'replicas': step('gpt', 4, 2, mesh={'replicas': 2}, optim={'shard': 'gradients'}),
    'grid': step('llama', 1, 2, sequence_parallel=True, mesh={'model_rows': 2}),
    'grid-weights': step(
        'gpt',
        2,
        2,
        sequence_parallel=True,
        mesh={'model_rows': 2},
        train={'recompute': 'full'},
        optim={'shard': 'weights'},
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('name', [name if name in SLOW else exhaustive(name) for name in RUNGS])
def test_every_gradient_of_each_rung_replica_and_grid_is_that_of_one_device(name):
    results = compared(RUNGS[name])
    assert not wrong(results)
    assert max(one.error for one in results) > 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('name', [exhaustive('gpt'), 'llama', exhaustive('bert')])
def test_a_program_of_16_bits_is_right_as_it_is_and_exact_where_they_are_fp32(name):
    config = step(
        name,
        2,
        4,
        sequence_parallel=True,
        train={'dtype': 'bfloat16'},
        model={'num_kv_heads': 2} if name == 'llama' else {},
    )
    emulated = EmulatedStep(config, 'h100')
    assert '__cudnn$fmha' in emulated.program.text
    as_it_is, exact = (emulated.results(exact=exact) for exact in (False, True))
    assert not wrong(as_it_is)
    assert not wrong(exact)
    assert exact[0].error < as_it_is[0].error / 100


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('coefficients', ['quintic', exhaustive('polar_express')])
def test_muon_in_16_bits_is_exact_where_they_are_fp32(coefficients):
    optim = {'kind': 'muon', 'shard': 'weights', 'ns_coefficients': coefficients}
    config = step('llama', 2, 2, train={'dtype': 'bfloat16'}, optim=optim)
    results = compared(config, exact=True)
    assert not wrong(results)
    assert max(one.error for one in results) > 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    'optim',
    [
        {'warmup_steps': 2, 'warmup_init': 0.0, 'decay_steps': 5},
        {'schedule': 'wsd', 'wsd_steps': 3, 'wsd_decay': 'cosine'},
    ],
)
def test_every_learning_rate_has_a_smooth_step(optim):
    smooth = updated(make_config('gpt', optim=optim), optim=emulated_step.SMOOTH)
    assert {make_schedule(smooth.optim, 10)(step).item() for step in range(10)} == {1.0}


@pytest.mark.slow
def test_a_result_that_the_compiler_changes_is_found(monkeypatch):
    """The step without the barrier before a bias, and with a factor after it (`scaled_bias.py`)."""
    if not ask(SCALED_BIAS, 'h100').is_faulty:
        pytest.skip('this XLA does not have the bug')
    monkeypatch.setattr(linear, 'add_bias', lambda y, bias: 1.5 * (y + bias))
    for module in (emulated_step, train_step):
        monkeypatch.setattr(module, 'step_options', lambda config: {})
    config = step('gpt', 2, 1, model={'dropout': 0.1}, train={'recompute': 'full'})
    assert wrong(compared(config, xla_gpu_enable_triton_gemm=False))


STAGES = {
    'interleaved': step(
        'llama',
        2,
        2,
        sequence_parallel=True,
        mesh={'stages': 2, 'virtual_stages': 2},
        model={'num_layers': 4},
        train={'microbatches': 4},
    ),
    'gpipe-zero': step(
        'gpt',
        2,
        1,
        mesh={'stages': 2},
        train={'microbatches': 4, 'schedule': 'gpipe', 'recompute': 'full'},
        optim={'shard': 'optimizer'},
    ),
    'bert': step('bert', 2, 2, mesh={'stages': 2}, train={'microbatches': 2}),
    'gather': step('llama', 2, 2, mesh={'context': 2}, optim={'shard': 'optimizer'}),
    'ring': step('gpt', 1, 2, mesh={'context': 4, 'context_exchange': 'ring'}),
    'all': step('llama', 1, 2, mesh={'stages': 2, 'context': 2}, train={'microbatches': 2}),
    'documents': step(
        'llama', 1, 2, mesh={'context': 4, 'context_exchange': 'ring'}, data={'document_mask': True}
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('name', [name if name in SLOW else exhaustive(name) for name in STAGES])
def test_every_gradient_of_stages_and_context_shards_is_that_of_one_device(name):
    results = compared(STAGES[name])
    assert not wrong(results)
    assert max(one.error for one in results) > 0


GEMMA = {
    'num_layers': 5,
    'layers': [{'repeat': 2, 'window': 8, 'rope_theta': 1e4}, {'rope_theta': 1e6}],
}
# Layers of each kind; in 16 bits, windows are cuDNN's.
YARN = {'type': 'yarn', 'factor': 4.0, 'original_max_seq_len': 8}
KINDS = {
    'windows': step(
        'windows', 2, 2, sequence_parallel=True, train={'dtype': 'bfloat16', 'recompute': 'full'}
    ),
    'blocks': step('windows', 2, 2, train={'recompute': 'selective', 'microbatches': 2}),
    'overlap': step(
        'llama', 4, 2, sequence_parallel=True, model=GEMMA, train=EVERYTHING,
        optim={'shard': 'weights'},
    ),
    'stages': step(
        'llama', 2, 1, mesh={'stages': 2}, model=GEMMA | {'num_layers': 6},
        train={'microbatches': 4, 'dtype': 'bfloat16'}, optim={'shard': 'optimizer'},
    ),
    'norms': step('both_norms', 2, 2, sequence_parallel=True, model={'window': 8}),
    'rotary': step('llama', 2, 2, model={'rotary_fraction': 0.5, 'rope_scaling': YARN}),
    'sinks': step('sinks', 2, 2, sequence_parallel=True, train={'dtype': 'bfloat16'}),
    'wide': step('windows', 1, 2, model={'head_dim': 256}, train={'dtype': 'bfloat16'}),
    'experts': step('experts', 4, 1, mesh={'experts': 2}, optim={'shard': 'weights'}),
    'experts of stages': step(
        'experts', 2, 2, mesh={'experts': 2, 'stages': 2}, train={'microbatches': 2},
        optim={'shard': 'optimizer'},
    ),
    'experts of context shards': step(
        'experts', 2, 2, mesh={'experts': 2, 'context': 2}, optim={'shard': 'optimizer'}
    ),
    'documents of context shards': step(
        'windows', 2, 2, mesh={'context': 2, 'context_exchange': 'ring'},
        train={'dtype': 'bfloat16'}, data={'document_mask': True},
    ),
    'capacity': step(
        'capacity', 4, 2, sequence_parallel=True, mesh={'experts': 4},
        train={'dtype': 'bfloat16', 'recompute': 'full'}, optim={'shard': 'gradients'},
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    'name',
    [pytest.param('windows', marks=pytest.mark.slow), *map(exhaustive, [*KINDS][1:])],
)
def test_every_gradient_of_each_kind_of_layer_is_that_of_one_device(name):
    config = KINDS[name]
    exact = config.train.dtype == 'bfloat16'
    results = compared(config, exact=exact)
    assert not wrong(results)
    assert max(one.error for one in results) > 0


def next_stages_layers(patch):
    """Each stage has the layers of the next one, and the last those of the first."""
    order = Layout.layer_order

    def next_order(self: Layout, num_layers: int) -> list[int]:
        places = order(self, num_layers)
        count = num_layers // self.num_shards('L')
        return [*places[count:], *places[:count]]

    patch(Layout, 'layer_order', next_order)


def other_chunks_first(patch):
    """Each stage runs the layers of its second chunk first."""
    load = pipeline.load
    patch(pipeline, 'load', lambda tree, index_Z: load(tree, jnp.where(index_Z == 0, 1, 0)))


def tokens_in_order(patch):
    """The positions are those of the zigzag, and the tokens are not."""
    patch(feed, 'shard_order', lambda length, shards: None)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('worsen', 'config'),
    [
        (next_stages_layers, STAGES['interleaved']),
        (other_chunks_first, STAGES['interleaved']),
        (tokens_in_order, STAGES['gather']),
    ],
)
def test_a_program_that_sends_the_same_bytes_and_computes_something_else_is_found(
    worsen, config, monkeypatch
):
    worsen(monkeypatch.setattr)
    differences = wrong(compared(config))
    assert differences['loss'] > 1e-4
    assert any(name.startswith('gradient of layers') for name in differences)


def times(factor: float, pieces: list[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
    return [(place, (factor * piece).astype(piece.dtype)) for place, piece in pieces]


@needs_compiler
@pytest.mark.slow
def test_in_16_bits_rounding_is_right_and_gradients_that_are_five_percent_too_large_are_wrong(
    monkeypatch,
):
    config = step(
        'olmo2',
        2,
        1,
        mesh={'stages': 2, 'virtual_stages': 2, 'context': 2, 'context_exchange': 'ring'},
        model={'num_layers': 4, 'qk_norm': True},
        train={'batch_size': 16, 'microbatches': 4, 'recompute': 'selective', 'dtype': 'bfloat16'},
    )
    emulated = EmulatedStep(config, 'h100')
    assert not wrong(emulated.results())
    by_name = emulated_step.compared_of

    def scaled(*results: Any) -> dict[str, Any]:
        return {
            name: times(1.05, x) if isinstance(x, list) and name.startswith('gradient') else x
            for name, x in by_name(*results).items()
        }

    monkeypatch.setattr(emulated_step, 'compared_of', scaled)
    found = emulated.results()
    gradients = {one.name for one in found if one.name.startswith('gradient')}
    assert {*wrong(found)} == gradients


@pytest.mark.parametrize(
    ('mesh', 'shrunk_mesh'),
    [
        ({'stages': 4, 'data': 2, 'model': 8}, (4, 1, 2, 1, 2)),
        ({'stages': 8, 'virtual_stages': 2, 'data': 16, 'model': 8}, (4, 2, 2, 1, 2)),
        ({'stages': 35, 'data': 4, 'model': 2}, (4, 1, 2, 1, 2)),
        ({'context': 8, 'model': 8}, (1, 1, 1, 4, 2)),
        ({'stages': 4, 'context': 4, 'data': 2, 'model': 8}, (2, 1, 2, 2, 2)),
    ],
)
def test_a_smaller_config_keeps_stages_chunks_and_context_shards(mesh, shrunk_mesh):
    stages, chunks = mesh.get('stages', 1), mesh.get('virtual_stages', 1)
    config = step(
        'llama',
        1,
        1,
        mesh=mesh | {'sequence_parallel': True},
        model={'num_layers': 2 * stages * chunks, 'num_kv_heads': 8, 'max_seq_len': 1024},
        train={
            'microbatches': stages,
            'batch_size': stages * mesh.get('data', 1),
            'seq_len': 1024,
        },
    )
    shrunk, _ = shrink(config)
    found = shrunk.mesh
    axes = found.stages, found.virtual_stages, found.data, found.context, found.model
    assert axes == shrunk_mesh
    assert found.num_devices <= 16
    assert shrunk.model.num_layers == 2 * found.stages * found.virtual_stages
    assert shrunk.train.microbatches == found.stages


def test_a_small_config_is_executed_as_it_is_and_a_large_one_keeps_its_mesh_layout_and_options():
    small = step('llama', 2, 4)
    assert shrink(small) == (small, [])
    wide = step(
        'llama',
        2,
        4,
        sequence_parallel=True,
        model={'hidden_size': 4096, 'num_layers': 32},
        train=EVERYTHING,
        optim={'shard': True},
    )
    shrunk, changes = shrink(wide)
    assert 'model.num_layers 32 -> 2' in changes
    assert (shrunk.mesh, shrunk.optim, shrunk.loss) == (wide.mesh, wide.optim, wide.loss)
    assert (shrunk.train.recompute, shrunk.train.overlap) == ('full', 'batch_split')
    assert shrunk.train.dtype == 'float32'


@pytest.mark.parametrize('kv_heads', [1, 2, 4, 8, 32])
@pytest.mark.parametrize('model', [1, 2, 4, 8])
def test_a_shrunk_model_shares_key_value_heads_among_devices_and_queries_as_before(kv_heads, model):
    sizes = {'hidden_size': 4096, 'num_heads': 32, 'num_kv_heads': kv_heads, 'head_dim': 128}
    config = step('llama', 2, model, model=sizes)
    shrunk = shrink(config)[0].model
    assert (shrunk.num_kv_heads < model) == (kv_heads < model)
    assert (shrunk.num_kv_heads < shrunk.num_heads) == (kv_heads < 32)


def test_the_mesh_is_cut_only_where_it_has_more_devices_than_are_simulated():
    config = step('llama', 64, 8, train={'batch_size': 64})
    shrunk, changes = shrink(config)
    assert (shrunk.mesh.data, shrunk.mesh.model) == (2, 8)
    assert 'mesh.data 64 -> 2' in changes


def test_reducing_keeps_what_a_fault_needs_and_takes_away_the_rest():
    def is_wrong(config: Config) -> bool:
        return config.mesh.sequence_parallel and config.mesh.data > 1 and not config.model.bias

    full = step(
        'llama',
        4,
        4,
        sequence_parallel=True,
        train=EVERYTHING | {'dtype': 'bfloat16'},
        optim={'shard': True},
    )
    found = smallest(full, is_wrong)
    assert is_wrong(found)
    assert (found.mesh.data, found.model.num_layers, found.train.microbatches) == (2, 1, 1)
    assert (found.train.recompute, found.train.overlap) == ('none', 'none')
    assert found.train.dtype == 'float32'
    assert found.optim.shard == 'none'


@pytest.mark.parametrize(
    ('mesh', 'hidden_size', 'shrunk_mesh'),
    [
        ({'data': 32, 'replicas': 4, 'model': 4}, 4096, (4, 2, 1, 4)),
        ({'data': 48}, 4096, (3, 1, 1, 1)),
        ({'data': 2, 'model_rows': 2, 'model': 4}, 4096, (2, 1, 2, 4)),
        ({'model_rows': 4, 'model': 16}, 4096, (1, 1, 2, 4)),
    ],
    ids=['replicas', 'padded', 'grid', 'grid of 64'],
)
def test_replicas_rows_and_padding_stay_in_a_smaller_config(mesh, hidden_size, shrunk_mesh):
    model = {'hidden_size': hidden_size, 'num_kv_heads': 16, 'num_heads': 32, 'dropout': 0.0}
    config = make_config(
        'llama',
        mesh={'sequence_parallel': True} | mesh,
        model=model | HEAD,
        train={'batch_size': 4 * mesh.get('data', 1)},
        optim={'shard': 'weights'},
    )
    shrunk, _ = shrink(config)
    found = shrunk.mesh
    assert (found.data, found.replicas, found.model_rows, found.model) == shrunk_mesh
    is_padded = [bool(x.model.hidden_size % x.mesh.data_shards) for x in (config, shrunk)]
    assert is_padded[0] == is_padded[1]


@pytest.mark.parametrize('rung', ['none', 'optimizer', 'gradients', 'weights'])
def test_reducing_ends_at_the_lowest_rung_that_is_wrong(rung):
    order = 'none', 'optimizer', 'gradients', 'weights'
    full = step('gpt', 4, 2, mesh={'replicas': 2}, optim={'shard': 'weights'})
    found = smallest(full, lambda config: order.index(config.optim.shard) >= order.index(rung))
    assert found.optim.shard == rung
    assert (found.mesh.replicas, found.mesh.model) == (1, 1)


@pytest.mark.parametrize(
    ('dtype', 'exact', 'gradient', 'loss'),
    [
        ('float32', False, 1e-5, 1e-5),
        ('bfloat16', True, 2e-5, 1e-5),
        ('bfloat16', False, 3e-2, 1e-3),
    ],
)
def test_limits_follow_from_the_dtype(dtype, exact, gradient, loss):
    config = step('gpt', 1, 1, train={'dtype': dtype, 'batch_size': 64, 'seq_len': 32})
    judge = functools.partial(judged, config=config, exact=exact)
    for name, limit in (('gradient of x', gradient), ('loss', loss)):
        assert [one.ok for one in judge([Difference(name, limit)])] == [True]
        assert [one.ok for one in judge([Difference(name, 1.01 * limit)])] == [False]
        assert [one.ok for one in judge([Difference(name, limit, limit / 2)])] == [False]
    assert not judge([Difference('loss', float('inf'))])[0].ok
    near, far = Difference('a', 0.9, 1.0), Difference('b', 0.2, 0.3)
    assert [one.name for one in judge([far, near])] == ['a', 'b']


def test_the_loss_of_fewer_tokens_may_differ_more_in_16_and_8_bits():
    def of_loss(dtype: str, rows: int, exact: bool = False) -> float:
        train = {'dtype': dtype, 'batch_size': rows, 'seq_len': 4}
        return limits(step('gpt', 1, 1, train=train), exact=exact)[1]

    assert of_loss('bfloat16', 16) == 2 * of_loss('bfloat16', 64) == pytest.approx(0.03 / 8)
    assert of_loss('fp8', 16) > of_loss('bfloat16', 16)
    assert of_loss('float32', 16) == of_loss('bfloat16', 16, exact=True) == 1e-5


@pytest.mark.parametrize(
    ('chooses', 'dtype', 'wrong_at', 'ok'),
    [
        (True, 'bfloat16', {0, 1}, True),
        (True, 'bfloat16', {0, 1, 2}, False),
        (True, 'float32', {0}, False),
        (False, 'bfloat16', {0}, False),
    ],
)
def test_where_tokens_choose_experts_a_wrong_step_is_wrong_with_other_parameters_too(
    chooses, dtype, wrong_at, ok
):
    experts = {'count': 4, 'active': 1 if chooses else 4, 'ffn_size': 64}
    config = step('gpt', 2, 1, model={'experts': experts}, train={'dtype': dtype})
    assert is_right(config, wrong_at) == ok


@pytest.mark.parametrize(('total', 'ok'), [(208, True), (128, False)])
def test_where_regions_share_tokens_a_wrong_step_is_wrong_with_other_parameters_too(total, ok):
    """Each of two regions has 64 of 128 tokens, whatever its relevance."""
    config = relevant(relevance={'total_tokens': total}, train={'dtype': 'bfloat16'})
    assert is_right(config, wrong_at={0}) == ok
    assert not is_right(config, wrong_at={0, 1, 2})


def is_right(config: Config, wrong_at: set[int]) -> bool:
    """The verdict on a step whose loss is wrong at these points."""

    class Step(EmulatedStep):
        def __init__(self):
            self.config = config

        def differences(self, *, exact=False, text=None, point=0):
            return [Difference('loss', float(point in wrong_at))]

    return Step().results()[0].ok
