"""What is told of a step that was executed: the verdict, the worst results, and why."""

from pathlib import Path

import pytest
from support import make_config

from megajax.analysis.inspect import step_run
from megajax.analysis.inspect.report import si
from megajax.analysis.inspect.result import Compared, StepRun
from megajax.analysis.inspect.run_report import run_lines
from megajax.analysis.inspect.step_run import run, run_in_child
from megajax.core.config import Config, dump
from megajax.xla.emulate.result import NOT_COVERED
from megajax.xla.hlo.errors import HloError

RIGHT = [Compared(name=f'gradient of {letter}', error=1e-6, limit=1e-5) for letter in 'abcdefg']
WRONG = [Compared(name='gradient of lost', error=1.0, limit=1e-5), *RIGHT]


def executed(results: list[Compared], **known: object) -> StepRun:
    return StepRun.model_validate(
        {'config': '', 'shrunk': [], 'exact': False, 'seconds': 61.7, 'results': results} | known
    )


def said(*runs: StepRun) -> list[str]:
    return [line.plain for line in run_lines(runs)]


def test_a_right_step_has_its_verdict_and_its_five_worst() -> None:
    assert said(executed(RIGHT)) == [
        'executed on simulated CPU devices, as compiled, and compared with one device: '
        'all 7 results agree (62 s)',
        *(f'  1.0e-06  gradient of {letter}  (limit 1.0e-05)' for letter in 'abcde'),
        NOT_COVERED,
        '',
    ]


def test_a_wrong_step_says_how_much_is_wrong_and_why() -> None:
    head, worst, *_, culprit, smallest, shrunk, _, _ = said(
        executed(
            WRONG,
            exact=True,
            culprit='some-pass',
            smallest='a: 1\n',
            shrunk=['x 2 -> 1', 'y 4 -> 2'],
        )
    )
    assert head.startswith(
        'executed on simulated CPU devices, with fp32 instead of 16-bit types, and compared '
        'with one device: 1 of 8 results are WRONG'
    )
    assert worst == '  1.0e+00  gradient of lost  (limit 1.0e-05)'
    assert culprit == 'first wrong after compiler pass some-pass'
    assert smallest == 'smallest wrong config of this family:\na: 1\n'
    assert shrunk == 'reduced so that a CPU can execute it: x 2 -> 1, y 4 -> 2'


def test_what_is_wrong_is_red() -> None:
    head, first, second, *_ = run_lines([executed(WRONG)])
    assert (head.style, first.style, second.style) == ('bold red', 'bold red', '')
    assert run_lines([executed(RIGHT)])[0].style == 'green'


def test_nothing_is_said_of_a_step_that_was_not_executed() -> None:
    assert said() == []


def test_one_result_that_is_no_number_makes_a_step_wrong() -> None:
    assert executed(RIGHT).ok
    assert not executed([*RIGHT, Compared(name='x', error=float('nan'), limit=1.0)]).ok


@pytest.mark.parametrize(('dtype', 'exact'), [('float32', [False]), ('bfloat16', [False, True])])
def test_a_program_of_16_bits_runs_twice_and_what_is_wrong_is_looked_into(
    dtype: str, exact: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Step:
        """The emulated step, which needs XLA's GPU compiler: one gradient is lost, unless two
        layers are one.
        """

        def __init__(self, config, target):
            self.layers = config.model.num_layers

        def results(self, *, exact):
            return [Compared(name='lost', error=1.0 if self.layers > 1 else 0.0, limit=1e-5)]

    monkeypatch.setattr('megajax.analysis.inspect.emulated_step.EmulatedStep', Step)
    monkeypatch.setattr(
        'megajax.analysis.inspect.step_run.culprit',
        lambda config, target, *, exact, say: f'{config.train.dtype} on {target}, exact={exact}',
    )
    heard: list[str] = []
    config = make_config('gpt', 2, 4, train={'dtype': dtype})
    found = run(config, 'h100', bisect=True, minimize=False, say=heard.append)
    assert [one.exact for one in found] == exact
    assert [one.culprit for one in found] == [f'{dtype} on h100, exact={one}' for one in exact]
    assert heard[0] == 'compiling the step for h100 ...'
    assert all(one.shrunk == [] and one.smallest == '' for one in found)


def test_a_wrong_step_is_told_though_a_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config('gpt', 2, 4, train={'dtype': 'float32'})

    class Step:
        """The emulated step, which is wrong, but can be executed only unchanged."""

        def __init__(self, config, target):
            self.config = config

        def results(self, *, exact):
            if self.config != config:
                raise HloError('%dot.7: no layout')
            return WRONG

    def culprit(*_: object, **__: object) -> str:
        raise ValueError('no pass is wrong')

    monkeypatch.setattr('megajax.analysis.inspect.emulated_step.EmulatedStep', Step)
    monkeypatch.setattr('megajax.analysis.inspect.step_run.culprit', culprit)
    heard: list[str] = []
    [found] = run(config, 'h100', bisect=True, minimize=True, say=heard.append)
    assert found.results == WRONG
    assert found.smallest == dump(config)
    assert 'not executed: %dot.7: no layout' in heard
    assert 'first wrong compiler pass not found: no pass is wrong' in said(found)


def test_the_process_of_its_own_runs_what_it_is_told_and_hands_the_result_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def call(module: str, task: Path, result: Path, *, target: str, say: object) -> None:
        assert (module, target) == (step_run.__name__, 'h200')
        step_run._main(str(task), str(result))

    def fake(config: Config, target: str, **options: object) -> list[StepRun]:
        asked.update(options, config=config, target=target)
        return [executed(RIGHT)]

    monkeypatch.setattr(step_run, 'call_in_child', call)
    monkeypatch.setattr(step_run, 'run', fake)
    config = make_config('gpt', 2, 4)
    assert run_in_child(config, 'h200', bisect=True, minimize=False, say=print) == [executed(RIGHT)]
    assert (asked['config'], asked['target'], asked['bisect'], asked['minimize']) == (
        config,
        'h200',
        True,
        False,
    )


@pytest.mark.parametrize(
    ('count', 'text'),
    [(999, '999 B'), (1000, '1.0 kB'), (2.5e9, '2.5 GB'), (1e12, '1.0 TB'), (2.5e15, '2500.0 TB')],
)
def test_bytes_have_the_largest_unit_that_leaves_a_digit(count: float, text: str) -> None:
    assert si(count) == text
