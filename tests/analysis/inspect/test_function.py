"""`megajax.inspect(function, *args)`: the collectives of a function without a config."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inspect_collectives import arguments_of_mlp
from jax.sharding import AxisType

import megajax
from megajax.analysis.inspect.function import FunctionInspection, FunctionTransfer
from megajax.analysis.inspect.result import Transfer
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices, has_compiler
from megajax.xla.hlo.errors import HloError
from megajax.xla.miscompiles import ask
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES

EXPLICIT = (AxisType.Explicit,) * 2
STEPS = 3


@pytest.fixture(name='mesh', scope='module')
def of_eight():
    return jax.make_mesh((2, 4), ('data', 'model'), axis_types=EXPLICIT)


@jax.jit
def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Three layers, and a mean over all devices."""

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        hidden = jnp.einsum('bd,df->bf', x, up, out_sharding=jax.P('data', 'model'))
        return jnp.einsum('bf,fd->bd', hidden, down, out_sharding=jax.P('data', None)), None

    return jax.lax.scan(layer, x, length=STEPS)[0].mean()


def test_bytes_counts_and_flops_of_a_loop_are_multiplied_by_its_steps(mesh) -> None:
    with jax.set_mesh(mesh):
        found = megajax.inspect(step, *arguments_of_mlp(mesh))
    assert found.counts() == {'model': {'all-reduce': STEPS}}
    assert found.sent_over('model') == STEPS * 2 * (3 / 4) * (4 * 16 * 4)
    assert found.sent_over('data') == 0  # a scalar
    assert found.matmul_flops == STEPS * 2 * (2 * 4 * 16 * 16)
    assert found.mesh == {'data': 2, 'model': 4}
    assert '3 AR f32[4,16]' in str(found)
    assert repr(found) == '<FunctionInspection: data=2 x model=4, target cpu>'
    assert 'test_function.py' in found.transfers[0].source


def test_equal_transfers_of_a_line_are_one_row_and_axes_of_one_device_are_not_shown(mesh) -> None:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum('bf,fd->bd', x, w, out_sharding=jax.P('data', None))

    def twice(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        with jax.named_scope('first'):
            y = layer(jnp.einsum('bd,df->bf', x, up, out_sharding=jax.P('data', 'model')), down)
        with jax.named_scope('second'):
            return layer(jnp.einsum('bd,df->bf', y, up, out_sharding=jax.P('data', 'model')), down)

    mesh = jax.make_mesh((2, 4, 1), ('data', 'model', 'stage'), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        found = megajax.inspect(twice, *arguments_of_mlp(mesh))
    assert len(found.transfers) == 2
    assert '2 AR f32[4,16]' in str(found)
    assert 'stage' not in str(found)


@pytest.mark.parametrize('is_bound', [(True, False), (False, True), (False, False)])
def test_a_row_is_an_upper_bound_if_one_of_its_transfers_is(is_bound) -> None:
    transfers = [
        FunctionTransfer(
            axis='model',
            transfer=Transfer(
                kind='all-reduce', array='f32[8]', times=1, wire_bytes=size, at_most=at_most
            ),
            op_name='',
            source='step.py:1',
        )
        for size, at_most in zip((32, 16), is_bound, strict=True)
    ]
    found = FunctionInspection(
        target='cpu',
        mesh={'model': 2},
        jax_version=jax.__version__,
        transfers=transfers,
        matmul_flops=0,
        known_miscompiles=[],
    )
    assert ('at most 2 AR f32[8]' in str(found)) == any(is_bound)


def either(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
    return jax.lax.cond(n > 0, lambda: x @ w, lambda: (x + 1) @ w.T)


def largest(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
    return jax.lax.switch(n, [lambda: x, lambda: x @ w, lambda: x @ w @ w])


def in_the_first_step(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
    def body(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(i == 0, lambda: x @ w, lambda: x), None

    return jax.lax.scan(body, x, jnp.arange(10))[0]


def until(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)


@pytest.mark.parametrize(
    ('function', 'trip_count', 'times', 'unknown'),
    [
        (either, None, 1, 0),
        (largest, None, 2, 0),
        (in_the_first_step, None, 1, 0),
        (until, None, 1, 1),
        (until, 6, 6, 0),
    ],
)
def test_only_the_matmuls_that_run_count(function, trip_count, times, unknown) -> None:
    mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        whole = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    arguments = array(jnp.float32, 16, 16), array(jnp.float32, 16, 16), array(jnp.int32)
    found = megajax.inspect(function, *arguments, trip_count=trip_count)
    assert found.matmul_flops == times * 2 * 16**3
    assert len(found.unknown_loops) == unknown
    assert ('unknown loop' in str(found)) == bool(unknown)
    assert all(f'{__file__}:' in place for place in found.unknown_loops)


def test_a_call_whose_work_is_unknown_is_shown() -> None:
    mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))
    found = megajax.inspect(
        lambda x: jnp.linalg.cholesky(x), np.eye(8, dtype=np.float32), mesh=mesh
    )
    assert [each.split(' at ')[0] for each in found.uncounted_calls] == ['1 x lapack_spotrf_ffi']
    assert 'not counted  1 x lapack_spotrf_ffi at ' in str(found)


def test_a_line_of_an_installed_package_is_named_from_its_package_on(mesh) -> None:
    library: dict[str, Any] = {'jnp': jnp, 'P': jax.P}
    code = (
        "def f(x, w): return jnp.einsum('bd,df->bf', x, w, out_sharding=P('data', 'model')).sum(1)"
    )
    exec(compile(code, '/venv/lib/python3.11/site-packages/peer/layers.py', 'exec'), library)
    with jax.set_mesh(mesh):
        found = megajax.inspect(library['f'], *arguments_of_mlp(mesh)[:2])
    assert ' peer/layers.py:1' in str(found)


@pytest.mark.parametrize('types', [(AxisType.Auto,) * 2, EXPLICIT])
def test_a_function_is_compiled_for_the_mesh_that_is_given(types) -> None:
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=types)

    def total(x: jax.Array) -> jax.Array:
        place = jax.reshard if types == EXPLICIT else jax.lax.with_sharding_constraint
        return place(jnp.tanh(place(x, jax.P('data', 'model'))), jax.P('data'))

    x = np.ones((8, 16), np.float32)
    for given in (mesh, mesh.abstract_mesh):
        found = megajax.inspect(total, x, mesh=given)
        assert found.counts() == {'model': {'all-gather': 1}}
        megajax.inspect.assert_collectives(total, x, mesh=given, model={'all-gather': 1})


def test_arguments_on_an_abstract_mesh_are_compiled_for_it(mesh) -> None:
    sharding = jax.NamedSharding(mesh.abstract_mesh, jax.P('data'))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    assert megajax.inspect(lambda x: x.sum(0), x).counts() == {'data': {'all-reduce': 1}}
    other = jax.make_mesh((8,), ('data',))
    with pytest.raises(ValueError, match='several meshes'):
        megajax.inspect(lambda x: x.sum(0), x, mesh=other)


def test_a_compiled_program_is_inspected_too(mesh) -> None:
    with jax.set_mesh(mesh):
        compiled = step.lower(*arguments_of_mlp(mesh)).compile()
        found = megajax.inspect(compiled)
    assert found.counts() == {'model': {'all-reduce': STEPS}}
    megajax.inspect.assert_collectives(compiled, mesh=mesh, **found.counts())


def test_a_config_is_inspected_as_before() -> None:
    with pytest.raises(megajax.ConfigError, match='target nowhere'):
        megajax.inspect(megajax.load('tiny'), target='nowhere')


def test_wrong_arguments_are_named(mesh) -> None:
    with pytest.raises(ValueError, match="target='nowhere': choose among cpu, a100"):
        megajax.inspect(step, *arguments_of_mlp(mesh), target='nowhere')
    with pytest.raises(ValueError, match='not 3'):
        megajax.inspect(3, mesh=mesh)
    with pytest.raises(ValueError, match='no mesh'):
        megajax.inspect(jnp.sin, jnp.ones(3))


@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: the extra gpu-compile")
def test_a_function_is_compiled_for_a_gpu(mesh) -> None:
    found = megajax.inspect(step, *arguments_of_mlp(mesh), mesh=mesh, target='h100')
    assert found.counts() == {'model': {'all-reduce': STEPS}}
    assert found.target == 'h100'


@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: the extra gpu-compile")
def test_the_target_of_a_compiled_program_is_that_of_its_devices() -> None:
    mesh = jax.sharding.Mesh(np.array(gpu_devices('a100', hosts=1, per_host=2)), ('data',))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P('data')))
    compiled = jax.jit(jnp.sum).lower(x).compile(WITHOUT_GPU)
    assert megajax.inspect(compiled).target == 'a100'


def of_flax() -> tuple[Any, nnx.Linear, jax.Array]:
    """A function of a Flax module and an array, on a mesh."""
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    model = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
    on_mesh = jax.NamedSharding(mesh, jax.P('model'))
    model.kernel[...] = jax.device_put(model.kernel[...], on_mesh)
    x = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P('data', 'model')))
    return nnx.jit(lambda model, x: model(x)), model, x


def test_a_function_of_a_flax_module_is_inspected_in_each_of_its_stages() -> None:
    function, model, x = of_flax()
    lowered = function.lower(model, x)
    counts = {'model': {'all-reduce': 1}}
    for program in (lowered, lowered.compile()):
        assert megajax.inspect(program).counts() == counts
        megajax.inspect.assert_collectives(program, **counts)
    assert megajax.inspect(function, model, x).counts() == counts


@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: the extra gpu-compile")
def test_a_function_of_a_flax_module_is_compiled_for_a_gpu() -> None:
    function, model, x = of_flax()
    found = megajax.inspect(function, model, x, target='h100')
    assert found.counts() == {'model': {'all-reduce': 1}}
    with pytest.raises(TypeError, match=r'cannot be traced: .* nnx\.split'):
        megajax.inspect.run(function, model, x)


@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: the extra gpu-compile")
def test_a_program_that_cannot_be_read_shows_its_known_miscompiles() -> None:
    if not ask(SPLIT_CYCLES, 'h100').is_faulty:
        pytest.skip('this XLA does not split cycles')
    repro = SPLIT_CYCLES.repro
    lowered = repro.lower(gpu_devices('h100', hosts=1, per_host=repro.num_devices))
    with pytest.raises(HloError) as raised:
        megajax.inspect(lowered.compile(WITHOUT_GPU | repro.options))
    assert re.search(r'remove the option: .* send\(', f'{raised.value}')
    assert re.search(rf'\nknown miscompile  .*{SPLIT_CYCLES.source}', f'{raised.value}')
