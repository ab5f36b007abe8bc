"""Context shards change neither loss nor gradients, whatever the exchange.

Errors are relative to the largest element, see `support.relative_error`.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from steps import Setting, evaluate, loss_and_gradients, train
from support import assert_close, exhaustive, make_batch, on_mesh, relative_error, slow

from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.microbatches import with_weights

SP = {'sequence_parallel': True}
RING = {'context_exchange': 'ring'}
HEADS = {'context_exchange': 'all_to_all'}


def sharded(name: str, context: int, data: int = 1, model: int = 1, **fields: Any) -> Setting:
    """A setting on data x context x model; llama has two key/value heads."""
    heads = {'num_kv_heads': 2} if name == 'llama' else {}
    return Setting(name, data, model, context=context, plain=True, **heads, **fields)


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(sharded('llama', 2, model=2, data=2, **SP, **RING)),
        exhaustive(sharded('llama', 2)),
        exhaustive(sharded('llama', 2, **RING)),
        exhaustive(sharded('sinks', 2, model=4, **SP, **RING)),
        exhaustive(sharded('llama', 4, model=2)),
        exhaustive(sharded('llama', 4, model=2, **SP, **RING, recompute='full')),
        exhaustive(sharded('llama', 2, model=4, **SP)),  # more devices than key/value heads
        exhaustive(sharded('gpt', 4, model=2, **SP)),
        exhaustive(sharded('gpt', 2, data=2, microbatches=2, recompute='selective', **RING)),
        exhaustive(sharded('gpt', 8)),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_whole_sequences(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


def test_shards_get_the_positions_of_their_tokens_and_the_first_one_the_weights_of_rows() -> None:
    config = sharded('bert', 4).config
    batch = make_batch(config)
    rows, length = batch['tokens'].shape
    batch['tokens'] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    batch['loss_mask'][:-1] = 1
    batch['loss_mask'][-1] = 0  # a row that pads the batch
    with on_mesh(config):
        given = jax.jit(partial(with_weights, config=config, layout=Layout.of(config)))
        shards = given(place_batch(batch))
    np.testing.assert_array_equal(shards['positions'], shards['tokens'])
    expected = np.zeros((rows, 4))
    expected[:-1, 0] = 1 / (rows - 1)
    np.testing.assert_allclose(shards['row_weights'], expected, rtol=1e-6)


def with_windows(context: int, seq_len: int, **fields: Any) -> Setting:
    """A setting whose layers have no window, or one of 4 or 6 tokens."""
    defaults = {'num_layers': 4, 'num_kv_heads': 2, 'seq_len': seq_len}
    return sharded('windows', context, **(defaults | fields))


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(with_windows(2, 32, model=2, data=2, **SP, **RING)),
        exhaustive(with_windows(2, 32, microbatches=2, data=2, recompute='full')),
        exhaustive(with_windows(2, 32, model=4, **SP)),  # more devices than key/value heads
        exhaustive(with_windows(4, 48, model=2, recompute='full', shard='weights', **SP, **RING)),
        exhaustive(with_windows(4, 48, data=2, shard='optimizer', unroll=False)),
        exhaustive(with_windows(8, 96, **RING)),
        exhaustive(with_windows(8, 96, recompute='selective')),
        exhaustive(with_windows(2, 32, model=2, stages=2, num_layers=6, microbatches=4, **RING)),
    ],
    ids=str,
)
def test_windows_give_the_loss_and_gradients_of_whole_sequences(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part.unsharded, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


def with_documents(name: str, context: int, **fields: Any) -> Setting:
    """A setting whose rows are cut anywhere: documents of one token, and of several shards."""
    return sharded(name, context, **({'cut': True, 'seq_len': 32} | fields))


WINDOWS = {'num_layers': 4, 'num_kv_heads': 2}


@pytest.mark.parametrize(
    'setting',
    [
        slow(with_documents('llama', 4, model=2, shard='weights', **SP, **RING)),
        exhaustive(with_documents('llama', 2, data=2, microbatches=2, recompute='full')),
        exhaustive(with_documents('gpt', 8, recompute='selective')),
        exhaustive(with_documents('sinks', 4, data=2, shard='gradients', **RING)),
        exhaustive(with_documents('gpt', 2, data=4, shard='optimizer', replicas=2, **RING)),
        exhaustive(with_documents('llama', 2, model=2, stages=2, microbatches=4, **SP, **RING)),
        exhaustive(with_documents('windows', 2, model=4, **SP, **WINDOWS)),
        exhaustive(with_documents('windows', 4, seq_len=48, data=2, **RING, **WINDOWS)),
    ],
    ids=str,
)
def test_documents_that_span_shards_give_the_loss_and_gradients_of_whole_sequences(
    setting: Setting,
) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part.unsharded, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


def with_dropout(name: str, context: int, data: int = 1, model: int = 1, **fields: Any) -> Setting:
    """A setting with dropout, of tokens and of attention's weights."""
    return Setting(name, data, model, context=context, dropout=0.1, **fields)


@pytest.mark.parametrize(
    'setting',
    [
        slow(with_dropout('gpt', 4, model=2, **SP, **RING)),
        exhaustive(with_dropout('gpt', 2, data=2, microbatches=2, recompute='full')),
        exhaustive(with_dropout('gpt', 2, data=2, stages=2, microbatches=2, shard='optimizer')),
        exhaustive(with_dropout('sinks', 2, data=2, cut=True, seq_len=32, shard='weights')),
        exhaustive(with_dropout('llama', 2, model=4, cut=True, seq_len=32, **SP, **RING)),
        exhaustive(with_dropout('windows', 4, cut=True, seq_len=48, **WINDOWS)),
    ],
    ids=str,
)
def test_dropout_zeroes_what_it_zeroes_on_one_device(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.on_one_device, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


@pytest.mark.parametrize(
    'setting',
    [
        slow(sharded('bert', 4, model=2, **SP, **RING)),
        exhaustive(sharded('bert', 2, data=2, microbatches=2, recompute='full')),
        exhaustive(sharded('bert', 8, recompute='selective', shard='weights')),
        exhaustive(sharded('bert', 2, data=2, stages=2, microbatches=2, shard='optimizer')),
        exhaustive(with_dropout('bert', 2, model=2, data=2, **RING)),
        exhaustive(with_dropout('bert', 4, model=2, **SP)),
    ],
    ids=str,
)
def test_bert_has_the_loss_and_gradients_of_whole_sequences(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.on_one_device, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(sharded('gpt', 2, data=2, **HEADS)),
        slow(with_dropout('sinks', 2, model=2, num_kv_heads=4, cut=True, shard='weights', **HEADS)),
        exhaustive(sharded('gpt', 2, model=4, recompute='selective', **SP, **HEADS)),
        exhaustive(with_dropout('bert', 2, data=2, stages=2, microbatches=2, **HEADS)),
        exhaustive(with_documents('llama', 2, data=2, microbatches=2, shard='gradients', **HEADS)),
        exhaustive(with_documents('windows', 2, recompute='full', **WINDOWS, **HEADS)),
    ],
    ids=str,
)
def test_heads_for_tokens_give_the_loss_and_gradients_of_one_device(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.on_one_device, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(sharded('llama', 2, data=2, model=2, shard='optimizer', **SP)),
        exhaustive(sharded('sinks', 2, data=2, model=2, shard='weights', **SP, **RING)),
        exhaustive(sharded('gpt', 2, data=2, shard='gradients', microbatches=2)),
        exhaustive(sharded('llama', 2, data=3, shard='weights')),  # padded shards
        exhaustive(sharded('gpt', 2, data=4, shard='weights', replicas=2, dtype='bfloat16')),
    ],
    ids=str,
)
def test_rungs_of_zero_shard_over_data_and_context_and_change_nothing(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.unsharded, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(sharded('llama', 2, model=2, stages=2, microbatches=4, **SP)),
        exhaustive(
            sharded(
                'llama', 2, model=2, stages=2, virtual_stages=2, num_layers=4, microbatches=4
            )._replace(**RING)
        ),
        sharded('gpt', 2, data=2, stages=2, microbatches=2, shard='optimizer', recompute='full'),
    ],
    ids=str,
)
def test_context_and_stages_compose(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)


@pytest.mark.slow
def test_steps_and_an_evaluation_end_as_those_of_whole_sequences() -> None:
    setting = sharded('gpt', 2, data=2, model=2, shard='optimizer', **SP)
    expected, actual = train(setting.in_one_part), train(setting)
    assert relative_error(actual.losses, expected.losses) <= 1e-5
    assert_close(actual.params, expected.params, 1e-5)
    assert actual.evaluated == pytest.approx(expected.evaluated, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('cut', 'is_bert'), [(True, False), exhaustive(False, False), exhaustive(False, True)]
)
def test_an_evaluation_sums_what_it_sums_of_whole_sequences(cut: bool, is_bert: bool) -> None:
    setting = sharded('bert' if is_bert else 'llama', 4, cut=cut, **RING)
    assert evaluate(setting) == pytest.approx(evaluate(setting.in_one_part), rel=1e-6)
