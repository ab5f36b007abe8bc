import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulate import others

import megajax
from megajax.config import ConfigError
from megajax.emulate.arguments import on_devices, simulated_mesh, values
from megajax.emulate.compare import difference
from megajax.emulate.one_device import CpuModule
from megajax.emulate.result import NOT_COVERED, GpuRun, Leaf
from megajax.hardware.gpu import has_compiler

P = jax.P
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'")
EXPLICIT = jax.sharding.AxisType.Explicit


def on_one_device(function, args, *, exact: bool = False):
    traced = jax.jit(function).trace(*args)
    inputs = values(args, [one.dtype for one in traced.jaxpr.in_avals], 0)
    module = CpuModule(traced)
    return module, module.run(inputs, jax.devices(), exact=exact)


def test_a_function_with_constraints_runs_on_one_device_as_on_its_mesh():
    case = others.top_k_experts()
    module, found = on_one_device(case.function, case.args)
    assert module.num_devices == 8
    for x, expected in zip(found, jax.tree.leaves(case.function(*case.args)), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def test_explicit_placements_are_taken_out_too():
    mesh = others.mesh_of(EXPLICIT, data=2, model=4)
    x, w = others.array(mesh, (8, 16), 'data', 'model'), others.array(mesh, (16, 8), 'model')
    with jax.set_mesh(mesh):

        def function(x, w):
            y = jnp.einsum('bd,df->bf', x, w, out_sharding=P('data'))
            return jax.reshard(y, P(None, 'model'))

        _, [found] = on_one_device(function, (x, w))
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(w), rtol=1e-5, atol=1e-6)


def test_a_manual_region_runs_on_all_of_its_devices():
    mesh = others.mesh_of(data=8)
    specs = {'in_specs': P('data'), 'out_specs': (P(), P('data'))}
    total = jax.shard_map(lambda x: (jax.lax.psum(x, 'data'), 2 * x), mesh=mesh, **specs)
    x = np.arange(16.0, dtype=np.float32)
    module, [summed, doubled] = on_one_device(total, (x,))
    assert module.is_manual
    np.testing.assert_array_equal(summed, x.reshape(8, 2).sum(0))
    np.testing.assert_array_equal(doubled, 2 * x)


def test_exactly_nothing_but_constants_is_rounded_to_16_bits():
    def function(x):
        y = jax.lax.scan(lambda y, _: (y * jnp.bfloat16(0.1), None), x, length=2)[0]
        return y.astype(jnp.float32).sum()

    x = jnp.linspace(1, 2, 64).astype(jnp.bfloat16)
    _, [rounded] = on_one_device(function, (x,))
    _, [found] = on_one_device(function, (x,), exact=True)
    expected = (np.asarray(x, np.float32) * np.float32(jnp.bfloat16(0.1)) ** 2).sum()
    assert abs(found / expected - 1) < 1e-6 < abs(rounded / expected - 1)


def test_a_function_that_reads_the_bits_of_16_bit_numbers_is_known():
    key = jax.random.key(0)
    for dtype, reads in ((jnp.bfloat16, True), (jnp.float32, False)):
        draw = functools.partial(jax.random.normal, shape=(8,), dtype=dtype)
        module, _ = on_one_device(draw, (key,))
        assert module.reads_16_bits == reads


def test_the_mesh_is_that_of_the_arguments_the_one_given_or_the_one_set():
    data, other = others.mesh_of(data=8), others.mesh_of(data=2, model=4)
    x, plain = others.array(data, (8, 4), 'data'), np.zeros(4)
    assert simulated_mesh((x, plain), None) == data
    assert simulated_mesh((plain,), other) == other
    assert simulated_mesh((plain,), None) is None
    with jax.set_mesh(other):
        assert simulated_mesh((plain,), None) == other
    with pytest.raises(ValueError, match='several meshes'):
        simulated_mesh((x,), other)


def test_an_abstract_mesh_becomes_simulated_devices_as_far_as_there_are():
    axes = jax.sharding.AbstractMesh((2, 4), ('data', 'model'), axis_types=(EXPLICIT,) * 2)
    x = others.abstract(axes, (8, 4), 'data')
    mesh = simulated_mesh((x,), None)
    assert (mesh.abstract_mesh.shape, mesh.axis_types) == (axes.shape, axes.axis_types)
    assert on_devices((x,), mesh)[0].sharding.mesh == mesh
    many = jax.sharding.AbstractMesh((16,), ('data',))
    with pytest.raises(ValueError, match=r"update\('jax_num_cpu_devices', 16\)"):
        simulated_mesh((others.abstract(many, (16,)),), None)


def test_abstract_numbers_are_drawn_and_abstract_integers_refused():
    x = jax.ShapeDtypeStruct((8, 400), jnp.bfloat16)
    [drawn], [again], [other] = (values((x,), [x.dtype], seed) for seed in (0, 0, 1))
    assert drawn.dtype == jnp.bfloat16
    assert 0.9 < np.linalg.norm(drawn.astype(np.float32), axis=1).mean() < 1.1
    assert (drawn == again).all()
    assert (drawn != other).any()
    tokens = {'tokens': jax.ShapeDtypeStruct((8,), jnp.int32)}
    with pytest.raises(ValueError, match=r"argument\[0\]\['tokens'\] is abstract and of int32"):
        values((tokens,), [np.dtype('int32')], 0)


def test_static_arguments_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r'functools\.partial'):
        values((np.zeros(3), 4), [np.dtype('float32')], 0)


@pytest.mark.skipif(has_compiler(), reason="XLA's GPU compiler is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match='gpu-compile'):
        megajax.inspect.run(jnp.sin, np.ones(3))


def test_no_gpu_is_a_target_by_another_name():
    with pytest.raises(ValueError, match='choose among a100, h100'):
        megajax.inspect.run(jnp.sin, np.ones(3), target='cpu')


def test_differences_are_over_the_largest_element_and_of_integers_a_share():
    everywhere = (slice(None),)

    def error(made, expected):
        return difference('x', [(everywhere, np.asarray(made))], np.asarray(expected)).error

    assert error([1.0, 4.5], [1.0, 5.0]) == pytest.approx(0.1)
    assert error([-np.inf, 1.0], [-np.inf, 1.0]) == 0
    assert error([np.nan, 1.0], [1.0, 1.0]) == np.inf
    assert error([1j, 1.0], [-1j, 1.0]) == 2
    assert error([1, 2, 3, 5], [1, 2, 3, 4]) == 0.25
    assert error([1e-3], [0.0]) == 1e-3


@needs_compiler
def test_a_gradient_that_is_rounding_alone_is_not_wrong():
    """A bias of keys moves all scores of a query alike, so its gradient is zero but for rounding."""
    mesh = others.mesh_of(data=8)

    def loss(w, x_BSD):
        key_BSD = x_BSD @ w['key'] + w['key_bias'][None, None]
        scores_BST = jnp.einsum('bsd,btd->bst', x_BSD, key_BSD)
        return jnp.square(jax.nn.softmax(scores_BST) @ x_BSD).sum()

    w = {'key': others.array(mesh, (64, 64)), 'key_bias': others.array(mesh, (64,))}
    found = megajax.inspect.run(jax.grad(loss), w, others.array(mesh, (16, 32, 64), 'data'))
    errors = {leaf.name: leaf.error for leaf in found.leaves}
    assert errors["['key_bias']"] > 1e-2
    assert errors["['key']"] < 1e-5
    found.raise_if_wrong()


def test_a_result_says_what_is_wrong_what_it_was_compared_with_and_what_it_does_not_cover():
    leaves = [Leaf(name="['w']", error=0.5, limit=1e-5, ok=False)]
    leaves += [Leaf(name=f'[{i}]', error=1e-7, limit=1e-5, ok=True) for i in range(30)]
    about = {'target': 'h100', 'jax_version': '0', 'mesh': {'data': 8}, 'seconds': 1}
    about |= {'exact': False, 'limit': 1e-5, 'known_miscompiles': ['f of a line']}
    make = functools.partial(GpuRun, **about)
    run = make(compared_with='one device', leaves=leaves, culprit='a-pass (pipeline p)')
    text = str(run)
    assert not run.ok
    for part in ("['w']", 'WRONG: 1 of 31', '... 11 more', 'one device', 'a-pass', 'data=8', 'f of a line'):
        assert part in text
    assert NOT_COVERED in ' '.join(text.split())
    assert '<pre' in run._repr_html_()
    with pytest.raises(AssertionError, match='h100 computes something else'):
        run.raise_if_wrong()
    make(compared_with='one device', leaves=leaves[1:], culprit=None).raise_if_wrong()
    assert GpuRun.model_validate_json(run.model_dump_json()) == run
