"""Kill one training run again and again, at seeded random moments, and compare its end with that of
an undisturbed one.

PYTHONPATH=tests python tests/run/monkey.py [--kills 200] [--seed 0]

Beside SIGKILL and SIGTERM the disk of its checkpoints fills up, which needs root, for a file system
of its own; without, that is left out.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runs import fill, flip_a_bit, largest_file, losses, steps

STEPS_PER_KILL = 20
# Of the kills; the others come in the training that follows, within a quarter of the time that the
# start takes.
IN_THE_START = 0.3
DISK = 8  # MiB, of which three checkpoints take less than two

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {model: 2}
train: {steps: STEPS, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 1000, \
eval_batches: 2, log_every: 1}
checkpoint: {every: 10}
optim: {lr: 1e-2}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        small_disk(Path(name) / 'disturbed/checkpoints') as disk,
    ):
        folder = Path(name)
        disturb(folder, arguments.kills, arguments.seed, disk)
        straight, disturbed = left(folder / 'straight'), left(folder / 'disturbed')
    print(
        f'{len(straight) - 1} arrays of the last state, and the losses of all steps:',
        'equal' if straight == disturbed else 'NOT equal',
    )
    sys.exit(straight != disturbed)


def disturb(folder: Path, kills: int, seed: int, disk: Path | None) -> None:
    """Train once in peace, in `folder`/straight, and once with kills, in `folder`/disturbed."""
    (folder / 'corpus.txt').write_text('def f(x):\n    return x + 1\n' * 300)
    config = CONFIG.replace('STEPS', str(STEPS_PER_KILL * kills))
    (folder / 'small.yaml').write_text(
        f'{config}data: {{corpus: {folder}/corpus.txt, tokenizer: bytes}}\n'
    )
    chance = random.Random(seed)
    kinds = (
        ['SIGKILL', 'SIGKILL', 'SIGTERM', 'full disk']
        if disk
        else ['SIGKILL', 'SIGKILL', 'SIGTERM']
    )
    assert run(folder, 'straight').wait() == 0
    usual = seconds_to_first_step(folder)
    for number in range(kills):
        kind = chance.choice(kinds)
        process = run(folder, 'disturbed')
        wait(process, folder / 'disturbed/metrics.jsonl', chance, usual)
        code = end(process, kind, disk, chance.uniform(0, usual / 4))
        print(
            f'{number + 1} of {kills}: {kind}, exit code {code}, '
            f'steps {steps(folder / "disturbed")}',
            flush=True,
        )
        if code == 0:  # it is at its end: the next ones disturb one that goes further back
            flip_a_bit(largest_file(folder / 'disturbed', steps(folder / 'disturbed')[-1]))
    assert run(folder, 'disturbed').wait() == 0


def wait(
    process: subprocess.Popen[bytes], metrics: Path, chance: random.Random, usual: float
) -> None:
    """Until a random moment of the start, or of the training that follows."""
    if chance.random() < IN_THE_START:
        time.sleep(usual * chance.uniform(0.05, 1))
        return
    count = last = num_steps(metrics)
    while (
        process.poll() is None and count <= last
    ):  # at first it may lose some, those that the run lost
        time.sleep(0.02)
        last, count = count, num_steps(metrics)
    time.sleep(chance.uniform(0, usual / 4))


def end(process: subprocess.Popen[bytes], kind: str, disk: Path | None, seconds: float) -> int:
    """End a run so, `seconds` after its disk is full if that is the kind, and return its exit
    code.
    """
    allowed = {0, 75, -signal.SIGKILL, -signal.SIGTERM}  # SIGTERM as such before python runs
    if disk and kind == 'full disk':
        fill(disk / 'ballast')
        time.sleep(seconds)
        kind, allowed = 'SIGTERM', allowed | {4}  # what it was to save last is not saved
    process.send_signal(signal.Signals[kind])
    code = process.wait()
    if disk:
        (disk / 'ballast').unlink(missing_ok=True)
    assert code in allowed, (kind, code)
    return code


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own at `folder`; None where it cannot be had."""
    folder.mkdir(parents=True)
    command = ['mount', '-t', 'tmpfs', '-o', f'size={DISK}m', 'tmpfs', str(folder)]
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )
    print(
        'full disks: ' + ('yes' if mounted else 'no, because a file system cannot be mounted here')
    )
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(['umount', '--lazy', folder], check=True)


def num_steps(metrics: Path) -> int:
    """Of those that are written down."""
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def seconds_to_first_step(folder: Path) -> float:
    """Of a run for which everything is compiled."""
    start, metrics = time.monotonic(), folder / 'timed/metrics.jsonl'
    with run(folder, 'timed') as process:
        while process.poll() is None and not num_steps(metrics):
            time.sleep(0.02)
        taken = time.monotonic() - start
        process.kill()
    return taken


def run(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, '-m', 'megajax', 'train', 'small.yaml', f'run.dir={name}']
    environ = os.environ | {
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def left(run: Path) -> dict[str, str]:
    """A hash of the losses of all steps, and one of the bytes of each array in the last
    checkpoint.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update('jax_num_cpu_devices', 2)  # as the run had
    last = run / 'checkpoints' / str(steps(run)[-1])
    state = ocp.StandardCheckpointer().restore(last.absolute() / 'state')
    arrays = {
        f'{last.name} {number}': np.asarray(array).tobytes()
        for number, array in enumerate(jax.tree.leaves(state))
    }
    contents = {'losses': json.dumps(losses(run)).encode(), **arrays}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


if __name__ == '__main__':
    main()
