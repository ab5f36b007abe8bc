"""In anybody's program, experts' weights that are gathered instead of tokens are found."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import megajax.inspect
import pytest
from jax import P, lax
from jax.sharding import AxisType, get_mesh

from megajax.core.hardware.targets import gpu_devices, has_compiler
from megajax.core.model.grouped import group, rows_by_weights
from megajax.core.parallel.mesh import mesh_of
from megajax.xla.emulate.execute import compile_for_gpu
from megajax.xla.hlo import mosaic

X, D, F = 8, 16, 32
OF_EXPERTS = P(None, 'expert')


def step(experts: Callable[..., jax.Array], of_weights: P = OF_EXPERTS) -> Any:
    """The gradient of two layers [L, ...], each device with its own tokens."""

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        add = lambda x, layer: (x + experts(x, *layer), None)  # noqa: E731
        return lax.pmean(jnp.square(lax.scan(add, x, weights)[0]).mean(), 'expert')

    specs = (of_weights, of_weights), P(None, 'expert')
    mapped = jax.shard_map(loss, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(jax.grad(mapped))


def of_rows(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(jnp.einsum('xcd,xdf->xcf', x, up))
    return jnp.einsum('xcf,xfd->xcd', hidden, down)


def weights_gathered(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    # all-gather over expert
    whole = (lax.all_gather(w, 'expert', axis=0, tiled=True) for w in (up, down))
    return of_rows(x, *whole)


def tokens_sent(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    # all-to-all over expert, there and back
    own = lax.all_to_all(x, 'expert', 0, 1, tiled=True)
    return lax.all_to_all(of_rows(own, up, down), 'expert', 1, 0, tiled=True)


def features_gathered(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    # all-gather over expert, as ZeRO-3 does over data
    whole = (lax.all_gather(w, 'expert', axis=1, tiled=True) for w in (up, down))
    return of_rows(x, *whole)


def found(experts: Callable[..., jax.Array], tokens: int, of_weights: P = OF_EXPERTS) -> Any:
    with jax.set_mesh(jax.make_mesh((8,), ('expert',), axis_types=(AxisType.Auto,))):
        shapes = [(2, X, D, F), (2, X, F, D), (X, 8 * tokens, D)]
        up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        compiled = step(experts, of_weights).lower((up, down), x).compile()
    return megajax.inspect.gathered_experts(compiled)


def test_weights_that_are_gathered_for_few_tokens_are_found_with_their_matmul() -> None:
    lines = found(weights_gathered, 2)
    for matmul, shape in (('xcd,xdf->xcf', f'{X},{D},{F}'), ('xcf,xfd->xcd', f'{X},{F},{D}')):
        [line] = [line for line in lines if f'/{matmul}/dot_general' in line]
        assert f'the weights of {X} experts are all-gathered, f32[{shape}]' in line


@pytest.mark.parametrize(
    ('experts', 'tokens', 'of_weights'),
    [
        (weights_gathered, 64, OF_EXPERTS),  # the rows have more bytes
        (tokens_sent, 2, OF_EXPERTS),
        (features_gathered, 2, P(None, None, 'expert')),
    ],
)
def test_other_programs_show_nothing(experts: Any, tokens: int, of_weights: P) -> None:
    assert found(experts, tokens, of_weights) == []


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")
def test_weights_that_are_gathered_for_a_kernel_of_experts_are_found() -> None:
    devices = gpu_devices('h100', hosts=1, per_host=4)

    def layer(x: jax.Array, w: jax.Array, expert_n: jax.Array) -> jax.Array:
        groups = group(expert_n, X, block=64)
        rows = x.at[groups.source_R].get(mode='fill', fill_value=0)
        whole = lax.all_gather(w, 'expert', axis=0, tiled=True)  # all-gather over expert
        return rows_by_weights(rows, whole, groups)

    sharded = P('expert')
    with jax.set_mesh(mesh_of(devices, {'expert': 4})):
        mapped = jax.shard_map(layer, in_specs=sharded, out_specs=sharded, check_vma=False)
        numbers = [((256, 512), jnp.bfloat16), ((X, 512, 1024), jnp.bfloat16), ((256,), jnp.int32)]
        traced = jax.jit(mapped).trace(
            *(
                jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(get_mesh(), sharded))
                for shape, dtype in numbers
            )
        )
    program = compile_for_gpu(traced, devices, {})
    assert mosaic.ROWS in program.text
    [line] = megajax.inspect.gathered_experts(program.text)
    assert f'the weights of {X} experts are all-gathered, bf16[{X},512,1024]' in line


def test_weights_that_are_gathered_for_a_ragged_dot_are_found() -> None:
    text = """HloModule f, num_partitions=4

ENTRY %main (x: bf16[64,32], w: bf16[2,32,128], n: s32[8]) -> bf16[64,128] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[2,32,128]{2,1,0} parameter(1)
  %n = s32[8]{0} parameter(2)
  %whole = bf16[8,32,128]{2,1,0} all-gather(%w), replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %r = bf16[64,128]{1,0} ragged-dot(%x, %whole, %n), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}
}
"""
    [line] = megajax.inspect.gathered_experts(text)
    assert 'the weights of 8 experts are all-gathered, bf16[8,32,128]' in line
    assert 'to multiply bf16[64,32]' in line
