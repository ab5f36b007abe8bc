"""BERT looks both ways and not at padding, and its loss is that of the masked tokens and that of
the order of the segments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    assert_close,
    exhaustive,
    gather,
    graph_of,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
)

from megajax.core.config import Config, ConfigError
from megajax.core.model.computation import Computation
from megajax.core.model.rows import Rows
from megajax.core.model.transformer import Bert
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.runtime.generate import Generator

LENGTH, REAL = 16, 11  # the rest is padding


def small(*mesh: int, sequence_parallel: bool = False, **model: object) -> Config:
    model = {'dropout': 0.0} | model
    return make_config(
        'bert',
        *mesh,
        sequence_parallel=sequence_parallel,
        model=model,
        train={'seq_len': LENGTH, 'batch_size': 4},
    )


@functools.cache
def changed_logits() -> np.ndarray:
    """[s, t]: whether another token at place s changes the logits of place t."""
    config = small()
    tokens = np.repeat(np.random.default_rng(0).integers(999, size=(1, LENGTH)), LENGTH + 1, axis=0)
    tokens[np.arange(LENGTH), np.arange(LENGTH)] += 1
    segments = np.broadcast_to((np.arange(LENGTH) >= REAL)[None], tokens.shape)
    with on_mesh(config):
        graph, params = graph_of(config), random_params(config, std=0.3)

        @jax.jit
        def forward(params: nnx.State) -> jax.Array:
            model, segment_BS = nnx.merge(graph, params), segments.astype(np.int32)
            return model(tokens.astype(np.int32), Computation.of(config), segment_BS=segment_BS)

        logits = forward(params)
    return np.asarray(logits[:-1] != logits[-1:])[..., : config.model.vocab_size].any(-1)


def test_each_logit_depends_on_every_token_before_and_after_it_and_on_no_padding():
    padding = np.arange(LENGTH) >= REAL
    np.testing.assert_array_equal(changed_logits(), padding[:, None] == padding[None, :])


def logits_of(config: Config, function, *arguments):
    """Of the entries of the vocabulary."""
    graph, params = graph_of(config), random_params(config, std=0.3)
    return jax.jit(
        lambda params: function(nnx.merge(graph, params), *arguments)[
            ..., : config.model.vocab_size
        ]
    )(params)


def test_the_type_of_a_token_is_added_to_it_and_is_0_unless_given():
    config, token_BS = small(), np.arange(LENGTH, dtype=np.int32)[None]
    computation = Computation.of(config)
    with on_mesh(config):
        plain, zero, one = (
            logits_of(
                config,
                lambda model, type_BS: model(token_BS, computation, type_BS=type_BS),
                None if kind is None else np.full_like(token_BS, kind),
            )
            for kind in (None, 0, 1)
        )
        first, second = (
            np.asarray(row) for row in random_params(config, std=0.3)['token_type']['table'][...]
        )
        shift_D = second - first
        shifted = logits_of(config, lambda model: shift(model, shift_D)(token_BS, computation))
    np.testing.assert_array_equal(plain, zero)
    assert relative_error(one, plain) > 1e-2
    assert relative_error(one, shifted) < 1e-5


def shift(model: Bert, vector_D: np.ndarray) -> Bert:
    """The model with a vector added to every position."""
    model.position.table[...] += vector_D[None]
    return model


def loss_by_the_book(model: Bert, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of one device: the mean over masked tokens, and the mean over sequences."""
    inputs = {'segment_BS': batch['segment_ids'], 'type_BS': batch['token_types']}
    computation = Computation.of(small())
    logits = model(batch['tokens'], computation, **inputs)[..., : model.config.vocab_size]
    log_probability = jax.nn.log_softmax(logits)
    of_labels = (log_probability * jax.nn.one_hot(batch['labels'], log_probability.shape[-1])).sum(
        -1
    )
    masked = -(of_labels * batch['loss_mask']).sum() / batch['loss_mask'].sum()

    first_BD = model.hidden(batch['tokens'], computation, Rows(**inputs))[0][:, 0]
    pooler, classifier = (
        lambda x, layer=layer: x @ layer.weight[...] + layer.bias[...][None]
        for layer in (model.order_head.pooler, model.order_head.classifier)
    )
    logits = classifier(jnp.tanh(pooler(first_BD)))
    return masked, -(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch['swapped'][:, 0], 2)).sum(
        -1
    ).mean()


@functools.cache
def by_the_book() -> tuple[float, float, dict[str, np.ndarray]]:
    """Both losses, and the gradients of their sum."""
    config = small()
    with on_mesh(config):
        graph, params = graph_of(config), random_params(config, std=0.1)
        batch = place_batch(make_batch(config))

        def loss(params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            masked, order = loss_by_the_book(nnx.merge(graph, params), batch)
            return masked + order, (masked, order)

        gradients, (masked, order) = jax.jit(jax.grad(loss, has_aux=True))(params)
        return float(masked), float(order), gather(gradients)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [exhaustive((1, 1, False)), (2, 2, True)])
def test_loss_and_gradients_are_those_of_masked_tokens_and_of_the_order(mesh):
    config = small(*mesh[:2], sequence_parallel=mesh[2])
    masked, order, expected = by_the_book()
    with on_mesh(config):
        params, batch = random_params(config, std=0.1), place_batch(make_batch(config))
        (loss, nll), gradients = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        sums = make_eval_step(config)(params, batch)
    assert_close(gather(gradients), expected, 1e-5)
    assert relative_error(nll, masked) < 1e-5
    assert relative_error(loss, masked + order) < 1e-5
    assert relative_error(sums['nll'] / sums['tokens'], masked) < 1e-5
    assert relative_error(sums['order_nll'] / sums['rows'], order) < 1e-5


def test_it_makes_no_text():
    config = small()
    with (
        on_mesh(config),
        pytest.raises(ConfigError, match='not the next token of a text') as error,
    ):
        Generator(config, random_params(config, std=0.05))
    assert error.value.exit_code == 2
