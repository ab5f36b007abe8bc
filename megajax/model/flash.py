"""cuDNN's flash attention, on the heads and rows that each GPU has.

B batch, S sequence, N query heads, K key/value heads, H head dim.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from megajax.parallel.layout import merged_rows, split_rows

logger = logging.getLogger(__name__)


@functools.cache
def can_flash(platform: str, dtype: str, head_dim: int) -> bool:
    """cuDNN's flash attention needs a GPU, a 16-bit dtype and a head dim of a multiple of 8 up to 128."""
    can = platform != 'cpu' and dtype in ('bfloat16', 'float16') and head_dim % 8 == 0 and head_dim <= 128
    logger.info('attention: %s (%s, %s, head dim %d)', 'cuDNN flash' if can else 'XLA', platform, dtype, head_dim)
    return can


# cuDNN's kernel knows neither Explicit axes nor a second batch dim. Batch and heads are independent, so `_run` gives each device
# its own in a shard_map, and where the train step has mapped it over data shards it takes the rows of all of them as one batch.
@jax.custom_vjp
def flash_attention(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Causal attention o_BSNH, placed as q; nothing of the scores is kept, the backward pass runs the kernel again."""
    return _run(q_BSNH, k_BSKH, v_BSKH)


def _forward(*qkv: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _run(*qkv), qkv


def _backward(qkv: tuple[jax.Array, ...], do_BSNH: jax.Array) -> tuple[jax.Array, ...]:
    return _run_gradient(*qkv, do_BSNH)


flash_attention.defvjp(_forward, _backward)


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays [batch, ...], which under `vmap` sees the rows of every mapped part in one batch."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def merge(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        assert all(batched)
        merged = (x.reshape(-1, *x.shape[2:], out_sharding=merged_rows(x)) for x in arrays)
        made = mapped(*merged)
        split = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:], out_sharding=split_rows(y)), made)
        return split, jax.tree.map(lambda _: True, made)

    return mapped


@_over_rows
def _run(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    spec = jax.typeof(q_BSNH).sharding.spec
    return jax.shard_map(_cudnn, in_specs=(spec,) * 3, out_specs=spec)(q_BSNH, k_BSKH, v_BSKH)


@_over_rows
def _run_gradient(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, do_BSNH: jax.Array) -> tuple[jax.Array, ...]:
    spec = jax.typeof(q_BSNH).sharding.spec

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(_cudnn, q, k, v)[1](do)

    return jax.shard_map(gradient, in_specs=(spec,) * 4, out_specs=(spec,) * 3)(q_BSNH, k_BSKH, v_BSKH, do_BSNH)


def _cudnn(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation='cudnn')
