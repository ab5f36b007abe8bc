"""cuDNN's flash attention, on the heads and rows that each GPU has."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import P

from megajax.counts.flops import fits_flash

logger = logging.getLogger(__name__)


@functools.cache
def can_flash(platform: str, dtype: str, head_dim: int) -> bool:
    """Whether cuDNN's flash attention runs on a device with this dtype and head dim.

    The platform of an NVIDIA GPU is 'gpu'; other GPUs have another name here.
    """
    can = platform == 'gpu' and fits_flash(dtype, head_dim)
    logger.info(
        'attention: %s (%s, %s, head dim %d)',
        'cuDNN flash' if can else 'XLA',
        platform,
        dtype,
        head_dim,
    )
    return can


# cuDNN's kernel supports neither Explicit axes nor a second batch dim. Batch and heads are
# independent, so `_kernels` gives each device its own in a shard_map; where the train step maps it
# over data shards, it merges the rows of all data shards into one batch.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    causal: bool = True,
) -> jax.Array:
    """Attention o_RSNH, causal or bidirectional, placed as q; within segments if they are given.

    No scores are saved: the backward pass runs the kernel again.
    """
    return _kernels(causal)[0](*_given(q_RSNH, k_RSKH, v_RSKH, segment_RS))


def _forward(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    causal: bool,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    arrays = q_RSNH, k_RSKH, v_RSKH, segment_RS
    return _kernels(causal)[0](*_given(*arrays)), arrays


def _backward(
    causal: bool, arrays: tuple[jax.Array | None, ...], do_RSNH: jax.Array
) -> tuple[jax.Array | None, ...]:
    return *_kernels(causal)[1](do_RSNH, *_given(*arrays)), None


flash_attention.defvjp(_forward, _backward)


def _merged_rows(x: jax.Array) -> P:
    """The placement of [data shard, row, ...] after a reshape to [row of all shards, ...]."""
    shards, rows, *rest = jax.typeof(x).sharding.spec
    return P((*_axes(shards), *_axes(rows)) or None, *rest)


def _split_rows(y: jax.Array, x: jax.Array) -> P:
    """The placement of y after a reshape to [data shard, row, ...], the first two dims of x."""
    shards, rows, *_ = jax.typeof(x).sharding.spec
    return P(shards, rows, *jax.typeof(y).sharding.spec[1:])


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _given(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in arrays if x is not None)


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` of arrays [batch, ...] merge the rows of all mapped parts under `vmap`."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def merge(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        assert all(batched)
        merged = (x.reshape(-1, *x.shape[2:], out_sharding=_merged_rows(x)) for x in arrays)
        result = mapped(*merged)
        split = jax.tree.map(
            lambda y: y.reshape(size, -1, *y.shape[1:], out_sharding=_split_rows(y, arrays[0])),
            result,
        )
        return split, jax.tree.map(lambda _: True, result)

    return mapped


@functools.cache
def _kernels(causal: bool) -> tuple[Callable[..., jax.Array], Callable[..., tuple[jax.Array, ...]]]:
    """Attention of (q, k, v[, segments]) and its gradients of (do, q, k, v[, segments])."""
    core = functools.partial(_cudnn, causal=causal)

    @_over_rows
    def run(*arrays: jax.Array) -> jax.Array:
        specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
        return jax.shard_map(core, in_specs=specs, out_specs=specs[0])(*arrays)

    @_over_rows
    def run_gradient(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        specs = tuple(jax.typeof(x).sharding.spec for x in arrays)

        def gradient(
            do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array
        ) -> tuple[jax.Array, ...]:
            return jax.vjp(lambda *qkv: core(*qkv, *segments), q, k, v)[1](do)

        return jax.shard_map(gradient, in_specs=specs, out_specs=specs[1:4])(*arrays)

    return run, run_gradient


def _cudnn(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    *,
    causal: bool,
) -> jax.Array:
    mask_R1SY = (
        None if segment_RS is None else segment_RS[:, None, :, None] == segment_RS[:, None, None, :]
    )
    return jax.nn.dot_product_attention(
        q_RSNH, k_RSKH, v_RSKH, mask=mask_R1SY, is_causal=causal, implementation='cudnn'
    )
