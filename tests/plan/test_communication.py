"""What a step sends, counted: the bytes of compiled steps, to the last one."""

import pytest

import megajax
from megajax.counts.megatron import Expected, expected
from megajax.plan.communication import communication, wire_bytes

LAYERS = ('attention', 'mlp')
MESH = [
    'mesh.data=1',
    'mesh.model=8',
    'train.batch_size=8',
    'train.microbatches=1',
    'train.dtype=bfloat16',
]


def config(name: str, *overrides: str) -> megajax.Config:
    return megajax.load(name, [*MESH, *overrides])


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


def test_one_device_sends_nothing() -> None:
    assert wire_bytes(config('gpt2_124m', 'mesh.model=1')) == {'data': 0, 'model': 0}
