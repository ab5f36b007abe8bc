"""A layout in words, as in the tables of `plan`."""

import pytest

from megajax.analysis.plan.describe import describe
from megajax.core.config import load


@pytest.mark.parametrize(
    ('overrides', 'words'),
    [
        ('train.microbatches=1', 'data=8 x model=1, 1 microbatch of 64'),
        (
            'mesh.stages=2 train.microbatches=4',
            'stages=2 x data=8 x model=1, 4 microbatches of 16',
        ),
        (
            'mesh.stages=2 mesh.virtual_stages=3 train.microbatches=4',
            'stages=2x3 x data=8 x model=1, 4 microbatches of 16',
        ),
    ],
)
def test_a_layout_in_words(overrides: str, words: str) -> None:
    config = load('gpt2_124m', ['mesh.data=8', *overrides.split()])
    assert describe(config).startswith(words)
