"""Whether two checkouts compile the same training step: `python benchmarks/same_text.py OLD NEW`.

Compares the compiled text of some configs for CPU and H100, up to names and metadata, and the bytes
that `inspect` tells, and prints a line for each as Markdown. H100s need megajax[gpu-compile].
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

GPT2 = 'gpt2_345m mesh.data=2 mesh.model=4 train.batch_size=8 train.microbatches=1'
LLAMA = (
    'llama3_8b mesh.data=1 mesh.model=8 mesh.sequence_parallel=true train.batch_size=2 '
    'train.microbatches=1 train.recompute=full optim.shard=none'
)
ZERO3 = (
    'llama3_8b mesh.data=8 mesh.model=1 train.batch_size=8 train.microbatches=1 optim.shard=weights'
)
PIPELINE = (
    'gpt2_345m mesh.data=1 mesh.stages=4 mesh.model=2 train.batch_size=16 train.microbatches=8'
)
CONFIGS = ['tiny', 'tiny_bert', GPT2, LLAMA, ZERO3, PIPELINE]
WITHOUT_DROPOUT = 'model.dropout=0.0'  # whose keys may change from one version to the next


class Step(NamedTuple):
    """A compiled step: its instructions without names, and the bytes of a device."""

    instructions: Counter[str]
    arguments: int
    temporaries: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('old', type=Path)
    parser.add_argument('new', type=Path)
    arguments = parser.parse_args()
    print('| config | target | instructions | different | arguments | temporaries |')
    print('|---|---|---|---|---|---|')
    different = 0
    for config in CONFIGS:
        for target in ('cpu', 'h100'):
            old, new = (compiled(config, target, at) for at in (arguments.old, arguments.new))
            changed = (old.instructions - new.instructions) + (new.instructions - old.instructions)
            different += changed.total()
            sizes = (ratio(new.arguments, old.arguments), ratio(new.temporaries, old.temporaries))
            cells = config, target, new.instructions.total(), changed.total(), *sizes
            print(f'| {" | ".join(map(str, cells))} |', flush=True)
    sys.exit(different > 0)


def ratio(new: int, old: int) -> str:
    return f'{new:,} ({new / old:.4f})'


def compiled(config: str, target: str, checkout: Path) -> Step:
    """The step as the `inspect` of a checkout compiles it."""
    with tempfile.TemporaryDirectory() as folder:
        text, told = Path(folder, 'step.hlo'), Path(folder, 'step.json')
        command = [sys.executable, '-m', 'megajax', 'inspect', *config.split(), WITHOUT_DROPOUT]
        command += ['--target', target, '--hlo', str(text), '--json', str(told)]
        environ = os.environ | {'PYTHONPATH': str(checkout)}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        if not told.exists():
            raise RuntimeError(f'{checkout}: {config}: {done.stderr[-500:]}')
        memory = json.loads(told.read_text())['memory']
        return Step(instructions(text.read_text()), memory['arguments'], memory['temporaries'])


def instructions(text: str) -> Counter[str]:
    """The instructions of a program without names, metadata and channels."""
    text = re.sub(r', metadata=\{[^}]*\}', '', text)
    lines = [line for line in text.splitlines() if re.match(r'\s+(ROOT )?%?[\w.\-]+ = ', line)]
    return Counter(re.sub(r'%[\w.\-]+|channel_id=\d+', '%', line).strip() for line in lines)


if __name__ == '__main__':
    main()
