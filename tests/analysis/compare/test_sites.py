"""The first site that differs is that of a planted fault, and two meshes have no such site."""

from typing import Any

import jax
import numpy as np
import pytest
from analysis.compare.small import PLAIN, on_one_device, recorded, small, with_fault
from support import abstract_state, exhaustive, on_mesh, random_params, slow

from megajax.analysis.compare import forward
from megajax.analysis.compare.difference import Comparison, compare_recordings
from megajax.analysis.compare.parameters import by_layer
from megajax.analysis.compare.site_names import WITHIN, backward_order, site_names, sites
from megajax.analysis.inspect.random_batch import make_batch
from megajax.core.counts.layers import layer
from megajax.core.train.feed import place_batch

MESHES = {
    'tensor and sequence parallel': {'mesh': {'data': 2, 'model': 4, 'sequence_parallel': True}},
    'weights at rest': {
        'mesh': {'data': 4, 'model': 2},
        'optim': {'shard': 'weights'},
        'train': {'microbatches': 2},
    },
    'a ring of context shards': {
        'mesh': {'data': 2, 'context': 2, 'context_exchange': 'ring', 'model': 2}
    },
    'chunks of stages': {
        'model': {'num_layers': 4},
        'mesh': {'stages': 2, 'virtual_stages': 2, 'data': 2, 'model': 2},
        'optim': {'shard': 'optimizer'},
        'train': {'microbatches': 2},
    },
    'a grid': {'mesh': {'model_rows': 2, 'model': 2, 'sequence_parallel': True}},
    'replicas that take turns': {
        'mesh': {'data': 4, 'replicas': 2, 'model': 2, 'sequence_parallel': True},
        'optim': {'shard': 'gradients'},
        'train': {'overlap': 'batch_split', 'unroll': True},
    },
}


def title(comparison: Comparison) -> tuple[str, str]:
    assert comparison.first is not None
    return comparison.first.name, comparison.first.phase


@pytest.mark.parametrize(
    'mesh',
    [
        name if 'seq' in name else slow(name) if name == 'a grid' else exhaustive(name)
        for name in MESHES
    ],
)
def test_no_site_of_a_mesh_differs_from_one_device(mesh: str) -> None:
    sections = MESHES[mesh]
    model, there = sections.get('model'), recorded(small(**sections))
    here = recorded(small(model=model)) if model else on_one_device()
    comparison = compare_recordings(here, there)
    assert comparison.first is None
    assert not comparison.same_bits
    assert [*there.forward] == [*site_names(small(model=model or {}).model), 'loss']
    assert [*there.gradients] == [*here.gradients]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt', exhaustive('bert')])
@pytest.mark.parametrize('dtype', [*map(exhaustive, ('float32', 'float16', 'fp8'))])
def test_every_model_and_dtype_has_the_same_sites_on_two_meshes(name: str, dtype: str) -> None:
    train, mesh = {'dtype': dtype}, {'data': 2, 'model': 2, 'sequence_parallel': True}
    sides = recorded(small(name, train=train)), recorded(small(name, train=train, mesh=mesh))
    assert compare_recordings(*sides).first is None


@pytest.mark.slow
def test_experts_have_their_sites_on_every_mesh_and_drop_the_same_tokens() -> None:
    experts = {'count': 4, 'active': 2, 'ffn_size': 32, 'capacity': 0.75, 'capacity_group': 8}
    model = {**PLAIN, 'experts': {**experts, 'selection_bias': True}}
    mesh = {'data': 2, 'experts': 2, 'model': 2, 'sequence_parallel': True}
    loss = {'label_smoothing': 0.0, 'z_loss': 0.0}
    one = small(model=model, loss=loss)
    here, there = recorded(one), recorded(small(model=model, loss=loss, mesh=mesh))
    assert compare_recordings(here, there).first is None
    assert 'layers.1.experts' in there.forward
    assert [*there.gradients][2:6] == [
        f'layers.1.experts.{name}'
        for name in ('down.weight', 'up.weight', 'router.weight', 'norm.weight')
    ]
    head = here.forward['logits'].reshape(-1, here.forward['logits'].shape[-1])
    labels, mask = (here.batch[name].reshape(-1) for name in ('labels', 'loss_mask'))
    nll = np.log(np.exp(head).sum(-1)) - head[np.arange(len(labels)), labels]
    assert np.isclose((nll * mask).sum() / mask.sum(), here.forward['loss'], rtol=1e-5)


def test_a_pass_repeats_to_the_bit_and_its_gradients_come_last_layer_first() -> None:
    here = on_one_device()
    comparison = compare_recordings(here, recorded(small()))
    assert comparison.same_bits
    assert not comparison.different_weights
    names = [*here.gradients]
    assert names[:3] == ['head', 'norm.weight', 'layers.1.mlp.down.weight']
    assert names[-1] == 'embedding.table'


def test_each_layer_of_a_pattern_runs_with_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(model={'num_layers': 3, 'layers': [{'window': 4}, {'rope_theta': 1e6}]})
    run_layer, found = forward.run_layer, []

    def run(block: Any, *rest: Any) -> jax.Array:
        found.append(block.attention.config)
        return run_layer(block, *rest)

    monkeypatch.setattr(forward, 'run_layer', run)
    with on_mesh(config):
        params, batch = abstract_state(config).params, place_batch(make_batch(config))
        jax.eval_shape(forward.make_forward(config), params, batch, jax.random.key(0))
    assert found == [config.model.layer_config(index) for index in range(3)]


@pytest.mark.parametrize('position', ['before', 'after', 'both'])
def test_sites_and_gradients_are_in_the_order_of_the_computation(
    position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tapped = small(model={'norm_position': position}), forward._tapped
    seen = list[forward.Sites]()
    monkeypatch.setattr(forward, '_tapped', lambda block: seen.append(tapped(block)) or seen[-1])
    with on_mesh(config):
        params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
        jax.eval_shape(forward.make_forward(config), params, batch, jax.random.key(0))
        gradients = [*by_layer(params, config)]
    assert [[*of_layer] for of_layer in seen] == [sites(config.model)] * 2
    before = ['layers.1.mlp.norm.weight'] if position != 'after' else []
    after = [f'layers.1.mlp.{"output_" * bool(before)}norm.weight'] if position != 'before' else []
    matrices = ['layers.1.mlp.down.weight', 'layers.1.mlp.up.weight']
    assert [name for name in gradients if '.1.mlp.' in name] == [*after, *matrices, *before]


def test_a_changed_weight_is_found_where_it_is_used_first() -> None:
    fault = ('layers', 'mlp', 'down', 'weight')
    broken = recorded(small(), lambda config: with_fault(config, fault, 1e-3))
    comparison = compare_recordings(on_one_device(), broken)
    assert title(comparison) == ('layers.1.mlp', 'forward')
    assert comparison.different_weights == ['layers.1.mlp.down.weight']


@pytest.mark.slow
def test_another_rope_is_found_in_the_attention_of_the_first_layer() -> None:
    comparison = compare_recordings(on_one_device(), recorded(small(model={'rope_theta': 5000})))
    assert title(comparison) == ('layers.0.attention', 'forward')
    assert comparison.keys == [('model.rope_theta', '10000.0', '5000.0')]
    assert not comparison.different_weights


@pytest.mark.slow
def test_gradients_that_are_summed_in_16_bits_are_found_after_an_equal_forward_pass() -> None:
    meshes = [
        small(mesh={'data': 2}, optim={'reduce_dtype': dtype}) for dtype in ('float32', 'bfloat16')
    ]
    comparison = compare_recordings(*map(recorded, meshes), tolerance=1e-5)
    assert title(comparison) == ('head', 'gradient')
    forward_sites = [site for site in comparison.sites if site.phase == 'forward']
    assert forward_sites
    assert all(site.same_bits for site in forward_sites)


def test_a_wrong_backward_pass_is_found_by_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from megajax.core.model import embedding

    def doubled(*arguments: object) -> tuple[object, ...]:
        table, *rest = embedding._backward(*arguments)
        return 2 * table, *rest

    sound = on_one_device()  # before the patch: it is computed once for all tests
    monkeypatch.setattr(embedding._embed, 'bwd', doubled)
    comparison = compare_recordings(sound, recorded(small()))
    assert title(comparison) == ('embedding.table', 'gradient')


def test_a_forward_pass_layer_by_layer_is_the_same_of_any_order_of_layers() -> None:
    plain = forward.layer_by_layer(small(model={'num_layers': 4}, mesh={'data': 2}))
    order = {'microbatches': 2, 'recompute': 'full'}
    staged = small(
        model={'num_layers': 4}, mesh={'data': 2, 'stages': 2, 'virtual_stages': 2}, train=order
    )
    assert forward.layer_by_layer(staged) == plain == forward.layer_by_layer(plain)


def test_parameters_are_in_the_order_in_which_a_backward_pass_reaches_them() -> None:
    order = [
        *('head.weight', 'norm.bias', 'norm.weight'),
        *('layers.10.mlp.down.weight', 'layers.10.mlp.norm.weight', 'layers.10.attention.out.bias'),
        *('layers.10.attention.qkv.weight', 'layers.10.attention.norm.weight'),
        *('layers.10.unknown', 'layers.9.mlp.up.weight', 'layers.9.experts.router.weight'),
        *('position.weight', 'token_type.weight', 'embedding.weight'),
    ]
    by_name = sorted(order)
    assert sorted(by_name, key=backward_order) == order


def test_all_parameters_of_a_layer_have_a_place_in_a_backward_pass() -> None:
    experts = {'count': 4, 'active': 2, 'ffn_size': 32, 'shared_ffn_size': 32}
    own = {'norm_position': 'both', 'qk_norm': True, 'attention_sinks': True}
    for model in small(model=own).model, small(model={**own, 'experts': experts}).model:
        for sublayer in layer(model):
            for name in sublayer.declared(model):
                assert f'{sublayer.name}.{name}' in WITHIN
