"""What an order of collectives asks of XLA's GPU compiler, and what no order leaves alone."""

import pytest

from megajax.core.config import load
from megajax.core.train.overlap import EARLY, OPTIONS, SLOTS, overlap_options

MESH = 'mesh.data=2', 'mesh.model=2', 'train.batch_size=8'


@pytest.mark.parametrize(
    ('overrides', 'options'),
    [
        (['train.unroll=false', 'train.overlap=none'], {}),
        (['train.unroll=true', 'train.overlap=none'], SLOTS | EARLY),
        (['train.unroll=true', 'train.overlap=batch_split'], OPTIONS | SLOTS | EARLY),
        (['mesh.stages=2', 'train.microbatches=2', 'train.overlap=none'], SLOTS),
    ],
    ids=str,
)
def test_an_order_of_ours_starts_collectives_where_they_stand(
    overrides: list[str], options: dict[str, str | bool]
) -> None:
    assert overlap_options(load('tiny', [*MESH, *overrides])) == options
