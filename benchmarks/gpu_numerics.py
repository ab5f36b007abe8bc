"""How far cuDNN's attention and its gradients are from those of fp32, for `benchmarks/gpu.py`.

A CPU has no cuDNN, so the tests put another kernel in its place. Beside each error stands that of
matrix products and softmax in 16 bits, which is what rounding costs any kernel.
"""

import os
from collections.abc import Callable
from typing import Any

from gpu_step import SMALL

ROWS, LENGTH = 2, 64 if SMALL else 1024
FORMS = (
    (16, 16, 64),
    (16, 16, 96),
    (32, 8, 128),
    (8, 4, 256),
)  # heads of queries, of keys, and their size


def numerics() -> dict[str, Any]:
    """Relative errors of o and its gradients by form, of cuDNN and of XLA's products in bf16."""
    # Fifty small programs: no time is spent on which kernel of a product is the fastest.
    options = '--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {options}'.strip()
    import jax

    kernels = ('xla',) if SMALL else ('cudnn', 'xla')
    with jax.default_matmul_precision('highest'):
        found = {
            f'{form[0]}/{form[1]} heads of {form[2]}, {name}': {
                kernel: errors(way, kernel, form) for kernel in kernels
            }
            for form in FORMS
            for name, way in WAYS.items()
        }
    return {'relative errors': found}


Results = tuple[Any, ...]
Way = Callable[[Any, Any, Any, Any, Any], Results]  # (kernel, q, k, v, do) -> o, dq, dk, dv


def whole(causal: bool, masked: bool, window: int | None = None) -> Way:
    """All keys at once, or those in the window."""

    def results(kernel: Any, q: Any, k: Any, v: Any, do: Any) -> Results:
        import jax.numpy as jnp

        document = jnp.arange(LENGTH) * 3 // LENGTH
        mask = (document[:, None] == document)[None, None].repeat(len(q), 0)
        more = (mask,) if masked else ()
        o, lse = kernel.forward(q, k, v, causal, *more, window=window)
        return o, *kernel.backward(q, k, v, o, lse, do, causal, *more, window=window)

    return results


def blocks(kernel: Any, q: Any, k: Any, v: Any, do: Any) -> Results:
    """The later half of the queries, on the earlier keys and on its own, merged as context shards
    do it.
    """
    import jax.numpy as jnp

    from megajax.core.model.context import merge

    half = LENGTH // 2
    q, do = q[:, half:], do[:, half:]
    parts = [(k[:, :half], v[:, :half], False), (k[:, half:], v[:, half:], True)]
    o, lse = merge(*(kernel.forward(q, *part) for part in parts))
    o = o.astype(q.dtype)
    gradients = [kernel.backward(q, k, v, o, lse, do, causal) for k, v, causal in parts]
    dq = sum(dq.astype(jnp.float32) for dq, _, _ in gradients)
    joined = [jnp.concatenate(x, 1) for x in zip(*(x[1:] for x in gradients), strict=True)]
    return o, dq, *joined


WAYS: dict[str, Way] = {
    'causal': whole(True, False),
    'bidirectional': whole(False, False),
    'causal, segments': whole(True, True),
    'bidirectional, segments': whole(False, True),
    'causal, window': whole(True, False, LENGTH // 8),
    'causal, window, segments': whole(True, True, LENGTH // 8),
    'two blocks of keys': blocks,
}


def errors(way: Way, kernel: str, form: tuple[int, int, int]) -> dict[str, float]:
    """Of o, dq, dk and dv, beside those of products in fp32 on the same inputs."""
    import jax
    import jax.numpy as jnp

    from megajax.core.model.kernels import KERNELS

    heads, groups, size = form
    scale = size**-0.5
    shapes = [(ROWS, LENGTH, n, size) for n in (heads, groups, groups, heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    given = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    found = jax.jit(way, static_argnums=0)(KERNELS[kernel].scaled(scale), *given)
    in_full = [x.astype(jnp.float32) for x in given]
    wanted = jax.jit(way, static_argnums=0)(KERNELS['xla'].scaled(scale), *in_full)

    def relative(a: Any, b: Any) -> float:
        return float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))

    names = 'o', 'dq', 'dk', 'dv'
    return {n: relative(a, b) for n, a, b in zip(names, found, wanted, strict=True)}
