"""`megajax.train` is the command's run, as one call from Python: in a script, in several processes,
in a notebook.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import optax
import pytest
from support import ROOT, assert_close, gather, on_mesh, write_run

import megajax
from megajax.core.config import ConfigError, StopRequested, load
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.processes.signals import STOPS, TELL

CONFIG = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2}
train: {steps: 3, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 3, log_every: 1}
run: {dir: run}
"""
SCRIPT = ROOT / 'scripts/train.py'


def start(folder: Path, *overrides: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), 'small.yaml', *overrides]
    variables = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'} | environ
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / 'run/metrics.jsonl').read_text().splitlines())
    return [line['loss'] for line in lines if 'loss' in line]


@pytest.mark.slow
def test_a_script_trains_and_a_mistake_has_the_exit_code_of_the_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path, CONFIG)
    for is_finished in (False, True):
        process = start(folder, *(['optim.lr=0.5'] if is_finished else []))
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert ('nothing to do: the checkpoint is at step 3' in out) == is_finished
        assert out.splitlines()[-1].startswith("run/checkpoints/3 {'step': 3,")
        assert (folder / 'run/checkpoints/3').is_dir()
        assert load(folder / 'run/config.yaml').optim.lr != 0.5
    process = start(folder, 'mesh.model=3')
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert 'model.num_heads: 2 is not a multiple of mesh.model=3' in err


def test_a_stop_that_was_asked_for_is_an_exception_with_its_cause(tmp_path: Path) -> None:
    config = load(write_run(tmp_path, CONFIG) / 'small.yaml')
    limits = config.run.model_copy(update={'max_minutes': 1e-9, 'dir': str(tmp_path / 'run')})
    with pytest.raises(StopRequested, match=r'run\.max_minutes'):
        megajax.train(config.model_copy(update={'run': limits}))
    assert not list((tmp_path / 'run/checkpoints').glob('*'))


def test_a_run_outside_the_main_thread_leaves_the_signals_to_its_program(tmp_path: Path) -> None:
    config = load(write_run(tmp_path, CONFIG) / 'small.yaml')
    limits = config.run.model_copy(update={'max_minutes': 1e-9, 'dir': str(tmp_path / 'run')})
    before = [signal.getsignal(number) for number in (*STOPS, TELL)]
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(megajax.train, config.model_copy(update={'run': limits}))
        assert isinstance(run.exception(), StopRequested)
    assert [signal.getsignal(number) for number in (*STOPS, TELL)] == before


@pytest.mark.slow
def test_a_run_trains_with_a_given_optimizer_and_resumes_with_it_bit_for_bit(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path, CONFIG, split='1,0,0') / 'small.yaml'

    def train(name: str, steps: int) -> dict[str, np.ndarray]:
        run = tmp_path / name
        config = load(file, [f'run.dir={run}', f'train.steps={steps}', 'optim.decay_steps=4'])
        lion = optax.lion(megajax.learning_rate(config))
        assert megajax.train(config, optimizer=lion).step == steps
        with on_mesh(config), Checkpoints(run / 'checkpoints', config, optimizer=lion) as saved:
            return gather(saved.restore(steps).params)

    train('resumed', 2)
    resumed, whole = train('resumed', 4), train('whole', 4)
    assert_close(resumed, whole, 0.0)
    with pytest.raises(ConfigError, match=r'different arrays .*the optimizer'):
        megajax.train(load(file, [f'run.dir={tmp_path / "whole"}', 'train.steps=5']))


@pytest.mark.faults
def test_two_processes_of_a_script_are_one_run(tmp_path: Path) -> None:
    alone, together = tmp_path / 'alone', tmp_path / 'together'
    for folder in (alone, together):
        folder.mkdir()
        write_run(folder, CONFIG, split='1,0,0')
    process = start(alone)
    assert process.wait(timeout=300) == 0, process.communicate()[1]
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    both = [
        start(
            together,
            MEGAJAX_COORDINATOR=address,
            MEGAJAX_PROCESSES='2',
            MEGAJAX_PROCESS=str(index),
        )
        for index in range(2)
    ]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert losses(together) == pytest.approx(losses(alone), rel=1e-6)


def test_what_is_offered_is_what_there_is() -> None:
    assert all(hasattr(megajax, name) for name in megajax.__all__)
    assert dir(megajax) == sorted(megajax.__all__)
