"""A vision encoder sends what is stated, less than Megatron inside its layers, and no more."""

import functools
from typing import Any

import pytest
from support import slow
from vlm import SP, relevant, vlm

from megajax.config import Config
from megajax.inspect.audit import audit
from megajax.inspect.compile import compile_for
from megajax.inspect.report import to_text
from megajax.inspect.result import Inspection


def inspect_here(config: Config) -> Inspection:
    return audit(config, compile_for(config, 'cpu', 1), 'cpu')


TWICE: dict[str, Any] = {'train': {'microbatches': 2, 'recompute': 'full'}}
HALF: dict[str, Any] = {'train': {'dtype': 'bfloat16'}}
# As many image vectors as no matrix of the encoder has rows.
ROWS: dict[str, Any] = {'train': {'batch_size': 24}}
cross = functools.partial(vlm, crossed=True)


@pytest.mark.parametrize(
    'config',
    [
        vlm(2, 2, **SP),
        slow(vlm(2, 2, **TWICE)),
        slow(vlm(1, 4, **SP, **HALF)),
        slow(vlm(4, 2, **SP, optim={'shard': 'optimizer'}, **HALF)),
        slow(vlm(2, 4, optim={'shard': 'weights'}, **TWICE)),
        slow(vlm(4, 2, mesh={'replicas': 2}, optim={'shard': 'gradients'})),
        slow(vlm(3, 2, optim={'shard': 'weights'}, train={'batch_size': 24})),
        slow(vlm(2, 1)),
        slow(vlm(2, 2, **SP, vision={'freeze': ('encoder',)}, train={'recompute': 'full'})),
        slow(vlm(2, 2, vision={'freeze': ('merger',)}, optim={'shard': 'weights'})),
        slow(vlm(2, 2, **SP, vision={'freeze': ('decoder',)}, optim={'shard': 'optimizer'})),
        cross(2, 2),
        cross(1, 4, **SP, **ROWS),
        slow(cross(2, 2, **SP, **TWICE)),
        slow(cross(1, 4, train=ROWS['train'] | HALF['train'])),
        slow(cross(2, 4, optim={'shard': 'weights'}, **TWICE)),
        slow(cross(4, 2, **SP, optim={'shard': 'gradients'}, **HALF)),
        slow(relevant(2, 2, **SP)),
        slow(relevant(1, 4, **HALF, relevance={'scorer_shards': 2})),
        slow(
            relevant(
                2,
                2,
                crossed=True,
                model={'num_layers': 4},
                optim={'shard': 'weights'},
                train={'seq_len': 32},
            )
        ),
    ],
)
def test_no_row_sends_more_than_is_stated(config: Config) -> None:
    found = inspect_here(config)
    assert found.ok, to_text(found)
    rows = {(row.site, row.phase, row.axis): row for row in found.rows}
    assert 'other' not in ''.join(site for site, *_ in rows)
    if config.mesh.model > 1:
        vectors = rows['vision', 'forward', 'model']
        assert vectors.wire_bytes == vectors.stated_wire_bytes or vectors.verdict == 'less'
        assert [transfer.kind for transfer in vectors.placed] == ['all-gather']
        assert rows['vision', 'forward', 'model'].megatron_wire_bytes > vectors.wire_bytes
        is_summed = ('vision', 'backward', 'model') in rows
        assert is_summed
    if config.model.num_cross_layers and config.mesh.model > 1:
        # Once, however many layers read the vectors, and a layer sends what any other does.
        summed = rows['vision', 'backward', 'model'].placed
        runs = config.train.microbatches
        assert [(x.kind, x.times) for x in summed] == [('reduce-scatter', runs)]
        kind = 'reduce-scatter' if config.mesh.sequence_parallel else 'all-reduce'
        for phase in ('forward', 'backward'):
            of_layers = rows['cross_attention', phase, 'model'].placed
            times = config.model.num_cross_layers * runs
            assert [x.times for x in of_layers if x.kind == kind] == [times]
    # Each device encodes its part of the images, and of the slots that fill up the last part.
    assert found.products.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('shard', ['none', slow('gradients')])
def test_a_frozen_encoder_sends_its_vectors_forward_alone(shard: str) -> None:
    frozen = {'freeze': ('encoder', 'merger')}
    config = vlm(2, 2, **SP, vision=frozen, optim={'shard': shard})
    found = inspect_here(config)
    assert found.ok, to_text(found)
    rows = {(row.site, row.phase, row.axis): row for row in found.rows}
    assert rows['vision', 'forward', 'model'].wire_bytes > 0
    assert not rows['vision', 'backward', 'model'].wire_bytes
    assert found.products.ratio == pytest.approx(1, abs=1e-3)
