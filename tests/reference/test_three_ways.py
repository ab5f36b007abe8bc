"""megajax, XLA left to itself and Megatron by hand: the same numbers, and over `model` the same
collectives.
"""

import functools
from collections import Counter

import pytest
from jax import P
from reference.three_ways import Way, auto_way, by_hand_way, explicit_way
from support import (
    assert_close,
    exhaustive,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
)

from megajax.core.config import Config
from megajax.xla.hlo.collectives import Collective

LIMIT = 1e-5  # relative, see support.relative_error
VOCAB_SIZE = 1024  # what no way has to pad


def gpt(*, sp: bool = False) -> Config:
    model = {'vocab_size': VOCAB_SIZE, 'num_kv_heads': 4, 'activation': 'gelu_tanh', 'dropout': 0.0}
    return make_config(
        'gpt', 2, 4, sequence_parallel=sp, model=model, loss={'label_smoothing': 0.0}
    )


@functools.cache
def ways(*, sp: bool = False) -> dict[str, Way]:
    """With sequence parallelism, XLA is told where the residual stream lies and no more."""
    config = gpt(sp=sp)
    with on_mesh(config):
        params, batch = random_params(config, std=0.1), make_batch(config)
        auto = auto_way(config, params, batch, P('data', 'model', None) if sp else None)
        return {
            'explicit': explicit_way(config, params, batch),
            'auto': auto,
            'by hand': by_hand_way(config, params, batch),
        }


@pytest.mark.parametrize('sp', [exhaustive(False), True], ids=['tp', 'tp+sp'])
def test_all_have_the_same_loss_and_gradients(sp: bool) -> None:
    expected = ways(sp=sp)['by hand']
    for name in ('explicit', 'auto'):
        way = ways(sp=sp)[name]
        assert relative_error(way.loss, expected.loss) < LIMIT
        assert_close(way.gradients, expected.gradients, LIMIT)


@pytest.mark.slow
def test_all_send_the_same_over_the_model_axis() -> None:
    counted = {name: sent(way, 'model') for name, way in ways().items()}
    assert counted['explicit'] == counted['by hand']
    assert counted['auto'] == counted['by hand']
    rows, length, hidden, layers = 4, 32, 64, 2
    # A layer four times, the embedding and the head once each; the loss three numbers per token.
    assert counted['by hand'] == {
        ('all-reduce', rows * length * hidden): 4 * layers + 2,
        ('all-reduce', rows * length): 3,
    }


@pytest.mark.slow
def test_over_data_xla_reduces_a_tied_embedding_twice() -> None:
    """Each parameter is reduced once, but Auto axes reduce the part of the lookup and that of the
    head, then add.
    """
    config = gpt()
    numbers = {
        name: sum(one.operand.bytes // 4 * one.times for one in over(way, 'data'))
        for name, way in ways().items()
    }
    assert numbers['explicit'] == numbers['by hand']
    assert (
        numbers['auto']
        == numbers['by hand'] + VOCAB_SIZE // config.mesh.model * config.model.hidden_size
    )


def test_with_sequence_parallelism_megajax_sends_activations_as_by_hand_does() -> None:
    counted = {name: activations(way) for name, way in ways(sp=True).items()}
    assert counted['explicit'] == counted['by hand']
    assert set(counted['explicit']) == {'all-gather', 'reduce-scatter'}


def test_a_constraint_on_the_residual_stream_alone_gathers_weights() -> None:
    config, auto = gpt(sp=True), ways(sp=True)['auto']
    gathered = {one.whole.dims for one in over(auto, 'model') if one.kind == 'all-gather'}
    assert (config.model.hidden_size, config.model.ffn_size) in gathered
    assert wire(auto) > 2 * wire(ways(sp=True)['by hand'])


def over(way: Way, axis: str) -> list[Collective]:
    """Single numbers aside."""
    return [one for one in way.collectives if one.axis == axis and not one.is_scalar]


def sent(way: Way, axis: str) -> Counter[tuple[str, int]]:
    """(kind, numbers of the whole array): how often."""
    counts: Counter[tuple[str, int]] = Counter()
    for one in over(way, axis):
        counts[one.kind, one.whole.bytes // 4] += one.times
    return counts


def activations(way: Way) -> Counter[str]:
    rows, length, hidden = 4, 32, 64
    counts: Counter[str] = Counter()
    for (kind, numbers), times in sent(way, 'model').items():
        counts[kind] += times * (numbers == rows * length * hidden)
    return +counts


def wire(way: Way) -> float:
    return sum(one.wire_bytes * one.times for one in over(way, 'model'))
