"""A repro says whether the compiler at hand has the fault, and its compiled text shows just that."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import AS_SHIPPED

from megajax.hardware.gpu import gpu_devices, has_compiler
from megajax.hlo.program import Program
from megajax.miscompiles import REGISTER, answers, ask, detect
from megajax.miscompiles.entry import Miscompile, find
from megajax.miscompiles.probe import probe, shows_fault
from megajax.miscompiles.sliced_scatter import BATCH, LENGTH, SLICED_SCATTER, VOCAB, WIDTH, lower
from megajax.miscompiles.small_dot import SMALL_DOT
from megajax.miscompiles.split_cycles import SPLIT_CYCLES

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'")
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
        assert answer.cure == entry.workaround
    if answer.cure:
        assert not shows_fault(entry, 'h100', answer.cure)


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
    assert answer.cure is None
    assert not answer.is_faulty or 'rejects xla_no_such_option=True' in answer.why


@needs_compiler
def test_a_repro_that_does_not_compile_answers_nothing() -> None:
    repro = dataclasses.replace(SPLIT_CYCLES.repro, options={'xla_no_such_option': True})
    answer = probe(dataclasses.replace(SPLIT_CYCLES, repro=repro), 'h100')
    assert answer.is_faulty is None
    assert 'xla_no_such_option' in answer.why


@pytest.mark.parametrize('reduced', [True, False])
def test_the_text_of_an_embeddings_gradient_on_cpus_shows_whether_it_is_wrong(reduced: bool) -> None:
    compiled = lower(jax.devices()[:4], reduced=reduced).compile(AS_SHIPPED)
    mesh = jax.tree.leaves(compiled.input_shardings)[0].mesh
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB // 2, (BATCH, LENGTH), dtype=np.int32)
    table = np.zeros((VOCAB, WIDTH), np.float32)
    weights = random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    want = np.zeros_like(table)
    np.add.at(want, ids, weights)
    specs = P('data', None), P('data', 'model'), P('data', 'model', None)
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((table, ids, weights), specs, strict=True)]
    is_right = np.allclose(compiled(*arrays), want, atol=1e-5)
    assert is_right == (not find(SLICED_SCATTER, Program(compiled.as_text())))
    assert is_right or reduced


def test_a_small_product_on_a_cpu_is_wrong_only_where_its_text_shows_the_form() -> None:
    answer = probe(SMALL_DOT, 'cpu')
    compiled = SMALL_DOT.repro.lower(jax.devices('cpu')).compile()
    assert answer.is_faulty == SMALL_DOT.repro.is_wrong(compiled)
    assert find(SMALL_DOT, Program(compiled.as_text())) or not answer.is_faulty
    assert not shows_fault(SMALL_DOT, 'cpu', SMALL_DOT.workaround)


def test_an_answer_is_kept_for_the_same_compiler_and_flags(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask(SMALL_DOT, 'cpu')
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    kept['answer']['why'] = 'kept'
    file.write_text(json.dumps(kept))
    ask.cache_clear()
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


def test_without_a_directory_for_it_an_answer_is_still_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, 'file').touch()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert ask(SMALL_DOT, 'cpu').is_faulty in (True, False)


@pytest.mark.parametrize('entry', ON_GPU, ids=lambda entry: entry.name)
def test_a_cpu_program_asks_no_gpu_compiler(entry: Miscompile, cache: Path) -> None:
    assert ask(entry, 'cpu').is_faulty is None
    assert not cache.exists()
