"""A repro says whether the compiler at hand has the fault, and its compiled text shows just
that.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import AS_SHIPPED

from megajax.analysis.inspect import known_miscompiles
from megajax.core.config import MiscompileError
from megajax.core.hardware.cpu_flags import LIMIT
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices, has_compiler
from megajax.runtime.run.compile_step import check
from megajax.runtime.run.log.report import Report
from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles import REGISTER, answers, ask, detect
from megajax.xla.miscompiles import probe as probing
from megajax.xla.miscompiles.double_matmul import DOUBLE_MATMUL
from megajax.xla.miscompiles.empty_permute import EMPTY_PERMUTE
from megajax.xla.miscompiles.entry import Miscompile, find
from megajax.xla.miscompiles.lost_indices import LOST_INDICES
from megajax.xla.miscompiles.misplaced_bias import MISPLACED_BIAS
from megajax.xla.miscompiles.probe import probe, shows_fault
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.miscompiles.sliced_scatter import (
    BATCH,
    LENGTH,
    SLICED_SCATTER,
    VOCAB,
    WIDTH,
    lower,
)
from megajax.xla.miscompiles.small_dot import SMALL_DOT
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES

from . import texts

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
Options = Mapping[str, Any]
ON_GPU = [entry for entry in REGISTER if entry.platform == 'gpu']


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    ask.cache_clear()
    return answers.folder()


@needs_compiler
@pytest.mark.parametrize('entry', ON_GPU, ids=lambda entry: entry.name)
def test_a_compiled_repro_shows_its_own_fault_or_none(entry: Miscompile) -> None:
    lowered = entry.repro.lower(gpu_devices('h100', hosts=1, per_host=entry.repro.num_devices))
    text = lowered.compile({'xla_gpu_autotune_level': '0', **entry.repro.options}).as_text()
    answer = probe(entry, 'h100')
    found = {finding.entry.name for finding in detect(text)}
    assert found == ({entry.name} if answer.is_faulty else set())


@needs_compiler
@pytest.mark.parametrize('entry', ON_GPU, ids=lambda entry: entry.name)
def test_the_cure_of_a_fault_takes_it_out_of_the_text(entry: Miscompile) -> None:
    answer = probe(entry, 'h100')
    if answer.is_faulty:
        assert answer.workaround == entry.workaround
    if answer.workaround:
        assert not shows_fault(entry, 'h100', answer.workaround)


@needs_compiler
def test_a_program_for_more_devices_than_xla_prints_a_table_of_shows_the_fault_too() -> None:
    compiled = lower(gpu_devices('h100', hosts=2, per_host=8)).compile(WITHOUT_GPU)
    assert '{...}' in (compiled.as_text() or '')
    is_faulty = shows_fault(SLICED_SCATTER, 'h100', {})
    assert len(known_miscompiles(compiled)) == int(is_faulty)
    mesh = jax.tree.leaves(compiled.input_shardings)[0].mesh
    with jax.set_mesh(mesh), pytest.raises(MiscompileError) if is_faulty else nullcontext():
        check(compiled, Report())


@needs_compiler
def test_rings_in_several_cycles_lose_data_without_the_options_too_only_if_they_are_cut() -> None:
    lowered = SPLIT_CYCLES.repro.lower(gpu_devices('h100', hosts=1, per_host=4))
    uncut = lowered.compile({'xla_gpu_autotune_level': '0'}).as_text()
    assert 'collective-permute' in uncut
    assert detect(uncut) == []


@needs_compiler
def test_an_option_that_the_compiler_rejects_is_no_cure() -> None:
    entry = dataclasses.replace(SPLIT_CYCLES, workaround={'xla_no_such_option': True})
    answer = probe(entry, 'h100')
    assert answer.workaround is None
    assert not answer.is_faulty or 'rejects xla_no_such_option=True' in answer.why


@needs_compiler
def test_a_repro_that_does_not_compile_answers_nothing() -> None:
    repro = dataclasses.replace(SPLIT_CYCLES.repro, options={'xla_no_such_option': True})
    answer = probe(dataclasses.replace(SPLIT_CYCLES, repro=repro), 'h100')
    assert answer.is_faulty is None
    assert 'xla_no_such_option' in answer.why


@pytest.mark.parametrize('reduced', [True, False])
def test_the_text_of_an_embeddings_gradient_on_cpus_shows_whether_it_is_wrong(
    reduced: bool,
) -> None:
    compiled = lower(jax.devices()[:4], reduced=reduced).compile(AS_SHIPPED)
    mesh = jax.tree.leaves(compiled.input_shardings)[0].mesh
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB // 2, (BATCH, LENGTH), dtype=np.int32)
    table = np.zeros((VOCAB, WIDTH), np.float32)
    weights = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    want = np.zeros_like(table)
    np.add.at(want, ids, weights)
    specs = P('data', None), P('data', 'model'), P('data', 'model', None)
    arrays = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((table, ids, weights), specs, strict=True)
    ]
    is_right = np.allclose(compiled(*arrays), want, atol=1e-5)
    assert is_right == (not find(SLICED_SCATTER, Program(compiled.as_text())))
    assert is_right or reduced


def test_a_small_product_on_a_cpu_is_wrong_only_where_its_text_shows_the_form() -> None:
    answer = probe(SMALL_DOT, 'cpu')
    compiled = SMALL_DOT.repro.lower(jax.devices('cpu')).compile()
    assert answer.is_faulty == SMALL_DOT.repro.is_wrong(compiled)
    assert find(SMALL_DOT, Program(compiled.as_text())) or not answer.is_faulty
    assert not shows_fault(SMALL_DOT, 'cpu', SMALL_DOT.workaround)


def test_an_answer_is_kept_for_the_same_compiler_and_flags(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ask(SMALL_DOT, 'cpu')
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    kept['answer']['why'] = 'kept'
    file.write_text(json.dumps(kept))
    ask.cache_clear()
    monkeypatch.setenv('XLA_FLAGS', f'{os.environ["XLA_FLAGS"]} {LIMIT}=7')  # changes no program
    assert ask(SMALL_DOT, 'cpu') == dataclasses.replace(answer, why='kept')
    monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_multi_thread_eigen=false')
    assert answers.read(answers.identity(SMALL_DOT, 'cpu')) is None


@pytest.mark.parametrize('text', ['', '{', '[]', '{"identity": 1, "answer": 2}', '{"answer": {}}'])
def test_a_broken_answer_is_asked_for_again(cache: Path, text: str) -> None:
    answer = ask(SMALL_DOT, 'cpu')
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(text)
    ask.cache_clear()
    assert ask(SMALL_DOT, 'cpu') == answer
    assert file.read_text() == whole


def test_without_a_directory_for_it_an_answer_is_still_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert ask(SMALL_DOT, 'cpu').is_faulty in (True, False)


@pytest.mark.parametrize('entry', ON_GPU, ids=lambda entry: entry.name)
def test_a_cpu_program_asks_no_gpu_compiler(entry: Miscompile, cache: Path) -> None:
    assert ask(entry, 'cpu').is_faulty is None
    assert not cache.exists()


@pytest.mark.parametrize('entry', REGISTER, ids=lambda entry: entry.name)
def test_a_repro_is_a_program_for_the_devices_that_it_is_given(entry: Miscompile) -> None:
    devices = jax.devices()[-entry.repro.num_devices :]
    compiled = entry.repro.lower(devices).compile()
    placed = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    assert all(sharding.device_set == set(devices) for sharding in placed)


def computed(entry: Miscompile, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the repro's program computes where CPUs are the devices."""
    compiled = entry.repro.lower(jax.devices()[: entry.repro.num_devices]).compile(AS_SHIPPED)
    placed = map(jax.device_put, inputs, jax.tree.leaves(compiled.input_shardings))
    return [np.asarray(x) for x in jax.tree.leaves(compiled(*placed))]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_the_bias_of_the_scaled_products_repro_is_scaled_too() -> None:
    x, w, b = np.zeros((256, 256), np.float32), np.zeros((256, 512), np.float32), numbers(512)
    [found] = computed(SCALED_BIAS, x, w, b)
    ratio = found / b
    assert np.ptp(ratio) < 1e-5
    assert abs(ratio.mean() - 1) > 0.1


def test_the_bias_of_the_square_products_repro_lies_along_the_rows_of_its_transpose() -> None:
    b, zeros = numbers(32), np.zeros((32, 64), np.float32)
    [found] = computed(MISPLACED_BIAS, zeros, zeros.T, b)
    np.testing.assert_array_equal(found, np.broadcast_to(b[:, None], (32, 32)))


def test_the_repro_of_a_lost_shard_reads_the_whole_and_each_devices_own_part() -> None:
    x = numbers(4, 64, 32)
    whole, own = computed(EMPTY_PERMUTE, x)
    np.testing.assert_allclose(whole, 3 * x, rtol=1e-6)
    np.testing.assert_allclose(own, 2 * x, rtol=1e-6)


def test_the_repro_of_lost_places_returns_where_the_largest_are() -> None:
    x = numbers(8, 64)
    largest, places = computed(LOST_INDICES, x)
    np.testing.assert_array_equal(places, np.argsort(-x)[:, :2])
    np.testing.assert_array_equal(largest, np.take_along_axis(x, places, 1))


def test_the_ring_of_the_repro_brings_every_shard_home_after_an_even_number_of_turns() -> None:
    x = numbers(8, 64)
    [found] = computed(SPLIT_CYCLES, x)
    np.testing.assert_array_equal(found, 16 * x)


def test_the_repro_of_a_product_that_runs_twice_reads_its_products_and_stacks_them() -> None:
    x, w = np.eye(512), np.broadcast_to(2 * np.eye(512), (4, 512, 512))
    last, stacked = computed(DOUBLE_MATMUL, x.astype('bfloat16'), w.astype('bfloat16'))
    assert stacked.shape == (4, 512, 512)
    np.testing.assert_array_equal(stacked[0].astype(np.float32), 2 * x)
    tanh = np.tanh(stacked[-1].astype(np.float32))
    np.testing.assert_allclose(last.astype(np.float32), tanh, atol=1e-2)


Shows = Callable[[Options], bool]


def entry_of(shows: Shows, platform: str = 'cpu', **changes: Any) -> Miscompile:
    """An entry that a compiler shows with the options for which `shows` is true."""

    def lower(devices: list[Any]) -> Any:
        def compiled(options: Options) -> Any:
            text = texts.permute('' if shows(options) else '{0,0}')
            return SimpleNamespace(as_text=lambda: text)

        return SimpleNamespace(compile=compiled)

    repro = dataclasses.replace(EMPTY_PERMUTE.repro, lower=lower, options={'needed': True})
    changes = {'workaround': {'cure': True}} | changes
    return dataclasses.replace(EMPTY_PERMUTE, repro=repro, platform=platform, **changes)


def rejects(*names: str) -> Shows:
    def shows(options: Options) -> bool:
        for name in names:
            if name in options:
                raise RuntimeError(f'\nNo such option: {name}\nmore of it')
        return True

    return shows


def test_a_compiler_is_asked_with_the_options_of_the_repro_and_once_more_with_the_cure() -> None:
    asked = list[Options]()

    def shows(options: Options) -> bool:
        asked.append(options)
        return 'cure' not in options

    answer = probe(entry_of(shows), 'cpu')
    assert (answer.is_faulty, answer.workaround) == (True, {'cure': True})
    assert asked == [{'needed': True}, {'needed': True, 'cure': True}]


@pytest.mark.parametrize(
    ('entry', 'is_faulty', 'why'),
    [
        (entry_of(lambda options: False), False, ''),
        (entry_of(lambda options: True), True, 'cure=True does not avoid it'),
        (entry_of(lambda options: True, workaround=None), True, 'no option avoids it'),
        (
            entry_of(rejects('cure')),
            True,
            'the compiler rejects cure=True: No such option: cure',
        ),
        (entry_of(rejects('needed')), None, 'its repro does not compile: No such option: needed'),
    ],
    ids=['right', 'not cured', 'no cure', 'rejects the cure', 'does not compile'],
)
def test_what_no_option_cures_has_its_reason(entry: Miscompile, is_faulty: Any, why: str) -> None:
    answer = probe(entry, 'cpu')
    assert (answer.is_faulty, answer.workaround, answer.why) == (is_faulty, None, why)


@pytest.mark.parametrize('name', ['xla_cpu_enable_fast_math', 'xla_no_such_option'])
def test_a_fault_that_may_be_there_has_the_cure_that_the_compiler_accepts(name: str) -> None:
    answer = probe(entry_of(rejects('needed'), workaround={name: False}), 'cpu')
    is_accepted = name == 'xla_cpu_enable_fast_math'
    assert (answer.is_faulty, answer.workaround) == (None, {name: False} if is_accepted else None)


def test_a_gpu_compiler_is_asked_once_for_each_target(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, options = list[Any](), list[Options]()

    def devices(target: str, *, hosts: int, per_host: int) -> None:
        asked.append((target, hosts, per_host))

    monkeypatch.setattr(probing, 'gpu_devices', devices)
    monkeypatch.setattr(probing, 'has_compiler', lambda: True)
    entry = entry_of(lambda given: bool(options.append(given)), 'gpu')
    assert ask(entry, 'b200').is_faulty is False
    assert asked == [('b200', 1, 4)]
    assert options == [{**WITHOUT_GPU, 'needed': True}]
    ask.cache_clear()
    assert ask(entry, 'b200').is_faulty is False
    assert len(asked) == 1  # the answer is kept
    assert ask(entry, 'a100').is_faulty is False
    assert asked[1] == ('a100', 1, 4)  # not for another target
    assert ask(entry, 'no such GPU').is_faulty is None


def test_what_cannot_be_asked_is_not_kept(cache: Path) -> None:
    assert ask(entry_of(rejects('needed')), 'cpu').is_faulty is None
    assert not cache.exists()


def test_a_repro_is_lowered_without_the_mesh_and_options_of_whoever_asks() -> None:
    seen = list[tuple[bool, object]]()

    def shows(options: Options) -> bool:
        mesh = jax.sharding.get_abstract_mesh()
        seen.append((mesh.empty, jax.config.values['jax_default_matmul_precision']))
        return False

    mesh = jax.make_mesh((8,), ('data',))
    with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
        ask(entry_of(shows), 'cpu')
    assert seen == [(True, None)]
    assert answers.read(answers.identity(entry_of(shows), 'cpu')) is not None


@pytest.mark.parametrize(
    ('option', 'value'),
    [('jax_use_shardy_partitioner', False), ('jax_default_matmul_precision', 'highest')],
)
def test_an_answer_is_for_the_options_of_jax_that_change_programs(
    option: str, value: object
) -> None:
    identity = answers.identity(SMALL_DOT, 'cpu')
    assert 'options' not in identity  # jax's defaults
    before = jax.config.values[option]
    jax.config.update(option, value)
    try:
        assert answers.identity(SMALL_DOT, 'cpu') == identity | {'options': {option: str(value)}}
    finally:
        jax.config.update(option, before)


@pytest.mark.parametrize(
    ('flag', 'matters'),
    [
        ('--xla_gpu_enable_triton_gemm=false', True),
        ('--xla_dump_to=dumps', False),
        ('--xla_force_host_platform_device_count=4', False),
    ],
)
def test_an_answer_is_for_the_flags_that_change_programs(
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    matters: bool,
) -> None:
    monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_multi_thread_eigen=false')
    before = answers.identity(SMALL_DOT, 'cpu')
    monkeypatch.setenv('XLA_FLAGS', f'{flag} --xla_cpu_multi_thread_eigen=false')
    assert (answers.identity(SMALL_DOT, 'cpu') != before) == matters


def test_an_answer_is_for_one_repro_one_target_and_one_level_of_optimization() -> None:
    gpus = [answers.identity(EMPTY_PERMUTE, target) for target in ('h100', 'h200')]
    assert gpus[0] != gpus[1]
    assert gpus[0] != answers.identity(LOST_INDICES, 'h100')
    before = answers.identity(SMALL_DOT, 'cpu')
    disabled = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', not disabled)
    try:
        assert answers.identity(SMALL_DOT, 'cpu') != before
    finally:
        jax.config.update('jax_disable_most_optimizations', disabled)
