"""What a newcomer runs, and runs that must repeat their own numbers, for `benchmarks/gpu.py`."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_step import SMALL

PRESET = 'tiny' if SMALL else 'gpt2_124m'
TINY = (
    *('model.num_layers=2', 'model.hidden_size=64', 'model.num_heads=4', 'model.vocab_size=512'),
    *('data.tokenizer=bytes', 'train.batch_size=4', 'optim.warmup_steps=2'),
)
ONE_GPU = 'mesh.data=1', 'mesh.model=1', 'train.log_every=1'
STEPS = 6  # of a run that is repeated
SAID = 400  # characters of a command's last words that are kept


def newcomer() -> dict[str, Any]:
    """Seconds of the first commands and of the first step, and what they warned of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = (
            *('train', PRESET, 'run.dir=run', 'train.steps=20'),
            *('train.profile={start: 10, steps: 3}', *ONE_GPU, *(TINY if SMALL else ())),
        )
        lines = {
            'doctor': command(folder, 'doctor'),
            'train': command(folder, *train),
            'profile': command(folder, 'profile', 'run'),
            'report': command(folder, 'report', 'run'),
        }
    return {'commands': lines}


def repeated() -> dict[str, Any]:
    """Whether two deterministic runs and a resume log the same losses, with each step replayed."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, more in FORMS.items():
            first = trained(folder, f'{kind}/first', *more)
            second = trained(folder, f'{kind}/second', *more)
            newest = folder / kind / f'second/checkpoints/{STEPS}'
            if newest.is_dir():  # as if the run had ended before it was saved
                shutil.rmtree(newest)
            resumed = trained(folder, f'{kind}/second', *more, 'run.resume=must')
            found[kind] = {
                'two runs are equal': same(first, second),
                'a resume is equal': same(first, resumed),
                'failures': [run for run in (first, second, resumed) if isinstance(run, str)],
                'losses': first,
            }
    return found


def trained(folder: Path, run: str, *options: str) -> list[Any] | str:
    """Train a deterministic run: the loss of each step, or how it failed."""
    how = 'train.deterministic=true', 'train.replay_every=1', f'train.steps={STEPS}'
    how = *how, f'checkpoint.every={STEPS // 2}', f'run.dir={run}'
    done = command(folder, 'train', 'tiny', *how, *ONE_GPU, *TINY, *options)
    losses = losses_of(folder / run)
    if done['code'] or len(losses) != STEPS:
        return f'exit code {done["code"]}, {len(losses)} losses: {done["said"]}'
    return losses


def same(first: list[Any] | str, other: list[Any] | str) -> bool:
    """Whether two runs trained to their ends, with the same losses."""
    return isinstance(first, list) and first == other


FORMS: dict[str, tuple[str, ...]] = {
    'bf16': ('train.dtype=bfloat16',),
    'fp8': ('train.dtype=fp8',),
    'LoRA': ('train.dtype=bfloat16', 'lora.rank=4'),
    'packed documents': ('train.dtype=bfloat16', 'data.document_mask=true'),
}


def command(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of megajax in `folder`: its seconds, exit code, warnings and last words.

    `first_step_s` is when it printed the first training step.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, '-m', 'megajax', *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
    )
    assert process.stdout is not None
    lines, first = list[str](), None
    for line in process.stdout:
        lines.append(line.rstrip())
        if first is None and line.startswith('step 1/'):
            first = round(time.perf_counter() - start, 1)
    return {
        'code': process.wait(),
        'seconds': round(time.perf_counter() - start, 1),
        'first_step_s': first,
        'warnings': [line for line in lines if 'warning' in line.lower()][:5],
        'said': '\n'.join(line for line in lines if line)[-SAID:],
    }


def losses_of(run: Path) -> list[Any]:
    """The loss of each step, the last time that it was taken."""
    file = run / 'metrics.jsonl'
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [*{line['step']: line['loss'] for line in lines if 'loss' in line}.values()]
