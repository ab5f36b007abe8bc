"""A model that reads images has the same loss and gradients on every mesh.

Errors are relative to the largest element, see `support.relative_error`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    abstract_state,
    assert_close,
    by_name,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
    slow,
)
from vlm import MODEL, SP, VISION, vlm

from megajax.core.config import Config
from megajax.core.counts.parameters import parameters
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.parallel.layout import Layout
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_gradients, make_loss_and_gradients
from megajax.core.train.microbatches import split, with_weights
from megajax.core.train.objective import Objective
from megajax.core.train.scaling import nothing_seen, remember, scales_of
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text

LIMIT = 5e-6


def params_of(config: Config) -> nnx.State:
    # Larger with cross-attention and with experts: they would see all vectors alike, and the
    # gradients of queries and routers would be rounding errors.
    assert config.vision is not None
    is_large = config.vision.is_crossed or config.model.experts is not None
    return random_params(config, std=0.1 if is_large else 0.05)


@functools.cache
def loss_and_gradients(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    with on_mesh(config):
        params, batch = params_of(config), place_batch(make_batch(config))
        (loss, _), gradients = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        return float(loss), gather(gradients)


@functools.cache
def scales_in(config: Config) -> np.ndarray:
    """The scales after a step in bf16."""
    with on_mesh(config):
        given = params_of(config), place_batch(make_batch(config)), jax.random.key(0)
        places = jax.jit(make_gradients(config))(*given)[2].places
        return np.asarray(scales_of(remember(nothing_seen(config), places)))


def in_fp8(config: Config, scales: np.ndarray) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """The loss, the gradients and the places of a step."""
    with on_mesh(config):
        given = params_of(config), place_batch(make_batch(config)), jax.random.key(0)
        (loss, _), gradients, seen = jax.jit(make_gradients(config))(*given, None, scales)
        return float(loss), gather(gradients), np.asarray(seen.places)


TWICE = {'train': {'microbatches': 2}}
cross = functools.partial(vlm, crossed=True)


@pytest.mark.parametrize(
    'config',
    [
        exhaustive(vlm(2, 2, **SP)),
        exhaustive(vlm(2, 2, **SP, optim={'shard': 'weights'}, train={'recompute': 'full'})),
        exhaustive(vlm(2, 1, **TWICE)),
        exhaustive(vlm(1, 2)),
        exhaustive(vlm(2, 4)),
        exhaustive(vlm(4, 2, **SP, train={'microbatches': 2, 'recompute': 'full'})),
        exhaustive(vlm(1, 8, **SP)),
        exhaustive(vlm(1, 8, **TWICE)),
        exhaustive(vlm(8, 1)),
        exhaustive(vlm(1, 4, **SP, **TWICE)),
        exhaustive(vlm(2, 2, **SP, optim={'shard': 'optimizer'})),
        exhaustive(vlm(4, 2, optim={'shard': 'gradients'}, **TWICE)),
        exhaustive(vlm(3, 2, **SP, optim={'shard': 'weights'}, train={'batch_size': 24})),
        exhaustive(vlm(2, 2, **SP, train={'overlap': 'batch_split', 'recompute': 'selective'})),
        slow(cross(2, 2, **SP, optim={'shard': 'weights'}, train={'recompute': 'full'})),
        exhaustive(cross(1, 4, **TWICE)),
        exhaustive(cross(2, 2)),
        exhaustive(cross(1, 8, **SP)),
        exhaustive(cross(2, 2, **SP, model={'dropout': 0.1}, **TWICE)),
        exhaustive(cross(8, 1)),
        exhaustive(cross(3, 2, **SP, train={'batch_size': 24})),
        exhaustive(cross(2, 2, **SP, optim={'shard': 'optimizer'})),
        exhaustive(cross(4, 2, optim={'shard': 'gradients'}, **TWICE)),
        exhaustive(cross(4, 2, mesh={'replicas': 2}, optim={'shard': 'weights'})),
        exhaustive(cross(2, 2, **SP, train={'overlap': 'batch_split', 'recompute': 'selective'})),
    ],
    ids=lambda config: f'{config.mesh.data}x{config.mesh.model}',
)
def test_loss_and_gradients_are_those_of_one_device(config: Config) -> None:
    assert config.vision is not None
    alone = vlm(
        crossed=config.vision.is_crossed,
        train={'batch_size': config.train.batch_size},
        model={'dropout': config.model.dropout},
    )
    (expected_loss, expected), (loss, gradients) = map(loss_and_gradients, (alone, config))
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


EXPERTS = {'count': 4, 'active': 2, 'ffn_size': 48, 'shared_ffn_size': 32, 'balance_loss': 0.1}
NORMS = {'norm_position': 'both', 'qk_norm': 'all'}


@pytest.mark.parametrize(
    'sections',
    [
        slow({'model': {'experts': EXPERTS}, 'crossed': True, 'train': {'overlap': 'batch_split'}}),
        slow({'model': NORMS, 'crossed': True, 'train': {'unroll': True}}),
        {'lora': {'rank': 4}, 'optim': {'shard': 'weights'}},
        slow({'lora': {'rank': 4}, 'crossed': True, 'train': {'overlap': 'batch_split'}}),
    ],
    ids=str,
)
def test_what_is_learned_of_other_decoders_has_a_gradient(sections: dict[str, Any]) -> None:
    config = vlm(2, 2, **SP, **sections)
    with on_mesh(config):
        given = abstract_state(config).params, place_batch(make_batch(config)), jax.random.key(0)
        _, gradients = jax.eval_shape(make_loss_and_gradients(config), *given)
    learned = {name for name, x in parameters(config.model) if not x.is_frozen}
    assert {*by_name(gradients)} == learned
    has_mlp = {name.split('.mlp.')[0] for name in learned if '.mlp.up.weight' in name}
    if 'experts' in sections.get('model', {}):
        assert has_mlp == {'vision.layers'} | ({'cross.layers'} if 'crossed' in sections else set())


@pytest.mark.parametrize(
    ('sections', 'mesh'),
    [
        exhaustive({'model': {'experts': EXPERTS}}, {'experts': 2}),
        exhaustive({'model': {'experts': EXPERTS}, 'crossed': True}, {}),
        exhaustive({'model': NORMS}, {}),
        exhaustive({'model': NORMS | {'norm_position': 'after'}, 'crossed': True}, {}),
        exhaustive({'lora': {'rank': 4}}, {}),
        exhaustive({'lora': {'rank': 4}, 'crossed': True}, {}),
        exhaustive({'lora': {'rank': 4}, 'crossed': True}, {'replicas': 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    'train', [{}, exhaustive({'unroll': True, 'recompute': 'full', 'microbatches': 2})]
)
def test_other_decoders_have_the_numbers_of_one_device_too(
    sections: dict[str, Any], mesh: dict[str, int], train: dict[str, Any]
) -> None:
    shard = {'shard': 'gradients' if train else 'weights'}
    config = vlm(2, 2, **SP, **sections, mesh=mesh, train=train, optim=shard)
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (vlm(**sections), config)
    )
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize('crossed', [False, True])
def test_only_the_images_of_a_row_matter_to_it(crossed: bool) -> None:
    config = vlm(crossed=crossed)
    batch = make_batch(config)
    layout = Layout.of(config)
    with on_mesh(config):
        objective = Objective.of(config, layout)
        params = params_of(config)
        shard = jax.tree.map(
            lambda x: split(x, 1, layout)[0, 0],
            with_weights(place_batch(batch), config, layout),
        )

        def of_row(pixels: jax.Array, row: jax.Array) -> jax.Array:
            weights = shard['weights'] * (jnp.arange(len(batch['tokens'])) == row)[:, None]
            given = {**shard, 'pixels': pixels, 'weights': weights}
            return objective(copy_to_shards(params, layout), None, given, jax.random.key(0))[0]

        pixels, gradient_of = shard['pixels'].astype(jnp.float32), jax.jit(jax.grad(of_row))
        for row in (0, 5):
            gradient = np.asarray(gradient_of(pixels, row))
            others = np.delete(gradient, row, axis=0)
            np.testing.assert_array_equal(others, 0)
            patches = batch['image_grid'][row].prod(-1)
            for slot, count in enumerate(patches):
                assert (abs(gradient[row, slot, :count]).max(-1) > 0).all()
                np.testing.assert_array_equal(gradient[row, slot, count:], 0)


def test_without_images_it_is_the_text_model_to_the_bit() -> None:
    config = vlm()
    text = make_config('llama', model=MODEL, train={'batch_size': 16, 'seq_len': 24})
    batch = make_batch(config)
    batch |= {
        'image_grid': 0 * batch['image_grid'],
        'image_index': np.full_like(batch['image_index'], -1),
    }
    images = 'pixels', 'image_grid', 'image_index'
    of_text = {name: x for name, x in batch.items() if name not in images}

    def loss(config: Config, batch: dict[str, np.ndarray]) -> float:
        with on_mesh(config):
            given = random_params(config, std=0.05), place_batch(batch)
            return float(make_eval_step(config)(*given)['nll'])

    assert loss(config, batch) == loss(text, of_text)


@pytest.mark.slow
def test_the_encoder_communicates_nothing_and_its_vectors_are_gathered_once() -> None:
    config = vlm(2, 4, **SP, vision={'deepstack': (0, 1)})
    with on_mesh(config):
        params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
        compiled = jax.jit(make_loss_and_gradients(config)).lower(params, batch, jax.random.key(0))
        program = Program(program_text(compiled.compile()))
    count, each = 16 // 2 * VISION['images'] * 4, (3, config.model.hidden_size)
    found = [
        (one.kind, one.axis, one.times, one.operand.shape)
        for one in collectives(program, {'data': 2, 'model': 4})
        if len(one.operand.shape) == 4 and one.operand.shape[-2:] == each
    ]
    assert sorted(found) == [
        ('all-gather', 'model', 1, (1, count // 4, *each)),
        ('reduce-scatter', 'model', 1, (1, count, *each)),
    ]
    # The loop over its layers would repeat what is inside.
    assert not [
        one.op_name
        for one in collectives(program, {'data': 2, 'model': 4})
        if 'vision' in one.op_name and one.times > 1
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('crossed', 'sections'),
    [exhaustive(False, {'optim': {'shard': 'weights'}, **TWICE}), exhaustive(True, {})],
)
def test_in_fp8_every_mesh_sees_the_same_exponents(crossed: bool, sections: dict[str, Any]) -> None:
    train = {**sections.get('train', {}), 'dtype': 'fp8'}
    config = vlm(2, 2, **SP, crossed=crossed, **{**sections, 'train': train})
    alone = vlm(crossed=crossed, train={'dtype': 'fp8'})
    scales = scales_in(alone)
    loss, gradients, places = in_fp8(config, scales)
    expected_loss, expected, own = in_fp8(alone, scales)
    assert relative_error(loss, expected_loss) < 1e-4
    np.testing.assert_array_equal(places, own)
    assert_close(gradients, expected, 0.15)
