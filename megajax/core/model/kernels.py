"""Attention of a block of queries on a block of keys, and its gradients, on one device.

Blocks of different keys are merged by their log-sum-exp (Dao et al., 2022): `lse_RNS` is the
log-sum-exp of each query's scores. The backward pass takes the merged output and log-sum-exp and
returns what these keys contribute to the gradients. Both passes are cuDNN's kernels, or matmuls and
a softmax in fp32. If `mask_R1SY` is given, a query attends only to the keys that it allows. With
`lengths`, the first queries of each sequence attend to its first keys: `lengths` has the number of
these queries [R] and the number of these keys [R]. Other queries get zeros and a log-sum-exp of
-inf, and other gradients are zero. Dropout of weights, with the masks in `dropped`, is only
supported by the matmuls.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOWEST = jnp.finfo(jnp.float32).min
Three = tuple[jax.Array, jax.Array, jax.Array]
Lengths = tuple[jax.Array, jax.Array]


class Dropped(NamedTuple):
    """Dropout of the weights of a block's queries and keys."""

    rate: float
    kept_RNSY: jax.Array

    def __call__(self, weight_RKGSY: jax.Array) -> jax.Array:
        """Return weights in fp32, or their gradients, after dropout."""
        kept_RKGSY = self.kept_RNSY.reshape(weight_RKGSY.shape)
        return jnp.where(kept_RKGSY, weight_RKGSY, 0) / (1 - self.rate)


class Kernel(NamedTuple):
    """The two passes; `causal` means that key and query at the same index are the same token.

    Scores are multiplied by `scale`. With a `window`, a causal query attends to the last `window`
    tokens, itself included.
    """

    # (q, k, v, causal[, mask][, window][, lengths][, dropped], scale) -> o_RSNH, lse_RNS
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    # (q, k, v, o, lse, do, causal[, mask][, window][, lengths][, dropped], scale) -> dq, dk, dv
    backward: Callable[..., Three]

    def scaled(self, scale: float) -> 'Kernel':
        """Return the passes with this scale of the scores."""
        return Kernel(partial(self.forward, scale=scale), partial(self.backward, scale=scale))


def _cudnn_forward(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    causal: bool,
    mask_R1SY: jax.Array | None = None,
    window: int | None = None,
    *,
    lengths: Lengths | None = None,
    dropped: Dropped | None = None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert dropped is None
    absent = jnp.zeros(0, q_RSNH.dtype)
    bias_R1SY = cudnn.combine_bias_and_mask(None, mask_R1SY, q_RSNH.dtype)
    o_RSNH, lse_RNS = cudnn._dot_product_attention_fwd_p_wrapper.bind(
        q_RSNH,
        k_RYKH,
        v_RYKH,
        absent if bias_R1SY is None else bias_R1SY,
        *_lengths_of_cudnn(lengths, absent),
        *(absent,) * 4,  # offsets and page tables
        is_training=True,
        **_settings(scale, causal, window, lengths, has_bias=bias_R1SY is not None),
    )
    return _of_first(o_RSNH, lse_RNS, lengths)


def _cudnn_backward(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    o_RSNH: jax.Array,
    lse_RNS: jax.Array,
    do_RSNH: jax.Array,
    causal: bool,
    mask_R1SY: jax.Array | None = None,
    window: int | None = None,
    *,
    lengths: Lengths | None = None,
    dropped: Dropped | None = None,
    scale: float,
) -> Three:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert dropped is None
    absent = jnp.zeros(0, q_RSNH.dtype)
    bias_R1SY = cudnn.combine_bias_and_mask(None, mask_R1SY, q_RSNH.dtype)
    dq_RSNH, dk_RYKH, dv_RYKH, *_ = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q_RSNH,
        k_RYKH,
        v_RYKH,
        absent if bias_R1SY is None else bias_R1SY,
        *_lengths_of_cudnn(lengths, absent),
        *(absent,) * 4,  # offsets and page tables
        lse_RNS,
        o_RSNH,
        do_RSNH,
        **_settings(scale, causal, window, lengths, has_bias=bias_R1SY is not None),
    )
    if lengths is None:
        return dq_RSNH, dk_RYKH, dv_RYKH
    of_queries, of_keys = lengths
    dk_RYKH, dv_RYKH = (_zero_after(of_keys, x) for x in (dk_RYKH, dv_RYKH))
    return _zero_after(of_queries, dq_RSNH), dk_RYKH, dv_RYKH


def _lengths_of_cudnn(lengths: Lengths | None, absent: jax.Array) -> tuple[jax.Array, ...]:
    """Return the numbers of queries and of keys for cuDNN, each at least 1."""
    return (absent, absent) if lengths is None else tuple(jnp.maximum(x, 1) for x in lengths)


def _of_first(
    o_RSNH: jax.Array, lse_RNS: jax.Array, lengths: Lengths | None
) -> tuple[jax.Array, jax.Array]:
    """Return the results, with zeros and -inf for queries that attend to no key."""
    if lengths is None:
        return o_RSNH, lse_RNS
    is_first_RS = _is_first(lengths[0], o_RSNH.shape[1])
    return _zero_after(lengths[0], o_RSNH), jnp.where(is_first_RS[:, None], lse_RNS, -jnp.inf)


def _zero_after(count_R: jax.Array, x_RSNH: jax.Array) -> jax.Array:
    return jnp.where(_is_first(count_R, x_RSNH.shape[1])[..., None, None], x_RSNH, 0)


def _is_first(count_R: jax.Array, length: int) -> jax.Array:
    """Return which of a sequence's tokens are among its first `count_R`, [R, S]."""
    return jnp.arange(length)[None] < count_R[:, None]


def _settings(
    scale: float, causal: bool, window: int | None, lengths: Lengths | None, *, has_bias: bool
) -> dict[str, Any]:
    """Return the settings that both passes of cuDNN get.

    The passes bypass jax.nn.dot_product_attention, which rounds the log-sum-exp to the dtype of q,
    and checks head dims against a GPU in this machine instead of the GPU that it compiles for.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    parameters = inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters
    newer = {name: None for name in ('score_mod',) if name in parameters}  # since jax 0.11
    if lengths is None:
        mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    else:
        mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    return {
        'scale': scale,
        'seed': 42,
        'dropout_rate': 0.0,
        'variadic_args': (has_bias, has_bias),  # the second one asks for the bias's gradient
        'mask_type': mask,
        'layout': cudnn.AttentionLayout.BTNH.value,
        'sliding_window_length': window,
        **newer,
    }


def _xla_forward(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    causal: bool,
    mask_R1SY: jax.Array | None = None,
    window: int | None = None,
    *,
    lengths: Lengths | None = None,
    dropped: Dropped | None = None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    mask_R1SY = _with_lengths(mask_R1SY, lengths, q_RSNH, k_RYKH)
    score_RKGSY = _scores(q_RSNH, k_RYKH, scale, causal, mask_R1SY, window)
    lse_RKGS = jax.nn.logsumexp(score_RKGSY, axis=-1)
    # A query that attends to none of these keys gets weights of 0. With weights of 1, the sum could
    # be infinite in fp16, and NaN after `merge`.
    seen_RKGS = jnp.where(lse_RKGS > LOWEST, lse_RKGS, jnp.inf)
    weight_RKGSY = jnp.exp(score_RKGSY - seen_RKGS[..., None])
    if dropped is not None:
        weight_RKGSY = dropped(weight_RKGSY)
    o_RSKGH = jnp.einsum('rkgsy,rykh->rskgh', weight_RKGSY.astype(v_RYKH.dtype), v_RYKH)
    rows, length, heads, _ = q_RSNH.shape
    o_RSNH, lse_RNS = o_RSKGH.reshape(q_RSNH.shape), lse_RKGS.reshape(rows, heads, length)
    return _of_first(o_RSNH, lse_RNS, lengths)


def _xla_backward(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    o_RSNH: jax.Array,
    lse_RNS: jax.Array,
    do_RSNH: jax.Array,
    causal: bool,
    mask_R1SY: jax.Array | None = None,
    window: int | None = None,
    *,
    lengths: Lengths | None = None,
    dropped: Dropped | None = None,
    scale: float,
) -> Three:
    groups, dtype = k_RYKH.shape[2], q_RSNH.dtype
    q_RSKGH, do_RSKGH = _grouped(scaled(q_RSNH, scale), groups), _grouped(do_RSNH, groups)
    mask_R1SY = _with_lengths(mask_R1SY, lengths, q_RSNH, k_RYKH)
    score_RKGSY = _scores(q_RSNH, k_RYKH, scale, causal, mask_R1SY, window)
    lse_RKGS = lse_RNS.reshape(score_RKGSY.shape[:-1])
    weight_RKGSY = jnp.exp(score_RKGSY - lse_RKGS[..., None])
    # The gradient of a softmax is weight * (dweight - sum of weight * dweight over the keys), and
    # the sum over all keys, not only these, is do * o.
    all_RSN = (do_RSNH.astype(jnp.float32) * o_RSNH.astype(jnp.float32)).sum(-1)
    all_RKGS = jnp.moveaxis(all_RSN, 1, -1).reshape(lse_RKGS.shape)
    dweight_RKGSY, used_RKGSY = _product('rskgh,rykh->rkgsy', do_RSKGH, v_RYKH), weight_RKGSY
    if dropped is not None:
        dweight_RKGSY, used_RKGSY = dropped(dweight_RKGSY), dropped(weight_RKGSY)
    dscore_RKGSY = (weight_RKGSY * (dweight_RKGSY - all_RKGS[..., None])).astype(dtype)
    dv_RYKH = _product('rkgsy,rskgh->rykh', used_RKGSY.astype(dtype), do_RSKGH)
    dk_RYKH = _product('rkgsy,rskgh->rykh', dscore_RKGSY, q_RSKGH)
    dq_RSKGH = _product('rkgsy,rykh->rskgh', dscore_RKGSY, k_RYKH) * scale
    dq_RSNH = dq_RSKGH.reshape(q_RSNH.shape)
    return dq_RSNH.astype(dtype), dk_RYKH.astype(dtype), dv_RYKH.astype(dtype)


def _with_lengths(
    mask_R1SY: jax.Array | None, lengths: Lengths | None, q_RSNH: jax.Array, k_RYKH: jax.Array
) -> jax.Array | None:
    if lengths is None:
        return mask_R1SY
    assert mask_R1SY is None
    is_first_RS, is_first_RY = (
        _is_first(count, x.shape[1]) for count, x in zip(lengths, (q_RSNH, k_RYKH), strict=True)
    )
    return is_first_RS[:, None, :, None] & is_first_RY[:, None, None, :]


def _scores(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    scale: float,
    causal: bool,
    mask_R1SY: jax.Array | None,
    window: int | None,
) -> jax.Array:
    q_RSKGH = _grouped(scaled(q_RSNH, scale), k_RYKH.shape[2])
    score_RKGSY = _product('rskgh,rykh->rkgsy', q_RSKGH, k_RYKH)
    if mask_R1SY is not None:
        score_RKGSY = jnp.where(mask_R1SY[:, :, None], score_RKGSY, LOWEST)
    if not causal:
        return score_RKGSY
    visible_SY = causal_mask(q_RSNH.shape[1], window)
    return jnp.where(jnp.expand_dims(visible_SY, (0, 1, 2)), score_RKGSY, LOWEST)


def causal_mask(length: int, window: int | None) -> jax.Array:
    """Return the keys [S, Y] that each query attends to: all up to itself, or the last `window`."""
    place = jnp.arange(length)
    visible_SY = place[:, None] >= place[None, :]
    if window is not None:
        visible_SY &= place[:, None] < place[None, :] + window
    return visible_SY


def same_document(document_RS: jax.Array | None) -> jax.Array | None:
    """Return the mask [R, 1, S, Y] of attention within documents, given each token's document."""
    if document_RS is None:
        return None
    return document_RS[:, None, :, None] == document_RS[:, None, None, :]


def scaled(q_RSNH: jax.Array, scale: float) -> jax.Array:
    """Return queries times a factor, in fp32: 16 bits have no number close to 128**-0.5."""
    return (q_RSNH.astype(jnp.float32) * scale).astype(q_RSNH.dtype)


def _grouped(x_RSNH: jax.Array, groups: int) -> jax.Array:
    return x_RSNH.reshape(*x_RSNH.shape[:2], groups, -1, x_RSNH.shape[-1])


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


KERNELS = {
    'cudnn': Kernel(_cudnn_forward, _cudnn_backward),
    'xla': Kernel(_xla_forward, _xla_backward),
}
