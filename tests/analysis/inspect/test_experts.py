"""Compiled, a layer of experts sends and multiplies what is counted."""

from typing import Any

import pytest
from support import exhaustive, make_config, slow

import megajax
from megajax.analysis.inspect.products import of_unused_blocks
from megajax.core.config import Config


def config(capacity: float | None, **sections: Any) -> Config:
    experts = {'count': 8, 'active': 2, 'ffn_size': 64, 'capacity': capacity}
    model = {'experts': experts, 'vocab_size': 1024}
    return make_config('experts', model=model, **sections)


@pytest.mark.parametrize(
    ('capacity', 'mesh', 'shard'),
    [
        slow(1.0, {'data': 4, 'experts': 2, 'model': 2, 'sequence_parallel': True}, 'optimizer'),
        exhaustive(None, {'data': 4, 'experts': 4}, 'none'),
        exhaustive(1.0, {'data': 4, 'experts': 2}, 'weights'),
        exhaustive(None, {'data': 4, 'experts': 2, 'model': 2}, 'weights'),
        exhaustive(1.0, {'data': 8, 'experts': 2, 'replicas': 2}, 'weights'),
    ],
)
def test_it_sends_two_all_to_alls_in_each_pass_and_nothing_more_if_the_load_is_balanced(
    capacity: float | None, mesh: dict[str, Any], shard: str
) -> None:
    sharded = config(capacity, mesh=mesh, optim={'shard': shard})
    inspection = megajax.inspect(sharded, target='cpu')
    assert not inspection.findings
    rows = {(row.phase, row.axis): row for row in inspection.rows if row.site == 'experts'}
    for phase in ('forward', 'backward'):
        row = rows[phase, 'expert']
        if capacity is not None:
            assert row.verdict == 'equal'
            continue
        assert row.verdict == 'expected'
        assert row.wire_bytes == row.expected_wire_bytes
        [of_all] = [each.times for each in row.placed if each.kind == 'all-to-all']
        assert of_all == 2 * sharded.model.num_layers
    assert all(row.verdict != 'MORE' for row in inspection.rows)
    flops = inspection.products
    assert flops.compiled == flops.expected + of_unused_blocks(sharded)


@pytest.mark.parametrize('name', [slow('experts'), exhaustive('bert_experts')])
def test_context_shards_find_out_once_where_the_padding_begins(name: str) -> None:
    sharded = make_config(name, mesh={'data': 2, 'context': 2}, train={'microbatches': 2})
    inspection = megajax.inspect(sharded, target='cpu')
    assert all(row.verdict != 'MORE' for row in inspection.rows)
    [row] = [row for row in inspection.rows if row.site == 'documents']
    assert row.wire_bytes == row.expected_wire_bytes


@pytest.mark.slow
@pytest.mark.exhaustive
def test_stages_send_no_more_than_in_every_tick() -> None:
    sharded = config(
        None,
        mesh={'data': 2, 'experts': 2, 'model': 2, 'stages': 2},
        train={'microbatches': 2},
        optim={'shard': 'optimizer'},
    )
    inspection = megajax.inspect(sharded, target='cpu')
    assert not inspection.findings
    assert all(row.verdict != 'MORE' for row in inspection.rows)


@pytest.mark.slow
def test_the_load_of_the_layers_with_experts_is_found_behind_a_layer_without() -> None:
    experts = {'count': 8, 'active': 2, 'ffn_size': 64, 'first_dense': 1, 'balance_loss': 0.01}
    model = {'experts': experts, 'vocab_size': 1024, 'num_layers': 3}
    sharded = make_config('experts', model=model, mesh={'data': 2, 'experts': 2})
    assert not megajax.inspect(sharded, target='cpu').findings
