"""A program is compiled for the devices given and run; here CPUs stand in for the GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate import others
from xla.emulate.texts import module, random

from megajax.core.hardware import targets
from megajax.xla.emulate.execute import (
    GpuProgram,
    compile_for_gpu,
    num_devices,
    run_on_cpu,
    widened,
)

P = jax.P


@pytest.fixture(scope='module')
def traced() -> jax.stages.Traced:
    """Three arguments, of which the second is not read; an array, keys and a sum."""
    mesh = others.mesh_of(data=2, model=2)
    x, unread = others.abstract(mesh, (8, 16), 'data'), others.abstract(mesh, (3,))
    w = others.abstract(mesh, (16, 4), None, 'model')

    def function(x, unread, w):
        bits = jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)
        return x @ w, jax.random.wrap_key_data(bits), w.sum()

    placed = jax.sharding.NamedSharding(mesh, P('data', 'model'))
    return jax.jit(function, out_shardings=(placed, None, None)).trace(x, unread, w)


def test_a_program_is_compiled_for_the_devices_given_whichever_it_was_traced_for(traced):
    assert num_devices(traced) == 4
    devices = jax.devices()[4:8]
    program = compile_for_gpu(traced, devices, {})
    assert program.kept == (0, 2)
    for sharding in (*program.inputs, *program.outputs):
        assert sharding.device_set == set(devices)
    assert [one.spec for one in program.inputs] == [P('data'), P(None, 'model')]
    assert program.output_shapes == ((8, 4), (2, 2), ())  # keys are integers in a program


def test_each_device_has_its_piece_of_a_result_and_replicas_are_all_there(traced):
    x, w = random(8, 16), random(16, 4)
    program = compile_for_gpu(traced, jax.devices()[4:8], {})
    products, keys, sums = run_on_cpu(program, [x, None, w], jax.devices()[:4])
    assert len(products) == len(keys) == len(sums) == 4
    assert len({str(place) for place, _ in products}) == 4
    for place, piece in products:
        np.testing.assert_allclose(piece, (x @ w)[place], rtol=1e-5, atol=1e-5)
    for _, piece in keys:
        np.testing.assert_array_equal(piece, np.arange(4).reshape(2, 2))
    for _, piece in sums:
        np.testing.assert_allclose(piece, w.sum(), rtol=1e-5, atol=1e-5)


def test_the_compiler_gets_options_for_absent_gpus_and_the_users_over_them(traced, monkeypatch):
    def compiled_with(options):
        return compile_for_gpu(traced, jax.devices()[:4], options)

    for of_user, of_absent in (('unknown', 0), ('unknown', 'unknown'), (None, 'unknown')):
        monkeypatch.setattr(targets, 'WITHOUT_GPU', {'xla_gpu_autotune_level': of_absent})
        options = {} if of_user is None else {'xla_gpu_autotune_level': of_user}
        with pytest.raises(jax.errors.JaxRuntimeError, match='xla_gpu_autotune_level'):
            compiled_with(options)
    assert compiled_with({'xla_gpu_autotune_level': 0}).text


def test_exactly_the_arguments_and_results_of_16_bits_are_wide_too():
    text = module(['%p = bf16[3]{0} parameter(0)', '%y = bf16[3]{0} multiply(%p, %p)'])
    placed = {'inputs': (None,), 'outputs': (None,)}
    program = GpuProgram(text=text, kept=(1,), output_shapes=((3,),), **placed)
    x = np.array([1.0, 1.5, 1.0078125], jnp.bfloat16)
    [[(_, rounded)]] = run_on_cpu(program, [None, x], jax.devices()[:1])
    [[(_, exact)]] = run_on_cpu(program, [None, x], jax.devices()[:1], exact=True)
    assert (rounded.dtype, exact.dtype) == (jnp.bfloat16, np.float32)
    np.testing.assert_array_equal(exact, np.square(x.astype(np.float32)))
    assert (rounded.astype(np.float32) != exact).any()


NARROW = [jnp.bfloat16, np.float16, jnp.float8_e4m3fn, jnp.float8_e5m2fnuz, jnp.float8_e8m0fnu]


@pytest.mark.parametrize('dtype', NARROW)
def test_floats_of_8_and_16_bits_are_widened(dtype):
    assert widened(np.ones(2, dtype)).dtype == np.float32


@pytest.mark.parametrize('dtype', [np.float32, np.int16, np.int8, np.complex64])
def test_nothing_else_is_widened(dtype):
    assert widened(np.ones(2, dtype)).dtype == dtype
