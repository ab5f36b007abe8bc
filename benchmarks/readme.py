"""What the README's commands show, and what a clock says of them:
`python benchmarks/readme.py OUT.md`.

Runs each command of COMMANDS in an empty folder and writes what it printed, its seconds in each
turn, the versions and the machine. A number that stands in the README without another script's
name beside it is in OUT.md. The steps for H100s need `pip install 'megajax[gpu-compile]'`.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """A line of the README, how often it is timed, and which of its lines are numbers it quotes."""

    line: str
    turns: int = 1
    quoted: str = '.'  # a pattern


STEP = 'inspect megatron_8.3b mesh.data=8 train.batch_size=64 --target h100'
BYTES = 'memory|state|temporaries|gradients|parameters'
COMMANDS = [
    Command('train'),
    Command('train tiny_bert train.steps=200', quoted='validation'),
    Command(
        'train tiny train.dtype=float16 train.steps=30 train.eval_every=100', quoted='scale|seconds'
    ),
    Command('inspect megatron_8.3b train.dtype=bfloat16 --target h100', turns=3),
    Command(STEP, quoted=BYTES),
    Command(f'{STEP} optim.shard=optimizer', quoted=BYTES),
    Command(
        'inspect llama3_8b mesh.data=2 mesh.model=4 mesh.sequence_parallel=true '
        'train.microbatches=64 train.recompute=full optim.shard=none --target h100 --run',
        quoted=r'executed|limit|smaller|covered',
    ),
    Command('plan megatron_8.3b model.dropout=0 --gpu h100 --gpus 64 --tokens 300e9', turns=5),
    Command(
        'plan llama3_8b train.seq_len=4096 mesh.stages=4 mesh.virtual_stages=2 mesh.data=2 '
        'mesh.model=8 mesh.sequence_parallel=true train.microbatches=16 train.batch_size=32 '
        'train.recompute=none optim.shard=none --gpu h100'
    ),
    Command(
        'plan gpt3_175b model.num_layers=128 model.hidden_size=25600 model.num_heads=160 '
        'model.head_dim=160 model.num_kv_heads=160 model.ffn_size=102400 model.vocab_size=51200 '
        'model.dropout=0.1 model.attention_dropout=0.1 train.batch_size=3072 train.dtype=float16 '
        '--gpu a100 --gpus 3072'
    ),
    Command('plan arr_coc_32b --gpu a100 --gpus 8'),
    Command(
        'plan llama3_8b mesh.data=8 mesh.model=1 optim.shard=weights train.recompute=none '
        'train.batch_size=8 train.microbatches=1 train.seq_len=4096 --gpu h100 --what-if'
    ),
]
PACKAGES = 'megajax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--only', default='', help='commands that contain this')
    arguments = parser.parse_args()
    found = [heading()]
    for command in (command for command in COMMANDS if arguments.only in command.line):
        found.append(shown(command))
        print(found[-1], flush=True)
        arguments.out.write_text('\n'.join(found))


def heading() -> str:
    """The day, the versions and the machine."""
    versions = ', '.join(f'{name} {version(name)}' for name in PACKAGES)
    return (
        f"# What the README's commands showed, {datetime.date.today()}\n\n"
        f'`python benchmarks/readme.py`: {versions}, Python {platform.python_version()}, '
        f'{os.cpu_count()} cores of {processor()}.\n'
    )


def processor() -> str:
    """Its name, where the system tells it."""
    found = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    return found[1] if found else platform.machine()


def shown(command: Command) -> str:
    """The command, its seconds in each turn, and the lines that are quoted from the first."""
    seconds, said = [], []
    for _ in range(command.turns):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            said.append(run(command.line, folder))
            seconds.append(time.perf_counter() - start)
    lines = [line.rstrip() for line in said[0].splitlines() if re.search(command.quoted, line)]
    turns = ', '.join(f'{one:.1f}' for one in seconds)
    return f'`megajax {command.line}`, {turns} s:\n\n```\n' + '\n'.join(lines) + '\n```\n'


def run(line: str, folder: str) -> str:
    """What it prints. Raises RuntimeError where it fails."""
    words = [sys.executable, '-m', 'megajax', *shlex.split(line)]
    environ = os.environ | {'COLUMNS': '140', 'PYTHONPATH': str(Path(__file__).parents[1])}
    done = subprocess.run(words, cwd=folder, env=environ, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f'megajax {line}: exit code {done.returncode}: {done.stderr[-500:]}')
    return done.stdout


if __name__ == '__main__':
    main()
