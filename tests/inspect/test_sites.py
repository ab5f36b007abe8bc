"""Arrays that XLA has joined are told apart by shape and path, also where they are of one size."""

import pytest
from inspect_collectives import reduced
from support import make_config

from megajax.counts.megatron import Site
from megajax.hlo.program import Array
from megajax.inspect.sites import site_of

IN_THE_LOSS = (
    'jit(train_step)/vmap(jvp(loss))/while/body/closed_call/'
    'transpose(jvp(head))/jit(_where)/select_n'
)
OF_THE_NORM = 'jit(train_step)/vmap(transpose(jvp(head)))/vmap(transpose(jvp(norm)))/reduce_sum'
CONFIG = make_config(
    'bert', 1, 2, train={'batch_size': 2, 'seq_len': 32}
)  # as many tokens as hidden_size


@pytest.mark.parametrize(
    ('op_name', 'shape', 'site'),
    [
        (IN_THE_LOSS, (2, 32), Site('loss', 'forward', 'model')),  # a number for each token
        (IN_THE_LOSS, (2, 2, 16), Site('loss', 'forward', 'model')),  # with sequence parallelism
        (
            IN_THE_LOSS,
            (64,),
            Site('gradients', 'step', 'model'),
        ),  # a vector, with the path of what XLA made it with
        (OF_THE_NORM, (64,), Site('gradients', 'step', 'model')),
        ('', (2, 1, 64), Site('gradients', 'step', 'model')),  # of all layers
        ('', (), Site('metrics', 'step', 'model')),
    ],
)
def test_numbers_of_tokens_are_the_losss_and_vectors_are_gradients(
    op_name: str, shape: tuple[int, ...], site: Site
) -> None:
    assert site_of(reduced(op_name, Array('f32', shape)), CONFIG) == site
