"""Relevance has the same levels, loss and gradients on every mesh, and learns.

Errors are relative to the largest element, see `support.relative_error`.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from support import (
    assert_close,
    exhaustive,
    gather,
    make_batch,
    on_mesh,
    random_params,
    relative_error,
    slow,
)
from vlm import RELEVANCE, SP, relevant

from megajax.core.config import Config
from megajax.core.config.relevance_rules import FEWEST, MOST
from megajax.core.model.arr_coc.budget import SIDES
from megajax.core.model.parameters import cast_matrices
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.pipeline_ops import over_shards
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.microbatches import images_of, split, with_weights
from megajax.core.train.objective import Objective

LIMIT = 5e-6
FOUR_ROWS = relevant(2, 2, **SP, train={'batch_size': 4})


def pictures(config: Config) -> dict[str, np.ndarray]:
    """A batch of pictures whose first region is darker than the second.

    Regions of the same noise differ by rounding alone.
    """
    batch = make_batch(config)
    batch['pixels'][:, :, :400] //= 3
    return batch


@functools.cache
def results(config: Config) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """The loss, all gradients, and the levels of all regions, with noise."""
    layout, key = Layout.of(config), jax.random.key(0)
    objective = Objective.of(config, layout)

    def levels(params: Any, shard: Any) -> jax.Array:
        model, _ = objective.model(params, None)
        x_BTD = model.embed(shard['tokens'], objective.computation.dtype)
        detail = model.detail(x_BTD, images_of(shard, key))
        assert detail is not None
        return detail.level

    def all_levels(params: Any, batch: Any) -> jax.Array:
        whole = with_weights(batch, config, layout)
        shards = jax.tree.map(lambda x: split(x, 1, layout)[0], whole)
        of_shards = over_shards(levels, layout, (None, 0))
        whole_params = cast_matrices(params, 'float32', layout)
        return of_shards(copy_to_shards(whole_params, layout), shards)

    with on_mesh(config):
        params = random_params(config, std=0.3 if config.vision.is_crossed else 0.05)
        batch = place_batch(pictures(config))
        (loss, _), gradients = jax.jit(make_loss_and_gradients(config))(params, batch, key)
        level = np.asarray(jax.jit(all_levels)(params, batch))
        return float(loss), gather(gradients), level.reshape(-1, 2)


@pytest.mark.parametrize(
    'config',
    [
        slow(FOUR_ROWS),
        exhaustive(relevant(2, 2, **SP)),
        exhaustive(relevant(1, 4)),
        exhaustive(relevant(2, 2, optim={'shard': 'weights'}, train={'microbatches': 2})),
        exhaustive(relevant(2, 4, **SP, relevance={'scorer_shards': 2})),
        exhaustive(relevant(1, 8, train={'recompute': 'full'})),
        exhaustive(relevant(2, 2, **SP, vision={'channels': 'texture'})),
        exhaustive(relevant(2, 2, crossed=True, train={'seq_len': 32})),
    ],
    ids=lambda config: f'{config.mesh.data}x{config.mesh.model}',
)
def test_levels_loss_and_gradients_are_those_of_one_device(config: Config) -> None:
    alone = relevant(
        relevance={'scorer_shards': config.relevance.scorer_shards},
        vision={'channels': config.vision.channels},
        crossed=config.vision.is_crossed,
        train={'seq_len': config.train.seq_len, 'batch_size': config.train.batch_size},
    )
    (expected_loss, expected, level), (loss, gradients, levels) = map(results, (alone, config))
    np.testing.assert_array_equal(levels, level)
    assert relative_error(loss, expected_loss) <= LIMIT
    # On one device, parameters that differ in their last bit change gradients by up to 2.5e-6, and
    # with cross-attention by up to 1.1e-5: attention to 400 vectors of noise cancels most of what
    # relevance could learn from. Sums over eight devices add up to 5.1e-6.
    assert_close(gradients, expected, (4 if config.vision.is_crossed else 2) * LIMIT)


@pytest.mark.slow
def test_every_parameter_of_relevance_learns_and_the_budget_is_spent() -> None:
    _, gradients, level = results(FOUR_ROWS)
    learned = {name: x for name, x in gradients.items() if name.startswith('relevance.')}
    assert len(learned) == 9
    assert all(np.abs(x).max() > 0 for x in learned.values())
    assert (np.abs(gradients['relevance.scorers.query']).max((1, 2)) > 0).all()
    tokens = np.square(SIDES)[level]
    assert tokens.min() >= FEWEST
    assert tokens.max() <= MOST
    assert (tokens.sum(1) <= RELEVANCE['total_tokens']).all()
    assert len(np.unique(level)) > 1
