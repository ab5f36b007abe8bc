"""An adapter changes a product, and its gradients, as the weight with it added would."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from support import (
    assert_close,
    exhaustive,
    gather,
    in_layer_order,
    make_batch,
    make_config,
    on_mesh,
    slow,
)
from support import random_params as random_of

from megajax.core.config import Config
from megajax.core.model.adapter_matmuls import ColumnParallel, RowParallel
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_gradients, make_loss_and_gradients
from megajax.core.train.scaling import nothing_seen, remember, scales_of

LORA = {'rank': 4, 'alpha': 6.0}
SCALE = 1.5
SP = {'sequence_parallel': True}
CURRENT = {'fp8_scaling': 'current'}
IN_ORDER = {'overlap': 'batch_split', 'unroll': True}
INTERLEAVED = {
    'mesh': {'stages': 2, 'virtual_stages': 2},
    'model': {'num_layers': 4},
    'train': {'microbatches': 4},
}
Arrays = dict[str, np.ndarray]


def with_adapters(*mesh: Any, **sections: Any) -> Config:
    return make_config(*mesh, **{'lora': LORA, **sections})


@functools.cache
def loss_and_gradients(config: Config) -> tuple[float, Arrays]:
    with on_mesh(config):
        params = random_of(config, std=0.05)
        batch = place_batch(make_batch(config))
        (loss, _), found = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        return float(loss), in_layer_order(gather(found), config)


@functools.cache
def of_merged_weights(name: str, num_layers: int) -> tuple[float, Arrays]:
    """The loss and the gradients of one device whose weights have their adapters added.

    Those of A and B follow from those of the weight W + s A B, by the chain rule.
    """
    config, plain = (
        make(name, model={'num_layers': num_layers}) for make in (with_adapters, make_config)
    )
    with on_mesh(config):
        arrays = gather(random_of(config, std=0.05))
    merged = merge(arrays)
    with on_mesh(plain):
        params = random_of(plain, std=0.05)
        params = jax.tree.map_with_path(
            lambda path, x: jax.device_put(merged[name_of(path)], x.sharding), params
        )
        batch = place_batch(make_batch(plain))
        (loss, _), found = jax.jit(make_loss_and_gradients(plain))(params, batch, jax.random.key(0))
        dense = gather(found)
    return float(loss), {
        f'{linear}.adapter.{which}': gradient
        for linear in linears(arrays)
        for which, gradient in zip('AB', chain(arrays, dense, linear), strict=True)
    }


def name_of(path: Any) -> str:
    return '.'.join(str(getattr(part, 'key', '')) for part in path if hasattr(part, 'key'))


def linears(arrays: Arrays) -> list[str]:
    return [name.removesuffix('.adapter.A') for name in arrays if name.endswith('.adapter.A')]


def flat(arrays: Arrays, linear: str) -> tuple[np.ndarray, np.ndarray]:
    """A [L, inputs, Q] and B [L, Q, outputs]."""
    a, b = (arrays[f'{linear}.adapter.{which}'].astype(np.float64) for which in 'AB')
    layers, rank = a.shape[0], a.shape[-1]
    return a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)


def merge(arrays: Arrays) -> Arrays:
    merged = {name: x for name, x in arrays.items() if '.adapter.' not in name}
    for linear in linears(arrays):
        a, b = flat(arrays, linear)
        weight = merged[f'{linear}.weight']
        merged[f'{linear}.weight'] = weight + (SCALE * a @ b).reshape(weight.shape).astype(
            np.float32
        )
    return merged


def chain(arrays: Arrays, dense: Arrays, linear: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = flat(arrays, linear)
    gradient = dense[f'{linear}.weight'].astype(np.float64)
    gradient = gradient.reshape(a.shape[0], a.shape[1], -1)
    of_a, of_b = SCALE * gradient @ b.swapaxes(1, 2), SCALE * a.swapaxes(1, 2) @ gradient
    shapes = (arrays[f'{linear}.adapter.{which}'].shape for which in 'AB')
    return tuple(x.reshape(shape) for x, shape in zip((of_a, of_b), shapes, strict=True))


@pytest.mark.parametrize(
    ('name', 'data', 'model', 'sections'),
    [
        exhaustive('gpt', 1, 1, {}),
        exhaustive('gpt', 2, 4, {}),
        slow('gpt', 2, 2, {'sequence_parallel': True, 'train': {'microbatches': 2}}),
        exhaustive('llama', 1, 2, {'sequence_parallel': True, 'train': {'recompute': 'full'}}),
        exhaustive('llama', 1, 4, {'train': {'recompute': 'selective'}}),
        ('llama', 2, 2, {'optim': {'shard': 'weights'}, 'sequence_parallel': True}),
        exhaustive('llama', 2, 2, {'optim': {'shard': 'gradients'}, 'train': {'microbatches': 2}}),
        exhaustive('llama', 2, 2, {'optim': {'shard': 'optimizer'}}),
        exhaustive('windows', 2, 2, {'optim': {'shard': 'weights'}, 'sequence_parallel': True}),
        exhaustive('llama', 2, 2, {'mesh': {'stages': 2}, **SP, 'train': {'microbatches': 4}}),
        exhaustive('gpt', 1, 2, INTERLEAVED),
        exhaustive(
            'llama',
            *(2, 1),
            {
                **{'mesh': {'stages': 4}, 'model': {'num_layers': 4}},
                **{'optim': {'shard': 'optimizer'}},
                **{'train': {'microbatches': 4, 'recompute': 'full'}},
            },
        ),
        exhaustive(
            'llama', 1, 2, {'mesh': {'context': 2, 'stages': 2}, **SP, 'train': {'microbatches': 2}}
        ),
        exhaustive('llama', 2, 1, {'mesh': {'context': 4}, 'optim': {'shard': 'weights'}}),
        exhaustive('llama', 2, 2, {'mesh': {'context': 2, 'context_exchange': 'ring'}, **SP}),
        slow('llama', 2, 2, {'optim': {'shard': 'weights'}, **SP, 'train': IN_ORDER}),
        exhaustive('llama', 2, 2, {'optim': {'shard': 'optimizer'}, 'train': IN_ORDER}),
        exhaustive(
            'llama',
            *(2, 2),
            {'optim': {'shard': 'optimizer'}, 'train': {**IN_ORDER, 'microbatches': 2}},
        ),
        exhaustive(
            'llama',
            *(1, 2),
            {'train': {'overlap': 'sequence_split', 'recompute': 'full'}, **SP},
        ),
        exhaustive('gpt', 1, 2, {'train': {**IN_ORDER, 'recompute': 'selective'}}),
        exhaustive('windows', 2, 2, {'mesh': {'context': 2}, 'optim': {'shard': 'gradients'}}),
        exhaustive('bert', 2, 2, {'optim': {'shard': 'weights'}, **SP}),
        exhaustive('bert', 1, 2, {'mesh': {'stages': 2}, **SP, 'train': {'microbatches': 4}}),
        exhaustive('bert', 2, 2, {'mesh': {'context': 2}, 'optim': {'shard': 'gradients'}}),
    ],
)
def test_loss_and_gradients_are_those_of_the_merged_weights(
    name: str, data: int, model: int, sections: dict[str, Any]
) -> None:
    config = with_adapters(name, data, model, **sections)
    loss, found = loss_and_gradients(config)
    expected_loss, expected = of_merged_weights(name, config.model.num_layers)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(found, expected, 1e-5)


@functools.cache
def in_fp8(config: Config) -> tuple[float, Arrays, np.ndarray]:
    """The loss, the gradients and the places of a step, with the scales of its own batch.

    With current scaling the places are zero.
    """
    with on_mesh(config):
        batch = place_batch(make_batch(config))
        given = random_of(config, std=0.05), batch, jax.random.key(0)
        function = jax.jit(make_gradients(config))
        (loss, _), found, seen = function(*given)
        if config.train.has_delayed_scales:
            scales = scales_of(remember(nothing_seen(config), seen.places))
            (loss, _), found, seen = function(*given, None, scales)
        places = np.zeros(()) if seen.places is None else np.asarray(seen.places)
        return float(loss), in_layer_order(gather(found), config), places


@pytest.mark.slow
@pytest.mark.parametrize(
    ('data', 'model', 'sections'),
    [
        exhaustive(2, 2, {'optim': {'shard': 'weights'}, **SP}),
        exhaustive(1, 4, {'train': {'microbatches': 2, 'recompute': 'full'}}),
        exhaustive(1, 2, {'mesh': {'stages': 2}, **SP, 'train': {'microbatches': 4}}),
        exhaustive(1, 2, {'mesh': {'context': 2}, **SP}),
        exhaustive(2, 2, {'optim': {'shard': 'weights'}, 'train': CURRENT}),
        exhaustive(1, 2, {'mesh': {'stages': 2}, **SP, 'train': {'microbatches': 4} | CURRENT}),
    ],
)
def test_in_fp8_loss_and_gradients_are_those_of_one_device(
    data: int, model: int, sections: dict[str, Any]
) -> None:
    train = sections.get('train', {}) | {'dtype': 'fp8'}
    config = with_adapters('llama', data, model, **sections | {'train': train})
    one = {key: train[key] for key in ('dtype', 'fp8_scaling') if key in train}
    (expected_loss, expected, places), (loss, found, own) = map(
        in_fp8, (with_adapters('llama', train=one), config)
    )
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert np.abs(own - places).max() <= 1  # a power of two that rounding tips
    assert_close(found, expected, 0.15)
    exact_loss, exact = of_merged_weights('llama', config.model.num_layers)
    assert loss == pytest.approx(exact_loss, rel=1e-4)
    assert_close(found, exact, 0.25)


@pytest.mark.parametrize(
    ('kind', 'equation', 'dims'),
    [
        (ColumnParallel, 'BSD,DF->BSF', ('BSD', 'BSF', 'DQ', 'QF')),
        (RowParallel, 'BSF,FD->BTD', ('BSF', 'BSD', 'FQ', 'QD')),
    ],
)
def test_the_factor_is_not_rounded_to_16_bits(
    kind: type[Any], equation: str, dims: tuple[str, ...]
) -> None:
    """Weights that are merged have the exact factor."""
    config, random, scale = make_config('gpt'), np.random.default_rng(0), 4 / 3
    sizes = {'B': 4, 'S': 64, 'D': 64, 'F': 64, 'Q': 16}
    given = [random.normal(size=[sizes[dim] for dim in each]).astype(np.float32) for each in dims]

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(how: Any, dtype: str, x: Any, dy: Any, a: Any, b: Any) -> tuple[jax.Array, ...]:
        x, dy = x.astype(dtype), dy.astype(dtype)
        h, dh = how.hidden(x, a), how.hidden_gradient(dy, b)
        return how.outputs(h, b), how.inputs(dh, a), how.of_a(x, dh), how.of_b(h, dy)

    with on_mesh(config):
        layout = Layout.of(config)
        placed = [jax.device_put(x, layout(each)) for x, each in zip(given, dims, strict=True)]
        exact = results(kind(equation, layout, 1.0), 'float32', *placed)
        found = results(kind(equation, layout, scale), 'bfloat16', *placed)
    for one, other in zip(found, map(np.asarray, exact), strict=True):
        factor = (np.asarray(one, np.float32) * other).sum() / (other * other).sum()
        assert factor == pytest.approx(scale, rel=5e-4)
