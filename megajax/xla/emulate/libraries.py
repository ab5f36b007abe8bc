"""Library calls as jax functions, according to the documentation of the libraries."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.xla.emulate.kernels import meaning_of_kernel
from megajax.xla.emulate.shapes import Shape
from megajax.xla.hlo import mosaic
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import window_of

Arrays = tuple[jax.Array, ...]
_EPILOGUES = re.compile(r'DEFAULT|(?:BIAS)?_?(?:GELU|RELU)?(?:_AUX)?')
LOWEST = -1e30


class _Mask(NamedTuple):
    """The keys that a query reads: all keys, or all up to its own, or the last `window` of these.

    With padding, the last two operands are the numbers of queries and of keys in each sequence; the
    remaining queries and keys are padding.
    """

    causal: bool
    window: int | None = None
    is_padded: bool = False

    def lengths(self, operands: Arrays) -> tuple[Arrays, Arrays]:
        """Split the operands into the numbers of queries and keys, if present, and the rest."""
        return (operands[-2:], operands[:-2]) if self.is_padded else ((), operands)

    def __call__(self, score_BNSY: jax.Array, lengths: Arrays) -> jax.Array:
        """Return the scores, with LOWEST for masked scores."""
        queries, keys = score_BNSY.shape[2:]
        if lengths:
            of_queries, of_keys = lengths
            is_real = _is_real(of_queries, queries)[:, :, None] & _is_real(of_keys, keys)[:, None]
            score_BNSY = jnp.where(is_real[:, None], score_BNSY, LOWEST)
        if not self.causal:
            return score_BNSY
        visible = jnp.tri(queries, keys, dtype=jnp.bool)
        if self.window is not None:
            visible &= ~jnp.tri(queries, keys, -self.window, dtype=jnp.bool)
        return jnp.where(visible[None, None], score_BNSY, LOWEST)


def _is_real(count_B: jax.Array, length: int) -> jax.Array:
    return jnp.arange(length)[None] < count_B[:, None]


def meaning(attributes: str, results: Sequence[Shape]) -> Callable[..., Arrays]:
    """Return a jax function that computes a custom call from its operands.

    A workspace among the results is filled with zeros. Raises HloError for an unknown call.
    """
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    name = target[1] if target else ''
    if name in ('__cublas$gemm', '__cublas$lt$matmul'):
        return partial(_matmul, _gemm_config(attributes), results)
    if name == '__cublas$lt$matmul$f8':
        return partial(_scaled_matmul, _gemm_config(attributes), results)
    if attention := re.fullmatch(r'__cudnn\$fmha(ScaleBias)?Softmax(Backward)?', name):
        scale = re.search(r'"fmha_scale":\s*([\d.e+-]+)', attributes)
        mask = re.search(r'"mask_type":\s*"(NO_MASK|(PADDING)?_?(CAUSAL)?)"', attributes)
        if scale and mask and not re.search(r'"max_seg_per_batch":\s*"?(?!1\b)\d', attributes):
            function = _attention_backward if attention[2] else _attention
            visible = _Mask(mask[3] is not None, window_of(attributes), mask[2] is not None)
            return partial(function, float(scale[1]), visible, results)
    if name in ('TopK', '__gpu$TopK') and len(results) == 2 and results[1].dtype == 's32':
        return partial(_top_k, results)
    if kernel := mosaic.grouped(attributes):
        return meaning_of_kernel(kernel, results)
    raise HloError(f'no translation for a custom call of {name}: {attributes[:300]}')


def _top_k(results: Sequence[Shape], x: jax.Array) -> Arrays:
    """Return the largest elements along the last dim, and their indices."""
    return _as_results(lax.top_k(x, results[0].dims[-1]), results)


def _gemm_config(attributes: str) -> dict:
    text = attributes[attributes.index('backend_config=') + len('backend_config=') :]
    config = json.JSONDecoder().raw_decode(text)[0]['gemm_backend_config']
    if not _EPILOGUES.fullmatch(config['epilogue']) or config.get('alpha_imag'):
        raise HloError(f'no translation for a matmul with this configuration: {config}')
    return config


def _matmul(
    config: dict, results: Sequence[Shape], a: jax.Array, b: jax.Array, *others: jax.Array
) -> Arrays:
    """Compute cuBLASLt's alpha A B + beta C, plus the unscaled bias, then the activation.

    The bias runs along the dim that is contiguous in memory. Integers are summed as integers.
    """
    is_whole = jnp.issubdtype(results[0].abstract().dtype, jnp.integer)
    number, wide = (int, _s32) if is_whole else (float, _wide)
    if is_whole and not (float(config['alpha_real']).is_integer() and config['beta'] in (0, 1)):
        raise HloError(f'no translation for a matmul of integers with fractions: {config}')
    rest, epilogue, dims = [*others], config['epilogue'], config['dot_dimension_numbers']
    batch, contracting = (
        tuple(tuple(map(int, dims.get(f'{side}_{kind}_dimensions', ()))) for side in ('lhs', 'rhs'))
        for kind in ('batch', 'contracting')
    )
    y = number(config['alpha_real']) * lax.dot_general(
        wide(a), wide(b), ((contracting[0], contracting[1]), (batch[0], batch[1]))
    )
    if config['beta']:
        y = y + number(config['beta']) * wide(rest.pop(0))
    if 'BIAS' in epilogue:
        minor = results[0].order[-1]
        others_dims = [dim for dim in range(y.ndim) if dim != minor]
        y = y + jnp.expand_dims(wide(rest.pop(0)), others_dims)
    before_activation = y
    if 'GELU' in epilogue:
        y = jax.nn.gelu(y, approximate=True)
    elif 'RELU' in epilogue:
        y = jax.nn.relu(y)
    if rest:
        raise HloError(f'a matmul with {len(rest)} operands too many: {config}')
    outputs = [y, before_activation] if epilogue.endswith('_AUX') else [y]
    return _as_results(outputs, results)


def _scaled_matmul(
    config: dict, results: Sequence[Shape], a: jax.Array, b: jax.Array, *others: jax.Array
) -> Arrays:
    """Compute cuBLASLt's FP8 matmul; the scales of A and of B follow C."""
    if config.get('damax_output') or config.get('scale_mode', 1) != 1:
        raise HloError(f'no translation for an FP8 matmul like this: {config}')
    count = 1 if config['beta'] else 0
    c, (scale_a, scale_b, *rest) = others[:count], others[count:]
    return _matmul(config, results, scale_a * _wide(a), scale_b * _wide(b), *c, *rest)


def _attention(
    scale: float, mask: _Mask, results: Sequence[Shape],
    q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array,
) -> Arrays:  # fmt: skip
    """Compute cuDNN's attention: the output [B, N, S, H] and, for a backward pass, logsumexp.

    Operands are q [B, S, N, H], k and v [B, Y, K, H]. The output of padding is zero. The logsumexp
    of padding is NaN, because nothing may read it.
    """
    lengths, bias = mask.lengths(rest)
    s_BNSY = mask(_scores(scale, q, k, bias), lengths)
    total_BNS = jax.nn.logsumexp(s_BNSY, -1)
    weights_BNSY = jnp.exp(s_BNSY - total_BNS[..., None])
    o_BNSH = jnp.einsum('bnsy,bynh->bnsh', weights_BNSY, _per_query_head(v, q))
    if lengths:
        is_real = _is_real(lengths[0], o_BNSH.shape[2])[:, None]
        o_BNSH, total_BNS = (
            jnp.where(is_real[..., None], o_BNSH, 0),
            jnp.where(is_real, total_BNS, jnp.nan),
        )
    return _as_results([o_BNSH, total_BNS][: len(results) - 1], results)


def _attention_backward(
    scale: float, mask: _Mask, results: Sequence[Shape],
    q: jax.Array, k: jax.Array, v: jax.Array,
    total_BNS: jax.Array, do_BSNH: jax.Array, *rest: jax.Array,
) -> Arrays:  # fmt: skip
    """Compute gradients of q [B, N, S, H], k and v [B, K, Y, H], and of the bias if needed.

    The gradients of padding are zero. The bias has a gradient if there are five results.
    """
    lengths, rest = mask.lengths(rest)
    *bias, o_BSNH = rest
    if lengths:
        is_real = _is_real(lengths[0], total_BNS.shape[2])[:, None]
        total_BNS = jnp.where(is_real, total_BNS, 0)
    weights_BNSY = jnp.exp(mask(_scores(scale, q, k, bias), lengths) - total_BNS[..., None])
    dweights_BNSY = jnp.einsum('bsnh,bynh->bnsy', _wide(do_BSNH), _per_query_head(v, q))
    row_BNS = jnp.einsum('bsnh,bsnh->bns', _wide(do_BSNH), _wide(o_BSNH))
    dbias_BNSY = weights_BNSY * (dweights_BNSY - row_BNS[..., None])
    ds_BNSY = dbias_BNSY * scale
    dq = jnp.einsum('bnsy,bynh->bnsh', ds_BNSY, _per_query_head(k, q))
    dk = jnp.einsum('bnsy,bsnh->bnyh', ds_BNSY, _wide(q))
    dv = jnp.einsum('bnsy,bsnh->bnyh', weights_BNSY, _wide(do_BSNH))
    groups = k.shape[2]
    grads = [dq, *(x.reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2) for x in (dk, dv))]
    if len(results) == 5:
        broadcast = [dim for dim, size in enumerate(bias[0].shape) if size < dbias_BNSY.shape[dim]]
        grads.append(dbias_BNSY.sum(broadcast, keepdims=True))
    return _as_results(grads, results)


def _scores(
    scale: float, q_BSNH: jax.Array, k_BYKH: jax.Array, bias: Sequence[jax.Array]
) -> jax.Array:
    keys_BYNH = _per_query_head(k_BYKH, q_BSNH)
    s_BNSY = scale * jnp.einsum('bsnh,bynh->bnsy', _wide(q_BSNH), keys_BYNH)
    for term in bias:
        s_BNSY = s_BNSY + _wide(term)
    return s_BNSY


def _per_query_head(x_BYKH: jax.Array, q_BSNH: jax.Array) -> jax.Array:
    return jnp.repeat(_wide(x_BYKH), q_BSNH.shape[2] // x_BYKH.shape[2], 2)


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _s32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


def _as_results(outputs: Sequence[jax.Array], results: Sequence[Shape]) -> Arrays:
    """Return the arrays in the dtypes of the results, followed by zeros for a workspace."""
    workspaces, pairs = results[len(outputs) :], [*zip(outputs, results, strict=False)]
    if len(workspaces) > 1 or any(y.shape != r.dims for y, r in pairs):
        wanted, have = [str(r) for r in results], [f'{y.dtype}{[*y.shape]}' for y in outputs]
        raise HloError(f'a library call has results {wanted}, but its translation has {have}')
    kept = [y.astype(r.abstract().dtype) for y, r in pairs]
    return *kept, *(jnp.zeros(shape.dims, shape.abstract().dtype) for shape in workspaces)
