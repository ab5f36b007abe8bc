"""`megajax eval` from the command line: what cannot be asked is said before jax, the rest is passed
on.
"""

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megajax.commands import generate as cli_generate
from megajax.commands.generate_output import results_json
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.core.config.extras import install

EITHER = 'give either --task perplexity, wikitext or lambada, or --harness TASKS'
TWICE = 'would be read twice: name it, or the folder that contains it, once'


@pytest.mark.parametrize(
    ('words', 'problem'),
    [
        ('', EITHER),
        (
            '--task perplexity --harness boolq',
            f'{EITHER}\n--task perplexity needs files, not 0',
        ),
        ('--task perplexity', '--task perplexity needs files, not 0'),
        ('--task wikitext', '--task wikitext needs one file, not 0'),
        ('--task wikitext a.txt b.txt', '--task wikitext needs one file, not 2'),
        ('--task lambada a.txt --stride 4', '--task lambada does not support --stride: remove it'),
        ('--task lambada a.txt --stride 0', '--task lambada does not support --stride: remove it'),
        ('model.experts.capacity=2', EITHER),
        ('--task perplexity gone.txt', 'gone.txt: no such file or folder'),
        (
            '--task perplexity hf://datasets/me/mine/a.jsonl',
            'hf://datasets/me/mine/a.jsonl: eval does not read URLs: copy the file to this machine '
            'and give its path',
        ),
        ('--task perplexity a.txt b.txt ./a.txt', f'./a.txt: {TWICE}'),
        ('--task perplexity . a.txt', f'a.txt: {TWICE}'),
        (
            '--task perplexity a.txt --json a.txt/out.json',
            'a.txt/out.json: a.txt is a file, not a folder: choose another file',
        ),
        ('--harness boolq a.txt', '--harness uses its own data: remove files and --stride'),
        (
            '--harness boolq --stride 4',
            '--harness uses its own data: remove files and --stride',
        ),
    ],
)
def test_what_cannot_be_asked_is_said(
    words: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_generate, 'find_spec', lambda _: True)
    for name in 'ab':
        Path(f'{name}.txt').write_text('text')
    done = CliRunner().invoke(app, ['eval', 'run', *words.split()])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == problem


def test_a_harness_that_is_not_installed_is_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_generate, 'find_spec', lambda _: None)
    done = CliRunner().invoke(app, ['eval', 'run', '--harness', 'boolq'])
    assert str(done.exception) == f'--harness needs lm-evaluation-harness: {install("harness")}'


@pytest.mark.parametrize(
    ('task', 'stride', 'asked'),
    [
        ('perplexity', None, ('perplexity', ['a', 'b'], {'stride': None})),
        ('perplexity', 4, ('perplexity', ['a', 'b'], {'stride': 4})),
        ('wikitext', None, ('wikitext', 'a', {})),
        ('wikitext', 4, ('wikitext', 'a', {'stride': 4})),
        ('lambada', None, ('lambada', 'a', {})),
    ],
)
def test_a_task_gets_its_files_and_the_stride_if_one_is_given(
    task: str,
    stride: int | None,
    asked: tuple[str, object, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ('perplexity', 'wikitext', 'lambada'):
        monkeypatch.setattr(
            f'megajax.runtime.evaluate.{name}',
            lambda scorer, tokenizer, files, name=name, **keys: (
                name,
                files,
                keys,
                scorer,
                tokenizer,
            ),
        )
    monkeypatch.setattr('megajax.runtime.evaluate.are_documents', lambda scorer, files: False)
    monkeypatch.setattr(
        'megajax.runtime.evaluate.Scorer', lambda config, params: f'{params} of {config}'
    )
    opened = SimpleNamespace(config='config', params='parameters', tokenizer='tokenizer')
    *found, scorer, tokenizer = cli_generate._evaluate(
        Path('run'), opened, [], ['a', 'b'], task, stride
    )
    assert tuple(found) == asked
    assert (scorer, tokenizer) == ('parameters of config', 'tokenizer')


def test_what_was_found_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Found:
        tokens: int
        loss: float

    def evaluate(
        run: Path,
        opened: object,
        overrides: list[str],
        files: list[str],
        task: str,
        stride: int | None,
    ) -> Found:
        assert (run, overrides, files) == (Path('run'), ['mesh.data=1'], [text])
        assert (task, stride) == ('perplexity', 3)
        return Found(tokens=12_345, loss=1.23456789)

    def open_run(run: Path, overrides: list[str]) -> object:
        assert (run, overrides) == (Path('run'), ['mesh.data=1'])
        opened = SimpleNamespace(config=None, params=None, tokenizer='tokenizer', mesh=None, step=7)
        return opened, SimpleNamespace(set_mesh=lambda _: nullcontext())

    monkeypatch.setattr(cli_generate, '_open', open_run)
    monkeypatch.setattr(cli_generate, '_evaluate', evaluate)
    (tmp_path / 'text').write_text('text')
    text, out = str(tmp_path / 'text'), tmp_path / 'found.json'
    options = ['--stride', '3', '--json', str(out)]
    arguments = ['eval', 'run', '--task', 'perplexity', text, 'mesh.data=1', *options]
    done = CliRunner().invoke(app, arguments)
    assert done.output == 'perplexity  tokens 12,345  loss 1.23457\n'
    results = {'perplexity': {'tokens': 12_345, 'loss': 1.23456789}}
    written = {'run': 'run', 'step': 7, 'files': [text], 'results': results}
    assert json.loads(out.read_text()) == written
    out.unlink()

    def lost(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(cli_generate, 'print', lost, raising=False)
    assert isinstance(CliRunner().invoke(app, arguments).exception, OSError | SystemExit)
    assert json.loads(out.read_text()) == written


def test_results_that_are_not_finite_are_null() -> None:
    lambada = {'passages': 3, 'accuracy': 0.5, 'perplexity': math.inf, 'loss': math.nan}
    text = results_json({'lambada': lambada}, run='runs/a', step=7)

    def reject(constant: str) -> None:
        raise AssertionError(f'{constant} is not JSON')

    written = json.loads(text, parse_constant=reject)
    finite = {'passages': 3, 'accuracy': 0.5, 'perplexity': None, 'loss': None}
    assert written == {'run': 'runs/a', 'step': 7, 'results': {'lambada': finite}}
