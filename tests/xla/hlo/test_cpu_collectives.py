"""What an XLA for CPUs cannot say is read as what it means."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.program import Program

DTYPES = {'f32': jnp.float32, 'bf16': jnp.bfloat16, 'f16': jnp.float16}


def product(
    x_spec: jax.P,
    w_spec: jax.P,
    out: jax.P,
    dtype: str,
    *,
    wide: bool = True,
    first: jax.P | None = None,
) -> list[Collective]:
    """Of `bsf,fd->bsd` in Explicit mode, on 2x4 devices."""
    mesh = jax.make_mesh(
        (2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x if first is None else jax.reshard(x, first)
        return jnp.einsum(
            'bsf,fd->bsd',
            x,
            w,
            preferred_element_type=jnp.float32 if wide else None,
            out_sharding=out,
        ).astype(x.dtype)

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(
            (4, 8, 64), DTYPES[dtype], sharding=jax.NamedSharding(mesh, x_spec)
        )
        w = jax.ShapeDtypeStruct((64, 32), DTYPES[dtype], sharding=jax.NamedSharding(mesh, w_spec))
        return collectives(
            Program(jax.jit(multiply).lower(x, w).compile().as_text()), dict(mesh.shape)
        )


ROWS = jax.P('data', None, 'model'), jax.P('model', None)


def test_a_sum_of_fp32_numbers_stays_in_fp32_if_only_its_result_is_rounded():
    mesh = jax.make_mesh((8,), ('model',), axis_types=(jax.sharding.AxisType.Explicit,))

    def rounded(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.einsum('bf,fd->bd', x, w, out_sharding=jax.P())
        return y.astype(jnp.bfloat16), x.sum(1).astype(jnp.bfloat16)

    with jax.set_mesh(mesh):
        x, w = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
            for shape, spec in (((16, 32), jax.P(None, 'model')), ((32, 64), jax.P('model')))
        )
        program = Program(jax.jit(rounded).lower(x, w).compile().as_text())
    found = collectives(program, dict(mesh.shape))
    assert {str(one.operand) for one in found} == {'f32[16,64]', 'f32[16]'}


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_partial_sums_are_reduced_in_the_dtype_of_the_product(dtype, wide):
    [one] = product(*ROWS, jax.P('data'), dtype, wide=wide)
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == (
        'all-reduce',
        'model',
        f'{dtype}[2,8,32]',
        f'{dtype}[2,8,32]',
    )
    assert 'dot_general' in one.op_name


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_partial_sums_of_which_each_device_keeps_its_part_are_reduced_and_scattered(dtype, wide):
    [one] = product(*ROWS, jax.P('data', 'model'), dtype, wide=wide)
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == (
        'reduce-scatter',
        'model',
        f'{dtype}[2,8,32]',
        f'{dtype}[2,2,32]',
    )
    assert one.wire_bytes == one.operand.bytes * 3 / 4


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_gather_before_a_product_is_in_the_dtype_of_its_array(dtype):
    [one] = product(
        jax.P('data', 'model'),
        jax.P(None, 'model'),
        jax.P('data', None, 'model'),
        dtype,
        first=jax.P('data'),
    )
    assert (one.kind, one.axis, str(one.operand), str(one.result)) == (
        'all-gather',
        'model',
        f'{dtype}[2,2,64]',
        f'{dtype}[2,8,64]',
    )


SENDS = {
    'all-reduce': lambda x: lax.psum(x, 'model'),
    'all-gather': lambda x: lax.all_gather(x, 'model'),
    'reduce-scatter': lambda x: lax.psum_scatter(x, 'model', tiled=True),
    'all-to-all': lambda x: lax.all_to_all(x, 'model', 0, 0, tiled=True),
    'collective-permute': lambda x: lax.ppermute(x, 'model', [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize('kind', ['all-gather', 'all-to-all', 'collective-permute'])
def test_fp8_that_xla_widens_to_fp16_on_its_way_is_read_as_fp8(kind, read):
    [one] = read(SENDS[kind], dtype=jnp.float8_e4m3fn)
    assert (one.kind, one.operand.dtype, one.result.dtype) == (kind, 'f8e4m3fn', 'f8e4m3fn')


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


def other_half(x: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, (4 * (1 - lax.axis_index('data')), 0), (4, 16))


def own_half(x: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, (4 * lax.axis_index('data'), 0), (4, 16))


@pytest.mark.parametrize(
    'program',
    [
        lambda x: own_part(lax.psum(x, 'model')),
        lambda x: own_half(lax.psum(x, 'model')),
        lambda x: own_half(lax.psum(x, 'data')) + other_half(lax.psum(x, 'data')),
        lambda x: lax.psum(x.sum(0)[:4], 'model'),  # as many numbers as devices
        lambda x: lax.psum(x, 'model')[2:4],
        lambda x: own_part(lax.psum(x, 'model')) + lax.psum(x, 'model').sum(),
        lambda x: tuple(map(own_part, lax.psum((x, 2 * x), 'model'))),
    ],
)
def test_a_sum_that_the_author_wrote_is_an_all_reduce_whatever_is_taken_of_it(program, read):
    assert {one.kind for one in read(lambda x: jnp.stack(jax.tree.leaves(program(x))))} == {
        'all-reduce'
    }


def test_a_sum_over_data_of_as_many_numbers_as_devices_is_an_all_reduce(read):
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data')))
    text = (
        jax.jit(lambda x: x.sum(0), out_shardings=jax.NamedSharding(mesh, jax.P()))
        .lower(x)
        .compile()
        .as_text()
    )
    assert [(one.kind, one.axis) for one in collectives(Program(text), dict(mesh.shape))] == [
        ('all-reduce', 'data')
    ]


def sliced(offset: str, size: int = 2, *, lines: str = '', more: str = '') -> str:
    """The kind of a sum over `model` of f32[8,16] of which a slice is taken at an offset, on 2x4
    devices.
    """
    text = f"""
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (p: f32[8,16], n: s32[]) -> f32[{size},16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %total = f32[8,16]{{1,0}} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add, \
metadata={{op_name="jit(f)/dot_general"}}
  %zero = s32[] constant(0)
  %device = u32[] partition-id()
  {lines}
  %start = {offset}
  %part = f32[{size},16]{{1,0}} dynamic-slice(%total, %start, %zero), \
dynamic_slice_sizes={{{size},16}}
  {more}
  ROOT %result = f32[{size},16]{{1,0}} negate(%part)
}}
"""
    [one] = collectives(Program(text), {'data': 2, 'model': 4})
    assert one.result.shape == ((size, 16) if one.kind == 'reduce-scatter' else (8, 16))
    return one.kind


TABLE = (
    '%table = s32[8]{0} constant({0, 2, 4, 6, 0, 2, 4, 6})\n'
    '  %one = s32[1]{0} dynamic-slice(%table, %device), dynamic_slice_sizes={1}'
)
PLACE = """%four = u32[] constant(4)
  %place = u32[] remainder(%device, %four)
  %signed = s32[] convert(%place)
  %two = s32[] constant(2)
  %minus = s32[] constant(-6)"""


@pytest.mark.parametrize(
    ('lines', 'offset', 'kind'),
    [
        (TABLE, 's32[] reshape(%one)', 'reduce-scatter'),
        (
            TABLE.replace('2, 4, 6}', '2, 4, 9}'),
            's32[] reshape(%one)',
            'reduce-scatter',
        ),  # moved inside
        (TABLE.replace('4, 6}', '6, 4}'), 's32[] reshape(%one)', 'all-reduce'),  # in another order
        (TABLE.replace('0, 2, 4, 6, 0', '0, 0, 4, 6, 0'), 's32[] reshape(%one)', 'all-reduce'),
        (
            TABLE.replace('0, 2, 4, 6, 0, 2, 4, 6', '...'),
            's32[] reshape(%one)',
            'all-reduce',
        ),  # not in the text
        (PLACE, 's32[] multiply(%signed, %two)', 'reduce-scatter'),
        (
            PLACE,
            's32[] shift-left(%signed, %minus)',
            'all-reduce',
        ),  # by a number of bits that there is not
        (
            PLACE + '\n  %from_end = s32[] multiply(%signed, %two)',
            's32[] subtract(%two, %from_end)',
            'all-reduce',
        ),
        (
            PLACE + '\n  %all = s32[] convert(%device)',
            's32[] multiply(%all, %two)',
            'all-reduce',
        ),  # by both axes
        ('', 's32[] copy(%n)', 'all-reduce'),
        ('', 's32[] constant(2)', 'all-reduce'),
    ],
)
def test_a_part_is_a_devices_own_by_the_offsets_that_the_devices_compute(lines, offset, kind):
    assert sliced(offset, lines=lines) == kind


def test_a_part_of_another_size_or_beside_another_is_not_the_devices_own():
    assert sliced('s32[] multiply(%signed, %two)', 1, lines=PLACE) == 'all-reduce'
    both = (
        '%again = f32[2,16]{1,0} dynamic-slice(%total, %start, %zero), dynamic_slice_sizes={2,16}'
    )
    assert sliced('s32[] multiply(%signed, %two)', lines=PLACE, more=both) == 'reduce-scatter'
    other = both.replace('%start', '%n')
    assert sliced('s32[] multiply(%signed, %two)', lines=PLACE, more=other) == 'all-reduce'


def layers(out: jax.P, count: int = 3) -> list[Collective]:
    """Of a loop whose step ends in partial sums that lie by `out`, on 2x4 devices."""
    mesh = jax.make_mesh(
        (2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = jnp.sin(
            jnp.einsum(
                'bsf,fd->bsd', jax.reshard(x, jax.P('data', None, 'model')), w, out_sharding=out
            )
        )
        return jax.reshard(y, jax.P('data', None, 'model')), None

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(
            (4, 8, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', None, 'model'))
        )
        w = jax.ShapeDtypeStruct(
            (count, 64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, 'model'))
        )
        text = jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[0]).lower(x, w).compile().as_text()
    return [one for one in collectives(Program(text), dict(mesh.shape)) if one.kind != 'all-to-all']


@pytest.mark.parametrize(
    ('out', 'kind', 'result'),
    [
        (jax.P('data', 'model'), 'reduce-scatter', 'f32[2,2,64]'),
        (jax.P('data', None, 'model'), 'reduce-scatter', 'f32[2,8,16]'),
    ],
)
def test_a_part_is_its_own_in_a_loop_too(out, kind, result):
    [one] = layers(out)
    assert (one.kind, one.axis, one.times, str(one.result)) == (kind, 'model', 3, result)


def test_a_slice_at_a_place_that_no_device_gives_is_not_its_own_part(read):
    def loop(x: jax.Array) -> jax.Array:
        whole = lax.psum(x, 'model')
        return lax.fori_loop(
            0,
            4,
            lambda i, total: total + jnp.sin(lax.dynamic_slice(whole, (2 * i, 0), (2, 16))),
            x[:2],
        )

    [one] = read(loop)
    assert one.kind == 'all-reduce'
