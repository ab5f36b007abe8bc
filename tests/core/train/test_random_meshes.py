"""Random compositions of mesh axes, rungs, recomputation and microbatches train as one device does.

The compositions are those that the rules of a config allow, so that a combination that no other
test thought of either is refused or has the right gradients.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note, reject, seed, settings
from hypothesis import strategies as st
from steps import Setting, loss_and_gradients
from support import assert_close, exhaustive, relative_error

DEVICES = 8
ROWS = 96  # of a batch: a multiple of all data shards x microbatches
SEED = 20261123


@st.composite
def compositions(draw: Any, name: str) -> Setting:
    """Draw a setting that the rules allow, on at most DEVICES devices."""
    free, sizes = DEVICES, {}
    for axis in draw(st.permutations(['stages', 'context', 'data', 'model', 'model_rows'])):
        sizes[axis] = draw(st.sampled_from([size for size in (1, 2, 4) if size <= free]))
        free //= sizes[axis]
    chunks = draw(st.sampled_from([1, 2])) if sizes['stages'] > 1 else 1
    microbatches = draw(st.sampled_from([1, 2, 4, 6])) * (sizes['stages'] if chunks > 1 else 1)
    shard = draw(st.sampled_from(['none', 'optimizer', 'gradients', 'weights']))
    setting = Setting(
        name,
        **sizes,
        virtual_stages=chunks,
        schedule=draw(st.sampled_from(['1f1b', 'gpipe'])),
        context_exchange=draw(st.sampled_from(['gather', 'ring', 'all_to_all'])),
        sequence_parallel=draw(st.booleans()),
        shard=shard,
        replicas=draw(st.sampled_from([1, 2])) if shard != 'none' else 1,
        microbatches=microbatches,
        rows=ROWS,
        recompute=draw(st.sampled_from(['none', 'selective', 'full'])),
        overlap=draw(st.sampled_from(['none', 'none', 'batch_split'])),
        num_layers=sizes['stages'] * chunks * (1 if sizes['stages'] > 1 else 2),
        plain=draw(st.booleans()),
        cut=draw(st.booleans()),
    )
    try:
        _ = setting.config
    except ValueError:
        reject()
    return setting


@pytest.mark.parametrize(
    ('name', 'start', 'examples'),
    [
        # ZeRO-3 with replicas, context shards, and halves that are recomputed, of cut documents.
        exhaustive('gpt', SEED + 32, 1),
        exhaustive('gpt', SEED, 8),
        exhaustive('llama', SEED, 8),
        exhaustive('gpt', SEED + 1, 40),
        exhaustive('llama', SEED + 1, 40),
    ],
)
def test_whatever_is_allowed_has_the_gradients_of_one_device(
    name: str, start: int, examples: int
) -> None:
    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(setting=compositions(name))
    def check(setting: Setting) -> None:
        note(f'seed {start}: {setting}')
        assume(setting.on_one_device != setting)
        in_one_pass = setting.on_one_device._replace(
            microbatches=1, recompute='none', overlap='none'
        )
        (expected_loss, expected), (loss, gradients) = map(
            loss_and_gradients, (in_one_pass, setting)
        )
        assert relative_error(loss, expected_loss) <= 1e-6
        assert_close(gradients, expected, 1e-5)

    check()
