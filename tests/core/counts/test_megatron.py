"""What Megatron places, against the closed formulas of its papers."""

import pytest

import megajax
from megajax.core.config import presets
from megajax.core.counts.collective import Expected
from megajax.core.counts.megatron import expected, over_products
from megajax.core.counts.parameters import own_counts


def config(name: str = 'megatron_8.3b', *overrides: str) -> megajax.Config:
    return megajax.load(
        name,
        [
            'mesh.data=1',
            'mesh.model=8',
            'train.batch_size=8',
            'train.recompute=none',
            'train.dtype=bfloat16',
            *overrides,
        ],
    )


def wire_bytes(found: list[Expected], *sites: str) -> float:
    return sum(one.wire_bytes * one.times for one in found if one.site.name in sites)


def counts(found: list[Expected], *sites: str) -> dict[str, int]:
    kinds = {one.kind for one in found if one.site.name in sites}
    return {
        kind: sum(one.times for one in found if one.kind == kind and one.site.name in sites)
        for kind in kinds
    }


def test_a_layer_of_8b_sends_352_megabytes_each_way_and_back():
    """Narayanan et al. (2021): 8 (t-1)/t b s h numbers a layer, for 8 GPUs, 8 x 1024 tokens of 3072
    numbers in 16 bits.
    """
    layer = wire_bytes(expected(config()), 'attention', 'mlp') / 72
    assert layer == 8 * 7 / 8 * 8 * 1024 * 3072 * 2
    assert layer == pytest.approx(352e6, rel=1e-2)


def test_full_recomputation_adds_the_forward_pass_once_more():
    plain, again = (
        wire_bytes(expected(config('megatron_8.3b', f'train.recompute={how}')), 'attention', 'mlp')
        for how in ('none', 'full')
    )
    assert again == 1.5 * plain
    assert expected(config('megatron_8.3b', 'train.recompute=selective')) == expected(config())


def test_tensor_parallelism_makes_2L_plus_1_all_reduces_each_way():
    found = [one for one in expected(config()) if one.site.name != 'loss']
    for phase in ('forward', 'backward'):
        assert sum(one.times for one in found if one.site.phase == phase) == 2 * 72 + 1
    assert {one.kind for one in found} == {'all-reduce'}


def test_sequence_parallelism_gathers_a_layers_input_again_for_the_weight_gradient():
    assert counts(
        expected(config('megatron_8.3b', 'mesh.sequence_parallel=true')), 'attention', 'mlp'
    ) == {
        'all-gather': 6 * 72,
        'reduce-scatter': 4 * 72,
    }


def test_microbatches_send_as_much_over_model_and_gradients_once():
    sites = 'embedding', 'attention', 'mlp', 'head', 'loss'
    one, four = (
        expected(config('megatron_8.3b', 'mesh.data=2', f'train.microbatches={count}'))
        for count in (1, 4)
    )
    assert wire_bytes(one, *sites) == wire_bytes(four, *sites)
    assert counts(four, 'gradients') == {'all-reduce': 1}
    assert wire_bytes(one, 'gradients') == wire_bytes(four, 'gradients')


def test_fp8_reduces_the_maxima_of_its_products_once_a_step():
    """A layer has four products, each of inputs, weights and gradients; weights have no batch."""
    found = [*over_products(config('megatron_8.3b', 'mesh.data=2', 'train.dtype=fp8'))]
    assert [(one.array.shape, one.size, one.times) for one in found] == [
        ((3 * 4 * 72,), 16, 1),
        ((4 * 72,), 8, 1),
    ]


@pytest.mark.parametrize(('shard', 'of_weights'), [('none', 'model'), ('optimizer', 'data+model')])
def test_with_zero_a_data_shard_has_the_maxima_of_its_part_of_a_weight(shard, of_weights):
    keys = 'mesh.data=2', 'train.dtype=fp8', f'optim.shard={shard}'
    found = [*over_products(config('megatron_8.3b', *keys))]
    assert [one.site.axis for one in found] == ['data+model', of_weights]


def test_a_mesh_of_one_sends_nothing():
    assert not expected(config('megatron_8.3b', 'mesh.model=1'))


@pytest.mark.parametrize('name', presets())
def test_each_number_of_a_device_is_reduced_over_data_once_in_fp32(name):
    one = [f'mesh.{axis}=1' for axis in ('model', 'context', 'experts', 'replicas')]
    loaded = config(name, *one, 'mesh.data=8', 'train.microbatches=1', 'optim.shard=none')
    routed = 4 * experts.count * loaded.model.num_layers if (experts := loaded.model.experts) else 0
    gradients = 4 * (own_counts(loaded, learned=True).all + routed)  # and the sums of routers
    assert wire_bytes(expected(loaded), 'gradients') == 2 * 7 / 8 * gradients


def test_few_key_value_heads_are_gathered_with_the_queries():
    found = expected(
        config('llama3_8b', 'mesh.model=16', 'train.batch_size=8', 'train.microbatches=1')
    )
    gathered = [
        one
        for one in found
        if one.kind == 'all-gather' and one.array.shape[-1] == (32 + 2 * 8) * 128
    ]
    assert [one.times for one in gathered] == [32]
