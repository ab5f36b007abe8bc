"""What a step sends, counted: the bytes of compiled steps, to the last one."""

import pytest

import megajax
from megajax.analysis.plan.communication import communication, wire_bytes
from megajax.core.counts.collective import Expected
from megajax.core.counts.megatron import expected

LAYERS = ('attention', 'mlp')
MESH = [
    'mesh.data=1',
    'mesh.model=8',
    'train.batch_size=8',
    'train.microbatches=1',
    'train.dtype=bfloat16',
]


def config(name: str, *overrides: str) -> megajax.Config:
    return megajax.load(name, [*MESH, 'optim.shard=none', *overrides])


def sent(found: list[Expected], *phases: str) -> float:
    return sum(
        one.wire_bytes * one.times
        for one in found
        if one.site.name in LAYERS and one.site.phase in phases
    )


@pytest.mark.parametrize('name', ['gpt2_345m', 'megatron_8.3b', 'gpt3_175b'])
def test_without_recomputation_tensor_parallelism_sends_what_megatron_does(name: str) -> None:
    plain = config(name, 'mesh.sequence_parallel=false', 'train.recompute=none')
    assert communication(plain) == expected(plain)


def test_sequence_parallelism_sends_as_much_as_tensor_parallelism_and_less_than_megatron() -> None:
    scattered, reduced = (
        config('megatron_8.3b', f'mesh.sequence_parallel={on}', 'train.recompute=none')
        for on in ('true', 'false')
    )
    assert sent(communication(scattered), 'forward', 'backward') == sent(
        communication(reduced), 'forward', 'backward'
    )
    assert (
        sent(communication(scattered), 'backward') == sent(expected(scattered), 'backward') * 2 / 3
    )


@pytest.mark.parametrize(('on', 'share'), [('false', 1 / 2), ('true', 3 / 4)])
def test_full_recomputation_sends_all_but_the_last_of_a_layer_again(on: str, share: float) -> None:
    found = communication(
        config('megatron_8.3b', f'mesh.sequence_parallel={on}', 'train.recompute=full')
    )
    assert sent(found, 'recompute') == share * sent(found, 'forward')


def test_few_key_value_heads_cost_less_than_gathering_queries_too() -> None:
    few = config(
        'llama3_8b', 'mesh.model=16', 'mesh.sequence_parallel=false', 'train.recompute=none'
    )
    ours, theirs = communication(few), expected(few)
    assert sum(one.kind == 'all-to-all' for one in ours) == 2
    assert sent(ours, 'forward') < sent(theirs, 'forward')
    assert sent(ours, 'backward') < sent(theirs, 'backward')


def test_zero_reduces_in_fp32_and_gathers_in_bf16_once_a_step() -> None:
    plain, sharded = (
        config('llama3_8b', 'mesh.data=8', f'optim.shard={on}', 'train.microbatches=1')
        for on in ('false', 'true')
    )
    over_data = {
        (one.site.name, one.kind): one.wire_bytes
        for one in communication(sharded)
        if one.site.axis == 'data' and one.times == 1
    }
    assert over_data['parameters', 'all-gather'] == over_data['gradients', 'reduce-scatter'] / 2
    assert wire_bytes(sharded)['data'] == pytest.approx(0.75 * wire_bytes(plain)['data'], rel=0.001)


def over_data(shard: str, *overrides: str) -> float:
    keys = 'mesh.data=8', 'mesh.model=1', 'train.batch_size=32', f'optim.shard={shard}'
    return wire_bytes(config('llama3_8b', *keys, *overrides))['data']


@pytest.mark.parametrize(('microbatches', 'recompute'), [(1, 'full'), (4, 'full'), (4, 'none')])
def test_each_rung_sends_its_formula(microbatches: int, recompute: str) -> None:
    """W elements of the layers' matrices, T of the tables, 7/8 of them from each of 8 GPUs."""
    layers, tables = 6_979_321_856, 2 * 4096 * 129024
    vectors = 65 * 4096
    keys = f'train.microbatches={microbatches}', f'train.recompute={recompute}'
    matrices, m = layers + tables, microbatches
    sent = {
        'none': 8 * matrices,
        'optimizer': 6 * matrices,
        'gradients': 2 * matrices + 4 * m * matrices,
        'weights': m * (8 * layers + 6 * tables),
    }
    for shard, count in sent.items():
        assert over_data(shard, *keys) == (count + 8 * vectors) * 7 / 8
    in_16_bits = m * (6 * layers + 4 * tables)
    assert (
        over_data('weights', 'optim.reduce_dtype=bfloat16', *keys)
        == (in_16_bits + 8 * vectors) * 7 / 8
    )


def test_replicas_send_a_shard_of_the_gradients_between_groups_once_a_step() -> None:
    keys = 'mesh.data=64', 'mesh.model=1', 'optim.shard=weights', 'train.batch_size=256'
    apart = 'mesh.replicas=8', 'train.microbatches=4'
    sent = wire_bytes(config('llama3_8b', *keys, *apart))
    matrices = 6_979_321_856 + 2 * 4096 * 129024
    assert sent['replica'] == 2 * 7 / 8 * 4 * matrices / 8
    one_host = over_data('weights', 'train.microbatches=4')
    assert sent['data'] == one_host - 8 * 65 * 4096 * 7 / 8
    # Vectors are reduced over all data shards at once.
    assert sent['replica+data'] == 8 * 65 * 4096 * 63 / 64


@pytest.mark.parametrize(('rows', 'model', 'ratio'), [(2, 2, 1.42), (2, 4, 0.89), (2, 8, 0.68)])
def test_a_grid_sends_the_formula_of_its_layers(rows: int, model: int, ratio: float) -> None:
    """4 f(y) D/x + f(x) (2q + 2kv + U + F)/y elements a token and layer, either pass."""
    overrides = 'mesh.sequence_parallel=true', 'train.recompute=none', 'train.batch_size=8'
    grid = config('llama3_8b', f'mesh.model_rows={rows}', f'mesh.model={model}', *overrides)
    over_row, over_model = (rows - 1) / rows, (model - 1) / model
    D, q, kv, F = 4096, 4096, 1024, 14336
    each = 4 * over_model * D / rows + over_row * (2 * q + 2 * kv + 2 * F + F) / model
    tokens, layers = 8 * 8192, 32
    assert sent(communication(grid), 'forward') == pytest.approx(2 * each * tokens * layers)
    assert sent(communication(grid), 'backward') == pytest.approx(2 * each * tokens * layers)
    flat = 4 * (rows * model - 1) / (rows * model) * D
    assert each / flat == pytest.approx(ratio, abs=0.005)


def test_one_device_sends_nothing() -> None:
    assert wire_bytes(config('gpt2_124m', 'mesh.model=1')) == {'data': 0, 'model': 0}
