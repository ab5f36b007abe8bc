"""Whether `train.deterministic` keeps its promise, for `benchmarks/gpu.py`, and what it costs.

Two starts of the same run and one that goes on from the first one's middle, each in a process of
its own with its own compiler and autotuner; then the milliseconds of a step with it and without.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_step import SMALL, STEP, TINY, prepared, timed

STEPS = 8
PRESET = 'tiny' if SMALL else 'gpt2_124m'
FORM = TINY if SMALL else ('model.num_layers=2', 'train.batch_size=8')


def deterministic() -> dict[str, Any]:
    """Whether the starts and the resume end with the same bits, and the cost of a step."""
    with tempfile.TemporaryDirectory() as folder:
        first = run('start', 'true', folder)
        second = run('start', 'true', tempfile.mkdtemp(dir=folder))
        resumed = run('resume', 'true', folder)
        free = run('start', 'false', tempfile.mkdtemp(dir=folder))
    return {
        'two starts are equal': first['digest'] == second['digest'],
        'a resume is equal': first['digest'] == resumed['digest'],
        'a step without it is equal': first['digest'] == free['digest'],
        'median_ms': first['median_ms'],
        'without_ms': free['median_ms'],
        'cost': first['median_ms'] / free['median_ms'] - 1,
    }


def run(how: str, wanted: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, how, wanted, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise SystemExit(f'{how}, deterministic={wanted}: {said[-1] if said else done.returncode}')
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(how: str, wanted: str, folder: Path) -> dict[str, Any]:
    """Train, from the first step or from the state of the middle, and digest the last state."""
    import jax
    import numpy as np

    import megajax

    config = megajax.load(PRESET, [*STEP, *FORM, f'train.deterministic={wanted}'])
    step, state, batch, _ = prepared(config)
    leaves, structure = jax.tree.flatten(state)
    middle = folder / 'middle.npz'
    if how == 'resume':
        kept = np.load(middle)
        placed = [jax.device_put(kept[f'arr_{i}'], x.sharding) for i, x in enumerate(leaves)]
        state = structure.unflatten(placed)
    for taken in range(int(state.step), STEPS):
        if taken == STEPS // 2 and how == 'start':
            np.savez(middle, *map(np.asarray, jax.tree.leaves(state)))
        state, _ = step(state, batch)
    digest = hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(state)))
    held = [state]

    def again() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready(metrics)

    return {'digest': digest.hexdigest(), **timed(again)}


if __name__ == '__main__':
    print(json.dumps(child(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
