"""What the guides under docs/ tell a reader to do works as it is written."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import exhaustive, slow
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.hardware.records import Hardware, hardware

ROOT = Path(__file__).parents[1]
GUIDES = ['add_a_family', 'add_a_gpu', 'add_a_layout', 'add_a_parameter', 'add_an_activation']

COUNTED = r'^\+\+\+ b/', r'^\+(?!\+\+ b/)', r'^-(?!-- (?:a/|/dev/null))'  # files, lines, lines


def blocks(guide: str, language: str) -> list[str]:
    text = (ROOT / 'docs' / f'{guide}.md').read_text()
    return re.findall(rf'^```{language}\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE)


def apply(diff: str, tree: Path) -> None:
    """Change the files as the diff says; what a hunk changes must be in its file once."""
    for part in re.split(r'^--- (?:a/.*|/dev/null)\n', diff, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r'^@@\n', part, flags=re.MULTILINE)
        file = tree / name.removeprefix('+++ b/').strip()
        if not file.exists():
            (new,) = hunks
            assert all(line[0] == '+' for line in new.splitlines())
            file.write_text(re.sub(r'^\+', '', new, flags=re.MULTILINE))
            continue
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old = ''.join(line[1:] for line in lines if line[0] in ' -')
            new = ''.join(line[1:] for line in lines if line[0] in ' +')
            text = file.read_text()
            assert text.count(old) == 1, f'{file.name} does not have this once:\n{old}'
            file.write_text(text.replace(old, new))


def changed(guide: str, folder: Path) -> Path:
    """A copy of the package, changed as the guide says."""
    for name in ('megajax', 'configs'):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
    for diff in blocks(guide, 'diff'):
        apply(diff, folder)
    if guide == 'add_a_gpu':
        (text,) = blocks(guide, 'yaml')
        (folder / 'megajax/hardware/gpus/l40s.yaml').write_text(text)
    return folder


def run_there(code: str, tree: Path) -> str:
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    'guide',
    [
        'add_a_family',
        'add_a_gpu',
        'add_a_layout',
        slow('add_a_parameter'),
        slow('add_an_activation'),
    ],
)
def test_the_change_of_a_guide_does_what_the_guide_says(guide: str, tmp_path: Path) -> None:
    tree = changed(guide, tmp_path)
    checks = blocks(guide, 'python')
    said = [run_there(check, tree).strip() for check in checks]
    assert said == [check.rpartition('  # ')[2].strip() for check in checks]
    assert said


STEP = """
import jax, numpy as np, megajax
tokens = np.random.default_rng(0).integers(0, 4096, (8, 65), np.int32)
mask = np.ones((8, 64), np.float32)
batch = {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask}
for key in KEYS:
    keys = ['model.num_layers=1', 'train.seq_len=64', 'mesh.data=1', 'mesh.model=2', *COMMON]
    config = megajax.load('tiny', [*keys, key])
    with jax.set_mesh(megajax.make_mesh(1, 2)):
        step = megajax.make_train_step(config)
        _, metrics = step(megajax.init_state(config), megajax.place_batch(batch))
        print(metrics['loss'], metrics['grad_norm'])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('guide', 'keys', 'common'),
    [
        ('add_a_layout', ['mesh.shard_vocab=true', 'mesh.shard_vocab=false'], []),
        exhaustive(
            'add_a_parameter',
            ['mesh.sequence_parallel=true', 'mesh.sequence_parallel=false'],
            ['model.layer_scale=0.1'],
        ),
    ],
)
def test_a_step_of_the_guide_has_the_same_loss_and_gradients_in_two_layouts(
    guide: str, keys: list[str], common: list[str], tmp_path: Path
) -> None:
    code = f'KEYS, COMMON = {keys}, {common}\n{STEP}'
    one, other = run_there(code, changed(guide, tmp_path)).splitlines()
    for value, expected in zip(one.split(), other.split(), strict=True):
        assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_the_gpu_of_the_guide_can_be_planned_for(tmp_path: Path) -> None:
    (text,) = blocks('add_a_gpu', 'yaml')
    file = tmp_path / 'l40s.yaml'
    file.write_text(text)
    result = CliRunner().invoke(app, ['plan', 'tiny', '--gpu', str(file), '--gpus', '8'])
    assert result.exit_code == 0, result.output
    assert '8 x NVIDIA L40S, 1 host of 8' in result.output
    assert 'unverified' in result.output


def test_the_gpu_of_the_guide_has_every_key_but_its_fit_and_a_source_for_each(
    tmp_path: Path,
) -> None:
    (text,) = blocks('add_a_gpu', 'yaml')
    file = tmp_path / 'l40s.yaml'
    file.write_text(text)
    gpu = hardware(file)
    assert gpu.model_fields_set == Hardware.model_fields.keys() - {'fit'}
    assert gpu.sources.keys() == hardware('h100').sources.keys()


@pytest.mark.parametrize('guide', GUIDES)
def test_a_guide_begins_with_the_files_to_touch(guide: str) -> None:
    text = (ROOT / 'docs' / f'{guide}.md').read_text()
    diffs = '\n'.join(blocks(guide, 'diff'))
    touched = set(re.findall(r'^\+\+\+ b/(\S+)', diffs, flags=re.MULTILINE))
    listed = set(re.findall(r'^\| `([^`]+)` \|', text, flags=re.MULTILINE))
    assert touched <= listed


def diffs() -> list[tuple[str, str]]:
    """Each diff of the guides, and the new file of the one whose change is a file of YAML."""
    found = [(guide, diff) for guide in GUIDES for diff in blocks(guide, 'diff')]
    (text,) = blocks('add_a_gpu', 'yaml')
    added = ''.join(f'+{line}\n' for line in text.splitlines())
    return [*found, ('add_a_gpu', f'+++ b/megajax/hardware/gpus/l40s.yaml\n{added}')]


def test_the_files_and_lines_of_each_change_are_those_of_its_diff() -> None:
    text = (ROOT / 'docs/architecture.md').read_text()
    rows = re.findall(r'^\| \[.*\]\((\w+)\.md.*\) \| (\d+) \| (\d+) \| (\d+) \|$', text, re.M)
    counted = [
        (guide, *(str(len(re.findall(lines, diff, re.M))) for lines in COUNTED))
        for guide, diff in diffs()
    ]
    assert sorted(rows) == sorted(counted)
