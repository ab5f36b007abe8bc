"""Arrays that XLA has joined are told apart by shape and path, also where they are of one size."""

import dataclasses

import pytest
from inspect_collectives import reduced
from support import make_config

from megajax.analysis.inspect.sites import phase_of, site_of
from megajax.core.counts.collective import Site
from megajax.core.counts.context import keys
from megajax.xla.hlo.program import Array

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


STACK = 'jit(train_step)/vmap(transpose(jvp(layers)))/while/body/closed_call/mlp/dot_general'


@pytest.mark.parametrize(
    ('rung', 'kind', 'axes', 'phase'),
    [
        ('optimizer', 'all-gather', ('data',), 'step'),
        ('gradients', 'all-gather', ('data',), 'step'),
        ('weights', 'all-gather', ('data',), 'backward'),
        ('optimizer', 'reduce-scatter', ('data',), 'step'),
        ('gradients', 'reduce-scatter', ('data',), 'backward'),
        ('weights', 'reduce-scatter', ('data',), 'backward'),
        ('weights', 'all-reduce', ('data',), 'step'),
        ('weights', 'all-reduce', ('replica',), 'step'),
        ('weights', 'all-reduce', ('replica', 'data'), 'step'),
    ],
)
def test_the_rung_decides_when_weights_and_gradients_are_sent(rung, kind, axes, phase) -> None:
    name = 'parameters' if kind == 'all-gather' else 'gradients'
    sent = dataclasses.replace(reduced(STACK, Array('f32', (64, 256))), kind=kind, axes=axes)
    config = make_config('gpt', 4, 1, mesh={'replicas': 2}, optim={'shard': rung})
    assert site_of(sent, config) == Site(name, phase, '+'.join(axes))


@pytest.mark.parametrize(
    ('shape', 'site'),
    [
        ((1, 4, 16), Site('norm', 'forward', 'row')),  # a number for each token of a device
        ((16, 4), Site('norm', 'forward', 'row')),
        ((1, 64), Site('gradients', 'backward', 'row')),  # as many, but a bias
    ],
)
def test_over_rows_a_grid_sums_statistics_of_tokens_and_gradients_of_vectors(shape, site) -> None:
    config = make_config(
        'gpt', 1, 2, sequence_parallel=True, mesh={'model_rows': 2}, train={'batch_size': 4}
    )
    sent = dataclasses.replace(reduced(STACK, Array('f32', shape)), axes=('row',))
    assert site_of(sent, config) == site


@pytest.mark.parametrize('kind', ['all-gather', 'reduce-scatter'])
@pytest.mark.parametrize(('overlap', 'halves'), [('none', [1]), ('batch_split', [1, 2])])
def test_keys_of_half_a_batch_are_attentions_too(kind, overlap, halves):
    """XLA combines the gathers of the two halves, or sends each by itself."""
    config = make_config(
        'llama', 1, 2, mesh={'context': 2}, train={'batch_size': 4, 'overlap': overlap}
    )
    path = 'jit(train_step)/vmap(jvp(layers))/while/body/attention/core/shard_map/attend'
    shards, rows, *others = keys(config).dims
    for part in (1, 2):
        array = Array('bf16', (shards, rows // part, *others))
        sent = dataclasses.replace(reduced(path, array), kind=kind, axes=('context',))
        found = site_of(sent, config)
        assert (found == Site('attention', 'forward', 'context')) == (part in halves)


RECOMPUTED = 'rematted_computation/attention'
# A layer of a loop over a pattern, which takes its weights again in the backward pass.
PERIOD = 'transpose(jvp(layers))/transpose(jvp())/while/body'


@pytest.mark.parametrize(
    ('op_name', 'phase'),
    [
        ('vmap(jvp(layers))/while/body/attention/dot', 'forward'),
        ('vmap(transpose(jvp(layers)))/while/body/checkpoint/attention/dot', 'backward'),
        ('transpose(jvp(layers))/while/checkpoint/rematted_computation/mlp/dot', 'recompute'),
        ('transpose(jvp(attention))/core/checkpoint/rematted_computation/dot', 'recompute'),
        (f'{PERIOD}/transpose(jvp(jvp()))/checkpoint/rematted_computation/mlp/dot', 'recompute'),
        # The overlap schedule differentiates what it recomputes.
        ('transpose(jvp(layers))/while/rematted_computation/mlp/dot', 'recompute'),
        ('transpose(jvp(layers))/mlp/transpose(jvp(rematted_computation/mlp))/dot', 'backward'),
        ('transpose(jvp(layers))/rematted_computation/transpose(jvp(mlp))/dot', 'backward'),
        (f'attention/transpose(jvp(qk_norm))/{RECOMPUTED}/jvp(qk_norm)/checkpoint/dot', 'backward'),
        (f'{PERIOD}/transpose(jvp({RECOMPUTED}))/dot', 'recompute'),
        (f'{PERIOD}/mlp/transpose(jvp(transpose(jvp({RECOMPUTED}))))/dot', 'backward'),
        # A pipeline stage recomputes in no transposition.
        ('while/body/recompute/vmap(jvp(layers))/mlp/dot', 'recompute'),
    ],
)
def test_the_phase_is_read_from_the_transformations_of_a_path(op_name: str, phase: str) -> None:
    assert phase_of(f'jit(train_step)/{op_name}_general') == phase
