import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate import others

import megajax
from megajax.core.config import ConfigError
from megajax.core.hardware.targets import has_compiler
from megajax.xla.emulate import jitted
from megajax.xla.emulate.arguments import of_arrays, on_devices, simulated_mesh, values
from megajax.xla.emulate.compare import difference, inexact
from megajax.xla.emulate.one_device import CpuModule
from megajax.xla.emulate.result import NOT_COVERED, GpuRun, Leaf

P = jax.P
needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
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


def test_the_arrays_that_a_function_owns_are_arguments_and_no_constants():
    w, x = jnp.ones((4, 2)), np.ones((3, 4), np.float32)
    owner = jax.tree_util.Partial(lambda w, x, power: (x @ w) ** power, w)
    function, arrays = of_arrays(owner, (x, 2))
    traced = function.trace(*arrays)
    assert [each.shape for each in traced.jaxpr.in_avals] == [x.shape, w.shape]
    assert not traced.jaxpr.consts
    np.testing.assert_array_equal(function(*arrays), np.full((3, 2), 16))


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
        assert module.reads_bits == reads


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
    on_host = x.update(sharding=x.sharding.with_memory_kind('pinned_host'))
    assert on_devices((on_host,), mesh)[0].sharding.memory_kind == 'pinned_host'
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
    with pytest.raises(ValueError, match='choose among a100, b200'):
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
    """A bias of keys moves all scores of a query alike, so its gradient is zero but for
    rounding.
    """
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
    for part in (
        "['w']",
        'WRONG: 1 of 31',
        '... 11 more',
        'one device',
        'a-pass',
        'data=8',
        'f of a line',
    ):
        assert part in text
    assert NOT_COVERED in ' '.join(text.split())
    assert '<pre' in run._repr_html_()
    with pytest.raises(AssertionError, match='h100 gives wrong results'):
        run.raise_if_wrong()
    make(compared_with='one device', leaves=leaves[1:], culprit=None).raise_if_wrong()
    assert GpuRun.model_validate_json(run.model_dump_json()) == run


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """XLA's CPU compiler in the place of that for GPUs; what GPUs were asked for."""
    asked = list[tuple[str, int, int]]()

    def devices(target: str, *, hosts: int, per_host: int) -> list[jax.Device]:
        asked.append((target, hosts, per_host))
        return jax.devices()[: hosts * per_host]

    monkeypatch.setattr(jitted, 'check_target', lambda target: None)
    monkeypatch.setattr(jitted, 'gpu_devices', devices)
    return asked


@pytest.fixture
def miscompile(stand_in, monkeypatch: pytest.MonkeyPatch):
    """Make a pass named `bad-pass`, between two others, write one thing instead of another."""
    right = jitted.compile_for_gpu

    def miscompile(was: str, made: str) -> None:
        def compiled(traced, devices, options):
            folder, program = options.get('xla_dump_to'), right(traced, devices, {})
            assert was in program.text
            wrong = program.text.replace(was, made)
            passes = enumerate(['good-pass', 'bad-pass', 'late-pass'] if folder else [])
            for place, name in passes:
                text = wrong if place else program.text
                Path(folder, f'module_0001.f.{place:04}.pipe.after_{name}.txt').write_text(text)
            return dataclasses.replace(program, text=wrong)

        monkeypatch.setattr(jitted, 'compile_for_gpu', compiled)

    return miscompile


def several(x, count):
    return {'same': x, 'twice': x * 2, 'later': count.at[5].add(1) - 0}


def test_a_right_program_agrees_with_one_device_in_all_that_it_gives(stand_in):
    mesh = others.mesh_of(data=2, model=4)
    x = others.abstract(mesh, (8, 16), 'data', 'model')
    run = megajax.inspect.run(lambda x: (x.sum(0), x.argmax(1)), x, target='a100')
    run.raise_if_wrong()
    assert stand_in == [('a100', 1, 8)]
    assert (run.target, run.mesh) == ('a100', {'data': 2, 'model': 4})
    assert run.compared_with == 'one device'
    assert [leaf.name for leaf in run.leaves if leaf.limit == 0] == ['[1]']
    assert 'ok: 2 outputs agree' in str(run)


def test_a_wrong_program_is_found_output_by_output_with_the_pass_that_made_it_wrong(miscompile):
    miscompile(' multiply(', ' add(')
    x, count = jnp.linspace(3, 4, 64), jnp.arange(64)
    run = megajax.inspect.run(several, x, count, bisect=True)
    assert [leaf.name for leaf in run.leaves if not leaf.ok] == ["['twice']"]
    assert len(run.leaves) == 3
    assert run.leaves[0].error == pytest.approx((8 - 6) / 8)
    assert run.culprit == 'bad-pass (pipeline pipe)'
    assert megajax.inspect.run(several, x, count).culprit is None
    assert megajax.inspect.run(several, x, count, limit=0.5, bisect=True).ok


def test_a_wrong_program_is_told_though_no_pass_is_found(miscompile, monkeypatch):
    miscompile(' multiply(', ' add(')
    monkeypatch.setattr(jitted, 'modules', lambda folder: sorted(folder.iterdir())[:1])
    run = megajax.inspect.run(several, jnp.linspace(3, 4, 64), jnp.arange(64), bisect=True)
    assert not run.ok
    assert run.culprit.startswith('not found: no pass is wrong')


def test_one_wrong_integer_is_wrong_under_any_limit_and_comes_before_what_is_right(miscompile):
    miscompile(' multiply(', ' add(')
    x, count = jnp.linspace(3, 4, 64), jnp.zeros(64, int).at[5].set(3)
    run = megajax.inspect.run(lambda x, n: {'x': x * 2, 'n': n * n}, x, count, limit=0.5)
    assert [(leaf.name, leaf.ok) for leaf in run.leaves] == [("['n']", False), ("['x']", True)]
    assert run.leaves[0].error == 1 / 64 < run.leaves[1].error


def test_an_output_that_is_zero_but_for_rounding_may_be_as_far_off_as_rounding_moves_it(stand_in):
    mesh = others.mesh_of(data=8)
    x = others.array(mesh, (64, 500), 'data')

    def centred(x):
        return {'nothing': (x - x.mean(0)[None]).sum(0), 'sum': x.sum(0)}

    run = megajax.inspect.run(centred, x)
    run.raise_if_wrong()
    found = {leaf.name: leaf for leaf in run.leaves}
    assert found["['nothing']"].error > 1e-2
    assert found["['sum']"].limit < 1e-4


def test_a_wrong_output_is_wrong_though_another_is_rounding_alone(miscompile):
    miscompile(' multiply(', ' add(')
    x = others.array(others.mesh_of(data=8), (64, 500), 'data')
    run = megajax.inspect.run(lambda x: ((x - x.mean(0)[None]).sum(0), 2 * x), x)
    assert '[1]' in [leaf.name for leaf in run.leaves if not leaf.ok]


def test_rounding_to_what_is_not_a_number_allows_no_error(miscompile):
    miscompile(' multiply(', ' add(')
    x, w = jnp.array([1.0, 0.5, 0.25]), jnp.array([2.5, 3.5, 4.5])
    run = megajax.inspect.run(lambda x, w: jnp.sqrt(1 - x) * w, x, w)
    assert not run.ok
    assert run.leaves[0].limit < 1


def test_a_wrong_output_is_wrong_though_its_mask_is_much_larger(miscompile):
    miscompile(' multiply(', ' add(')
    x, w = jnp.linspace(0.1, 1, 8), jnp.linspace(1, 2, 8)
    run = megajax.inspect.run(lambda x, w: jnp.where(jnp.arange(8) < 6, x * w, -1e9), x, w)
    assert not run.ok
    assert 0.5 < run.leaves[0].error < 2


def test_a_mask_is_not_rounded(miscompile):
    miscompile(' multiply(', ' add(')
    x, mask = jnp.linspace(0.1, 1, 8), jnp.array([1.0, 0] * 4)
    run = megajax.inspect.run(lambda x, m: jax.nn.softmax(x + (1 - m) * -1e9), x, mask)
    assert not run.ok
    assert run.leaves[0].limit < 1e-3


def test_whole_numbers_are_rounded_only_if_nothing_else_is():
    x, mask, ids = np.array([0.5, 2]), np.array([0.0, 1]), np.array([0.0, 3])
    wide, narrow = np.array([2.0, 1j]), x.astype(jnp.bfloat16)
    assert inexact([x, mask, ids, narrow, wide, wide / 2, np.arange(3)]) == {0, 3, 5}
    assert inexact([ids, mask, mask.astype(jnp.bfloat16), np.arange(3)]) == {0}


@pytest.mark.parametrize('exact', [False, True])
def test_16_bits_are_allowed_their_rounding_unless_they_are_computed_exactly(stand_in, exact):
    x = jnp.linspace(1, 2, 64)
    narrow = megajax.inspect.run(lambda x: x * 3, x.astype(jnp.bfloat16), exact=exact)
    wide = megajax.inspect.run(lambda x: x * 3, x, exact=exact)
    assert narrow.ok
    assert wide.ok
    assert wide.limit < 1e-4
    assert (narrow.limit < 1e-4) == exact
    assert exact or narrow.limit > jnp.finfo(jnp.bfloat16).eps


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize(('exponent_bits', 'mantissa_bits'), [(8, 7), (8, 10)])
def test_fp32_that_the_function_itself_rounds_is_rounded_by_the_reference_too(
    stand_in, exponent_bits, mantissa_bits, exact
):
    rounded = functools.partial(
        jax.lax.reduce_precision, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits
    )
    x = jnp.linspace(1, 2, 64)
    run = megajax.inspect.run(
        lambda x: (rounded(x), rounded(x.astype(jnp.bfloat16))), x, exact=exact
    )
    assert [leaf.error for leaf in run.leaves if leaf.name == '[0]'] == [0]
    assert run.ok


@pytest.mark.parametrize('dtype', [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3])
def test_fp8_is_allowed_its_rounding_unless_it_is_computed_exactly(stand_in, dtype):
    x = jnp.linspace(1, 2, 64)
    rounded, exact = (
        megajax.inspect.run(lambda x: x.astype(dtype), x, exact=exact) for exact in (False, True)
    )
    assert 0.03 < rounded.leaves[0].error < rounded.limit == 0.4
    assert exact.ok
    assert exact.limit < 1e-4
    assert megajax.inspect.run(lambda x: x.astype(jnp.float32) * 3, x.astype(dtype)).ok


def test_fp8_arguments_that_are_read_as_bits_are_not_widened(stand_in):
    x = jnp.arange(8, dtype=jnp.uint8) + 50
    as_fp8 = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float8_e4m3fn)
    run = megajax.inspect.run(as_fp8, x)
    assert run.ok
    assert run.leaves[0].error == 0
    with pytest.raises(ValueError, match='the bits of 8- or 16-bit values'):
        megajax.inspect.run(as_fp8, x, exact=True)


def test_a_reference_takes_the_place_of_one_device_and_must_return_as_much(stand_in):
    x = np.linspace(1, 2, 8, dtype=np.float32)
    right = megajax.inspect.run(lambda x: 2 * x, x, reference=lambda x: x + x)
    assert right.ok
    assert right.compared_with == 'the reference given'
    wrong = megajax.inspect.run(lambda x: 2 * x, x, reference=lambda x: 3 * x)
    assert wrong.leaves[0].error == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match='the reference returns'):
        megajax.inspect.run(lambda x: 2 * x, x, reference=lambda x: (x, x))


@pytest.mark.parametrize(
    ('reference', 'returned'),
    [
        (lambda x: (2 * x)[:1], r'float32\[1\]'),
        (lambda x: (2 * x)[None], r'float32\[1, 8\]'),
        (lambda x: (2 * x).sum(), r'float32\[\]'),
        (lambda x: jnp.rint(2 * x).astype(int), r'int32\[8\]'),
    ],
)
def test_a_reference_returns_the_same_shapes_and_kinds_of_numbers(stand_in, reference, returned):
    message = rf'the reference returns {returned}, but the function returns float32\[8\]; make'
    with pytest.raises(ValueError, match=message):
        megajax.inspect.run(lambda x: 2 * x, np.ones(8, np.float32), reference=reference)


def test_an_operation_of_gpus_alone_needs_a_reference(stand_in):
    x = np.ones((4, 4), np.float32)
    tf32 = functools.partial(jnp.dot, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32)
    traced = jax.jit(tf32).trace(x, x)
    needs_reference = pytest.raises(ValueError, match='the function needs a GPU: pass reference=')
    with needs_reference, jitted._pass_a_reference():
        CpuModule(traced)


def test_a_typed_key_goes_to_a_reference_as_a_key_of_its_own_kind(stand_in):
    key = jax.random.key(3, impl='rbg')
    halves = megajax.inspect.run(jax.random.split, key, reference=jax.random.split)
    assert halves.ok
    assert halves.leaves[0].limit == 0


def test_what_is_not_a_number_even_by_one_device_is_refused(stand_in):
    with pytest.raises(ValueError, match=r"output\['root'\] \(from one device\) is not a number"):
        megajax.inspect.run(lambda x: {'root': jnp.sqrt(x)}, jnp.array([1.0, -1.0]))


def test_without_a_reference_a_manual_region_is_compared_with_the_cpus_own(stand_in):
    mesh = others.mesh_of(data=8)
    specs = {'in_specs': P('data'), 'out_specs': P()}
    total = jax.shard_map(lambda x: jax.lax.psum(x, 'data'), mesh=mesh, **specs)
    run = megajax.inspect.run(total, np.arange(8.0, dtype=np.float32))
    assert run.ok
    assert run.compared_with == "the CPU's own program on 8 simulated devices"
    assert 'pass reference= for an independent check' in ' '.join(str(run).split())


def test_a_function_of_explicit_axes_has_the_mesh_that_its_caller_could_not_set(stand_in):
    axes = jax.sharding.AbstractMesh((8,), ('data',), axis_types=(EXPLICIT,))

    def gathered(x):
        return jax.reshard(x, P()) * 2

    assert megajax.inspect.run(gathered, others.abstract(axes, (16,), 'data')).ok
    assert megajax.inspect.run(gathered, np.zeros(16, np.float32), mesh=axes).mesh == {'data': 8}


def test_what_the_program_shows_of_known_miscompiles_is_told(miscompile):
    miscompile('HloModule', '// source_target_pairs={}\nHloModule')
    seen, x = list[str](), np.ones(3, np.float32)
    detect = lambda text: seen.append(text) or ['one']  # noqa: E731
    run = jitted.run(jnp.sin, (x,), target='h100', detect=detect)
    assert run.known_miscompiles == ['one']
    assert seen[0].startswith('// source_target_pairs')


def test_other_seeds_draw_other_numbers(stand_in):
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    run = functools.partial(megajax.inspect.run, jnp.exp, x, reference=jnp.sin)
    errors = [run(seed=seed).leaves[0].error for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]
