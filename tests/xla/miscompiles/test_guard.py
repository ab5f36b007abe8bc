"""Programs of megajax are compiled with the workarounds, and refused where there is none."""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import make_config

from megajax.analysis import inspect
from megajax.analysis.inspect.compile import compile_step
from megajax.analysis.inspect.lint import known_miscompiles
from megajax.core.config import Config, ConfigError, MiscompileError
from megajax.core.counts.declaration import Parameter, Role
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import GPUS, WITHOUT_GPU, gpu_devices, has_compiler
from megajax.core.model.embedding import VocabParallelEmbedding
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import axis_sizes, make_mesh, mesh_of
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text
from megajax.xla.miscompiles import (
    REGISTER,
    __main__,
    ask,
    check_compiled,
    detect,
    guard,
    mesh_target,
    probe,
    reject_affected,
    reject_pipelined_sends,
    target_of,
    workarounds,
)
from megajax.xla.miscompiles.empty_permute import EMPTY_PERMUTE, PASS
from megajax.xla.miscompiles.entry import replicated
from megajax.xla.miscompiles.guard import DEFAULT_TARGET, merged
from megajax.xla.miscompiles.misplaced_bias import MISPLACED_BIAS
from megajax.xla.miscompiles.probe import Answer
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES

from . import texts

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)

OTHER_FLAG = '--xla_cpu_enable_fast_math=false'
OPT_LEVEL = '--xla_gpu_experimental_pipeline_parallelism_opt_level=PIPELINE_PARALLELISM_OPT_LEVEL'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    ask.cache_clear()


def affected_config() -> Config:
    """Sequence parallelism without biases, over two data shards."""
    model = {'num_heads': 2, 'head_dim': 64, 'hidden_size': 128, 'dropout': 0.0}
    return make_config('llama', 2, 2, sequence_parallel=True, model=model)


@pytest.mark.slow
@needs_compiler
def test_a_step_that_is_compiled_with_the_cures_shows_no_fault() -> None:
    devices = gpu_devices('h100', hosts=1, per_host=4)
    config, mesh = affected_config(), mesh_of(devices, axis_sizes(2, 2))
    compiled = compile_step(config, mesh, 4)
    assert detect(compiled.text) == []
    assert check_compiled(compiled.text, 'h100') == []


def test_an_instruction_that_shows_a_fault_is_a_lint_error() -> None:
    (finding,) = known_miscompiles(Program(texts.permute('')), 'h100')
    assert (finding.level, finding.rule) == ('error', 'miscompiled: permute without pairs')
    assert known_miscompiles(Program(texts.permute('{0,0},{1,1}')), 'h100') == []


@needs_compiler
def test_the_cures_of_all_faults_are_given_to_a_gpu_and_none_to_a_cpu() -> None:
    given = workarounds('h100')
    assert (given.get('xla_disable_hlo_passes') == PASS) == bool(
        ask(EMPTY_PERMUTE, 'h100').workaround
    )
    assert ('xla_gpu_enable_pipelined_p2p' in given) == bool(ask(SPLIT_CYCLES, 'h100').workaround)
    assert workarounds('cpu') == {}


@needs_compiler
def test_a_config_that_has_an_uncured_fault_is_refused_with_its_keys_and_the_fix() -> None:
    # A ring in several cycles is lost on every jax so far: with another remedy and other configs.
    entry = dataclasses.replace(
        SPLIT_CYCLES,
        workaround={'xla_no_such_option': True},
        affects=EMPTY_PERMUTE.affects,
        affected_keys=EMPTY_PERMUTE.affected_keys,
    )
    if not ask(entry, 'h100').is_faulty:
        pytest.skip('this compiler has no such fault')
    with pytest.raises(ConfigError) as error:
        reject_affected(affected_config(), 'h100', (entry,))
    assert error.value.exit_code == 2
    for part in (
        'mesh.sequence_parallel=true, model.bias=false, mesh.data=2',
        'xla_no_such_option',
        'a different jaxlib',
    ):
        assert part in str(error.value)
    reject_affected(make_config('llama', 1, 2, sequence_parallel=True), 'h100', (entry,))
    reject_affected(make_config('gpt', 2, 2, sequence_parallel=True), 'h100', (entry,))
    reject_affected(affected_config(), 'cpu', (entry,))


@needs_compiler
def test_a_gpu_that_is_not_there_has_the_target_that_it_was_made_for() -> None:
    for target in GPUS:
        devices = gpu_devices(target, hosts=1, per_host=1)
        assert target_of(devices[0]) == target
        with jax.set_mesh(mesh_of(devices, axis_sizes(1, 1))):
            assert mesh_target() == target


def test_a_cpu_has_the_target_cpu() -> None:
    assert target_of(jax.devices('cpu')[0]) == mesh_target() == 'cpu'
    with jax.set_mesh(make_mesh(2, 2)):
        assert mesh_target() == 'cpu'


def test_a_compiled_step_that_computes_something_else_ends_the_run_with_1() -> None:
    with pytest.raises(MiscompileError, match='permute at jit') as error:
        check_compiled(texts.permute(''), 'h100')
    assert error.value.exit_code == 1


def test_a_compiled_step_that_only_wastes_time_does_not_end_the_run() -> None:
    (finding,) = check_compiled(texts.products('layers/dot'), 'h100')
    assert finding.entry.effect == 'slow'


def test_a_text_that_may_be_right_ends_no_run_where_nobody_knows_of_the_fault() -> None:
    (finding,) = check_compiled(texts.product(1.5, 'BIAS'), 'no such GPU')
    assert finding.entry is SCALED_BIAS
    assert str(finding).endswith('whether this compiler has the bug: no GPU compiler to ask')
    (told,) = known_miscompiles(Program(texts.product(1.5, 'BIAS')), 'no such GPU')
    assert (told.level, told.message) == ('note', str(finding))


def test_lists_of_passes_are_joined_with_each_other_and_with_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = {'xla_disable_hlo_passes': 'a', 'other': True}, {'xla_disable_hlo_passes': 'b'}
    assert merged(several) == {'xla_disable_hlo_passes': 'a,b', 'other': True}
    monkeypatch.setenv('XLA_FLAGS', '--xla_disable_hlo_passes=mine --other=1')
    assert merged(several) == {'xla_disable_hlo_passes': 'mine,a,b', 'other': True}


@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_the_gradient_of_our_embedding_is_right_and_shows_no_fault(sequence_parallel: bool) -> None:
    config = make_config('gpt', 2, 4, sequence_parallel=sequence_parallel)
    declared = {'table': Parameter('VD', Role.MATRIX, std=1.0)}
    parameters = Parameters(declared, {'V': 1024, 'D': 32}, Layout.of(config))
    random = np.random.default_rng(0)
    ids, weights = (
        random.integers(0, 1024, (4, 16), dtype=np.int32),
        random.normal(size=(4, 16, 32)),
    )
    with jax.set_mesh(make_mesh(2, 4)):
        embedding = VocabParallelEmbedding(parameters, key=jax.random.key(0))
        graph, params = nnx.split(embedding)

        def loss(params: nnx.State, ids: jax.Array, weights: jax.Array) -> jax.Array:
            x_BSD = nnx.merge(graph, params)(jax.reshard(ids, jax.P('data', None)), jnp.float32)
            return (jax.reshard(x_BSD, jax.P('data', None, None)) * weights).sum()

        gradient = jax.jit(jax.grad(loss))
        placed = jax.device_put(weights.astype(np.float32), jax.P('data', None, None))
        text = gradient.lower(params, ids, placed).compile().as_text()
        (got,) = jax.tree.leaves(jax.device_get(gradient(params, ids, placed)))
    want = np.zeros((1024, 32), np.float32)
    np.add.at(want, ids, weights)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert detect(text) == []


def test_the_register_is_read_by_no_import_of_megajax() -> None:
    program = (
        "import sys, megajax, megajax.inspect; sys.exit('megajax.xla.miscompiles' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, '-c', program], env=os.environ, check=False).returncode == 0
    )


WITH_WORKAROUND = Answer(is_faulty=True, workaround=EMPTY_PERMUTE.workaround)
WITHOUT_WORKAROUND = Answer(is_faulty=True, workaround=None, why='no option avoids it')
RIGHT = Answer(is_faulty=False, workaround=None)
UNKNOWN = Answer(is_faulty=None, workaround=None, why='no GPU compiler to ask')


Answers = dict[str, Answer]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What the compiler answers, by the names of entries; it has none of the other faults."""
    given = Answers()
    for module in (guard, probe, __main__):
        monkeypatch.setattr(module, 'ask', lambda entry, target: given.get(entry.name, RIGHT))
    return given


@needs_compiler
@pytest.mark.parametrize('target', ['a100', 'h100'])
def test_a_compiled_program_is_judged_by_the_compiler_for_its_own_devices(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a100 = {'a100': Answer(is_faulty=True, workaround=None)}
    monkeypatch.setattr(probe, 'ask', lambda entry, target: of_a100.get(target, RIGHT))
    arrays = replicated(gpu_devices(target, hosts=1, per_host=1), (256, 256), (256, 512), (512,))
    lowered = jax.jit(lambda x, w, b: 1.5 * (x @ w) + b[None]).lower(*arrays)
    compiled = lowered.compile({**WITHOUT_GPU, 'xla_gpu_enable_triton_gemm': False})
    assert len(detect(program_text(compiled))) == 1
    assert len(inspect.known_miscompiles(compiled)) == (target == 'a100')


def test_a_config_that_loses_a_shard_is_refused_where_nothing_cures_it(answers: Answers) -> None:
    answers[EMPTY_PERMUTE.name] = WITHOUT_WORKAROUND
    with pytest.raises(ConfigError) as error:
        reject_affected(affected_config(), 'h100')
    keys = 'mesh.sequence_parallel=true, model.bias=false, mesh.data=2'
    for part in (keys, 'for h100', EMPTY_PERMUTE.what, WITHOUT_WORKAROUND.why):
        assert part in str(error.value)
    reject_affected(make_config('llama', 1, 2, sequence_parallel=True), 'h100')
    reject_affected(make_config('llama', 2, 2), 'h100')
    reject_affected(make_config('gpt', 2, 2, sequence_parallel=True), 'h100')
    reject_affected(affected_config(), 'cpu')


@pytest.mark.parametrize(
    'answer', [WITH_WORKAROUND, RIGHT, UNKNOWN], ids=['avoided', 'right', 'unknown']
)
def test_a_cured_or_unknown_fault_refuses_no_config(answers: Answers, answer: Answer) -> None:
    answers[EMPTY_PERMUTE.name] = answer
    reject_affected(affected_config(), 'h100')


def test_the_options_are_those_that_cure_what_the_compiler_has(answers: Answers) -> None:
    assert workarounds('h100') == {}
    answers[SPLIT_CYCLES.name] = Answer(is_faulty=True, workaround=SPLIT_CYCLES.workaround)
    assert workarounds('h100') == SPLIT_CYCLES.workaround
    answers[EMPTY_PERMUTE.name] = WITH_WORKAROUND
    assert workarounds('h100') == {**SPLIT_CYCLES.workaround, **EMPTY_PERMUTE.workaround}
    answers[SPLIT_CYCLES.name] = WITHOUT_WORKAROUND
    assert workarounds('h100') == EMPTY_PERMUTE.workaround
    assert workarounds('cpu') == {}


def test_a_fault_that_may_be_there_is_cured_with_one_warning(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    why = 'its repro does not compile'
    answers[EMPTY_PERMUTE.name] = Answer(
        is_faulty=None, workaround=EMPTY_PERMUTE.workaround, why=why
    )
    guard._warn.cache_clear()
    for _ in range(2):
        assert workarounds('h100') == EMPTY_PERMUTE.workaround
    (line,) = caplog.messages
    assert f'{EMPTY_PERMUTE.name}: {why}' in line


def test_a_text_that_may_be_right_ends_the_run_where_the_fault_is_there(answers: Answers) -> None:
    assert check_compiled(texts.product(1.5, 'BIAS'), 'h100') == []
    answers[SCALED_BIAS.name] = WITHOUT_WORKAROUND
    with pytest.raises(MiscompileError, match='call at no path'):
        check_compiled(texts.product(1.5, 'BIAS'), 'h100')
    answers[SCALED_BIAS.name] = UNKNOWN
    assert [x.doubt for x in check_compiled(texts.product(1.5, 'BIAS'), 'h100')] == [UNKNOWN.why]


@pytest.mark.parametrize('target', GPUS)
def test_a_gpu_has_the_target_that_its_kind_names_or_else_the_default(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu(kind: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(platform='gpu', device_kind=kind)

    assert target_of(gpu(hardware(target).compiler.name)) == target
    assert target_of(gpu('Tesla T4')) == DEFAULT_TARGET
    # Otherwise, the major compute capability decides, of its record or of the GPU itself.
    assert target_of(gpu('NVIDIA B300 SXM6 AC')) == target_of(gpu('NVIDIA GB300')) == 'b200'
    assert target_of(gpu(hardware('v100').device_kinds[0])) == DEFAULT_TARGET
    ada = types.SimpleNamespace(**vars(gpu('NVIDIA GeForce RTX 4090')), compute_capability='8.9')
    monkeypatch.setattr(jax, 'local_devices', lambda: [ada])
    assert target_of(ada) == 'a100'


def test_the_report_says_of_each_fault_what_is_done_about_it(answers: Answers) -> None:
    assert __main__.report('h100') == [f'none of the {len(REGISTER)} known miscompiles']
    answers[EMPTY_PERMUTE.name] = WITH_WORKAROUND
    answers[MISPLACED_BIAS.name] = WITHOUT_WORKAROUND
    answers[SPLIT_CYCLES.name] = UNKNOWN
    cured, misplaced, unknown = __main__.report('h100')
    assert cured.endswith(f'every program is compiled with xla_disable_hlo_passes={PASS}')
    name = f'{MISPLACED_BIAS.name} ({MISPLACED_BIAS.source})'
    assert misplaced == f'{name}: inspect and train reject an affected program'
    assert unknown.endswith('unknown, no GPU compiler to ask')
    answers[EMPTY_PERMUTE.name] = WITHOUT_WORKAROUND
    [uncured, *_] = __main__.report('h100')
    assert 'are rejected (mesh.sequence_parallel, model.bias, mesh.data)' in uncured


@pytest.mark.usefixtures('answers')
def test_the_command_takes_a_gpu_by_any_of_its_names_and_rejects_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (['H100'], ['a100'], []):
        monkeypatch.setattr('sys.argv', ['miscompiles', *names])
        __main__.main()
        assert capsys.readouterr().out == f'none of the {len(REGISTER)} known miscompiles\n'
    for names, message in ((['h1000'], 'target h1000: choose among a100'), (['a', 'b'], 'b')):
        monkeypatch.setattr('sys.argv', ['miscompiles', *names])
        with pytest.raises(SystemExit, match='2'):
            __main__.main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('mesh', 'is_refused'),
    [
        ({'stages': 2, 'data': 2}, True),
        ({'stages': 2}, False),  # one ring
        ({'data': 2, 'model': 2}, False),
        ({'context': 2, 'model': 2, 'context_exchange': 'ring'}, True),
        ({'context': 2, 'model': 2, 'context_exchange': 'gather'}, False),
    ],
)
@pytest.mark.parametrize(
    ('flags', 'pipelines'),
    [
        ('--xla_gpu_enable_pipelined_p2p=true', True),
        ('--xla_gpu_enable_pipelined_p2p', True),
        (f'{OTHER_FLAG} {OPT_LEVEL}_ENABLE', True),
        ('--xla_gpu_enable_pipelined_p2p=false', False),
        (f'{OPT_LEVEL}_DISABLE', False),
        (OTHER_FLAG, False),
    ],
)
def test_flags_that_pipeline_sends_are_refused_where_a_permute_has_several_cycles(
    mesh: dict, is_refused: bool, flags: str, pipelines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XLA_FLAGS', flags)
    train = {'microbatches': 2, 'batch_size': 8}
    config = make_config('llama', mesh={'data': 1, 'model': 1} | mesh, train=train)
    reject_pipelined_sends(config, 'cpu')
    if not (is_refused and pipelines):
        reject_pipelined_sends(config, 'h100')
        return
    with pytest.raises(ConfigError, match=r'xla#45222.* 2 of 2 devices; remove it'):
        reject_pipelined_sends(config, 'h100')
