"""A finding is told from other faults, minimized, and described by a folder of files."""

import json
import signal
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from megajax.analysis.fuzz import execute, explain
from megajax.analysis.fuzz.case import Case, Worst
from megajax.analysis.fuzz.draw import described, draw
from megajax.analysis.fuzz.explain import explained
from megajax.analysis.inspect.one_device import updated
from megajax.analysis.inspect.result import Compared
from megajax.core.config import Config, ConfigError, load
from megajax.xla.hlo.errors import HloError

LAYERS = 2
CONFIG = draw(0, 0, (f'model.num_layers={LAYERS}', 'train.dtype=bfloat16', 'mesh.data=2'))
TOLD: dict[str, object] = {
    'seed': 4,
    'number': 17,
    'fixed': ['mesh.data=2'],
    'target': 'h100',
    'jax_version': jax.__version__,
}
RIGHT = Compared(name='loss', error=1e-6, limit=1e-5)
WRONG = Compared(name='gradients.head', error=0.25, limit=1e-5)


def found(verdict: str, message: str = '', config: Config = CONFIG, **worst: Worst) -> Case:
    written = config.model_dump(mode='json', exclude_unset=True)
    return Case.model_validate(
        {**TOLD, 'config': written, 'verdict': verdict, 'message': message, **worst}
    )


def hlo(name: str) -> str:
    return f'HloModule after_{name}\n\nENTRY main {{\n  ROOT x = f32[] constant(0)\n}}\n'


class Step:
    """A step whose program is wrong after the pass `second`, with 16-bit types and without."""

    made: ClassVar[list['Step']] = []
    dumps = 'first', 'second', 'third'

    def __init__(self, config: Config, target: str, options: dict[str, Any]):
        self.options = {'xla_gpu_autotune_level': 0, **options}
        self.program = type('Program', (), {'text': 'ENTRY optimized'})
        self.exact, self.limits = list[bool](), list[float]()
        self.made.append(self)
        if folder := options.get('xla_dump_to'):
            module = 'module_0001.jit_train_step'
            Path(folder, f'{module}.before_optimizations.txt').write_text('ENTRY before')
            for place, name in enumerate(self.dumps):
                path = Path(folder, f'{module}.{place:04}.hlo_passes.after_{name}.txt')
                path.write_text(hlo(name))

    def results(self, *, exact: bool = False, text: str | None = None) -> list[Compared]:
        self.exact.append(exact)
        self.limits.append(signal.getitimer(signal.ITIMER_REAL)[0])
        is_right = text is not None and 'after_first' in text
        return [RIGHT, RIGHT] if is_right else [WRONG, RIGHT]

    def pair(self, name: str, *, exact: bool) -> tuple[np.ndarray, np.ndarray]:
        assert name == WRONG.name
        return np.ones(2), np.zeros(2)


@pytest.fixture(name='step')
def fixture_step(monkeypatch: pytest.MonkeyPatch) -> type[Step]:
    for module in (explain, execute):
        monkeypatch.setattr(module, 'EmulatedStep', Step)
    monkeypatch.setattr(Step, 'made', [])
    return Step


@pytest.mark.parametrize(
    ('message', 'is_same'),
    [
        ('Traceback\n  ...\nHloError: %dot.9: no layout\n', True),
        ('Traceback\n  ...\nTypeError: %dot.7: no layout', False),
        ('', False),
    ],
)
def test_a_simpler_step_fails_alike_if_its_error_has_the_same_type(tmp_path, message, is_same):
    case = found('failed', 'File "x.py"\nHloError: %dot.7: no layout')
    tried = list[Config]()

    def execute(config: Config) -> Case:
        tried.append(config)
        return found('failed', message, config)

    folder = tmp_path / 'new' / '4-17'
    explained(case, execute, folder)
    small = load(folder / 'smallest.yaml')
    assert (small != CONFIG) == is_same
    assert small in tried or not is_same


def test_the_folder_of_a_failure_has_its_configs_versions_and_message(tmp_path):
    case = explained(found('failed', 'HloError: no layout'), lambda _: found('right'), tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {'config.yaml', 'smallest.yaml', 'versions.json', 'README.md'}
    assert load(tmp_path / 'config.yaml') == CONFIG
    assert json.loads((tmp_path / 'versions.json').read_text())['jax'] == jax.__version__
    lines = (tmp_path / 'README.md').read_text().splitlines()
    assert lines[0] == '# failed: seed 4, step 17, h100'
    assert case.smallest in lines[2]
    assert lines[lines.index('HloError: no layout') - 1] == '```'
    named = {line.split('`')[1] for line in lines if line.startswith('- `')}
    assert named == files - {'README.md'}
    assert case.culprit == ''


@pytest.mark.parametrize('is_wrong_in_fp32', [True, False])
def test_the_folder_of_a_wrong_step_has_the_modules_around_the_pass(
    tmp_path, step, monkeypatch, is_wrong_in_fp32
):
    calls = []

    def reduce(*call: object, target: str, seconds: float) -> None:
        assert (target, seconds) == ('h100', explain.REDUCING)
        calls.append(call)

    monkeypatch.setattr(explain, 'call_in_child', reduce)
    worst = Worst(name=WRONG.name, error=0.25, limit=1e-5, wrong=1, results=2)
    right = worst.model_copy(update={'wrong': 0, 'name': 'loss'})
    both = (right, worst) if is_wrong_in_fp32 else (worst, right)
    case = found('wrong', **dict(zip(('as_compiled', 'exact'), both, strict=True)))
    case = explained(case, lambda _: found('right'), tmp_path)
    assert case.culprit == 'second (pipeline hlo_passes)'
    texts = {path.name: path.read_text() for path in tmp_path.glob('*.txt')}
    assert texts == {
        'before_optimizations.txt': 'ENTRY before',
        'after_optimizations.txt': 'ENTRY optimized',
        'last_right_module.txt': hlo('first'),
        'first_wrong_module.txt': hlo('second'),
    }
    assert (tmp_path / 'results.csv').read_text().splitlines() == [
        'result,error,limit,ok', 'gradients.head,0.25,1e-05,False', 'loss,1e-06,1e-05,True'
    ]  # fmt: skip
    saved = np.load(tmp_path / 'worst_result.npz')
    assert (saved['actual'].sum(), saved['expected'].sum()) == (2, 0)
    assert {*step.made[0].exact} == {is_wrong_in_fp32}
    assert min(step.made[0].limits) > 0  # a compiler that hangs is ended
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    readme = (tmp_path / 'README.md').read_text()
    assert 'gradients.head differs by 0.25 (limit 1.0e-05).' in readme
    assert 'loss differs' not in readme
    # The program is reduced with the options of the step, except for the dumps.
    ((module, _, out, *rest),) = calls
    assert (module, out) == ('megajax.xla.reduce', tmp_path / 'hlo')
    assert rest == ['--target', 'h100', '--options', '{"xla_gpu_autotune_level": 0}']


@pytest.mark.parametrize('error', [RuntimeError, ConfigError])
def test_a_pass_that_is_not_found_or_not_reduced_is_said(tmp_path, step, monkeypatch, error):
    def failing(*_: object, **__: object) -> None:
        raise error('SIGSEGV')

    monkeypatch.setattr(explain, 'call_in_child', failing)
    assert explained(found('wrong'), lambda _: found('right'), tmp_path).culprit
    assert (tmp_path / 'hlo' / 'error.txt').read_text() == 'SIGSEGV\n'
    monkeypatch.setattr(Step, 'dumps', ())
    case = explained(found('wrong'), lambda _: found('right'), tmp_path)
    assert case.culprit.startswith('not found: no pass dumps')


def test_each_part_of_an_explanation_is_told_before_the_next_may_end_the_process(
    tmp_path, step, monkeypatch
):
    told, read = list[tuple[str, str]](), list[str]()

    def say(case: Case) -> None:
        told.append((case.smallest, case.culprit))
        read.append((tmp_path / 'it' / 'README.md').read_text())

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, 'call_in_child', ended)
    with pytest.raises(KeyboardInterrupt):
        explained(found('wrong'), lambda _: found('right'), tmp_path / 'it', say)
    small = described(CONFIG)
    assert told == [(small, ''), (small, 'second (pipeline hlo_passes)')]
    assert all(small in text for text in read)
    assert 'first_wrong_module.txt' in read[1]


def test_the_folder_has_no_files_of_an_earlier_finding(tmp_path):
    (tmp_path / 'it' / 'hlo').mkdir(parents=True)
    (tmp_path / 'it' / 'first_wrong_module.txt').touch()
    explained(found('failed', 'HloError: no'), lambda _: found('right'), tmp_path / 'it')
    files = {path.name for path in (tmp_path / 'it').iterdir()}
    assert files == {'config.yaml', 'smallest.yaml', 'versions.json', 'README.md'}


def test_findings_with_different_keys_have_different_folders():
    case = found('wrong')
    others = [{'target': 'b200'}, {'fixed': []}, {'jax_version': '0.9'}, {'compiler': 'x'}]
    others += [{'seed': 5}, {'number': 18}, {'step': 'x'}]
    names = {case.name, *(case.model_copy(update=other).name for other in others)}
    assert len(names) == 1 + len(others)
    assert case.model_copy(update={'verdict': 'failed'}).name == case.name


@pytest.mark.parametrize('is_wrong_in_fp32', [True, False])
def test_a_simpler_step_is_wrong_with_the_same_types(tmp_path, step, monkeypatch, is_wrong_in_fp32):
    monkeypatch.setattr(explain, 'call_in_child', lambda *_, **__: None)
    worst = Worst(name=WRONG.name, error=0.25, limit=1e-5, wrong=1, results=2)
    right = worst.model_copy(update={'wrong': 0})
    as_compiled = {'as_compiled': worst.model_copy(update={'error': 0.125}), 'exact': right}
    drawn = {'as_compiled': worst, 'exact': worst if is_wrong_in_fp32 else right}
    explained(found('wrong', **drawn), lambda x: found('wrong', '', x, **as_compiled), tmp_path)
    assert (load(tmp_path / 'smallest.yaml') == CONFIG) == is_wrong_in_fp32
    readme = (tmp_path / 'README.md').read_text()
    assert f'differs by {0.25 if is_wrong_in_fp32 else 0.125} ' in readme


def test_a_step_in_16_bits_is_also_executed_in_fp32_and_its_verdict_is_of_both(step, monkeypatch):
    tried = execute.case(CONFIG, TOLD, 'h100')
    assert step.made[0].exact == [False, True]
    assert tried.verdict == 'wrong'
    assert tried.exact == Worst(name=WRONG.name, error=0.25, limit=1e-5, wrong=1, results=2)
    assert (tried.seed, tried.number, tried.fixed) == (4, 17, ['mesh.data=2'])
    assert tried.config == CONFIG.model_dump(mode='json', exclude_unset=True)
    not_a_number = WRONG.model_copy(update={'error': float('nan')})
    monkeypatch.setattr(Step, 'results', lambda *_, exact=False: [not_a_number if exact else RIGHT])
    tried = execute.case(CONFIG, TOLD, 'h100')
    assert (tried.verdict, tried.as_compiled.wrong, tried.exact.error) == ('wrong', 0, None)
    monkeypatch.setattr(Step, 'results', lambda *_, exact=False: [RIGHT, RIGHT])
    assert execute.case(CONFIG, TOLD, 'h100').verdict == 'right'
    assert execute.case(updated(CONFIG, train={'dtype': 'float32'}), TOLD, 'h100').exact is None


@pytest.mark.parametrize(
    'error',
    [
        OSError(28, 'No space left on device'),
        MemoryError(),
        jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.'),
        RuntimeError('INTERNAL: cuDNN not found'),
    ],
)
def test_a_fault_of_the_machine_is_no_case(step, monkeypatch, error):
    def results(*_: object, **__: object) -> list[Compared]:
        raise error

    monkeypatch.setattr(Step, 'results', results)
    with pytest.raises(type(error)) as raised:
        execute.case(CONFIG, TOLD, 'h100')
    assert raised.value is error


def test_memory_that_runs_out_during_the_search_for_the_pass_is_raised(step, monkeypatch, tmp_path):
    error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.')

    def results(*_: object, text: str | None = None, **__: object) -> list[Compared]:
        if text is not None:
            raise error
        return [WRONG]

    monkeypatch.setattr(Step, 'results', results)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        explained(
            execute.case(CONFIG, TOLD, 'h100'), lambda config: found('right'), tmp_path / 'it'
        )
    assert raised.value is error


@pytest.mark.parametrize(
    'error', [FileNotFoundError(2, 'No such file or directory'), TimeoutError('too late')]
)
def test_another_error_of_the_system_is_a_fault_of_the_step(step, monkeypatch, error):
    def results(*_: object, **__: object) -> list[Compared]:
        raise error

    monkeypatch.setattr(Step, 'results', results)
    tried = execute.case(CONFIG, TOLD, 'h100')
    assert tried.verdict == 'failed'
    assert tried.message.endswith(f'{type(error).__name__}: {error}')


def test_a_step_that_cannot_be_drawn_is_rejected_and_the_next_one_executed(
    step, monkeypatch, capsys
):
    def drawn(seed: int, number: int, fixed: object) -> Config:
        if number == 8:
            raise ConfigError('found no config')
        return draw(seed, number)

    monkeypatch.setattr(execute, 'draw', drawn)
    execute._execute_all(TOLD, [8, 9], None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(execute.DONE)]
    first, second = (Case.model_validate_json(line.removeprefix(execute.DONE)) for line in lines)
    assert (first.number, first.verdict, first.message) == (8, 'rejected', 'found no config')
    assert (second.number, second.verdict) == (9, 'wrong')


def test_a_machine_that_cannot_execute_a_step_is_told(step, monkeypatch, capsys):
    def failing(*_: object) -> Case:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(execute, 'case', failing)
    with pytest.raises(OSError, match='No space'):
        execute._execute_all(TOLD, [0], None)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f'{execute.UNABLE}[Errno 28] No space left on device'
    )


@pytest.mark.parametrize(
    ('error', 'verdict'), [(ConfigError('use x'), 'rejected'), (HloError('y' * 900), 'failed')]
)
def test_a_step_that_raises_has_a_verdict_and_its_error(step, monkeypatch, error, verdict):
    def results(*_: object, **__: object) -> list[Compared]:
        raise error

    monkeypatch.setattr(Step, 'results', results)
    tried = execute.case(CONFIG, TOLD, 'h100')
    assert (tried.verdict, tried.is_finding) == (verdict, verdict == 'failed')
    assert str(error)[:400] in tried.message
    lines = tried.message.splitlines()
    assert len(lines) <= execute.MOST_LINES
    assert max(map(len, lines)) <= 500
