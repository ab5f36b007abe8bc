"""What is drawn at random in training is drawn with a key of its own."""

from functools import partial

import jax
import pytest
from support import make_config, on_mesh

from megajax.core.train.step import dropout_key, make_params


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


def drawn() -> tuple[str, list[int]]:
    """The program that makes the parameters, and the key of a step's dropout."""
    config = make_config('llama', 2, 2)
    with on_mesh(config):
        program = jax.make_jaxpr(partial(make_params, config))()
    return str(program), jax.random.key_data(dropout_key(7, 3)).tolist()


@pytest.mark.parametrize('generator', ['rbg', 'unsafe_rbg'])
def test_another_default_generator_changes_no_initial_weight_and_no_mask(generator: str) -> None:
    expected = drawn()
    with jax.default_prng_impl(generator):
        assert drawn() == expected
