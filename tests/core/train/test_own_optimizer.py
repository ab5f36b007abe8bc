"""An optimizer of one's own in the training step, and whole matrices for one that needs them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
    assert_close,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    slow,
)

import megajax
from megajax.core.config import Config, ConfigError, load
from megajax.core.train.feed import place_batch
from megajax.core.train.optimizer import learning_rate, make_optimizer
from megajax.core.train.step import init_state, make_train_step
from megajax.core.train.whole_matrices import on_whole_matrices


def case(data: int = 1, model: int = 1, shard: str = 'none') -> Config:
    return make_config(
        'llama',
        data,
        model,
        model={'hidden_size': 60, 'head_dim': 8},
        optim={'shard': shard, 'grad_clip': 1e9},
    )


def shampoo() -> optax.GradientTransformation:
    """Shampoo (Gupta et al., 2018) for one matrix."""

    def init(matrix: jax.Array) -> Any:
        m, n = matrix.shape
        return jnp.zeros((m, m)), jnp.zeros((n, n))

    def update(gradient: jax.Array, state: Any, params: Any = None) -> Any:
        assert gradient.shape[0] <= gradient.shape[1]
        left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
        return root(left) @ gradient @ root(right), (left, right)

    def root(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x + 1e-3 * jnp.eye(len(x)))
        return vectors @ jnp.diag(values**-0.25) @ vectors.T

    return optax.GradientTransformation(init, update)


@functools.cache
def updated(config: Config, steps: int = 2) -> dict[str, np.ndarray]:
    """The parameters after some steps of Shampoo with Lion."""
    optimizer = optax.chain(
        on_whole_matrices(config, shampoo(), others=optax.scale_by_lion()),
        optax.scale_by_learning_rate(1e-2),
    )
    with on_mesh(config):
        params = random_params(config, std=0.05)
        state = jax.jit(optimizer.init)(params)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            gradients = jax.tree.map(lambda x: jnp.sin(40 * x), params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(steps):
            params, state = step(params, state)
        return gather(params)


@pytest.mark.parametrize(
    'config',
    [slow(case(2, 4, 'weights')), exhaustive(case(8, 1, 'optimizer')), exhaustive(case(4, 2))],
)
def test_an_optimizer_of_whole_matrices_computes_the_same_on_every_mesh(config: Config) -> None:
    assert_close(updated(config), updated(case()), 1e-5)


@pytest.mark.parametrize(('data', 'model', 'shard'), [(1, 1, 'none'), (2, 2, 'weights')])
def test_square_matrices_have_their_inputs_as_rows_on_every_mesh(
    data: int, model: int, shard: str
) -> None:
    """The optimizer divides each row of a matrix by its norm."""

    def divide(gradient: jax.Array, state: Any, params: Any = None) -> Any:
        return gradient / jnp.linalg.norm(gradient, axis=1, keepdims=True), state

    config = make_config('gpt', data, model, optim={'shard': shard})
    of_rows = optax.GradientTransformation(lambda _: optax.EmptyState(), divide)
    optimizer = on_whole_matrices(config, of_rows, others=optax.identity())
    with on_mesh(config):
        gradients = random_params(config, std=0.05)
        expected = gather(gradients)
        updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(gradients))
        found = gather(updates)
    # LDKCH: queries, keys and values are square; LNhD is square; LDF and LFD are not
    outputs = {'attention.qkv': (2, 4), 'attention.out': 3, 'mlp.up': 2, 'mlp.down': 1}
    for name, axes in outputs.items():
        x = expected[f'layers.{name}.weight']
        expected[f'layers.{name}.weight'] = x / np.sqrt(np.square(x).sum(axes, keepdims=True))
    assert_close(found, expected, 1e-5)


def test_each_matrix_has_its_own_state() -> None:
    def init(matrix: jax.Array) -> Any:
        return jnp.zeros(matrix.shape)

    def update(gradient: jax.Array, state: Any, params: Any = None) -> Any:
        return gradient + state, state + gradient

    config = case(2, 2, 'weights')
    counting = optax.GradientTransformation(init, update)
    optimizer = on_whole_matrices(config, counting, others=optax.identity())
    with on_mesh(config):
        gradients = random_params(config, std=0.05)
        state = jax.jit(optimizer.init)(gradients)
        state = jax.tree.map(jnp.zeros_like, state)
        for number in (1, 2, 3):
            updates, state = jax.jit(optimizer.update)(gradients, state)
            expected = {
                name: x * (number if name.startswith('layers') and x.ndim > 2 else 1)
                for name, x in gather(gradients).items()
            }
            assert_close(gather(updates), expected, 1e-6)


@pytest.mark.parametrize(
    ('preset', 'override', 'key'),
    [('tiny', 'lora.rank=8', 'lora'), ('tiny_vlm', 'vision.freeze=[decoder]', 'vision.freeze')],
)
def test_frozen_layers_have_no_whole_matrices(preset: str, override: str, key: str) -> None:
    config = load(preset, [override])
    with pytest.raises(ConfigError, match=f'^{key}: freezes the layers'):
        on_whole_matrices(config, shampoo(), others=optax.identity())


def test_the_mask_of_weight_decay_excludes_biases_and_norms() -> None:
    config = make_config('gpt', 2, 2, optim={'shard': 'weights'})
    lion = optax.lion(1.0, weight_decay=0.5, mask=megajax.decays)
    with on_mesh(config):
        params = random_params(config, std=0.05)
        zeros = jax.tree.map(jnp.zeros_like, params)
        moved = gather(jax.jit(lion.update)(zeros, jax.jit(lion.init)(params), params)[0])
        before = gather(params)
    for name, x in before.items():
        is_vector = 'norm' in name or name.endswith('bias')
        np.testing.assert_array_equal(moved[name], -0.5 * x * (not is_vector), err_msg=name)


def test_a_dtype_of_moments_that_an_own_optimizer_would_ignore_is_rejected() -> None:
    config = load('tiny', ['optim.moments_dtype=bfloat16'])
    said = r'^optim\.moments_dtype: bfloat16 has no effect'
    with pytest.raises(ConfigError, match=said):
        megajax.train(config, optimizer=optax.lion(1e-3))
    with on_mesh(config), pytest.raises(ConfigError, match=said):
        make_train_step(config, optimizer=optax.lion(1e-3))


@pytest.mark.parametrize(
    'make',
    [
        # dot products of all parameters
        slow(lambda rate: optax.contrib.prodigy(rate)),
        # norms of rows
        lambda rate: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(rate)),
    ],
    ids=['prodigy', 'adaptive_grad_clip'],
)
def test_a_step_takes_any_optimizer_and_computes_on_a_mesh_what_it_does_on_one_device(
    make: Callable[[optax.Schedule], optax.GradientTransformation],
) -> None:
    """Also one that leaves shardings to XLA; it gets the gradients without clipping."""
    optim = {'shard': 'weights', 'warmup_steps': 3, 'lr': 1.0, 'grad_clip': 0.01}
    config = make_config('gpt', 2, 2, optim=optim)
    alone, keeps_gradients = make(learning_rate(config)), optax.trace(decay=0)
    optimizer = optax.chain(keeps_gradients, alone)
    with on_mesh(config):
        state = init_state(config, random_params(config, std=0.05), optimizer=optimizer)
        train_step, batch = make_train_step(config, optimizer), place_batch(make_batch(config))
        expected = gather(state.params)
        of_expected, update = alone.init(expected), jax.jit(alone.update)
        for step in range(2):
            state, metrics = train_step(state, batch)
            assert float(metrics['lr']) == pytest.approx(config.optim.lr * (step + 1) / 4)
            gradients = gather(state.opt_state[0].trace)
            norm = np.linalg.norm(np.concatenate([x.ravel() for x in gradients.values()]))
            assert norm == pytest.approx(float(metrics['grad_norm']), rel=1e-5)
            updates, of_expected = update(gradients, of_expected, expected)
            expected = optax.apply_updates(expected, updates)
        assert train_step._cache_size() == 1
        assert_close(gather(state.params), expected, 1e-4)


def test_a_mistake_of_an_optimizer_is_shown_as_it_is() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise ZeroDivisionError('of the optimizer')

    config = make_config('gpt', 2, 1)
    wrong = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    with on_mesh(config):
        state = jax.eval_shape(lambda: init_state(config, optimizer=wrong))
        batch, train_step = place_batch(make_batch(config)), make_train_step(config, wrong)
        with pytest.raises(ZeroDivisionError, match='of the optimizer'):
            train_step.lower(state, batch)


@pytest.mark.slow
def test_the_optimizer_of_the_config_given_by_hand_changes_nothing() -> None:
    config = make_config('gpt', 2, 1, optim={'shard': 'optimizer'})
    with on_mesh(config):
        batch, given = place_batch(make_batch(config)), make_optimizer(config)
        before, after = [
            make_train_step(config, of_step)(init_state(config, optimizer=of_step), batch)[0]
            for of_step in (None, given)
        ]
    assert_close(gather(before.params), gather(after.params), 0.0)
