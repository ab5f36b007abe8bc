"""What is drawn at random in training is drawn with a key of its own."""

import jax
import pytest

from megajax.core.train.step import dropout_key


@pytest.mark.parametrize('num_keys', [2, 3, 4, 5])
def test_no_step_draws_its_dropout_with_a_key_of_the_initialisation(num_keys: int) -> None:
    seed = 7
    initial = jax.random.split(jax.random.key(seed), num_keys)
    taken = {tuple(jax.random.key_data(key).tolist()) for key in initial}
    for step in range(2 * num_keys):
        key = dropout_key(seed, step)
        assert tuple(jax.random.key_data(key).tolist()) not in taken
        below = jax.random.split(key, num_keys)
        assert taken.isdisjoint({tuple(jax.random.key_data(k).tolist()) for k in below})
