"""Each mesh has layouts among which a search finds one that fits, however shards exchange keys."""

import pytest

from megajax.analysis.plan.layouts import (
    Mesh,
    changed,
    deep_meshes,
    is_frugal,
    layouts,
    meshes,
)
from megajax.core.config import load


@pytest.mark.parametrize('name', ['olmo2_7b', 'llama3_8b'])  # 32 key-value heads, and 8
@pytest.mark.parametrize('exchange', ['gather', 'ring', 'all_to_all'])
def test_every_mesh_has_a_frugal_layout(name: str, exchange: str) -> None:
    config = changed(
        load(name), train__batch_size=8, train__seq_len=32768, mesh__context_exchange=exchange
    )
    every = [*meshes(8, has_grids=True), *deep_meshes(config, 8, 8)]
    assert Mesh(1, 1, 1, context=8) in every
    assert [mesh for mesh in every if not any(map(is_frugal, layouts(config, mesh, 8)))] == []


def test_no_ring_is_frugal() -> None:
    config = changed(load('olmo2_7b'), train__batch_size=8, train__seq_len=32768)
    listed = list(layouts(config, Mesh(1, 1, 1, context=8), 8))
    assert 'ring' in {layout.mesh.context_exchange for layout in listed}
    assert {layout.mesh.context_exchange for layout in listed if is_frugal(layout)} == {
        'all_to_all'
    }
