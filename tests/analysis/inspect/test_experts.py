"""Compiled, a layer of experts sends and multiplies what is counted."""

from typing import Any

import pytest
from support import exhaustive, make_config, slow

import megajax
from megajax.core.config import Config


def config(capacity: float | None, **sections: Any) -> Config:
    experts = {'count': 8, 'active': 2, 'ffn_size': 64, 'capacity': capacity}
    model = {'experts': experts, 'vocab_size': 1024}
    return make_config('experts', model=model, **sections)


@pytest.mark.parametrize(
    ('capacity', 'mesh', 'shard'),
    [
        slow(1.0, {'data': 4, 'experts': 2, 'model': 2, 'sequence_parallel': True}, 'optimizer'),
        slow(None, {'data': 4, 'experts': 4}, 'none'),
        exhaustive(1.0, {'data': 4, 'experts': 2}, 'weights'),
        exhaustive(None, {'data': 4, 'experts': 2, 'model': 2}, 'weights'),
    ],
)
def test_it_sends_two_all_to_alls_in_each_pass_and_nothing_more(
    capacity: float | None, mesh: dict[str, Any], shard: str
) -> None:
    inspection = megajax.inspect(config(capacity, mesh=mesh, optim={'shard': shard}), target='cpu')
    assert not inspection.findings
    rows = {(row.phase, row.axis): row for row in inspection.rows if row.site == 'experts'}
    for phase in ('forward', 'backward'):
        assert rows[phase, 'expert'].verdict == 'equal'
    assert all(row.verdict != 'MORE' for row in inspection.rows)
