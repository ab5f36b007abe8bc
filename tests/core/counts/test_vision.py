"""The collectives of an encoder's parameters, and the matmuls of layers that attend to images."""

from math import prod

import pytest
from vlm import vlm

from megajax.analysis.plan.communication import over_data_shards
from megajax.core.config import Config
from megajax.core.counts.parameters import own_counts
from megajax.core.counts.products import products
from megajax.core.counts.vision import images_over_devices, padding_at_rest

EXPERTS = {'model': {'experts': {'count': 8, 'active': 2, 'ffn_size': 32}}}


def gathered(config: Config) -> list[tuple[str, int]]:
    return [
        (row.site.axis, prod(row.array.shape))
        for row in over_data_shards(config)
        if row.site.name == 'parameters'
    ]


def test_no_data_shards_share_experts_that_all_differ() -> None:
    config = vlm(8, mesh={'experts': 8}, optim={'shard': 'optimizer'}, **EXPERTS)
    others = own_counts(config, of_experts=False).matrices
    assert gathered(config) == [('expert', others)]


def test_data_shards_with_the_same_experts_gather_them() -> None:
    config = vlm(4, mesh={'experts': 2}, optim={'shard': 'optimizer'}, **EXPERTS)
    others, experts = (own_counts(config, of_experts=only).matrices for only in (False, True))
    assert gathered(config) == [('data+expert', others), ('data', experts)]


@pytest.mark.parametrize(
    ('experts', 'axis', 'kind'), [(1, 'data', {}), (2, 'data+expert', EXPERTS)]
)
def test_an_encoder_is_stored_in_shards_along_experts_too(experts, axis, kind) -> None:
    config = vlm(
        6,
        2,
        mesh={'experts': experts},
        optim={'shard': 'optimizer'},
        train={'batch_size': 24},
        **kind,
    )
    weights = next(x for x in images_over_devices(config) if x.site.name == 'parameters')
    assert weights.site.axis == f'{axis}+model'
    padding = padding_at_rest(config)  # 32 columns in 12 shards
    assert padding is not None
    assert padding.site.axis == axis


def test_layers_that_attend_to_images_have_no_windows() -> None:
    pattern = {'num_layers': 12, 'layers': [{'repeat': 5, 'window': 8}, {}]}
    config = vlm(crossed=True, model=pattern, vision={'cross_every': 6})
    assert config.model.num_cross_layers == 2
    times = {x.phase: x.times for x in products(config, flash=False) if x.name == 'cross attention'}
    assert times == {'forward': 4, 'backward': 8, 'recompute': 0}
