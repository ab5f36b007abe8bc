import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
from inspect_collectives import arguments_of_mlp
from jax.sharding import AxisType

import megajax
from megajax.analysis.inspect import assert_collectives, gathered_experts, known_miscompiles

EXPLICIT = (AxisType.Explicit,) * 2


@pytest.fixture(name='mesh')
def on_mesh():
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        yield mesh


@jax.jit
def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum('bd,df->bf', x, up, out_sharding=jax.P('data', 'model')))
    with jax.named_scope('down'):
        return jnp.einsum('bf,fd->bd', hidden, down, out_sharding=jax.P('data', None))


def test_the_right_count_passes_for_shapes_and_for_arrays(mesh):
    shapes = arguments_of_mlp(mesh)
    assert_collectives(mlp, *shapes, model={'all-reduce': 1})
    arrays = [jax.device_put(jnp.ones(one.shape), one.sharding) for one in shapes]
    assert_collectives(mlp, *arrays, model={'all-reduce': 1}, data={})


@pytest.mark.parametrize(
    'expected',
    [
        {},
        {'all-reduce': 2},
        {'all-reduce': 0},
        {'all-gather': 1},
        {'all-reduce': 1, 'all-gather': 1},
    ],
)
def test_a_wrong_count_fails_and_shows_what_was_expected_and_what_is_there(mesh, expected):
    with pytest.raises(AssertionError) as raised:
        assert_collectives(mlp, *arguments_of_mlp(mesh), model=expected)
    message = str(raised.value)
    assert f"over model: expected {expected or 'none'}, found {{'all-reduce': 1}}" in message
    assert re.search(
        r'1 x all-reduce over model of f32\[4,16\] at \S*down/\S+dot_general '
        r'\(\S*test_check.py:\d+',
        message,
    )


def gradients(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.grad(lambda up, down: mlp(x, up, down).sum(), argnums=(0, 1))(up, down)


def test_an_axis_that_is_not_named_has_none(mesh):
    step = jax.jit(gradients)
    assert_collectives(step, *arguments_of_mlp(mesh), data={'all-reduce': 2})
    with pytest.raises(AssertionError, match=r"over data: expected none, found {'all-reduce': 2}"):
        assert_collectives(step, *arguments_of_mlp(mesh))
    with pytest.raises(AssertionError, match=r"over model: expected {'all-reduce': 1}, found none"):
        assert_collectives(
            step, *arguments_of_mlp(mesh), data={'all-reduce': 2}, model={'all-reduce': 1}
        )


@pytest.mark.parametrize('axis', ['tensor', 'data_and_tensor', 'data+model', 'model_and'])
def test_an_axis_that_the_mesh_does_not_have_is_an_error_before_anything_compiles(mesh, axis):
    with pytest.raises(ValueError, match=r'no mesh axis .*: the mesh has data, model'):
        assert_collectives(None, *arguments_of_mlp(mesh), **{axis: {'all-reduce': 1}})


def test_a_kind_that_there_is_not_is_an_error_before_anything_compiles(mesh):
    with pytest.raises(
        ValueError, match='no kind of collective all_reduce: choose among all-reduce, all-gather'
    ):
        assert_collectives(None, *arguments_of_mlp(mesh), model={'all_reduce': 0})


def mapped(function, **options):
    return jax.jit(
        jax.shard_map(
            function,
            in_specs=jax.P('data', 'model'),
            out_specs=jax.P('data', 'model'),
            check_vma=False,
            **options,
        )
    )


@pytest.mark.parametrize('keyword', ['data_and_model', 'model_and_data'])
def test_axes_are_joined_in_either_order(mesh, keyword):
    x = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model'))
    )
    function = mapped(lambda x: jax.lax.psum(x, ('data', 'model')))
    assert_collectives(function, x, **{keyword: {'all-reduce': 1}})
    with pytest.raises(
        AssertionError, match=r"over data\+model: expected none, found {'all-reduce': 1}"
    ):
        assert_collectives(function, x, data={'all-reduce': 1})


def test_loops_multiply_and_single_numbers_are_not_counted(mesh):
    def loop(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, 'model')), None), x, None, length=5)[
            0
        ]
        return x * jax.lax.psum(x.sum(), 'data')

    x = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model'))
    )
    assert_collectives(mapped(loop), x, model={'all-reduce': 5})


def sharded(*spec: str | None) -> jax.ShapeDtypeStruct:
    """f32[8,16] on the current mesh."""
    return jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=jax.NamedSharding(jax.sharding.get_mesh(), jax.P(*spec))
    )


def test_a_loop_of_unknown_length_is_an_error_with_its_place_or_takes_a_trip_count(mesh):
    def loop(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0, n[0, 0].astype(int), lambda _, x: jnp.sin(jax.lax.psum(x, 'model')), x
        )

    function = jax.jit(
        jax.shard_map(
            loop,
            in_specs=(jax.P('data', 'model'),) * 2,
            out_specs=jax.P('data', 'model'),
            check_vma=False,
        )
    )
    arguments = sharded('data', 'model'), sharded('data', 'model')
    with pytest.raises(ValueError, match=r'give a trip_count, .*while at .*test_check.py:\d+'):
        assert_collectives(function, *arguments, model={'all-reduce': 6})
    assert_collectives(function, *arguments, trip_count=6, model={'all-reduce': 6})
    with pytest.raises(AssertionError, match=r"found {'all-reduce': 5}"):
        assert_collectives(function, *arguments, trip_count=5, model={'all-reduce': 6})


@pytest.mark.parametrize('trip_count', [-1, True, 2.5])
def test_a_trip_count_that_cannot_be_is_an_error_before_anything_compiles(mesh, trip_count):
    with pytest.raises(ValueError, match=rf'trip_count={trip_count}: give the number of steps'):
        assert_collectives(None, *arguments_of_mlp(mesh), trip_count=trip_count)


def test_a_branch_that_hangs_on_data_says_at_most(mesh):
    def branch(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, 'model'), jnp.sin, x)

    with pytest.raises(AssertionError, match=r'at most 1 x all-reduce over model of f32\[4,4\]'):
        assert_collectives(mapped(branch), sharded('data', 'model'))


class Filtered:
    """What equinox.filter_jit makes: `.lower` and `.compile` return wrappers of jax's own."""

    def __init__(self, function):
        self.function = jax.jit(function)

    def lower(self, *args):
        lowered = self.function.lower(*args)
        return types.SimpleNamespace(
            compile=lambda: types.SimpleNamespace(compiled=lowered.compile())
        )


def test_it_takes_a_plain_function_and_whatever_can_be_lowered(mesh):
    for function in (mlp.__wrapped__, mlp, Filtered(mlp.__wrapped__), functools.partial(mlp)):
        assert_collectives(function, *arguments_of_mlp(mesh), model={'all-reduce': 1})


def test_known_miscompiles_takes_what_equinox_compiles(mesh):
    with jax.set_mesh(mesh):
        compiled = Filtered(mlp.__wrapped__).lower(*arguments_of_mlp(mesh)).compile()
    assert known_miscompiles(compiled) == gathered_experts(compiled) == []


def test_it_takes_what_equinox_compiles(mesh):
    equinox = pytest.importorskip('equinox', reason='needs equinox: pip install equinox')
    arrays = [jax.device_put(jnp.ones(one.shape), one.sharding) for one in arguments_of_mlp(mesh)]
    assert_collectives(equinox.filter_jit(mlp.__wrapped__), *arrays, model={'all-reduce': 1})


def test_it_takes_what_is_lowered_or_compiled_with_the_mesh_of_its_arguments():
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        lowered = mlp.lower(*arguments_of_mlp(mesh))
    for program in (lowered, lowered.compile()):
        assert_collectives(program, model={'all-reduce': 1})
        assert_collectives(program, mesh=mesh, model={'all-reduce': 1})
        assert_collectives(program, mesh=mesh.abstract_mesh, model={'all-reduce': 1})
        with pytest.raises(ValueError, match='already has its arguments: do not pass any'):
            assert_collectives(program, 1.0)
    other = jax.make_mesh((8,), ('x',))
    assert_collectives(lowered, mesh=other, x={'all-reduce': 1})
    for size in (4, 16):
        given = jax.sharding.AbstractMesh((size,), ('x',))
        with pytest.raises(ValueError, match=rf"'x': {size}.* has {size} devices, .* for 8: give"):
            assert_collectives(lowered, mesh=given)


def test_a_program_without_arrays_as_arguments_has_the_mesh_of_its_results():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P('data'))
    compiled = jax.jit(lambda: jnp.arange(8.0), out_shardings=sharding).lower().compile()
    assert_collectives(compiled, data={})


@pytest.mark.parametrize('function', [3, 'mlp', None])
def test_what_it_does_not_take_is_told_in_one_sentence(mesh, function):
    with pytest.raises(
        ValueError,
        match=(
            r'takes a function, a jitted one .*, a jax.stages.Lowered or a .*Compiled, '
            rf'not {function!r}$'
        ),
    ):
        assert_collectives(function, *arguments_of_mlp(mesh))


def permute(*pairs: tuple[int, int], axis: str = 'model'):
    return mapped(lambda x: jnp.sin(jax.lax.ppermute(x, axis, pairs)))


RING = (0, 1), (1, 2), (2, 3), (3, 0)
BACK = (1, 0), (2, 1), (3, 2), (0, 3)
CHAIN = RING[:3]
KEPT = (0, 0), (1, 2), (2, 3), (3, 1)


@pytest.mark.parametrize(
    ('pairs', 'declared'),
    [
        (RING, {}),
        (KEPT, {}),
        (RING, {'model': 'ring'}),
        (BACK, {'model': 'ring'}),
        (CHAIN, {'model': 'chain'}),
        (CHAIN, {'model': [(0, 1), (1, 2), (2, 3)]}),
        (CHAIN[:1], {'model': [(0, 1)]}),
        (BACK[:3], {'model': ['chain', [(1, 0), (2, 1), (3, 2)]], 'data': 'ring'}),
        (KEPT[:1], {'model': [(0, 0)]}),
    ],
)
def test_a_permute_that_gives_every_device_a_source_passes_and_one_that_is_declared(
    mesh, pairs, declared
):
    assert_collectives(
        permute(*pairs),
        sharded('data', 'model'),
        permutes=declared,
        model={'collective-permute': int(pairs != KEPT[:1])},
    )


@pytest.mark.parametrize(
    ('pairs', 'declared', 'message'),
    [
        (
            CHAIN,
            {},
            r'devices 0, 4 have no source and get zeros; if this is intended, declare its pairs: '
            r"permutes={'model': \.\.\.}",
        ),
        (KEPT[1:], {}, 'devices 0, 1, 4, 5 have no source|devices 0, 4 have no source'),
        (KEPT[:1], {}, 'devices 1, 2, 3, 5, 6, 7 have no source and get zeros'),
        (CHAIN, {'data': 'ring'}, 'devices 0, 4 have no source'),
        (
            CHAIN,
            {'model': 'ring'},
            (
                r'its pairs of devices are not the declared ones: \(0, 1\), \(1, 2\), \(2, 3\), '
                r'\(4, 5\)'
            ),
        ),
        (CHAIN[:2], {'model': 'chain'}, 'not the declared ones'),
        (BACK[:3], {'model': 'chain'}, 'not the declared ones'),
        (RING, {'model': 'chain'}, 'not the declared ones'),
        (CHAIN[:1], {'model': [(1, 0)]}, 'not the declared ones'),
        ((), {}, 'it has no pairs, so every device gets zeros$'),
        ((), {'model': 'ring', 'data': [(0, 1)]}, 'it has no pairs, so every device gets zeros$'),
    ],
)
def test_a_permute_that_hands_a_device_zeros_is_an_error_unless_its_pairs_are_declared(
    mesh, pairs, declared, message
):
    with pytest.raises(AssertionError, match=message):
        assert_collectives(
            permute(*pairs),
            sharded('data', 'model'),
            permutes=declared,
            model={'collective-permute': 1},
        )


def test_a_permute_over_two_axes_is_declared_by_both(mesh):
    chain = tuple((place, place + 1) for place in range(7))
    x, function = sharded('data', 'model'), permute(*chain, axis=('data', 'model'))
    assert_collectives(
        function, x, permutes={'data_and_model': 'chain'}, data_and_model={'collective-permute': 1}
    )
    with pytest.raises(
        AssertionError, match=r"device 0 has no source .* permutes={'data_and_model': \.\.\.}"
    ):
        assert_collectives(function, x, data_and_model={'collective-permute': 1})


@pytest.mark.parametrize(
    ('declared', 'message'),
    [
        ({'model': []}, r'permutes: model=\[\]: give pairs of positions along the axis'),
        ({'model': ['chain', []]}, r'permutes: model=\[\]: give pairs'),
        ({'model': 'star'}, "permutes: model='star': give pairs"),
        ({'model': (0, 1)}, 'permutes: model=0: give pairs'),
        ({'model': [(0, 1), (2, 1)]}, 'the source of at most one pair, and the target of at most'),
        ({'model': [(0, 1), (0, 2)]}, 'the source of at most one pair, and the target of at most'),
        ({'model': [(0, 4)]}, 'permutes: model has no position 4: its size is 4'),
        ({'stage': 'ring'}, 'no mesh axis stage: the mesh has data, model'),
    ],
)
def test_a_declaration_that_cannot_be_is_an_error_before_anything_compiles(mesh, declared, message):
    with pytest.raises(ValueError, match=message):
        assert_collectives(None, *arguments_of_mlp(mesh), permutes=declared)


def test_an_array_with_one_element_on_each_device_is_counted_and_a_scalar_is_not(mesh):
    def send(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jax.lax.all_gather(jax.lax.ppermute(x, 'data', [(0, 1), (1, 0)]), 'model')
        return jnp.sin(gathered), jax.lax.psum(x.sum(), 'model')

    whole = jax.P(('data', 'model'))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, whole))
    function = jax.shard_map(send, in_specs=whole, out_specs=jax.P(), check_vma=False)
    counts = {'data': {'collective-permute': 1}, 'model': {'all-gather': 1}}
    assert_collectives(function, x, **counts)
    assert megajax.inspect(function, x, mesh=mesh).counts() == counts


def test_a_gather_and_an_exchange_are_one_each(mesh):
    def send(x: jax.Array) -> jax.Array:
        x = jnp.sin(jax.lax.all_gather(x, 'data').sum(0))
        return jax.lax.all_to_all(x, 'model', 0, 0, tiled=True)

    x = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model'))
    )
    assert_collectives(mapped(send), x, data={'all-gather': 1}, model={'all-to-all': 1})


def test_the_mesh_is_that_of_the_arguments_in_whatever_tree_or_else_the_current_one():
    mesh = jax.make_mesh((4, 2), ('rows', 'columns'), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('rows', 'columns'))
    )
    total = jax.jit(
        lambda tree: tree['x'].sum(0), out_shardings=jax.NamedSharding(mesh, jax.P('columns'))
    )
    assert_collectives(total, {'scale': 2.0, 'x': x}, rows={'all-reduce': 1})
    with jax.set_mesh(mesh):
        spread = jax.shard_map(
            lambda x: jax.lax.psum(x, 'rows'), in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
        assert_collectives(
            jax.jit(spread), jax.ShapeDtypeStruct((8,), jnp.float32), rows={'all-reduce': 1}
        )
    with pytest.raises(ValueError, match='no mesh: place the arguments on one'):
        assert_collectives(total, {'x': 1.0})
