"""The way around cuDNN's kernel, with XLA's attention in the kernel's place: a CPU has no cuDNN."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice
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

from megajax.core.config import load
from megajax.core.counts.flash import missing_for_flash, uses_flash
from megajax.core.hardware.targets import capability_of
from megajax.core.model import attention, flash
from megajax.core.model.kernels import KERNELS
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import abstract_batch, place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state


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
    monkeypatch.setattr(flash, 'can_flash', lambda *_, **__: True)
    flash_loss, flash_gradients = loss_and_gradients(name, data, model, microbatches, documents)
    assert set(seen) == {(8 // data // microbatches, 32, 8 // model, seen[0][-1])}
    assert relative_error(flash_loss, loss) < 1e-6
    assert_close(flash_gradients, gradients, 1e-5)


@pytest.mark.parametrize(
    ('kind', 'head_dim', 'expected'),
    [
        (
            'NVIDIA H100 80GB HBM3',
            256,
            'cuDNN flash (NVIDIA H100 80GB HBM3, bfloat16, head dim 256)',
        ),
        ('NVIDIA A100-SXM4-80GB', 256, ': flash attention takes head dims up to 128'),
        ('NVIDIA H100 80GB HBM3', 512, ': flash attention takes head dims up to 256'),
        ('AMD Instinct MI300X', 64, ': flash attention needs an NVIDIA GPU'),
    ],
)
def test_a_run_says_which_kernel_it_takes_and_why_not_flash(
    kind, head_dim, expected, caplog
) -> None:
    caplog.set_level('INFO', 'megajax')
    flash.can_flash.cache_clear()
    device = AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
    can = flash.can_flash(device, 'bfloat16', head_dim)
    assert expected in caplog.text
    assert can == ('cuDNN flash (' in caplog.text)
    assert not flash.can_flash(device, 'bfloat16', head_dim, 1024, has_dropout=True)
    assert f'bfloat16, head dim {head_dim}, window 1,024): flash attention ' in caplog.text


@pytest.mark.parametrize(
    ('overrides', 'tokens'),
    [
        (['train.seq_len=31'], 0),
        (['train.seq_len=31', 'data.document_mask=true'], 31),
        (['train.seq_len=24', 'data.document_mask=true', 'mesh.context=4'], 6),
        # A window within context shards: the kernel gets one of a shard's two chunks.
        (['train.seq_len=24', 'data.document_mask=true', 'mesh.context=4', 'model.window=2'], 3),
    ],
)
def test_a_mask_of_an_odd_number_of_tokens_is_not_for_the_kernel(
    overrides, tokens, monkeypatch
) -> None:
    asked = []
    monkeypatch.setattr(flash, 'can_flash', lambda *kind, has_dropout: bool(asked.append(kind[-1])))
    config = load('tiny', ['mesh.data=1', 'mesh.model=1', *overrides])
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config).params)
        step = make_loss_and_gradients(config)
        jax.eval_shape(step, params, abstract_batch(config), jax.random.key(0))
    assert set(asked) == {tokens}
    is_odd = tokens % 2 == 1
    assert ('even' in missing_for_flash('bfloat16', 64, (9, 0), tokens)) == is_odd
    in_bf16 = load('tiny', ['train.dtype=bfloat16', *overrides])
    assert uses_flash(in_bf16) == (not is_odd)


def test_a_gpu_without_a_record_has_the_capability_that_jax_reports(monkeypatch) -> None:
    local = SimpleNamespace(device_kind='NVIDIA L40S', compute_capability='8.9')
    monkeypatch.setattr(jax, 'local_devices', lambda: [local])
    device = AbstractDevice(device_kind='NVIDIA L40S', num_cores=None, platform='gpu')
    assert capability_of(device) == (8, 9)


@pytest.mark.parametrize(
    ('rate', 'has_keys'), [(0.0, False), (0.0, True), (0.5, False), (0.5, True)]
)
def test_attention_with_dropout_to_apply_never_runs_the_kernel_which_has_none(
    rate, has_keys, monkeypatch
):
    seen = []
    monkeypatch.setattr(flash, 'can_flash', lambda *_, has_dropout: not has_dropout)
    monkeypatch.setattr(attention, 'attend_by', lambda _, q, *rest: seen.append(q) or q)
    config = make_config()
    with on_mesh(config):
        layout = Layout.of(config)
        q_BSNH = jax.device_put(jnp.ones((2, 8, 4, 16)), layout('BSNh'))
        keys = jax.device_put(jax.random.split(jax.random.key(0), 2), layout('B'))
        key_B = keys if has_keys else None

        @jax.jit
        def attend(x_BSNH, key_B):
            return attention.attend(
                x_BSNH, x_BSNH, x_BSNH, layout, scale=1.0, rate=rate, key_R=key_B
            )

        o_BSNH = np.asarray(attend(q_BSNH, key_B))
    is_dropped = rate > 0 and has_keys
    assert len(seen) == (0 if is_dropped else 1)
    assert bool((o_BSNH == 1).all()) != is_dropped
