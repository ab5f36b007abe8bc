"""JAX's Mosaic attention compared with cuDNN's, for `benchmarks/gpu.py`, on Hopper GPUs.

`jax.experimental.pallas.ops.gpu.attention_mgpu` takes heads of a multiple of 64. Its backward pass
has no causal mask and keeps fp16 in shared memory (jax 0.10.2 and 0.12.0), so it is timed without a
mask and in fp16, for both kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

from gpu_step import SMALL, timed

ROWS, LENGTH, HEADS = 8, 1024, 16
SIZES = 64, 96, 128  # of a head
BLOCKS = 256, 128, 64  # keys at once


def mosaic() -> dict[str, Any]:
    """TFLOP/s of each kernel by the size of a head, or why a kernel does not run."""
    import jax

    kind = jax.devices()[0].device_kind
    if not any(name in kind for name in ('H100', 'H200', 'H800')):
        return {'skipped': f'Mosaic attention is written for Hopper GPUs, and this is a {kind}'}
    return {
        'tflops': {
            f'heads of {size}, {name}': {
                kernel: attempt(functools.partial(measure, kernel, size))
                for kernel, measure in kernels.items()
            }
            for size in SIZES
            for name, kernels in WAYS.items()
        }
    }


def attempt(measure: Callable[[], float]) -> float | str:
    """Return what was measured, or the first line of what the kernel raised."""
    try:
        return round(measure(), 1)
    except Exception as error:  # of a kernel that does not take this form
        return f'{type(error).__name__}: {error}'.splitlines()[0][:200]


def inputs(size: int, dtype: Any) -> Any:
    import jax

    shape = ROWS, 64 if SMALL else LENGTH, HEADS, size
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 3)]


def rate(function: Callable[..., Any], arrays: Any, matmuls: float) -> float:
    """TFLOP/s of a function that multiplies `matmuls` times Q by K's size."""
    import jax

    rows, length, heads, size = arrays[0].shape
    compiled = jax.jit(function)
    median = timed(lambda: jax.block_until_ready(compiled(*arrays)))['median_ms']
    return float(matmuls * 2 * rows * heads * length**2 * size / median / 1e9)


def cudnn(*, causal: bool) -> Callable[..., Any]:
    import jax

    return functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation='xla' if SMALL else 'cudnn'
    )


def mosaic_attention(*, causal: bool, block: int) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=block,
        max_concurrent_steps=2,
        causal=causal,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    return functools.partial(attention_mgpu.attention, config=config)


def gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    return jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), (0, 1, 2))


def cudnn_forward(size: int) -> float:
    return rate(cudnn(causal=True), inputs(size, 'bfloat16'), 1)


def cudnn_both(size: int) -> float:
    return rate(gradient(cudnn(causal=False)), inputs(size, 'float16'), 7)


def mosaic_forward(size: int) -> float:
    return fastest(size, lambda attend: rate(attend, inputs(size, 'bfloat16'), 1), causal=True)


def mosaic_both(size: int) -> float:
    arrays = inputs(size, 'float16')
    return fastest(size, lambda attend: rate(gradient(attend), arrays, 7), causal=False)


def fastest(size: int, measure: Callable[[Any], float], *, causal: bool) -> float:
    """Return the best rate of the blocks that shared memory holds."""
    found, last = list[float](), ValueError(f'no block of {BLOCKS} keys')
    for block in BLOCKS:
        try:
            found.append(measure(mosaic_attention(causal=causal, block=block)))
        except ValueError as error:  # more shared memory than there is, or a size it does not take
            last = error
    if not found:
        raise last
    return max(found)


# The causal forward pass multiplies twice on half of the scores; both passes without a mask seven
# times on all.
WAYS: dict[str, dict[str, Callable[[int], float]]] = {
    'forward, causal, bf16': {'cudnn': cudnn_forward, 'mosaic': mosaic_forward},
    'both, no mask, fp16': {'cudnn': cudnn_both, 'mosaic': mosaic_both},
}
