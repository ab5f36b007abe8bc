"""Layers whose parts take turns have the loss and the gradients of the plain layers.

The loss is equal to the bit; errors of gradients are relative to the largest element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import Setting, loss_and_gradients
from support import assert_close, exhaustive, slow

from megajax.core.counts.declaration import Parameter
from megajax.core.model.overlap.per_layer_arrays import Stack
from megajax.core.model.parameters import map_parameters
from megajax.core.train import zero

SP = {'sequence_parallel': True}


def assert_as_plain(setting: Setting) -> None:
    """The same step without overlap, in a loop over layers, has the same numbers."""
    expected_loss, expected = loss_and_gradients(setting._replace(overlap='none', unroll=False))
    loss, gradients = loss_and_gradients(setting)
    gradients, expected = {**gradients}, {**expected}
    assert loss == expected_loss
    limit = 1e-6 if setting.dtype == 'float32' else 2e-6
    # The norms of queries and keys have gradients of tokens that nearly cancel: their sizes add up
    # to 11 times the sum, where it is 4 times at most elsewhere. On jax 0.12, and on some CPUs,
    # rounding shows there.
    for name in ('layers.attention.query_norm.weight', 'layers.attention.key_norm.weight'):
        if name in gradients:
            assert_close({name: gradients.pop(name)}, {name: expected.pop(name)}, 2e-6)
    # What leaves the first layer is rounded to 16 bits, on jax 0.12 one element of 65,536
    # the other way; both gradients are 0.5 % from those of fp32.
    for name in ('embedding.table', 'position.table'):
        if setting.dtype != 'float32' and name in gradients:
            one, other = gradients.pop(name), expected.pop(name)
            assert np.mean(np.asarray(one) != np.asarray(other)) < 1e-3, name
            assert_close({name: one}, {name: other}, 1e-4)
    assert_close(gradients, expected, limit)


@pytest.mark.parametrize('unroll', [exhaustive(False), True], ids=['loop', 'unrolled'])
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('llama', 2, 4, **SP, rows=8)),  # with document masks
        exhaustive(Setting('sinks', 2, 2, **SP, rows=8)),
        exhaustive(Setting('llama', 1, 4, num_kv_heads=2)),
        # With dropout and biases; where it is unrolled, a tied table is cast before them all.
        exhaustive(Setting('gpt', 2, 2, dtype='bfloat16', microbatches=2)),
        exhaustive(Setting('gpt', 2, 2, **SP, recompute='full')),
        exhaustive(Setting('llama', 2, 2, **SP, recompute='selective', microbatches=2, rows=16)),
        exhaustive(Setting('bert', 2, 2, **SP)),
        exhaustive(Setting('both_norms', 1, 2, **SP, recompute='full')),
        # Norms after the sublayers, and of all heads at once.
        exhaustive(Setting('olmo2', 2, 2, recompute='selective', rows=8)),
        exhaustive(Setting('llama', 1, 8, num_kv_heads=2, recompute='full')),
    ],
    ids=str,
)
def test_halves_of_the_rows_change_nothing(setting: Setting, unroll: bool) -> None:
    assert_as_plain(setting._replace(overlap='batch_split', unroll=unroll))


@pytest.mark.parametrize('unroll', [exhaustive(False), True], ids=['loop', 'unrolled'])
@pytest.mark.parametrize(
    'setting',
    [
        # One row a shard, with document masks.
        slow(Setting('llama', 2, 4, **SP, rows=2)),
        exhaustive(Setting('llama', 1, 4, rows=4, num_kv_heads=2)),
        exhaustive(Setting('gpt', 2, 2, **SP, plain=True, dtype='bfloat16', recompute='full')),
        exhaustive(Setting('bert', 2, 2, **SP, plain=True, microbatches=2)),
        exhaustive(Setting('olmo2', 1, 4, **SP, rows=4, num_kv_heads=2, recompute='full')),
    ],
    ids=str,
)
def test_halves_of_the_tokens_change_nothing(setting: Setting, unroll: bool) -> None:
    assert_as_plain(setting._replace(overlap='sequence_split', unroll=unroll))


@pytest.mark.parametrize('shard', [exhaustive('optimizer'), exhaustive('gradients'), 'weights'])
@pytest.mark.parametrize(
    'setting',
    [
        # Norms of the inputs and of the outputs of sublayers, with gains of 1 + w.
        Setting('both_norms', 2, 2, **SP, recompute='full'),
        # One part: only what is sent over `data` is in order.
        slow(Setting('llama', 4, 1, rows=4)),
        exhaustive(Setting('gpt', 2, 2, **SP, recompute='full')),
        exhaustive(Setting('llama', 3, 2, **SP, rows=24)),  # 3 divides no dim: padded at rest
        exhaustive(Setting('llama', 4, 2, replicas=2, microbatches=2, rows=32)),
        exhaustive(Setting('gpt', 2, 2, dtype='bfloat16')),
        exhaustive(Setting('olmo2', 2, 2, **SP, rows=8, recompute='full')),
    ],
    ids=str,
)
def test_windows_over_data_change_nothing(setting: Setting, shard: str) -> None:
    assert_as_plain(setting._replace(overlap='batch_split', unroll=True, shard=shard))


@pytest.mark.slow
@pytest.mark.parametrize('shard', ['none', exhaustive('weights')])
def test_layers_on_their_own_have_the_numbers_of_a_loop(shard: str) -> None:
    assert_as_plain(Setting('gpt', 2, 2, shard, **SP, unroll=True))


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('llama', 1, 1, microbatches=4, rows=8)),
        exhaustive(Setting('gpt', 2, 2, **SP, microbatches=2, rows=16, overlap='batch_split')),
        slow(Setting('llama', 2, 2, 'optimizer', microbatches=2, rows=16)),
    ],
    ids=str,
)
def test_products_that_add_to_the_gradients_of_earlier_microbatches_change_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights have slots that hold these gradients only in 16 bits; here they do in fp32."""
    expected_loss, expected = loss_and_gradients(setting._replace(overlap='none'))

    def with_slots(weights: Any) -> tuple[Any, Any]:
        def slot(declared: Parameter, stack: Stack) -> Stack:
            return jax.tree.map(jnp.zeros_like, stack) if isinstance(stack, tuple) else stack

        return weights, map_parameters(slot, weights)

    monkeypatch.setattr(zero, 'separate', with_slots)
    loss, gradients = loss_and_gradients.__wrapped__(setting._replace(unroll=True))
    assert loss == expected_loss
    assert_close(gradients, expected, 1e-6)
