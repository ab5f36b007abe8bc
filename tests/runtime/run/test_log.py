"""What a run leaves in its directory about itself: where its seconds went, its speed, and a
trace.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from support import write_run

from megajax.analysis.report import write_at_end
from megajax.core.config import load
from megajax.runtime.run.run import run

CONFIG = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: 12, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 6, eval_batches: 2, \
log_every: 4, sample_prompts: ['def ']}
checkpoint: {every: 5}
optim: {schedule: constant}
"""
ROOT = Path(__file__).parents[3]

# A run in which process 1 takes long to read each batch, and has the fullest device.
SLOW_READER = """
import sys, threading, time, jax
from megajax.core.config import load
from megajax.runtime.data import Batches
from megajax.runtime.processes.distributed import processes
from megajax.runtime.run.meter import Meter
from megajax.runtime.run.run import run
read, one, known = Batches.rows, threading.Lock(), Meter.peak_bytes
def rows(self, step, start, stop):
    with one:
        time.sleep(0.5 * jax.process_index())
    return read(self, step, start, stop)
Batches.rows = rows
Meter.peak_bytes = lambda meter: max(known(meter), 1e9 * (1 + jax.process_index()))
with processes():
    run(load('small.yaml', sys.argv[1:]), name='small')
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG)


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / 'summary.json').read_text())


class Finished(NamedTuple):
    """A run that has ended: its directory, what it said, and its seconds without the report."""

    folder: Path
    said: str
    seconds: float


@pytest.fixture(scope='module')
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, said = write_run(tmp_path_factory.mktemp('run'), CONFIG), io.StringIO()
    keys = f'run.dir={folder}/run', 'train.profile={start: 7, steps: 2}'
    config, ended = load(folder / 'small.yaml', keys), list[float]()

    def report(folder: Path) -> Path | None:
        ended.append(time.perf_counter())
        return write_at_end(folder)

    began = time.perf_counter()
    with redirect_stdout(said):
        run(config, name='small', at_end=report)
    return Finished(folder / 'run', said.getvalue(), ended[0] - began)


def test_a_run_says_what_it_does_and_leaves_what_it_says(finished: Finished) -> None:
    for said in (
        'data=2 x model=2',
        'simulated',
        'layers.mlp.down.weight',
        'step 12/12',
        'bits per byte',
        "sample after 'def '",
    ):
        assert said in finished.said
    assert (finished.folder / 'checkpoints/12').is_dir()
    written = {path.name for path in finished.folder.iterdir()}
    assert {'config.yaml', 'tokenizer.json', 'tensorboard', 'report.html'} <= written


def test_a_run_tells_of_each_step_once_and_where_its_seconds_went(finished: Finished) -> None:
    lines, said, passed = read_lines(finished.folder), finished.said, finished.seconds

    steps = [line for line in lines if 'loss' in line]
    evaluations = [line for line in lines if 'validation_loss' in line]
    assert len(steps) + len(evaluations) == len(lines)
    assert [line['step'] for line in steps] == list(range(1, 13))
    assert [line['step'] for line in evaluations] == [0, 6, 12]
    always = {
        'loss', 'lr', 'grad_norm', 'tokens_per_s', 'tflops_per_device', 'planned_memory_bytes',
        'step_ms', 'data_wait_ms', 'checkpoint_ms', 'skipped_steps',
    }  # fmt: skip
    assert all(always <= line.keys() for line in steps)
    after_a_save = {6, 11}
    assert max(steps, key=lambda line: line['checkpoint_ms'])['step'] in after_a_save

    seconds = summary(finished.folder)['seconds']
    # The clock's last look comes before its seconds are printed, and the report after that.
    assert passed - 2 < sum(seconds.values()) - seconds['total'] <= passed + 0.01  # rounded to 1 ms
    productive = sum(line['step_ms'] - line['data_wait_ms'] for line in steps) / 1e3
    # While the host writes the line of a step, which is `other` by the clock, the devices are
    # already at the next step, whose time this is.
    most = seconds['productive'] + seconds['other']
    assert seconds['productive'] - 0.01 <= productive <= most + 0.01
    assert seconds['data_wait'] == pytest.approx(
        sum(line['data_wait_ms'] for line in steps) / 1e3, rel=0.01, abs=1e-3
    )
    assert (
        min(seconds['compile'], seconds['evaluation'], seconds['checkpoint'], seconds['setup']) > 0
    )
    assert seconds['restore'] == pytest.approx(0, abs=0.1)
    assert seconds['lost'] == 0
    told = re.search(
        r'seconds ([\d.]+): .* productive \(\d+%\), .* compile, .* restore, .* checkpoint, '
        r'.* data wait',
        ' '.join(said.split()),
    )
    assert told
    assert float(told[1]) == pytest.approx(seconds['total'], abs=0.06)  # the line has one decimal

    (trace,) = (finished.folder / 'profile').rglob('*.xplane.pb')
    events = (
        event
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
    )
    assert [dict(event.stats)['step_num'] for event in events if event.name == 'train'] == [8, 9]


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, '-m', 'megajax', 'train', 'small.yaml', 'run.dir=run', *overrides]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.faults
@pytest.mark.exhaustive
def test_stopped_or_killed_a_run_sums_over_its_starts(folder: Path) -> None:
    def stop(number: signal.Signals, after: str) -> str:
        process = start(folder, 'train.steps=100000', 'checkpoint.every=50', 'train.log_every=1')
        assert process.stdout is not None
        said = ''
        while f'step {after}/' not in said:
            said += process.stdout.readline()
            assert process.poll() is None, said
        process.send_signal(number)
        return said + process.communicate(timeout=100)[0]

    said = stop(signal.SIGTERM, '60')
    assert re.search(r'^seconds    .* productive', said, re.MULTILINE)
    first = summary(folder / 'run')
    assert first['starts'] == 1
    assert first['step'] == read_lines(folder / 'run')[-1]['step']
    stop(signal.SIGKILL, f'{first["step"] + 30}')
    said = stop(signal.SIGTERM, f'{first["step"] + 40}')
    found, lines = summary(folder / 'run'), read_lines(folder / 'run')
    assert found['step'] == lines[-1]['step']
    assert [line['step'] for line in lines if 'loss' in line] == list(range(1, found['step'] + 1))
    assert found['starts'] in (
        2,
        3,
    )  # a start that is killed in its first seconds leaves no summary
    assert re.search(rf'^{found["starts"]} starts   ', said, re.MULTILINE)
    assert (
        found['seconds']['total']
        > first['seconds']['total'] + found['seconds_of_last_start']['total'] - 0.01
    )
    assert found['seconds']['restore'] > 0


@pytest.mark.faults
def test_the_process_that_the_others_wait_for_is_named(folder: Path) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': '2',
        'PYTHONPATH': str(ROOT),
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
    }
    both = [
        subprocess.Popen(
            [sys.executable, '-c', SLOW_READER, 'run.dir=run', 'train.eval_every=100',
             'train.profile={start: 3, steps: 1}'],
            cwd=folder, env=environ | {'MEGAJAX_PROCESSES': '2', 'MEGAJAX_PROCESS': f'{index}'},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for index in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=150)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = {
        line['step']: (line['slowest_process'], line['slowest_process_behind_ms'])
        for line in read_lines(folder / 'run')
        if 'slowest_process' in line
    }
    assert list(found) == [4, 8, 12]
    memory = [line['memory_bytes'] for line in read_lines(folder / 'run') if 'loss' in line]
    assert memory == [*3 * [1e9], *9 * [2e9]]
    process, behind = found[12]
    assert process == 1
    assert 50 < behind < 600
    assert re.search(
        r'^step 12  process 1 reaches each step \d+\.\d ms later than the median$',
        said[0],
        re.MULTILINE,
    )
    assert len(list((folder / 'run/profile').rglob('process_*/**/*.xplane.pb'))) == 2
