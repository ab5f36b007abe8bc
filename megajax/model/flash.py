"""cuDNN's flash attention, on the heads and rows that each GPU has.

B batch, S (and T) sequence, N query heads, K key/value heads, H head dim.
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
def flash_attention(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array | None = None) -> jax.Array:
    """Causal attention o_BSNH, inside each segment where there are some, placed as q.

    Nothing of the scores is kept, the backward pass runs the kernel again.
    """
    return _run(*_given(q_BSNH, k_BSKH, v_BSKH, segment_BS))


def _forward(*arrays: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    return _run(*_given(*arrays)), arrays


def _backward(arrays: tuple[jax.Array | None, ...], do_BSNH: jax.Array) -> tuple[jax.Array | None, ...]:
    return *_run_gradient(do_BSNH, *_given(*arrays)), None


flash_attention.defvjp(_forward, _backward)


def _given(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in arrays if x is not None)


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
def _run(*arrays: jax.Array) -> jax.Array:
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    return jax.shard_map(_cudnn, in_specs=specs, out_specs=specs[0])(*arrays)


@_over_rows
def _run_gradient(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)

    def gradient(do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *qkv: _cudnn(*qkv, *segments), q, k, v)[1](do)

    return jax.shard_map(gradient, in_specs=specs, out_specs=specs[1:4])(*arrays)


def _cudnn(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array | None = None) -> jax.Array:
    mask_B1ST = None if segment_BS is None else segment_BS[:, None, :, None] == segment_BS[:, None, None, :]
    return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, mask=mask_B1ST, is_causal=True, implementation='cudnn')
