"""Norms of queries and keys over all heads sum two numbers of each token over `model`."""

import pytest
from support import make_config

from megajax.core.counts.collective import REDUCE
from megajax.core.counts.megatron import expected
from megajax.core.counts.qk_norm import SITE
from megajax.xla.hlo.program import Array


def sums(name: str, **mesh: int) -> list[tuple[str, str, Array, int]]:
    train = {'batch_size': 8, 'microbatches': 2}
    config = make_config(name, mesh=mesh, train=train, model={'num_layers': 6})
    found = [each for each in expected(config) if each.site.name == SITE]
    return [(each.site.phase, each.kind, each.array, each.times) for each in found]


@pytest.mark.parametrize(
    ('mesh', 'rows', 'tokens', 'layers'),
    [
        ({'data': 2, 'model': 2}, 2, 32, 6),
        ({'model': 8}, 4, 32, 6),
        ({'model': 2, 'context': 2}, 4, 16, 6),
        ({'model': 2, 'model_rows': 2, 'sequence_parallel': True}, 2, 32, 6),
        ({'model': 2, 'stages': 2}, 4, 32, 3),
    ],
    ids=str,
)
def test_each_layer_reduces_two_numbers_a_token_in_each_pass(
    mesh: dict[str, int], rows: int, tokens: int, layers: int
) -> None:
    array = Array('f32', (rows, tokens, 2))
    assert sums('olmo2', **mesh) == [
        (phase, REDUCE, array, 2 * layers) for phase in ('forward', 'backward')
    ]


def test_layer_norms_reduce_the_means_of_queries_and_keys_as_well() -> None:
    one, both = sums('olmo2', model=2), sums('layer_norms', model=2)
    assert both == [(*sent, 2 * times) for *sent, times in one]


def test_one_device_and_norms_of_single_heads_reduce_nothing() -> None:
    assert not sums('olmo2', data=2)
    assert not sums('llama', model=2)
