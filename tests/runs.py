"""Runs as a user starts them, in processes of their own: with faults in them, read while they go,
and what they leave.
"""

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from support import megajax

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: 40, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 10, \
eval_batches: 2, log_every: 1}
checkpoint: {every: 10}
optim: {lr: 1e-2}
"""

COMMAND = 'import os, signal, sys, time\n{fault}\nfrom megajax.commands.main import main\nmain()'
# `megajax launch`, but for a command that has a fault in it.
LAUNCH = """
import sys
from megajax.core.config import load
from megajax.runtime.processes.launch import launch
from megajax.runtime.processes.launch_plan import LaunchPlan, make_plan
processes, command, *arguments = sys.argv[1:]
needed = load(arguments[1], arguments[2:]).mesh.num_devices
plan = make_plan(arguments, processes=int(processes), needed=needed)
command = (sys.executable, '-c', command, *arguments)
sys.exit(launch(LaunchPlan(command=command, variables=plan.variables)))
"""

STARTED: list[subprocess.Popen[str]] = []  # `conftest.py` ends those that a failed test leaves


def start(
    folder: Path,
    *overrides: str,
    processes: int = 1,
    fault: str = '',
    name: str = 'run',
    **environ: str,
) -> subprocess.Popen[str]:
    """`megajax train small.yaml run.dir=NAME` in `folder`; each process first runs the code
    `fault`, which may break what it imports.
    """
    arguments = ['train', 'small.yaml', f'run.dir={name}', *overrides]
    if fault:
        command = ['-c', COMMAND.format(fault=fault), *arguments]
        command = command if processes == 1 else ['-c', LAUNCH, str(processes), *command[1:]]
    else:
        command = ['-m', 'megajax', *arguments]
        command[2:2] = [] if processes == 1 else ['launch', '--processes', str(processes), '--']
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What the process says up to the line that matches."""
    assert process.stdout is not None
    said = ''
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(said)


def finish(process: subprocess.Popen[str], timeout: float = 200) -> tuple[int, str]:
    """The exit code, and what it says to its end."""
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        raise AssertionError(f'did not end within {timeout:g} s:\n{said}') from None
    return process.returncode, said


def train(folder: Path, *overrides: str, **options: str | int) -> str:
    """What a run says that comes to its end."""
    code, said = finish(start(folder, *overrides, **options))  # type: ignore[arg-type]
    assert code == 0, said
    return said


def end_here(folder: Path, *overrides: str, name: str = 'run') -> tuple[int, str]:
    """The exit code of a run without a process of its own, and what it says: without the seconds
    that a process takes to import jax.
    """
    logged = logging.StreamHandler(io.StringIO())
    logging.getLogger('megajax').addHandler(logged)
    try:
        done = megajax('train', 'small.yaml', f'run.dir={name}', *overrides, folder=folder)
    finally:
        logging.getLogger('megajax').removeHandler(logged)
    return done.returncode, done.stdout + done.stderr + logged.stream.getvalue()


def train_here(folder: Path, *overrides: str, name: str = 'run') -> str:
    """What a run says that comes to its end, without a process of its own."""
    code, said = end_here(folder, *overrides, name=name)
    assert code == 0, said
    return said


def children(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of what a launch started, in the order of the processes."""
    return [
        int(pid)
        for pid in Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
    ]


def gone(pid: int) -> bool:
    """Whether a process ends, soon."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'Z':
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, which is there once."""
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    found = [(line['step'], line['loss']) for line in lines if 'loss' in line]
    assert len(dict(found)) == len(found), 'a step is there twice'
    return dict(found)


def steps(run: Path) -> list[int]:
    """The checkpoints that are there, finished or not."""
    checkpoints = run / 'checkpoints'
    return (
        sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
        if checkpoints.is_dir()
        else []
    )


def largest_file(run: Path, step: int) -> Path:
    """The one of a checkpoint in which most of its arrays are."""
    return max(
        (path for path in (run / f'checkpoints/{step}').rglob('*') if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def flip_a_bit(path: Path) -> None:
    """In the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def fill(ballast: Path) -> None:
    """Write until there is no room."""
    with suppress(OSError), ballast.open('ab', buffering=0) as file:
        while file.write(bytes(4096)):
            pass


# A fault for any run: it writes a hash of each state that is saved or restored, without the padding
# of its shards and with the layers in their order: the same on every mesh and number of processes.
HASH_STATES = """
import hashlib, jax, numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.unpadded import unpadded
from megajax.core.parallel.layout import Layout

def hash_state(state, name, config):
    digest, layout = hashlib.sha256(), Layout.of(config)
    own = unpadded(state, layout)
    places = np.argsort(layout.layer_order(config.model.num_layers))
    def leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for x, like in zip(leaves(state), leaves(own), strict=True):
        is_stacked = isinstance(x, nnx.Variable) and x.declared.is_stacked
        x, like = (y.get_value() if isinstance(y, nnx.Variable) else y for y in (x, like))
        whole = np.asarray(multihost_utils.process_allgather(x, tiled=True))
        whole = whole[places] if is_stacked else whole
        digest.update(whole[tuple(map(slice, like.shape))].tobytes())
    if jax.process_index() == 0:
        with open('hashes', 'a') as file:
            print(name, digest.hexdigest(), file=file)

def restore(self, step, restore=Checkpoints.restore):
    state = restore(self, step)
    hash_state(state, f'restored {step}', self.config)
    return state

def save(self, state, step, save=Checkpoints.save, **options):
    hash_state(state, f'saved {step}', self.config)
    return save(self, state, step, **options)

Checkpoints.restore, Checkpoints.save = restore, save
"""


def hashes(folder: Path) -> dict[str, set[str]]:
    """What HASH_STATES wrote in `folder`: {'saved 10': {hash}, ...}."""
    found: dict[str, set[str]] = {}
    for line in (folder / 'hashes').read_text().splitlines():
        name, _, digest = line.rpartition(' ')
        found.setdefault(name, set()).add(digest)
    return found


def in_two_processes(program: str, *arguments: str) -> list[str]:
    """Run a program that enters `processes()` in two processes; return the output of each."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
        'MEGAJAX_PROCESSES': '2',
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': '1',
        'PYTHONPATH': os.pathsep.join(sys.path),
    }
    environment.pop('XLA_FLAGS', None)
    started = [
        subprocess.Popen(
            [sys.executable, '-c', program, *arguments],
            env=environment | {'MEGAJAX_PROCESS': str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    return [process.communicate(timeout=120)[0] for process in started]


def stop(
    process: subprocess.Popen[str], number: signal.Signals, pattern: str
) -> tuple[int, str, float]:
    """Send a signal when the process has said `pattern`; its exit code, all that it said, and how
    many seconds it took to end.
    """
    said = read_until(process, pattern)
    process.send_signal(number)
    sent = time.monotonic()
    code, more = finish(process)
    return code, said + more, time.monotonic() - sent
