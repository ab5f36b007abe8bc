"""What the commands of two pages show: `python benchmarks/claims.py OUT.md`.

The pages are `docs/layout_guide.md` and `docs/parallelism.md`. Runs each command of
COMMANDS in an empty folder and writes what it printed, errors and exit code included. Nothing here
depends on the speed of the machine.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from readme import heading

LARGE = 'megajax plan gpt3_175b --gpu a100'
ON_1024 = (
    'mesh.data=128 mesh.model=8 mesh.sequence_parallel=true train.recompute=full '
    'optim.shard=weights train.microbatches=1 train.overlap=none'
)
COMMANDS = [
    'megajax inspect tiny mesh.data=1 mesh.model=2',
    'megajax inspect tiny mesh.data=1 mesh.model=2 mesh.sequence_parallel=true',
    'megajax config show gpt3_175b',
    f'{LARGE} --gpus 4',
    f'{LARGE} --gpus 1024',
    f'megajax plan gpt3_175b {ON_1024} --gpu a100',
    'megajax inspect tiny mesh.data=1 mesh.model=4 mesh.sequence_parallel=true',
    'megajax inspect tiny mesh.data=1 mesh.model=2 mesh.model_rows=2 mesh.sequence_parallel=true',
    'megajax inspect tiny mesh.stages=2 mesh.data=2 mesh.model=2 train.microbatches=2',
    'megajax plan gpt2_124m --gpu h100 --gpus 8',
    'megajax plan llama3_8b --gpu h100 --gpus 64',
    'megajax plan megatron_8.3b model.dropout=0 --gpu h100 --gpus 64',
    'megajax plan megatron_8.3b model.dropout=0 mesh.data=8 mesh.model=8 --gpu h100',
    'megajax plan megatron_8.3b model.dropout=0 mesh.data=4 mesh.model=16 --gpu h100',
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    first, rest = heading().split('\n', 1)
    day = first.rpartition(' ')[2]
    found = [f'# Choose a layout, and misconceptions, {day}\n{rest}'.replace('readme', 'claims')]
    for line in COMMANDS:
        found.append(shown(line))
        print(found[-1], flush=True)
        out.write_text('\n'.join(found))


def shown(line: str) -> str:
    """The command, its exit code and what it printed."""
    words = [sys.executable, '-m', *shlex.split(line)]
    environ = os.environ | {'COLUMNS': '140', 'PYTHONPATH': str(Path(__file__).parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, env=environ, text=True, capture_output=True)
    lines = [one.rstrip() for one in (done.stdout + done.stderr).splitlines() if one.strip()]
    return f'`{line}`, exit code {done.returncode}:\n\n```\n' + '\n'.join(lines) + '\n```\n'


if __name__ == '__main__':
    main()
