"""The README's commands run from top to bottom in a fresh clone, for a reader without a GPU."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megajax.core.hardware.targets import has_compiler
from megajax.runtime.data.synthetic_images import draw_word, words

ROOT = Path(__file__).parents[1]
SKIPPED = {
    'make': 'installs packages',
    'pip': 'installs packages',
    'python3 -m venv': 'installs packages',
    'sbatch': 'needs Slurm, which tests/commands/test_slurm.py has',
    'kubectl': 'needs a cluster',
}
SHORTER = 'train.steps=2 train.batch_size=4 optim.warmup_steps=1 train.eval_batches=1'
# Instead of the standard library, which tests/runtime/data/test_load.py reads.
SMALLER = 'data.corpus=docs'
BLOCK_OR_SPAN = re.compile(
    r'^(<!-- .*? -->\n)?```(\w*)\n(.*?)^```$|`(megajax [^`]+)`', re.DOTALL | re.MULTILINE
)


def readme_commands(text: str) -> Iterator[str]:
    """Yield the commands of the README in order, also those inside sentences."""
    for output, language, block, span in BLOCK_OR_SPAN.findall(text):
        if span:
            yield ' '.join(span.split())
        elif not output and not language:
            yield from (line.partition('  #')[0].strip() for line in block.splitlines())


def shortened(command: str) -> str:
    words = shlex.split(command)
    if words[1:] == ['train']:
        return f'{command} {SHORTER} {SMALLER}'
    is_training = words[1] == 'train' or '--' in words
    return f'{command} {SHORTER}' if is_training else command


def is_skipped(command: str) -> bool:
    return any(command.startswith(start) for start in SKIPPED)


def run_as_a_reader(command: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in the clone, whose package is the one that `megajax` finds."""
    environment = {**os.environ, 'PYTHONPATH': str(clone), 'CUDA_VISIBLE_DEVICES': ''}
    environment.pop('JAX_PLATFORMS')  # which conftest.py sets
    script = f'megajax() {{ {shlex.quote(sys.executable)} -m megajax "$@"; }}; {command}'
    return subprocess.run(
        ['bash', '-c', script],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_a_clone_and_leave_it_clean(tmp_path: Path) -> None:
    clone = tmp_path / 'clone'
    done = subprocess.run(['git', 'clone', '--quiet', ROOT, clone], check=False)
    if done.returncode:
        pytest.skip('these files are not a git repository')
    text = (clone / 'README.md').read_text()
    (example,) = re.findall(r'^```yaml\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE)
    (clone / 'my.yaml').write_text(example)
    commands = list(readme_commands(text))
    assert {'doctor', 'data', 'train', 'generate', 'export', 'import', 'launch', 'plan'} <= {
        command.split()[1] for command in commands
    }
    for command in commands:
        if is_skipped(command) or ('--target' in command and not has_compiler()):
            continue
        done = run_as_a_reader(shortened(command), clone)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert 'Traceback' not in done.stderr, (command, done.stderr)
    status = subprocess.run(
        ['git', 'status', '--porcelain'], cwd=clone, capture_output=True, text=True, check=True
    )
    assert status.stdout == ''


def test_a_skipped_command_is_one_of_the_readme() -> None:
    commands = list(readme_commands((ROOT / 'README.md').read_text()))
    for start in SKIPPED:
        assert any(command.startswith(start) for command in commands), start


def test_the_image_of_the_readme_is_of_a_word_that_is_not_trained_on() -> None:
    drawn = draw_word('sharding', np.random.default_rng(0))
    np.testing.assert_array_equal(np.asarray(Image.open(ROOT / 'docs/word.png')), drawn)
    assert 'sharding' not in {word.lower() for part in words().values() for word in part}
