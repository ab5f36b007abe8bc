"""What the guides of docs/extend.md tell a reader to do works as it is written."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from support import slow
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import load
from megajax.core.counts.flash import uses_flash
from megajax.core.hardware.records import Hardware, hardware

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs/extend.md').read_text()
GUIDES = {  # name and text of each section
    title.lower().replace(' ', '_').replace('hugging_face_', ''): text
    for title, text in re.findall(
        r'^## (Add [^\n]*)\n(.*?)(?=^## )', PAGE, re.MULTILINE | re.DOTALL
    )
}

COUNTED = r'^\+\+\+ b/', r'^\+(?!\+\+ b/)', r'^-(?!-- (?:a/|/dev/null))'  # files, lines, lines


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```$', GUIDES[guide], flags=re.DOTALL | re.MULTILINE)


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
        (folder / 'megajax/core/hardware/gpus/l40s.yaml').write_text(text)
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
from megajax.core.train.gradients import make_loss_and_gradients
tokens = np.random.default_rng(0).integers(0, 256, (4, 33), np.int32)
mask = np.ones((4, 32), np.float32)
batch = {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask}
SIZES = {'num_layers': 2, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 256, 'dropout': 0.0}
keys = [f'model.{key}={value}' for key, value in SIZES.items()]
keys += ['mesh.data=1', 'mesh.model=2', 'train.batch_size=4', 'train.seq_len=32']
numbers = []
with jax.set_mesh(megajax.make_mesh(1, 2)):
    for changed in KEYS:
        config = megajax.load('tiny', [*keys, 'train.dtype=float32', *changed.split()])
        params = megajax.init_state(config).params
        function = jax.jit(make_loss_and_gradients(config))
        (loss, _), gradients = function(params, megajax.place_batch(batch), jax.random.key(0))
        numbers.append([np.asarray(x) for x in [loss, *jax.tree.leaves(gradients)]])
for changed, each in zip(KEYS, numbers):
    for x, y in zip(each, numbers[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max(), err_msg=changed)
"""
CHANGES = {
    'add_a_layout': 'mesh.shard_vocab=false',
    'add_a_parameter': 'model.layer_scale=0.1',
    'add_an_activation': 'model.activation=reglu',
}
ORDERS = [
    'train.overlap=none train.unroll=false',
    'train.overlap=none train.unroll=true',
    'train.overlap=batch_split',
    'train.overlap=batch_split train.recompute=full',
    'train.overlap=sequence_split',
]


@pytest.mark.slow
def test_the_changes_of_all_guides_have_the_same_loss_and_gradients_in_every_order(
    tmp_path: Path,
) -> None:
    tree = changed('add_a_family', tmp_path)
    for guide in CHANGES:
        for diff in blocks(guide, 'diff'):
            apply(diff, tree)
    keys = [' '.join([order, *CHANGES.values()]) for order in ORDERS]
    run_there(f'KEYS = {keys}\n{STEP}', tree)


@pytest.mark.slow
def test_a_step_of_the_layout_guide_has_the_same_loss_and_gradients_as_without_it(
    tmp_path: Path,
) -> None:
    keys = ['mesh.shard_vocab=true', 'mesh.shard_vocab=false']
    run_there(f'KEYS = {keys}\n{STEP}', changed('add_a_layout', tmp_path))


def test_the_gpu_of_the_guide_can_be_planned_for(tmp_path: Path) -> None:
    (text,) = blocks('add_a_gpu', 'yaml')
    file = tmp_path / 'l40s.yaml'
    file.write_text(text)
    result = CliRunner().invoke(app, ['plan', 'tiny', '--gpu', str(file), '--gpus', '8'])
    assert result.exit_code == 0, result.output
    assert '8 x NVIDIA L40S, 1 host of 8' in result.output
    assert 'unverified' in result.output


def test_attention_on_the_gpu_of_the_guide_is_one_kernel_in_memory_and_in_time(
    tmp_path: Path,
) -> None:
    (text,) = blocks('add_a_gpu', 'yaml')
    (file := tmp_path / 'l40s.yaml').write_text(text)
    gpu, config = hardware(file), load('llama3_8b')
    assert uses_flash(config, gpu.compute_capability)
    for kernel in ('flash', 'flash_2'):
        assert gpu.efficiency.of_attention(kernel, config.train.seq_len) is not None
    assert gpu.efficiency == hardware('h100').efficiency.changed(fp8=gpu.efficiency.fp8)


def test_the_gpu_of_the_guide_has_every_key_but_its_fit_and_a_source_for_each(
    tmp_path: Path,
) -> None:
    (text,) = blocks('add_a_gpu', 'yaml')
    file = tmp_path / 'l40s.yaml'
    file.write_text(text)
    gpu = hardware(file)
    of_others = {'capability', 'die', 'devices_per_domain', 'host_bandwidth'}
    assert gpu.model_fields_set == Hardware.model_fields.keys() - {'fit', *of_others}
    assert gpu.sources.keys() == hardware('a100').sources.keys()


@pytest.mark.parametrize('guide', GUIDES)
def test_a_guide_begins_with_the_files_to_touch(guide: str) -> None:
    diffs = '\n'.join(blocks(guide, 'diff'))
    touched = set(re.findall(r'^\+\+\+ b/(\S+)', diffs, flags=re.MULTILINE))
    listed = set(re.findall(r'^\| `([^`]+)` \|', GUIDES[guide], flags=re.MULTILINE))
    assert touched <= listed


def diffs() -> list[tuple[str, str]]:
    """Each diff of the guides, and the new file of the one whose change is a file of YAML."""
    found = [(guide, diff) for guide in GUIDES for diff in blocks(guide, 'diff')]
    (text,) = blocks('add_a_gpu', 'yaml')
    added = ''.join(f'+{line}\n' for line in text.splitlines())
    return [*found, ('add_a_gpu', f'+++ b/megajax/core/hardware/gpus/l40s.yaml\n{added}')]


def test_the_files_and_lines_of_each_change_are_those_of_its_diff() -> None:
    rows = re.findall(r'^\| \[.*\]\(#.*\) \| (\d+) \| (\d+) \| (\d+) \|$', PAGE, re.MULTILINE)
    counted = [
        tuple(str(len(re.findall(lines, diff, re.MULTILINE))) for lines in COUNTED)
        for _, diff in diffs()
    ]
    assert sorted(rows) == sorted(counted)


@pytest.mark.slow
def test_the_scripts_of_the_optimizer_page_train(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / 'docs/optimizers.md').read_text()
    lion, shampoo = re.findall(r'^```python\n(.*?)^```$', page, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(ROOT)
    sizes = "'model.num_layers=1', 'model.hidden_size=32', 'model.num_heads=2', "
    lion = lion.replace("load('tiny', [", f"load('tiny', [{sizes}")
    assert sizes in lion
    start, rest = lion.split('optimizer = optax.chain(')
    of_lion, steps = rest.split('state = megajax.init_state')
    of_lion = f'optimizer = optax.chain({of_lion}'
    for optimizer in (of_lion, shampoo):
        names: dict[str, Any] = {'print': lambda *_: None}
        with jax.set_mesh(jax.sharding.get_mesh()):
            exec(f'{start}{optimizer}state = megajax.init_state{steps}', names)
        assert float(names['metrics']['loss']) < 9
        assert int(names['state'].guard.taken) == 3


@pytest.mark.slow
def test_the_reading_path_is_within_a_twentieth_of_a_step() -> None:
    command = [sys.executable, 'benchmarks/reading_path.py']
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    totals = re.compile(r'^\| (a [^|]+) \| \d+ \| \d+ \| ([\d,]+) \|$', re.MULTILINE)
    now, quoted = (
        {step: int(lines.replace(',', '')) for step, lines in totals.findall(text)}
        for text in (printed, PAGE)
    )
    assert now.keys() == quoted.keys()
    assert quoted == pytest.approx(now, rel=0.05)
