"""Why QKV is fused: three products of one input reduce three input gradients, where Megatron
reduces one.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import slow

from megajax.core.hardware.targets import gpu_devices, has_compiler
from megajax.core.parallel.mesh import axis_sizes, make_mesh, mesh_of
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

B, S, D, N, H = 8, 64, 256, 8, 32


@pytest.fixture(params=['cpu', slow('h100')])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != 'cpu' and not has_compiler():
        pytest.skip("needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'")
    # The pass in question is one of those that conftest.py turns off.
    disabled = jax.config.values['jax_disable_most_optimizations']
    jax.config.update('jax_disable_most_optimizations', False)
    yield request.param
    jax.config.update('jax_disable_most_optimizations', disabled)


def attend(
    q_BSNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, out_NHD: jax.Array
) -> jax.Array:
    weight_BNST = jax.nn.softmax(jnp.einsum('bsnh,btnh->bnst', q_BSNH, k_BSNH), axis=-1)
    o_BSNH = jnp.einsum('bnst,btnh->bsnh', weight_BNST, v_BSNH)
    return jnp.einsum('bsnh,nhd->bsd', o_BSNH, out_NHD, out_sharding=P('data', None, None))


def fused(x_BSD: jax.Array, qkv_DNCH: jax.Array, out_NHD: jax.Array) -> jax.Array:
    qkv_BSNCH = jnp.einsum('bsd,dnch->bsnch', x_BSD, qkv_DNCH)
    return attend(*(qkv_BSNCH[:, :, :, i] for i in range(3)), out_NHD)


def separate(
    x_BSD: jax.Array, q_DNH: jax.Array, k_DNH: jax.Array, v_DNH: jax.Array, out_NHD: jax.Array
) -> jax.Array:
    return attend(
        *(jnp.einsum('bsd,dnh->bsnh', x_BSD, w_DNH) for w_DNH in (q_DNH, k_DNH, v_DNH)), out_NHD
    )


def separate_after_f(x_BSD: jax.Array, *weights: jax.Array) -> jax.Array:
    return separate(jax.reshard(x_BSD, P('data', None, None, reduced={'model'})), *weights)


def separate_in_fp32(
    x_BSD: jax.Array, q_DNH: jax.Array, k_DNH: jax.Array, v_DNH: jax.Array, out_NHD: jax.Array
) -> jax.Array:
    def product(w_DNH: jax.Array) -> jax.Array:
        return jnp.einsum('bsd,dnh->bsnh', x_BSD, w_DNH, preferred_element_type=jnp.float32).astype(
            x_BSD.dtype
        )

    return attend(product(q_DNH), product(k_DNH), product(v_DNH), out_NHD)


def test_fused_the_input_gradient_is_reduced_once(target: str) -> None:
    assert reduced_backward(fused, target) == 1


@pytest.mark.slow
def test_separate_products_reduce_once_after_f(target: str) -> None:
    assert reduced_backward(separate_after_f, target) == 1


@pytest.mark.slow
def test_separate_products_reduce_three_times_unless_the_compiler_adds_them_first(
    target: str,
) -> None:
    """XLA for GPUs has a pass that does."""
    assert reduced_backward(separate, target) == (3 if target == 'cpu' else 1)


@pytest.mark.slow
def test_a_cast_keeps_the_compiler_from_adding_them_first(target: str) -> None:
    """Three times, and on GPUs in fp32."""
    assert reduced_backward(separate_in_fp32, target) == (3 if target == 'cpu' else 6)


def reduced_backward(function: Callable[..., jax.Array], target: str) -> float:
    """What the backward pass reduces over `model`, in activations in bf16."""
    mesh = (
        mesh_of(gpu_devices('h100', hosts=1, per_host=8), axis_sizes(2, 4))
        if target == 'h100'
        else make_mesh(2, 4)
    )

    def abstract(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.square(function(*args).astype(jnp.float32)).sum()

    weights = [abstract((D, N, H), None, 'model', None)] * 3
    if function is fused:
        weights = [abstract((D, N, 3, H), None, 'model', None, None)]
    args = (
        abstract((B, S, D), 'data', None, None),
        *weights,
        abstract((N, H, D), 'model', None, None),
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, argnums=range(len(args)))).lower(*args)
        text = lowered.compile(
            {'xla_gpu_autotune_level': '0'} if target == 'h100' else {}
        ).as_text()
    assert text is not None
    sent = [one for one in collectives(Program(text), dict(mesh.shape)) if one.axis == 'model']
    assert {one.kind for one in sent} == {'all-reduce'}
    return sum(one.operand.bytes for one in sent) / (B // 2 * S * D * 2) - 1  # g, forward
