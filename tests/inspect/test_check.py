import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from megajax.inspect import assert_collectives

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


def arguments(mesh: jax.sharding.Mesh) -> list[jax.ShapeDtypeStruct]:
    placed = {(8, 16): jax.P('data', None), (16, 64): jax.P(None, 'model'), (64, 16): jax.P('model', None)}
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)) for shape, spec in placed.items()]


def test_the_right_count_passes_for_shapes_and_for_arrays(mesh):
    shapes = arguments(mesh)
    assert_collectives(mlp, *shapes, model={'all-reduce': 1})
    arrays = [jax.device_put(jnp.ones(one.shape), one.sharding) for one in shapes]
    assert_collectives(mlp, *arrays, model={'all-reduce': 1}, data={})


@pytest.mark.parametrize('expected', [{}, {'all-reduce': 2}, {'all-reduce': 0}, {'all-gather': 1}, {'all-reduce': 1, 'all-gather': 1}])
def test_a_wrong_count_fails_and_shows_what_was_expected_and_what_is_there(mesh, expected):
    with pytest.raises(AssertionError) as raised:
        assert_collectives(mlp, *arguments(mesh), model=expected)
    message = str(raised.value)
    assert f"over model: expected {expected or 'none'}, found {{'all-reduce': 1}}" in message
    assert re.search(r'1 x all-reduce over model of f32\[4,16\] at \S*down/\S+dot_general \(\S*test_check.py:\d+', message)


def gradients(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.grad(lambda up, down: mlp(x, up, down).sum(), argnums=(0, 1))(up, down)


def test_an_axis_that_is_not_named_has_none(mesh):
    step = jax.jit(gradients)
    assert_collectives(step, *arguments(mesh), data={'all-reduce': 2})
    with pytest.raises(AssertionError, match=r"over data: expected none, found {'all-reduce': 2}"):
        assert_collectives(step, *arguments(mesh))
    with pytest.raises(AssertionError, match=r"over model: expected {'all-reduce': 1}, found none"):
        assert_collectives(step, *arguments(mesh), data={'all-reduce': 2}, model={'all-reduce': 1})


@pytest.mark.parametrize('axis', ['tensor', 'data_and_tensor', 'data+model', 'model_and'])
def test_an_axis_that_the_mesh_does_not_have_is_an_error_before_anything_compiles(mesh, axis):
    with pytest.raises(ValueError, match=r'no mesh axis .*: the mesh has data, model'):
        assert_collectives(None, *arguments(mesh), **{axis: {'all-reduce': 1}})


def test_a_kind_that_there_is_not_is_an_error_before_anything_compiles(mesh):
    with pytest.raises(ValueError, match='no kind of collective all_reduce: choose among all-reduce, all-gather'):
        assert_collectives(None, *arguments(mesh), model={'all_reduce': 0})


def mapped(function, **options):
    return jax.jit(jax.shard_map(function, in_specs=jax.P('data', 'model'), out_specs=jax.P('data', 'model'), check_vma=False, **options))


@pytest.mark.parametrize('keyword', ['data_and_model', 'model_and_data'])
def test_axes_are_joined_in_either_order(mesh, keyword):
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model')))
    function = mapped(lambda x: jax.lax.psum(x, ('data', 'model')))
    assert_collectives(function, x, **{keyword: {'all-reduce': 1}})
    with pytest.raises(AssertionError, match=r"over data\+model: expected none, found {'all-reduce': 1}"):
        assert_collectives(function, x, data={'all-reduce': 1})


def test_loops_multiply_and_single_numbers_are_not_counted(mesh):
    def loop(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, 'model')), None), x, None, length=5)[0]
        return x * jax.lax.psum(x.sum(), 'data')

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model')))
    assert_collectives(mapped(loop), x, model={'all-reduce': 5})


def test_in_a_loop_of_unknown_length_the_message_says_at_least(mesh):
    loop = mapped(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: jnp.sin(jax.lax.psum(x, 'model')), x))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model')))
    with pytest.raises(AssertionError, match='1 x at least all-reduce over model'):
        assert_collectives(loop, x)


def test_a_gather_and_an_exchange_are_one_each(mesh):
    def send(x: jax.Array) -> jax.Array:
        x = jnp.sin(jax.lax.all_gather(x, 'data').sum(0))
        return jax.lax.all_to_all(x, 'model', 0, 0, tiled=True)

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data', 'model')))
    assert_collectives(mapped(send), x, data={'all-gather': 1}, model={'all-to-all': 1})


def test_the_mesh_is_that_of_the_arguments_in_whatever_tree_or_else_the_current_one():
    mesh = jax.make_mesh((4, 2), ('rows', 'columns'), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('rows', 'columns')))
    total = jax.jit(lambda tree: tree['x'].sum(0), out_shardings=jax.NamedSharding(mesh, jax.P('columns')))
    assert_collectives(total, {'scale': 2.0, 'x': x}, rows={'all-reduce': 1})
    with jax.set_mesh(mesh):
        spread = jax.shard_map(lambda x: jax.lax.psum(x, 'rows'), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        assert_collectives(jax.jit(spread), jax.ShapeDtypeStruct((8,), jnp.float32), rows={'all-reduce': 1})
    with pytest.raises(ValueError, match='no mesh: place the arguments on one'):
        assert_collectives(total, {'x': 1.0})
