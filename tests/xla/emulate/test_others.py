import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate import others

import megajax
from megajax.core.hardware.targets import gpu_devices, has_compiler
from megajax.xla.emulate.execute import compile_for_gpu, num_devices

REASON = "needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
NAMES = 'fsdp', 'gpipe', 'ring_attention', 'tensor_parallel', 'top_k_experts'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason=REASON),
]


@pytest.mark.parametrize('name', NAMES)
def test_programs_of_others_compute_on_a_gpu_what_one_device_does(name):
    case = getattr(others, name)()
    megajax.inspect.run(case.function, *case.args, reference=case.reference).raise_if_wrong()


def test_a_program_of_16_bits_is_closer_exactly_than_as_it_is():
    case = others.fsdp()
    runs = [megajax.inspect.run(case.function, *case.args, exact=exact) for exact in (False, True)]
    worst = [run.leaves[0].error for run in runs]
    assert worst[1] < 2e-5 < worst[0] < 3e-2


def test_a_module_of_equinox_is_run_by_its_arrays():
    eqx = pytest.importorskip('equinox', reason='needs equinox')
    case = others.equinox_mlp(eqx)
    megajax.inspect.run(case.function, *case.args).raise_if_wrong()


def test_what_equinox_jits_is_run_with_its_modules_as_arguments():
    """Leaves of a module that are no arrays, such as its activation, are constants."""
    eqx = pytest.importorskip('equinox', reason='needs equinox')
    step, model, x_BD = others.equinox_step(eqx)
    assert not all(map(eqx.is_array, jax.tree.leaves(model)))
    run = megajax.inspect.run(step, model, x_BD)
    assert run.ok, run
    assert {leaf.name for leaf in run.leaves} == {'[0].layers[0].weight', '[1]'}
    assert megajax.inspect(step, model, x_BD, target='h100').sent_over('data') > 0


def test_arrays_that_a_function_of_equinox_owns_are_arguments():
    """A module that is jitted, and a method of one; a literal would need no all-gather."""
    eqx = pytest.importorskip('equinox', reason='needs equinox')

    class Model(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        def step(self, x_BD):
            return jnp.tanh(x_BD @ self.weight)

        def __call__(self, x_BD):
            return jnp.tanh(x_BD @ self.weight)

    mesh = others.mesh_of(data=8)
    model, x_BD = Model(others.array(mesh, (64, 64), 'data')), np.ones((8, 64), np.float32)
    counts = {'data': {'all-reduce': 1}}
    for function in (eqx.filter_jit(model), model.step, model.__call__, model):
        assert megajax.inspect(function, x_BD).counts() == counts
    for function in (model.step, model):
        assert megajax.inspect(function, x_BD, target='h100').counts() == counts
    abstract = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=model.weight.sharding)
    step = eqx.filter_jit(lambda model, x_BD: model(x_BD))
    assert megajax.inspect(step, Model(abstract), x_BD).counts() == counts
    run = megajax.inspect.run(model.step, x_BD, reference=lambda x_BD: model(x_BD))
    assert run.ok, run


def test_an_abstract_mesh_is_as_good_as_devices():
    types = (jax.sharding.AxisType.Auto,) * 2
    axes = jax.sharding.AbstractMesh((2, 4), ('data', 'model'), axis_types=types)
    assert megajax.inspect.run(*flat(others.tensor_parallel(axes)), target='b200').ok


def test_a_cache_of_compiled_programs_does_not_hold_those_for_a_gpu_that_is_not_there(tmp_path):
    code = 'import megajax, jax.numpy as jnp\n'
    code += 'megajax.inspect.run(lambda x: jnp.tanh(x @ x), jnp.ones((64, 64))).raise_if_wrong()'
    cache = {
        'JAX_COMPILATION_CACHE_DIR': str(tmp_path),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, '-c', code],
            env=os.environ | cache, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert 'compilation cache' not in done.stderr


def test_without_a_reference_a_manual_region_is_compared_with_the_cpus_own_program():
    case = others.ring_attention()
    run = megajax.inspect.run(case.function, *case.args)
    assert run.ok
    assert run.compared_with == "the CPU's own program on 8 simulated devices"
    assert 'pass reference= for an independent check' in ' '.join(str(run).split())


def test_a_ring_with_a_missing_pair_is_wrong_beside_the_reference():
    case = others.ring_attention(missing=2)
    run = megajax.inspect.run(case.function, *case.args, reference=case.reference)
    assert run.leaves[0].error > 0.1
    with pytest.raises(AssertionError, match='WRONG: 3 of 3'):
        run.raise_if_wrong()


def test_a_bias_that_cublas_does_not_scale_is_found_where_the_compiler_makes_such_a_call():
    def scaled(x, w, b):
        return 1.5 * (x @ w + b[None])

    args = [others.abstract(others.mesh_of(data=1), shape) for shape in ((64, 64), (64, 64), (64,))]
    options = {'xla_gpu_enable_triton_gemm': False}
    run = megajax.inspect.run(scaled, *args, compiler_options=options)
    text = gpu_text(scaled, args, options)
    has_fault = re.search(r'"alpha_real":1.5\b.*"epilogue":"BIAS"', text) is not None
    assert run.ok != has_fault
    if has_fault:
        found = megajax.inspect.run(scaled, *args, compiler_options=options, bisect=True)
        assert 'cublas' in found.culprit or 'gemm' in found.culprit


def test_a_gradient_that_a_permute_without_pairs_loses_is_found_with_its_pass():
    function, args, mesh = others.shared_cotangent()
    with jax.set_mesh(mesh):
        if 'source_target_pairs={}' not in gpu_text(function, args, {}):
            pytest.skip('this compiler makes no permute without pairs')
        run = megajax.inspect.run(function, *args, bisect=True)
        pass_ = 'all-gather-to-collective-permute-simplifier'
        assert run.leaves[0].error > 0.1
        assert pass_ in run.culprit
        assert run.known_miscompiles
        options = {'xla_disable_hlo_passes': pass_}
        assert megajax.inspect.run(function, *args, compiler_options=options).ok


def test_places_of_the_largest_that_the_partitioner_drops_are_found():
    x = others.abstract(others.mesh_of(data=8), (64, 4096), 'data')

    def largest(x):
        return jax.lax.top_k(x, 8)

    text = gpu_text(largest, [x], {})
    reads_places = re.search(r'get-tuple-element\(%custom-call[\w.]*\), index=1', text)
    run = megajax.inspect.run(largest, x, bisect=True)
    assert '__gpu$TopK' in text
    assert run.ok == bool(reads_places)
    if not run.ok:
        assert (run.leaves[0].name, run.leaves[0].error) == ('[1]', 1.0)
        assert 'spmd-partitioning' in run.culprit


def test_typed_keys_and_integers_are_arguments_and_outputs():
    mesh = others.mesh_of(data=8)

    @jax.jit
    def dropped(key, x, count):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return {'x': jnp.where(kept, x, 0), 'key': jax.random.split(key)[0], 'count': count + 1}

    x = others.abstract(mesh, (64, 32), 'data')
    run = megajax.inspect.run(dropped, jax.random.key(3), x, 7)
    assert run.ok
    assert sorted(leaf.name for leaf in run.leaves) == ["['count']", "['key']", "['x']"]


def flat(case):
    return case.function, *case.args


def gpu_text(function, args, options) -> str:
    traced = jax.jit(function).trace(*args)
    count = num_devices(traced)
    devices = gpu_devices('h100', hosts=1, per_host=count)
    return compile_for_gpu(traced, devices, options).text
