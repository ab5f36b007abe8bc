"""What an XLA for CPUs cannot say is read as what it means."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from megajax.hlo.collectives import Collective, collectives
from megajax.hlo.program import Program

DTYPES = {'f32': jnp.float32, 'bf16': jnp.bfloat16, 'f16': jnp.float16}


def product(x_spec: jax.P, w_spec: jax.P, out: jax.P, dtype: str, *, wide: bool = True, first: jax.P | None = None) -> list[Collective]:
    """Of `bsf,fd->bsd` in Explicit mode, on 2x4 devices."""
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x if first is None else jax.reshard(x, first)
        return jnp.einsum('bsf,fd->bsd', x, w, preferred_element_type=jnp.float32 if wide else None, out_sharding=out).astype(x.dtype)

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 8, 64), DTYPES[dtype], sharding=jax.NamedSharding(mesh, x_spec))
        w = jax.ShapeDtypeStruct((64, 32), DTYPES[dtype], sharding=jax.NamedSharding(mesh, w_spec))
        return collectives(Program(jax.jit(multiply).lower(x, w).compile().as_text()), dict(mesh.shape))


ROWS = jax.P('data', None, 'model'), jax.P('model', None)


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_partial_sums_are_reduced_in_the_dtype_of_the_product(dtype, wide):
    [one] = product(*ROWS, jax.P('data'), dtype, wide=wide)
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == ('all-reduce', 'model', f'{dtype}[2,8,32]', f'{dtype}[2,8,32]')
    assert 'dot_general' in one.op_name


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_partial_sums_of_which_each_device_keeps_its_part_are_reduced_and_scattered(dtype, wide):
    [one] = product(*ROWS, jax.P('data', 'model'), dtype, wide=wide)
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == ('reduce-scatter', 'model', f'{dtype}[2,8,32]', f'{dtype}[2,2,32]')
    assert one.wire_bytes == one.operand.bytes * 3 / 4


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_gather_before_a_product_is_in_the_dtype_of_its_array(dtype):
    [one] = product(jax.P('data', 'model'), jax.P(None, 'model'), jax.P('data', None, 'model'), dtype, first=jax.P('data'))
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == ('all-gather', 'model', f'{dtype}[2,2,64]', f'{dtype}[2,8,64]')


SENDS = {
    'all-reduce': lambda x: lax.psum(x, 'model'),
    'all-gather': lambda x: lax.all_gather(x, 'model'),
    'reduce-scatter': lambda x: lax.psum_scatter(x, 'model', tiled=True),
    'all-to-all': lambda x: lax.all_to_all(x, 'model', 0, 0, tiled=True),
    'collective-permute': lambda x: lax.ppermute(x, 'model', [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', SENDS)
def test_an_array_that_xla_widens_on_its_way_is_read_in_its_own_dtype(kind, dtype, read):
    [one] = read(SENDS[kind], dtype=DTYPES[dtype])
    assert (one.kind, one.operand.dtype, one.result.dtype) == (kind, dtype, dtype)


@pytest.mark.parametrize('kind', SENDS)
def test_what_an_author_sends_in_fp32_and_casts_after_it_is_in_fp32(kind, read):
    [one] = read(lambda x: SENDS[kind](jnp.sin(x)).astype(jnp.bfloat16))
    assert (one.kind, one.operand.dtype, one.result.dtype) == (kind, 'f32', 'f32')


@pytest.mark.parametrize('kind', SENDS)
def test_what_an_author_widens_before_it_is_sent_is_in_fp32(kind, read):
    [one] = read(lambda x: jnp.sin(SENDS[kind](x.astype(jnp.float32))), dtype=jnp.bfloat16)
    assert (one.kind, one.operand.dtype, one.result.dtype) == (kind, 'f32', 'f32')


def own_part(x: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, (2 * lax.axis_index('model'), 0), (2, 16))


@pytest.mark.parametrize(
    ('slice_of', 'kind'),
    [
        (lambda total, _: own_part(total), 'reduce-scatter'),
        (lambda total, x: lax.dynamic_slice(total, (x[0, 0].astype(int), 0), (2, 16)), 'all-reduce'),
        (lambda total, _: lax.dynamic_slice(total, (4 * (lax.axis_index('model') // 2), 0), (4, 16)), 'all-reduce'),
        (lambda total, _: total[2:4], 'all-reduce'),
        (lambda total, _: own_part(total) + total.sum(), 'all-reduce'),
    ],
)
def test_only_a_sum_of_which_each_device_keeps_its_own_part_is_a_reduce_scatter(slice_of, kind, read):
    [one] = read(lambda x: slice_of(lax.psum(x, 'model'), x))
    assert one.kind == kind


@pytest.mark.parametrize('is_hoisted', [False, True])
def test_a_part_is_its_own_in_a_loop_too_wherever_its_place_was_computed(is_hoisted, read):
    def loop(x: jax.Array) -> jax.Array:
        outside = 2 * lax.axis_index('model')

        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            start = outside if is_hoisted else 2 * lax.axis_index('model')
            return jnp.sin(jnp.tile(lax.dynamic_slice(lax.psum(x, 'model'), (start, 0), (2, 16)), (4, 1))), None

        return lax.scan(layer, x, None, length=3)[0]

    [one] = read(loop)
    assert (one.kind, one.times, str(one.result)) == ('reduce-scatter', 3, 'f32[2,16]')


def test_a_slice_at_a_place_that_no_device_gives_is_not_its_own_part(read):
    def loop(x: jax.Array) -> jax.Array:
        whole = lax.psum(x, 'model')
        return lax.fori_loop(0, 4, lambda i, total: total + jnp.sin(lax.dynamic_slice(whole, (2 * i, 0), (2, 16))), x[:2])

    [one] = read(loop)
    assert one.kind == 'all-reduce'


def test_of_arrays_sent_together_only_the_sliced_one_is_scattered(read):
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = lax.psum((x, x * 2), 'model')
        return own_part(second), jnp.sin(first)

    assert sorted(one.kind for one in read(both)) == ['all-reduce', 'reduce-scatter']
