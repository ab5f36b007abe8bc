"""A grid (2-D tensor parallelism) has the numbers of one dimension and of one device.

Errors are relative to the largest element, see `support.relative_error`. The models have dropout
(`gpt`) and document masks (`llama`).
"""

from typing import Any

import pytest
from steps import Setting, evaluate, loss_and_gradients, train
from support import assert_close, exhaustive, relative_error, slow

LIMIT = 1e-5


def grid(name: str, rows: int, columns: int, data: int = 1, **fields: Any) -> Setting:
    """A setting on data x rows x columns; the key/value heads of llama are as few as possible."""
    heads = {'num_kv_heads': columns} if name == 'llama' else {}
    return Setting(name, data, columns, model_rows=rows, sequence_parallel=True, **fields, **heads)


@pytest.mark.parametrize('twin', ['on_one_device', exhaustive('in_one_row')])
@pytest.mark.parametrize(
    'setting',
    [
        grid('llama', 2, 2),
        exhaustive(grid('llama', 4, 2)),
        # With norms of gain 1 + w and scaled embeddings; with dropout, whose masks are made again.
        slow(grid('both_norms', 2, 2, data=2, shard='weights', recompute='full', dropout=0.1)),
        exhaustive(grid('gpt', 2, 2, recompute='full')),
        exhaustive(grid('llama', 2, 4)),
        exhaustive(grid('gpt', 2, 4, recompute='selective')),
        exhaustive(grid('gpt', 4, 2)),
        exhaustive(grid('llama', 2, 2, data=2, microbatches=2)),
        exhaustive(grid('gpt', 2, 1, data=2)),
        exhaustive(grid('llama', 8, 1)),
        slow(grid('sinks', 2, 2, num_kv_heads=2, recompute='full')),
        exhaustive(grid('layer_norms', 2, 2)),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_dimension(setting: Setting, twin: str) -> None:
    plain = getattr(setting, twin)._replace(recompute='none')
    (expected_loss, expected), (loss, gradients) = map(loss_and_gradients, (plain, setting))
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(
            grid('llama', 2, 2, data=2, shard='weights', recompute='full', overlap='batch_split')
        ),
        exhaustive(grid('gpt', 2, 2, data=2, shard='weights', recompute='selective')),
        grid('llama', 2, 2, data=2, shard='gradients', microbatches=2, dtype='bfloat16'),
        exhaustive(grid('gpt', 2, 2, data=2, shard='optimizer', overlap='batch_split')),
        exhaustive(grid('llama', 2, 1, data=4, shard='weights', replicas=2)),
    ],
    ids=str,
)
def test_rungs_of_zero_change_nothing_in_a_grid(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.unsharded, setting)
    )
    # Without replicas to the bit; the sum over replicas has another order.
    assert relative_error(loss, expected_loss) <= (1e-6 if setting.replicas > 1 else 0)
    # In bf16 one rounding that falls the other way shows in the norms of queries and keys, whose
    # gradients are small sums of tokens that nearly cancel: 5e-6, where meshes differ by 1e-2.
    assert_close(gradients, expected, 1e-6 if setting.dtype == 'float32' else LIMIT)
    assert evaluate(setting) == pytest.approx(evaluate(setting.unsharded), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        grid('llama', 2, 2, data=2, shard='weights', recompute='full'),
        exhaustive(
            grid('gpt', 2, 2, data=2, shard='weights', recompute='full', overlap='batch_split')
        ),
        exhaustive(grid('gpt', 4, 2)),
        exhaustive(grid('llama', 2, 4)),
    ],
    ids=str,
)
def test_five_steps_and_an_evaluation_end_as_those_of_one_device(setting: Setting) -> None:
    expected, actual = train(setting.on_one_device), train(setting)
    assert relative_error(actual.losses, expected.losses) <= LIMIT
    assert_close(actual.first_moments, expected.first_moments, LIMIT)
    assert_close(actual.params, expected.params, LIMIT)
    assert actual.evaluated == pytest.approx(expected.evaluated, rel=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize('setting', [grid('llama', 2, 2), exhaustive(grid('gpt', 2, 2))], ids=str)
def test_in_bf16_a_grid_is_as_near_as_rounding(setting: Setting) -> None:
    setting = setting._replace(dtype='bfloat16')
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.on_one_device, setting)
    )
    assert relative_error(loss, expected_loss) <= 2e-2
    assert_close(gradients, expected, 2e-2)
