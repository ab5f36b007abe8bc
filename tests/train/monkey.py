"""Kill one training run again and again, at seeded random moments, and compare its end with that of an undisturbed one.

python tests/train/monkey.py [--kills 200] [--seed 0]
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
from pathlib import Path

STEPS_PER_KILL = 150

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: STEPS, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 1000, eval_batches: 2, log_every: 1}
checkpoint: {every: 50}
optim: {lr: 1e-2}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disturb(folder, arguments.kills, arguments.seed)
        straight, disturbed = left(folder / 'straight'), left(folder / 'disturbed')
    print(f'{len(straight) - 1} arrays of the last state, and the losses of all steps:', 'equal' if straight == disturbed else 'NOT equal')
    sys.exit(straight != disturbed)


def disturb(folder: Path, kills: int, seed: int) -> None:
    """Train once in peace, in `folder`/straight, and once with kills, in `folder`/disturbed."""
    (folder / 'corpus.txt').write_text('def f(x):\n    return x + 1\n' * 300)
    config = CONFIG.replace('STEPS', str(STEPS_PER_KILL * kills))
    (folder / 'small.yaml').write_text(f'{config}data: {{corpus: {folder}/corpus.txt, tokenizer: bytes}}\n')
    chance = random.Random(seed)
    assert run(folder, 'straight').wait() == 0
    usual = seconds_to_first_step(folder)
    for number in range(kills):
        process = run(folder, 'disturbed')
        time.sleep(usual * chance.uniform(0.1, 2))  # half of the kills in the start, which is compiled already
        kind = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        process.send_signal(kind)
        code = process.wait()
        assert code in (0, 75, -signal.SIGKILL, -signal.SIGTERM), (number, code)  # SIGTERM as such before python runs
        print(f'{number + 1} of {kills}: {kind.name}, exit code {code}, steps {steps(folder / "disturbed")}', flush=True)
        if code == 0:  # it is at its end: the next ones disturb one that goes further back
            rewind(folder / 'disturbed', chance)
    assert run(folder, 'disturbed').wait() == 0


def seconds_to_first_step(folder: Path) -> float:
    """Of a run for which everything is compiled."""
    start, metrics = time.monotonic(), folder / 'timed/metrics.jsonl'
    with run(folder, 'timed') as process:
        while process.poll() is None and not (metrics.exists() and '"loss"' in metrics.read_text()):
            time.sleep(0.02)
        taken = time.monotonic() - start
        process.kill()
    return taken


def run(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, '-m', 'megajax', 'train', 'small.yaml', f'run.dir={name}']
    environ = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def steps(folder: Path) -> list[int]:
    checkpoints = folder / 'checkpoints'
    return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()) if checkpoints.is_dir() else []


def rewind(folder: Path, chance: random.Random) -> None:
    """Damage the newest checkpoint, so that the run has to go on from the one before."""
    newest = folder / 'checkpoints' / str(steps(folder)[-1])
    largest = max((path for path in newest.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    largest.write_bytes(content)


def left(folder: Path) -> dict[str, str]:
    """A hash of the losses of all steps, and one of the bytes of each array in the last checkpoint."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update('jax_num_cpu_devices', 4)  # as the run had
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    losses = [(line['step'], line['loss']) for line in lines if 'loss' in line]
    last = folder / 'checkpoints' / str(steps(folder)[-1])
    state = ocp.StandardCheckpointer().restore(last.absolute() / 'state')
    arrays = {f'{last.name} {number}': np.asarray(array).tobytes() for number, array in enumerate(jax.tree.leaves(state))}
    return {name: hashlib.sha256(content).hexdigest() for name, content in {'losses': json.dumps(losses).encode(), **arrays}.items()}


if __name__ == '__main__':
    main()
