"""Other commands read a run that is training and deletes its checkpoints."""

import signal
import time
from pathlib import Path

import pytest
from runs import finish, read_until, start, steps
from support import megajax, write_run

from megajax.runtime.checkpoint.digests import find_steps

pytestmark = pytest.mark.faults

CONFIG = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
train: {steps: 100000, batch_size: 2, seq_len: 32, dtype: float32, eval_every: 1000000, \
eval_batches: 1, log_every: 1000000}
checkpoint: {every: 2, keep: 1}
optim: {lr: 1e-3, schedule: constant}
"""


def test_what_is_read_is_whole_however_fast_the_run_deletes(tmp_path: Path) -> None:
    folder = write_run(tmp_path, CONFIG)
    process = start(folder)
    read_until(process, 'compiling the training step')
    while process.poll() is None and not find_steps(folder / 'run/checkpoints'):
        time.sleep(0.1)
    first = find_steps(folder / 'run/checkpoints')
    for command in (
        'checkpoint verify run',
        'export hf run exported',
        'generate run --prompt a --max-tokens 2',
        'compare run run',
        'train small.yaml run.start_from=run run.dir=other train.steps=1',
    ):
        done = megajax(*command.split(), folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    assert len(steps(folder / 'run')) == 1
    assert steps(folder / 'run')[0] > first[-1]
