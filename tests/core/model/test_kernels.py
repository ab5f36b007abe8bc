"""Attention kernels: windows against a softmax in fp64, and programs compiled for a GPU."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import make_config

from megajax.core.hardware.targets import compile_without_gpu, gpu_devices, has_compiler
from megajax.core.model import flash
from megajax.core.model.attention import attend
from megajax.core.model.context_exchange import merge
from megajax.core.model.kernels import KERNELS
from megajax.core.model.passes import attend_by
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import axis_sizes, mesh_of

LENGTH, HEADS, GROUPS, HEAD_DIM = 12, 4, 2, 8
SCALE = 0.25  # of scores
needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)


def attention_in_fp64(q, k, v, window):
    """Softmax attention of all queries on all keys, of which those in the window are visible."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    score = SCALE * jnp.einsum('rsnh,rynh->rnsy', q, k)
    visible = [[0 <= i - j < window for j in range(LENGTH)] for i in range(LENGTH)]
    weight = jax.nn.softmax(jnp.where(jnp.array(visible), score, -jnp.inf), axis=-1)
    return jnp.einsum('rnsy,rynh->rsnh', weight, v)


def both_passes(attend: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The result of attention and its gradients, compiled."""

    @jax.jit
    def passes(q, k, v, do):
        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(do)

    return passes


@pytest.mark.parametrize('window', [1, 5, LENGTH, 2 * LENGTH])
def test_a_query_attends_to_a_window_of_keys_that_ends_with_its_own(window: int) -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal((2, LENGTH, heads, HEAD_DIM))
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    with jax.enable_x64(True):
        expected = both_passes(partial(attention_in_fp64, window=window))(q, k, v, do)
    kernel = KERNELS['xla'].scaled(SCALE)

    @jax.jit
    def found(q, k, v, do):
        o, lse = kernel.forward(q, k, v, True, window=window)
        return o, *kernel.backward(q, k, v, o, lse, do, True, window=window)

    inputs = (x.astype(np.float32) for x in (q, k, v, do))
    for x, y in zip(found(*inputs), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6)


def test_keys_to_which_a_query_does_not_attend_have_no_part_in_a_merged_result() -> None:
    """In fp16, the sum of their values may be infinite."""
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((1, 4096, 1, HEAD_DIM)).astype(np.float16) for _ in range(2))
    q, v, mask = q[:, :2], np.full_like(k, 20), np.zeros((1, 1, 2, 4096), bool)
    mask[..., 1, :] = True

    @jax.jit
    def merged(q, k, v, mask):
        own = KERNELS['xla'].forward(q, k[:, :2], v[:, :2], False, scale=SCALE)
        o, lse = KERNELS['xla'].forward(q, k, v, False, mask, scale=SCALE)
        return merge((own[0].astype(jnp.float32), own[1]), (o, lse))[0]

    np.testing.assert_allclose(merged(q, k, v, mask), 20, rtol=2e-3)


@pytest.mark.parametrize('causal', [False, True])
def test_queries_and_keys_after_the_lengths_have_no_part_in_the_result(causal: bool) -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal((3, LENGTH, heads, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    lengths = queries, keys = np.array([5, 12, 0]), np.array([7, 1, 0])
    kernel = KERNELS['xla'].scaled(SCALE)

    @jax.jit
    def found(q, k, v, do, lengths):
        o, lse = kernel.forward(q, k, v, causal, lengths=lengths)
        merged = jnp.where(jnp.isinf(lse), 0, lse)  # as with a block that these queries attend to
        return lse, o, *kernel.backward(q, k, v, o, merged, do, causal, lengths=lengths)

    lse, *results = map(np.asarray, found(q, k, v, do, lengths))
    for row, (some, of_these) in enumerate(zip(queries, keys, strict=True)):
        for x, count in zip(results, (some, some, of_these, of_these), strict=True):
            assert not np.any(x[row, count:])
        assert np.all(np.isneginf(lse[row, :, some:]))
        if not some:
            continue
        arrays = q[row : row + 1, :some], *(x[row : row + 1, :of_these] for x in (k, v))
        reach = np.tri(some, of_these, dtype=bool)[None, None] if causal else None
        attend = partial(jax.nn.dot_product_attention, mask=reach, scale=SCALE)
        wanted = both_passes(attend)(*arrays, do[row : row + 1, :some])
        for x, y in zip(results, wanted, strict=True):
            np.testing.assert_allclose(x[row, : y.shape[1]], y[0], atol=3e-6)


@pytest.mark.parametrize(
    ('causal', 'has_lengths', 'mask'),
    [
        (False, False, 'NO_MASK'),
        (True, False, 'CAUSAL'),
        (False, True, 'PADDING'),
        (True, True, 'PADDING_CAUSAL'),
    ],
)
def test_cudnn_gets_its_mask_scale_window_and_lengths_in_both_passes(
    causal: bool, has_lengths: bool, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cuDNN returns is replaced by ones of the same shape, for which no GPU is needed."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    settings, given = [], []

    def of_ones(primitive: Any) -> SimpleNamespace:
        def bind(*arrays: Any, **how: Any) -> list[np.ndarray]:
            settings.append((how['mask_type'], how['scale'], how['sliding_window_length']))
            given.append([np.asarray(x).tolist() for x in arrays[4:6]])
            results = jax.eval_shape(partial(primitive.bind, **how), *arrays)
            return [np.ones(x.shape, x.dtype) for x in results]

        return SimpleNamespace(bind=bind)

    for name in ('_dot_product_attention_fwd_p_wrapper', '_dot_product_attention_bwd_p_wrapper'):
        monkeypatch.setattr(cudnn, name, of_ones(getattr(cudnn, name)))
    q, k = (np.ones((3, LENGTH, heads, HEAD_DIM), np.float32) for heads in (HEADS, GROUPS))
    queries, keys = np.array([[5, LENGTH, 0], [7, 1, 0]] if has_lengths else [[LENGTH] * 3] * 2)
    how = {'window': 5 if causal else None, 'lengths': (queries, keys) if has_lengths else None}
    kernel = KERNELS['cudnn'].scaled(SCALE)
    o, lse = kernel.forward(q, k, k, causal, **how)
    gradients = kernel.backward(q, k, k, o, lse, q, causal, **how)
    assert settings == [(cudnn.MaskType[mask], SCALE, how['window'])] * 2
    # cuDNN needs at least one query and one key of a sequence.
    assert given == [[[5, LENGTH, 1], [7, 1, 1]] if has_lengths else [[], []]] * 2
    for x, counts in zip((o, *gradients), (queries, queries, keys, keys), strict=True):
        is_first = np.arange(LENGTH) < counts[:, None]
        np.testing.assert_array_equal(x, np.broadcast_to(is_first[..., None, None], x.shape))
    is_first = np.arange(LENGTH) < queries[:, None]
    np.testing.assert_array_equal(lse, np.where(is_first[:, None], np.ones(lse.shape), -np.inf))


def compiled_for(target: str, head_dim: int, attend: Callable[..., jax.Array]) -> str:
    """The program of attention and its gradients in bf16."""
    mesh = mesh_of(gpu_devices(target, hosts=1, per_host=2), axis_sizes(2, 1))

    def inputs(heads: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P('data', None, 'model', None))
        return jax.ShapeDtypeStruct((4, 256, heads, head_dim), jnp.bfloat16, sharding=sharding)

    def gradients(q, k, v, do):
        o, pullback = jax.vjp(attend, q, k, v)
        return o, pullback(do)

    with jax.set_mesh(mesh):
        lowered = jax.jit(gradients).lower(*map(inputs, (4, 2, 2, 4)))
    text = compile_without_gpu(lambda options: lowered.compile(options), {}).as_text()
    assert text is not None
    return text


def calls(text: str) -> list[str]:
    return sorted(re.findall(r'"__cudnn\$fmha(\w+)"', text))


@needs_compiler
@pytest.mark.parametrize(('window', 'written'), [(64, '64'), (None, '0')])
def test_the_kernels_of_a_gpu_get_the_window_in_both_passes(window, written) -> None:
    text = compiled_for('h100', 64, lambda *x: attend_by(flash.passes(True, window, SCALE), *x))
    assert re.findall(r'"fmha_scale": ?([\d.]+)', text) == [str(SCALE)] * 2
    assert calls(text) == ['Softmax', 'SoftmaxBackward']
    assert re.findall(r'"sliding_window_length": ?"?(\d+)', text) == [written] * 2
    assert re.findall(r'"mask_type": ?"(\w+)"', text) == ['CAUSAL'] * 2


@needs_compiler
@pytest.mark.parametrize(
    ('target', 'head_dim', 'is_flash'),
    [('h100', 256, True), ('a100', 256, False), ('h100', 512, False)],
)
def test_wide_heads_take_the_kernel_if_the_target_has_it(target, head_dim, is_flash) -> None:
    layout = Layout.of(make_config())
    text = compiled_for(target, head_dim, lambda *x: attend(*x, layout, scale=SCALE))
    assert calls(text) == (['Softmax', 'SoftmaxBackward'] if is_flash else [])
