"""Which matrices Muon updates, where their pieces are, and what their exchange sends."""

import pytest
from support import make_config

import megajax
from megajax.core.config import Config
from megajax.core.counts.collective import EXCHANGE, GATHER
from megajax.core.counts.megatron import expected
from megajax.core.counts.muon import exchanges, newton_schulz, pools_of
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.counts.whole_matrices import parts_of, pools
from megajax.core.parallel.layout import Layout

EIGHT = [
    'mesh.data=8 optim.shard=optimizer',
    'mesh.data=8 optim.shard=weights',
    'mesh.data=4 mesh.model=2 optim.shard=optimizer',
    'mesh.data=1 mesh.model=8',
    'mesh.data=2 mesh.context=2 mesh.model=2 optim.shard=gradients',
    'mesh.data=2 mesh.model_rows=2 mesh.model=2 mesh.sequence_parallel=true optim.shard=weights',
]


def muon(overrides: str, size: int = 64) -> Config:
    batch = f'train.batch_size={size}'
    return megajax.load('llama3_8b', [*overrides.split(), 'optim.kind=muon', batch])


def num_matrix_elements(config: Config) -> int:
    sizes = dim_sizes(config.model)
    return sum(elements(x.dims, sizes) for _, x in parameters(config.model) if x.is_layer_matrix)


@pytest.mark.parametrize('overrides', EIGHT)
def test_each_device_receives_2_x_2_N_n_minus_1_over_n_squared_bytes(overrides: str) -> None:
    config = muon(overrides)
    sent = [*exchanges(config)]
    assert {(one.kind, one.array.dtype, one.times) for one in sent} == {(EXCHANGE, 'bf16', 2)}
    assert len(sent) == len(pools(config))
    total = sum(one.times * one.wire_bytes for one in sent)
    assert total == 2 * 2 * num_matrix_elements(config) * 7 / 64


def test_replicas_gather_the_results_of_their_shares() -> None:
    config = muon('mesh.data=8 mesh.replicas=2 optim.shard=optimizer')
    of_kind = {
        kind: sum(one.times * one.wire_bytes for one in exchanges(config) if one.kind == kind)
        for kind in (EXCHANGE, GATHER)
    }
    count = num_matrix_elements(config)
    assert of_kind == {
        EXCHANGE: 2 * 2 * count / 2 * 3 / 4**2,
        GATHER: 2 * count / 4 * 1 / 2,
    }


def test_zeros_are_not_gathered() -> None:
    """288 square matrices and 144 others are padded to 512 each, for 512 devices."""
    config = megajax.load('megatron_8.3b', ['optim.kind=muon'])
    d, n, r = 3072, 8, 64
    sent = [(one.kind, one.site.axis, one.times * one.wire_bytes) for one in exchanges(config)]
    total: dict[tuple[str, str], float] = {}
    for kind, axis, size in sent:
        total[kind, axis] = total.get((kind, axis), 0.0) + size
    padded = 512 * (d * d + 4 * d * d)
    assert total == {
        (EXCHANGE, 'model'): 2 * 2 * padded * (n - 1) / (r * n**2),
        (EXCHANGE, 'data'): 2 * padded * (r - 1) / (n * r**2),
        (GATHER, 'data'): 2 * num_matrix_elements(config) * (r - 1) / (n * r),
    }


@pytest.mark.parametrize('matrices', [5, 7, 8, 9, 60, 63, 64])
def test_what_is_gathered_has_the_fewest_bytes(matrices: int) -> None:
    config = megajax.load('tiny', ['mesh.data=8', 'optim.kind=muon', 'train.batch_size=8'])
    form, layout = next(iter(pools(config))), Layout.of(config)
    padded = form.padded(matrices, layout)
    whole, in_parts = padded * 7 / 8, padded / 8 * 7 / 8 + matrices * 7 / 8
    assert padded % 8 == 0
    assert form.by_elements(matrices, layout) == (in_parts < whole)


@pytest.mark.parametrize(
    'overrides', [*EIGHT, 'mesh.data=8', 'mesh.data=8 mesh.replicas=4 optim.shard=weights']
)
def test_no_matrix_is_orthogonalized_twice(overrides: str) -> None:
    """Llama 3 8B has 128 square matrices, 64 for keys and values, and 96 in the MLPs."""
    config = muon(overrides)
    flops = sum(x.times * x.flops for x in newton_schulz(config))
    layers, d, kv, f = 32, 4096, 1024, 14336
    once = 10 * sum(
        count * layers * (2 * m * m * n + m**3)
        for count, m, n in ((2, d, d), (2, kv, d), (3, d, f))
    )
    assert flops * 8 == once


def test_pools_are_padded_to_the_devices() -> None:
    config = muon('mesh.data=5 optim.shard=optimizer train.microbatches=1', size=60)
    assert [pool.count for pool in pools_of(config)] == [65, 65, 100]


def test_query_key_and_value_and_gate_and_up_are_matrices_of_their_own() -> None:
    model = make_config('llama', model={'head_dim': 16}).model
    sizes, declared = dim_sizes(model), dict(parameters(model))
    layers = {name: x for name, x in declared.items() if x.is_layer_matrix}
    shapes = {
        name: [part.form.shape for part in parts_of(x, sizes, Layout())]
        for name, x in layers.items()
    }
    assert shapes == {
        'layers.attention.qkv.weight': [(64, 128), (32, 64), (32, 64)],
        'layers.attention.out.weight': [(64, 128)],
        'layers.mlp.up.weight': [(64, 256), (64, 256)],
        'layers.mlp.down.weight': [(64, 256)],
    }


@pytest.mark.parametrize('overrides', EIGHT)
def test_matrices_of_one_shape_share_a_pool(overrides: str) -> None:
    config = muon(overrides)
    forms = pools(config)
    assert len(forms) == len({form.shape for form in forms}) == 3


@pytest.mark.parametrize('name', ['gpt', 'bert', 'llama'])
def test_embedding_and_heads_are_not_among_them(name: str) -> None:
    declared = parameters(make_config(name).model)
    assert {name.split('.')[0] for name, x in declared if x.is_layer_matrix} == {'layers'}


def test_experts_that_have_a_device_each_are_not_exchanged() -> None:
    config = make_config(
        'experts', mesh={'data': 4, 'experts': 4}, optim={'kind': 'muon', 'shard': 'optimizer'}
    )
    of_experts = [form for form in pools(config) if 'expert' in form.groups]
    assert of_experts
    assert {form.pieces for form in of_experts} == {()}


@pytest.mark.parametrize('experts', [0, 1, 2, 4])
def test_megatron_gathers_over_tensor_parallel_ranks_in_fp32(experts: int) -> None:
    config = muon('mesh.data=4 mesh.model=2 optim.shard=optimizer')
    if experts:  # the data shards include the axis of experts
        mesh = {'data': 4, 'model': 2, 'experts': experts}
        config = make_config('experts', mesh=mesh, optim={'kind': 'muon', 'shard': 'optimizer'})
    (sent,) = [one for one in expected(config) if one.site.name == 'optimizer']
    assert (sent.kind, sent.site.axis) == (GATHER, 'model')
    assert sent.wire_bytes == 4 * num_matrix_elements(config) / 4 * 1 / 2


def test_adamw_exchanges_nothing() -> None:
    config = megajax.load('llama3_8b', ['mesh.data=8', 'optim.shard=weights'])
    assert not [*exchanges(config), *newton_schulz(config)]
