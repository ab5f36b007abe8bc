"""The command as a user types it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT, megajax
from typer.testing import CliRunner

from megajax.commands.config import _short
from megajax.commands.main import app


def started(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, '-m', 'megajax', *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            'gpt2_124m model.num_layer=2',
            (
                'override model.num_layer=2: model.num_layer: unknown key; '
                'did you mean model.num_layers?'
            ),
        ),
        (
            'gpt2_124m optim.lr=fast',
            "override optim.lr=fast: optim.lr: must be a valid number, not 'fast'",
        ),
        (
            'gpt2_124m mesh.model=8',
            ('model.num_heads: 12 is not a multiple of mesh.model=8; use 8 or 16, or mesh.model 4'),
        ),
        (
            '{folder}/twice.yaml',
            'twice.yaml:3: train.steps: written twice, first on line 2; delete one of the two',
        ),
        ('gpt2_124', 'gpt2_124: no such file or preset; did you mean gpt2_124m? presets: '),
        (
            'gpt2_124m steps',
            'override steps: not of the form section.key=value, for example train.steps=100',
        ),
        (
            'modle.bias=false',
            'override modle.bias=false: modle.bias: unknown key; did you mean model.bias?',
        ),
    ],
    ids=[
        'unknown key',
        'wrong type',
        'indivisible heads',
        'duplicate key',
        'missing file',
        'malformed override',
        'tiny by default',
    ],
)
def test_a_wrong_config_exits_2_and_names_the_fix(
    arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / 'twice.yaml').write_text('train:\n  steps: 5\n  steps: 6\n')
    done = megajax('train', *arguments.format(folder=tmp_path).split())
    assert (done.returncode, done.stdout) == (2, '')
    assert message in done.stderr
    assert all(line.startswith('error: ') for line in done.stderr.splitlines())


@pytest.mark.parametrize('arguments', ['bogus', 'config show', 'train --bogus'])
def test_wrong_usage_exits_2(arguments: str) -> None:
    done = megajax(*arguments.split())
    assert (done.returncode, done.stdout) == (2, '')
    assert 'Usage: ' in done.stderr


@pytest.mark.slow
def test_a_wrong_config_is_refused_before_jax_alone_would_be_imported() -> None:
    def seconds(run: Callable[[], object]) -> float:
        before = os.times()
        run()
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # of children, however busy the machine is

    imports = [sys.executable, '-c', 'import jax, flax.nnx, optax, orbax.checkpoint']
    refusal = min(seconds(lambda: started('train', 'mesh.model=7')) for _ in range(2))
    assert refusal < seconds(lambda: subprocess.run(imports, check=True))


def test_configs_need_neither_jax_nor_numpy() -> None:
    commands = 'train mesh.model=7', 'config show tiny', 'config list', 'config keys'
    program = (
        'import sys\nfrom megajax.commands.main import main\n'
        'for command in sys.argv[1:]:\n'
        "    sys.argv = ['megajax', *command.split()]\n"
        '    try: main()\n'
        '    except SystemExit: pass\n'
        "    assert not {'jax', 'numpy'} & {*sys.modules}, command"
    )
    done = subprocess.run(
        [sys.executable, '-c', program, *commands],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'mesh.model=7' in done.stderr
    assert 'hidden_size: ' in done.stdout


def test_show_prints_a_config_that_loads_and_its_size(tmp_path: Path) -> None:
    shown = megajax('config', 'show', 'megatron_8.3b', 'train.steps=4000').stdout
    assert '  steps: 4000\n' in shown
    assert shown.endswith(
        '# parameters: 8,314,143,744 (8.31B); with the vocabulary padded to 51200: '
        '8,317,040,640 (8.32B)\n'
    )
    (tmp_path / 'shown.yaml').write_text(shown)
    assert megajax('config', 'show', str(tmp_path / 'shown.yaml')).stdout == shown


def test_show_counts_the_parameters_that_a_token_uses() -> None:
    shown = CliRunner().invoke(app, ['config', 'show', 'qwen3_30b_a3b']).output
    assert shown.endswith(
        '# parameters: 30,532,122,624 (30.53B), of which a token uses 3,353,032,704 (3.35B); with '
        'the vocabulary padded to 152576: 30,534,744,064 (30.53B)\n'
    )


def test_a_size_is_in_billions_from_one_billion_on() -> None:
    sizes = [_short(count) for count in (123_456_789, 999_940_000, 1_000_000_000, 1_994_000_000)]
    assert sizes == ['123.5M', '999.9M', '1.00B', '1.99B']


def test_list_names_each_preset_with_its_size() -> None:
    rows = [line.split() for line in megajax('config', 'list').stdout.splitlines()]
    assert rows[0] == ['preset', 'layers', 'hidden', 'heads', 'parameters']
    assert ['megatron_8.3b', '72', '3072', '32', '8.31B'] in rows
    files = (ROOT / 'configs').rglob('*.yaml')
    names = {str(file.relative_to(ROOT / 'configs').with_suffix('')) for file in files}
    assert {row[0] for row in rows[1:]} == names


def test_presets_are_found_inside_the_package_as_a_wheel_has_them(tmp_path: Path) -> None:
    shutil.copytree(ROOT / 'megajax', tmp_path / 'megajax')
    shutil.copytree(ROOT / 'configs', tmp_path / 'megajax' / 'configs')
    assert started('config', 'list', folder=tmp_path).stdout == megajax('config', 'list').stdout


COMMANDS = (
    *(
        '',
        'train',
        'generate',
        'eval',
        'config',
        'config diff',
        'config from-megatron',
        'config keys',
        'report',
        'data',
        'data build',
    ),
    *('checkpoint', 'import', 'export', 'plan', 'plan for', 'inspect', 'inspect step', 'profile'),
)


@pytest.mark.parametrize('command', COMMANDS)
def test_help_says_everything_in_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('COLUMNS', '80')
    texts = [
        CliRunner().invoke(app, [*command.split(), option]).stdout for option in ('-h', '--help')
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith('Usage: ')
    assert max(map(len, texts[0].splitlines())) <= 80
    cut = [line for line in texts[0].splitlines() if line.endswith('...') and '[' not in line]
    assert not cut


def test_the_first_command_listed_is_train() -> None:
    listed = CliRunner().invoke(app, ['-h']).stdout.partition('Commands:')[2].split()
    assert listed[0] == 'train'


@pytest.mark.parametrize('shell', ['bash', 'zsh', 'fish'])
def test_a_shell_completes_commands(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('_MEGAJAX_COMPLETE', f'complete_{shell}')
    monkeypatch.setenv('COMP_WORDS', 'megajax tra')
    monkeypatch.setenv('COMP_CWORD', '1')
    monkeypatch.setenv('_TYPER_COMPLETE_ARGS', 'megajax tra')
    monkeypatch.setenv('_TYPER_COMPLETE_FISH_ACTION', 'get-args')
    assert 'train' in CliRunner().invoke(app, [], prog_name='megajax').stdout


def test_two_configs_differ_in_what_is_written_and_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text(
        megajax('config', 'show', 'tiny', 'model.position=learned', 'mesh.model=1').stdout
    )
    found = CliRunner().invoke(app, ['config', 'diff', 'tiny', str(tmp_path)]).stdout
    assert found == 'mesh.model: 2 -> 1\nmodel.position: rope -> learned\n'
    text = (tmp_path / 'config.yaml').read_text()
    # An earlier version has recorded a key that has no effect.
    (tmp_path / 'config.yaml').write_text(text.replace('theta: 10000.0', 'theta: 500000.0'))
    assert CliRunner().invoke(app, ['config', 'diff', 'tiny', str(tmp_path)]).stdout == found
    assert not CliRunner().invoke(app, ['config', 'diff', 'tiny', 'tiny']).stdout
    assert 'vision.patch_size: None -> ' in (
        CliRunner().invoke(app, ['config', 'diff', 'tiny', 'tiny_vlm']).stdout
    )
