"""The way around cuDNN's kernel, with XLA's attention in the kernel's place: a CPU has no cuDNN."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import (
    assert_close,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    pack,
    random_params,
    relative_error,
    slow,
)

from megajax.core.model import attention, flash
from megajax.core.model.kernels import KERNELS
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients


def loss_and_gradients(name, data, model, microbatches, documents):
    config = make_config(
        name, data, model, model={'dropout': 0.0}, train={'microbatches': microbatches}
    )
    with on_mesh(config):
        batch = make_batch(config)
        params, batch = (
            random_params(config, std=0.05),
            place_batch(pack(batch, documents) if documents else batch),
        )
        (loss, _), gradients = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        return float(loss), gather(gradients)


@pytest.mark.parametrize(
    ('name', 'data', 'model', 'microbatches', 'documents'),
    [
        exhaustive('llama', 1, 1, 1, None),
        exhaustive('llama', 2, 4, 1, None),
        slow('llama', 2, 4, 1, [5, 20, 7]),
        exhaustive('llama', 2, 2, 2, None),
        slow('bert', 2, 2, 2, None),
    ],
)
def test_the_kernel_sees_the_rows_and_heads_of_its_device_and_changes_nothing(
    name, data, model, microbatches, documents, monkeypatch
):
    loss, gradients = loss_and_gradients(name, data, model, microbatches, documents)
    seen, on_cpu = [], KERNELS['xla']

    def forward(q, k, v, *rest, **window):
        seen.append(q.shape)
        return on_cpu.forward(q, k, v, *rest, **window)

    monkeypatch.setitem(KERNELS, 'cudnn', on_cpu._replace(forward=forward))
    monkeypatch.setattr(attention, 'can_flash', lambda *_: True)
    flash_loss, flash_gradients = loss_and_gradients(name, data, model, microbatches, documents)
    assert set(seen) == {(8 // data // microbatches, 32, 8 // model, seen[0][-1])}
    assert relative_error(flash_loss, loss) < 1e-6
    assert_close(flash_gradients, gradients, 1e-5)


def test_flash_is_for_16_bit_on_a_gpu_and_head_dims_that_cudnn_has():
    can = functools.partial(flash.can_flash, 'gpu')
    assert can('bfloat16', 64)
    assert can('float16', 128)
    assert not can('float32', 64)
    assert not can('bfloat16', 60)
    assert not can('bfloat16', 256)
    assert not flash.can_flash('cpu', 'bfloat16', 64)


@pytest.mark.parametrize(
    ('rate', 'has_keys'), [(0.0, False), (0.0, True), (0.5, False), (0.5, True)]
)
def test_attention_with_dropout_to_apply_never_runs_the_kernel_which_has_none(
    rate, has_keys, monkeypatch
):
    seen = []
    monkeypatch.setattr(attention, 'can_flash', lambda *_: True)
    monkeypatch.setattr(attention, 'flash_attention', lambda q, *_: seen.append(q) or q)
    config = make_config()
    with on_mesh(config):
        layout = Layout.of(config)
        q_BSNH = jax.device_put(jnp.ones((2, 8, 4, 16)), layout('BSNh'))
        keys = jax.device_put(jax.random.split(jax.random.key(0), 2), layout('B'))
        key_B = keys if has_keys else None
        o_BSNH = attention.attend(q_BSNH, q_BSNH, q_BSNH, layout, rate=rate, key_R=key_B)
    is_dropped = rate > 0 and has_keys
    assert len(seen) == (0 if is_dropped else 1)
    assert bool((o_BSNH == 1).all()) != is_dropped
