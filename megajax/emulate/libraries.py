"""Calls of cuBLAS, cuDNN and top-k as functions of jax: what the libraries document that they compute.

B batch, S (and T) sequence, N query heads, K key/value heads, H head dim.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.emulate.shapes import Shape
from megajax.hlo.program import HloError

Arrays = tuple[jax.Array, ...]
_EPILOGUES = re.compile(r'DEFAULT|(?:BIAS)?_?(?:GELU|RELU)?(?:_AUX)?')
LOWEST = -1e30


def meaning(attributes: str, results: Sequence[Shape]) -> Callable[..., Arrays]:
    """The function of its operands that a custom call computes; a workspace among the results is zeros.

    Raises HloError for a call whose meaning is not known.
    """
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    name = target[1] if target else ''
    if name in ('__cublas$gemm', '__cublas$lt$matmul'):
        return partial(_matmul, _gemm_config(attributes), results)
    if found := re.fullmatch(r'__cudnn\$fmha(ScaleBias)?Softmax(Backward)?', name):
        scale = re.search(r'"fmha_scale":\s*([\d.e+-]+)', attributes)
        mask = re.search(r'"mask_type":\s*"(CAUSAL|NO_MASK)"', attributes)
        if scale and mask:
            function = _attention_backward if found[2] else _attention
            return partial(function, float(scale[1]), mask[1] == 'CAUSAL', results)
    if name in ('TopK', '__gpu$TopK') and len(results) == 2 and results[1].dtype == 's32':
        return partial(_top_k, results)
    raise HloError(f'no translation for a custom call of {name}: {attributes[:300]}')


def _top_k(results: Sequence[Shape], x: jax.Array) -> Arrays:
    """The largest along the last dim, and where they are."""
    return _as_results(lax.top_k(x, results[0].dims[-1]), results)


def _gemm_config(attributes: str) -> dict:
    text = attributes[attributes.index('backend_config=') + len('backend_config=') :]
    config = json.JSONDecoder().raw_decode(text)[0]['gemm_backend_config']
    if not _EPILOGUES.fullmatch(config['epilogue']) or config.get('alpha_imag'):
        raise HloError(f'no translation for a product with this configuration: {config}')
    return config


def _matmul(
    config: dict, results: Sequence[Shape], a: jax.Array, b: jax.Array, *others: jax.Array
) -> Arrays:
    """cuBLASLt's alpha A B + beta C, then the vector bias, which is not scaled, then the activation.

    The bias lies along the dim that is contiguous in memory.
    """
    rest, epilogue, dims = [*others], config['epilogue'], config['dot_dimension_numbers']
    batch, contracting = (
        tuple(tuple(map(int, dims.get(f'{side}_{kind}_dimensions', ()))) for side in ('lhs', 'rhs'))
        for kind in ('batch', 'contracting')
    )
    y = config['alpha_real'] * lax.dot_general(
        _wide(a), _wide(b), ((contracting[0], contracting[1]), (batch[0], batch[1]))
    )
    if config['beta']:
        y = y + config['beta'] * _wide(rest.pop(0))
    if 'BIAS' in epilogue:
        minor = results[0].order[-1]
        others_dims = [dim for dim in range(y.ndim) if dim != minor]
        y = y + jnp.expand_dims(_wide(rest.pop(0)), others_dims)
    before_activation = y
    if 'GELU' in epilogue:
        y = jax.nn.gelu(y, approximate=True)
    elif 'RELU' in epilogue:
        y = jax.nn.relu(y)
    if rest:
        raise HloError(f'a product with {len(rest)} operands too many: {config}')
    made = [y, before_activation] if epilogue.endswith('_AUX') else [y]
    return _as_results(made, results)


def _attention(
    scale: float, causal: bool, results: Sequence[Shape],
    q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array,
) -> Arrays:  # fmt: skip
    """Operands [B, S, N or K, H]; results o [B, N, S, H] and, where a backward pass needs it, logsumexp."""
    s_BNST = _scores(scale, causal, q, k, bias)
    total_BNS = jax.nn.logsumexp(s_BNST, -1)
    weights_BNST = jnp.exp(s_BNST - total_BNS[..., None])
    o_BNSH = jnp.einsum('bnst,btnh->bnsh', weights_BNST, _per_query_head(v, q))
    return _as_results([o_BNSH, total_BNS][: len(results) - 1], results)


def _attention_backward(
    scale: float, causal: bool, results: Sequence[Shape],
    q: jax.Array, k: jax.Array, v: jax.Array, total_BNS: jax.Array, do_BSNH: jax.Array, *rest: jax.Array,
) -> Arrays:  # fmt: skip
    """Gradients of q, k and v [B, N or K, S, H] and, where five results are asked for, of the bias."""
    *bias, o_BSNH = rest
    weights_BNST = jnp.exp(_scores(scale, causal, q, k, bias) - total_BNS[..., None])
    dweights_BNST = jnp.einsum('bsnh,btnh->bnst', _wide(do_BSNH), _per_query_head(v, q))
    row_BNS = jnp.einsum('bsnh,bsnh->bns', _wide(do_BSNH), _wide(o_BSNH))
    dbias_BNST = weights_BNST * (dweights_BNST - row_BNS[..., None])
    ds_BNST = dbias_BNST * scale
    dq = jnp.einsum('bnst,btnh->bnsh', ds_BNST, _per_query_head(k, q))
    dk = jnp.einsum('bnst,bsnh->bnth', ds_BNST, _wide(q))
    dv = jnp.einsum('bnst,bsnh->bnth', weights_BNST, _wide(do_BSNH))
    groups = k.shape[2]
    made = [dq, *(x.reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2) for x in (dk, dv))]
    if len(results) == 5:
        broadcast = [dim for dim, size in enumerate(bias[0].shape) if size < dbias_BNST.shape[dim]]
        made.append(dbias_BNST.sum(broadcast, keepdims=True))
    return _as_results(made, results)


def _scores(
    scale: float, causal: bool, q_BSNH: jax.Array, k_BTKH: jax.Array, bias: Sequence[jax.Array]
) -> jax.Array:
    keys_BTNH = _per_query_head(k_BTKH, q_BSNH)
    s_BNST = scale * jnp.einsum('bsnh,btnh->bnst', _wide(q_BSNH), keys_BTNH)
    for one in bias:
        s_BNST = s_BNST + _wide(one)
    if not causal:
        return s_BNST
    return jnp.where(
        jnp.tri(s_BNST.shape[2], s_BNST.shape[3], dtype=jnp.bool)[None, None], s_BNST, LOWEST
    )


def _per_query_head(x_BTKH: jax.Array, q_BSNH: jax.Array) -> jax.Array:
    return jnp.repeat(_wide(x_BTKH), q_BSNH.shape[2] // x_BTKH.shape[2], 2)


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _as_results(made: Sequence[jax.Array], results: Sequence[Shape]) -> Arrays:
    """The arrays in the dtypes of the results, and zeros for the workspace that may follow."""
    workspaces = results[len(made) :]
    if len(workspaces) > 1 or any(y.shape != r.dims for y, r in zip(made, results, strict=False)):
        wanted, have = [str(r) for r in results], [f'{y.dtype}{[*y.shape]}' for y in made]
        raise HloError(f'a library call has results {wanted}, and its meaning {have}')
    kept = [y.astype(r.abstract().dtype) for y, r in zip(made, results, strict=False)]
    return *kept, *(jnp.zeros(one.dims, one.abstract().dtype) for one in workspaces)
