"""Real processes over gloo: together one jax, and none outlives another."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from megajax.core.config import ConfigError
from megajax.runtime.processes.environment import Start
from megajax.runtime.processes.rendezvous import gather

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[3]

MEET = (
    'from megajax.runtime.processes.environment import read_start; '
    'from megajax.runtime.processes.rendezvous import gather; gather(read_start())'
)

STEPS = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.base.errors import ConfigError, UnreachableError
from megajax.runtime.processes.distributed import processes
from megajax.core.parallel.mesh import make_mesh

with processes():
    with jax.set_mesh(make_mesh(2, 1)) as mesh:
        add = jax.jit(lambda x: jnp.sum(x))
        sharding = NamedSharding(jax.sharding.get_mesh(), P('data'))
        x = jax.make_array_from_callback((2,), sharding, lambda index: np.ones(1))
        for step in range(10_000):
            assert float(add(x)) == 2
            if step == 3:
                print('stepping', flush=True)
            if step == 6 and jax.process_index() == 1:
                exec(' '.join(sys.argv[1:]))
            time.sleep(0.02)
"""

SAVES = """
from orbax.checkpoint import multihost
from megajax.runtime.processes.consensus import SaveBarrier
from megajax.runtime.processes.distributed import processes

with processes():
    barrier = SaveBarrier(str)
    for save in range(20):
        barrier(key=f'save {save}', timeout_ms=60_000)
    client = multihost.get_jax_distributed_client()
    client.wait_at_barrier('all have saved', 60_000)
    rounds = range(1, barrier.round + 1)
    print('kept', [n for n in rounds if client.key_value_dir_get(f'megajax_save_{n}/')], flush=True)
    client.wait_at_barrier('all have counted', 60_000)
"""

ADD_UP = """
import os, socket, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.core.config import ConfigError, load
from megajax.runtime.processes.distributed import processes
from megajax.core.parallel.mesh import make_mesh, mesh_for

with processes():
    mesh = make_mesh(1, 4)
    sharding = NamedSharding(mesh, P('model'))
    x = jax.make_array_from_callback((4,), sharding, lambda index: jnp.arange(4.0)[index])
    with jax.set_mesh(mesh):
        print('sum', float(jax.jit(jnp.sum)(x)), jax.process_count(), jax.local_device_count())
    socket.gethostname = lambda: f'host{jax.process_index()}'
    groups = make_mesh(2, 2).devices
    print('hosts', [[device.process_index for device in group] for group in groups])
    across = 'mesh.data=1', 'mesh.model=4', 'mesh.allow_model_across_hosts=true'
    print('across', mesh_for(load('tiny', across)).shape['model'])
    replicas = make_mesh(2, 1, replica=2).devices.reshape(2, 2)
    print('replicas', [[device.process_index for device in group] for group in replicas])
    try:
        make_mesh(1, 4)
    except ConfigError as error:
        print('refused', error)
    files = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]
    own = {os.readlink(file) for file in files if os.path.exists(file)}
    for line in [*open('/proc/net/tcp'), *open('/proc/net/tcp6')]:
        address, state, inode = (line.split()[i] for i in (1, 3, 9))
        if state == '0A' and f'socket:[{inode}]' in own:
            print('listens', address.split(':')[0])
"""


def free_port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as server:
        return server.getsockname()[1]


class Run:
    """A program in several processes, whose lines are read as they come."""

    def __init__(
        self, program, *arguments, count=2, devices=1, indices=None, counts=None, **variables
    ):
        environ = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
        environ |= {
            'JAX_PLATFORMS': 'cpu',
            'JAX_NUM_CPU_DEVICES': f'{devices}',
            'PYTHONPATH': str(ROOT),
            'PYTHONUNBUFFERED': '1',
        }
        environ |= {'MEGAJAX_COORDINATOR': f'127.0.0.1:{free_port()}', **variables}
        self.processes, self.lines, self.readers = {}, {}, []
        for index in indices or range(count):
            own = {
                'MEGAJAX_PROCESSES': f'{(counts or {}).get(index, count)}',
                'MEGAJAX_PROCESS': f'{index}',
            }
            process = subprocess.Popen(
                [sys.executable, '-c', program, *arguments],
                env=environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            self.processes[index], self.lines[index] = process, []
            self.readers.append(threading.Thread(target=self._read, args=(index,), daemon=True))
            self.readers[-1].start()

    def _read(self, index):
        for line in self.processes[index].stdout:
            self.lines[index].append(line.rstrip())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()

    def wait_for(self, text):
        deadline = time.monotonic() + 60
        while not all(any(text in line for line in lines) for lines in self.lines.values()):
            assert time.monotonic() < deadline, self.lines
            assert all(process.poll() is None for process in self.processes.values()), self.lines
            time.sleep(0.02)

    def codes(self, timeout=60):
        deadline = time.monotonic() + timeout
        codes = {
            index: process.wait(max(deadline - time.monotonic(), 0.01))
            for index, process in self.processes.items()
        }
        for reader in self.readers:
            reader.join(timeout=5)
        return codes

    def errors(self, index):
        return [line for line in self.lines[index] if line.startswith('error: ')]

    def after(self, index, name):
        return [
            line.removeprefix(f'{name} ')
            for line in self.lines[index]
            if line.startswith(f'{name} ')
        ]


def test_processes_are_one_jax_whose_model_axis_stays_in_a_host_and_which_listens_on_loopback():
    with Run(ADD_UP, devices=2) as run:
        assert run.codes() == {0: 0, 1: 0}, run.lines
        for index in (0, 1):
            assert run.after(index, 'sum') == ['6.0 2 2']
            assert run.after(index, 'hosts') == ['[[0, 0], [1, 1]]']
            assert run.after(index, 'across') == ['4']
            assert run.after(index, 'replicas') == ['[[0, 0], [1, 1]]']
            (refusal,) = run.after(index, 'refused')
            assert refusal.startswith('mesh.model=4 reaches across hosts (host0, host1)')
            assert (
                'set mesh.model to 2 or a divisor of it, for example mesh.data=2 mesh.model=2, or '
                in refusal
            )
        # In hexadecimal, the first byte last.
        assert all(
            re.fullmatch(r'.{6}7F|0{24}01000000|0{16}FFFF0000.{6}7F', one)
            for one in run.after(0, 'listens')
        ), run.lines


def test_processes_leave_the_coordinator_no_keys_of_saves_long_done():
    with Run(SAVES) as run:
        assert run.codes() == {0: 0, 1: 0}, run.lines
        assert [run.after(index, 'kept') for index in range(2)] == [['[20]'], ['[20]']]


@pytest.mark.parametrize('victim', [1, 0])
def test_a_killed_process_ends_the_other_within_seconds_in_a_line_that_names_it(victim):
    with Run(STEPS, 'pass') as run:
        run.wait_for('stepping')
        run.processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        codes = run.codes()
        assert time.monotonic() - killed < 5
        # Where its coordinator is gone jax aborts within a tenth of a second, on a busy machine
        # perhaps before our line is printed.
        if victim == 0 and codes[1] == -signal.SIGABRT:
            return
        assert codes[1 - victim] == 75
        (line,) = run.errors(1 - victim)
        assert re.match(
            rf'error: process {victim} on \S+ was lost, so this process ends too: '
            r'start the run again',
            line,
        )
        assert not any('Traceback' in line for line in run.lines[1 - victim])


@pytest.mark.parametrize(
    ('action', 'code', 'why'),
    [
        ('raise ArithmeticError("a loss of nan")', 1, 'failed (ArithmeticError: a loss of nan)'),
        ('raise ConfigError("mesh.model=3")', 2, 'failed (ConfigError: mesh.model=3)'),
        ('raise UnreachableError("the URL")', 75, 'failed (UnreachableError: the URL)'),
    ],
    ids=['exception', 'mistake of the user', 'a server that one process does not reach'],
)
def test_an_error_in_one_process_keeps_its_exit_code_and_ends_the_other(action, code, why):
    with Run(STEPS, action) as run:
        run.wait_for('stepping')
        start = time.monotonic()
        assert run.codes() == {0: 2 if code == 2 else 75, 1: code}
        assert time.monotonic() - start < 8
        (line,) = run.errors(0)
        assert why in line
        assert sum('Traceback' in line for line in run.lines[1]) == 1


def test_process_0_says_who_did_not_come():
    with Run(MEET, count=4, indices=[0, 2], MEGAJAX_START_TIMEOUT='2') as run:
        assert run.codes(timeout=15) == {0: 75, 2: 75}
        assert re.match(
            r'error: of 4 processes, 1, 3 did not connect to process 0 at 127.0.0.1:\d+ '
            r'within 2 s: check that',
            run.lines[0][0],
        )
        assert re.match(
            r'error: process 0 at 127.0.0.1:\d+ ended before all 4 had connected', run.lines[2][0]
        )
        assert [len(lines) for lines in run.lines.values()] == [1, 1]


def test_a_process_that_does_not_reach_process_0_says_where_it_looked():
    with Run(MEET, indices=[1], MEGAJAX_START_TIMEOUT='1') as run:
        assert run.codes(timeout=15) == {1: 75}
        (line,) = run.lines[1]
        assert re.match(
            r'error: process 1 could not reach process 0 at 127.0.0.1:\d+ within 1 s '
            r'\(Connection refused\): check that',
            line,
        )


def test_processes_that_do_not_agree_on_their_number_are_refused():
    with Run(MEET, counts={1: 3}) as run:
        assert all(run.codes(timeout=15).values())
        for index in (0, 1):
            assert re.search(
                r'ConfigError: process 1 on \S+ of 3 connected to .*, where process 0 of 2 expects',
                run.lines[index][-1],
            )


def test_a_port_that_is_taken_is_refused_with_the_fix():
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        start = Start(index=0, count=2, host='127.0.0.1', port=port, bind='127.0.0.1', timeout=1)
        with pytest.raises(
            ConfigError,
            match=(
                rf'cannot listen on 127.0.0.1, port {port} .*: '
                r'choose a different port in MEGAJAX_COORDINATOR'
            ),
        ):
            gather(start)


LATE = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.runtime.processes.distributed import processes
from megajax.core.parallel.mesh import make_mesh

with processes():
    with jax.set_mesh(make_mesh(2, 1)) as mesh:
        scatter = jax.jit(jax.shard_map(
            lambda x: jax.lax.psum_scatter(x, 'data', tiled=True),
            in_specs=P(None), out_specs=P('data'),
        ))
        sharding = NamedSharding(jax.sharding.get_mesh(), P(None))
        x = jax.make_array_from_callback((2,), sharding, lambda index: np.ones(2))
        for pause in (0, 40):  # gloo's reduce-scatter waits for 30 s (jax-ml/jax#40831)
            if jax.process_index() == 1:
                time.sleep(pause)
            jax.block_until_ready(scatter(x))
"""


@pytest.mark.skipif(
    not version('jax').startswith('0.10.'), reason='gloo in jax 0.12 waits longer than 40 s'
)
def test_where_a_process_comes_too_late_for_a_collective_all_leave_with_75():
    with Run(LATE) as run:
        assert set(run.codes(timeout=200).values()) == {75}
        lines = [line for lines in run.lines.values() for line in lines]
        assert any(
            re.match(
                r'error: the processes did not reach each other in time \(\w+: UNKNOWN: Gloo', line
            )
            for line in lines
        )
        assert not any('Traceback' in line for line in lines)


@pytest.mark.parametrize(
    'said', [b'', b'GET / HTTP/1.1\r\n\r\n', b'{"event": "hello", "process": "one"}\n', b'[1]\n']
)
def test_strangers_at_the_port_do_not_disturb(said):
    port = free_port()
    with Run(MEET, indices=[0], MEGAJAX_COORDINATOR=f'127.0.0.1:{port}') as run:
        while True:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(('127.0.0.1', port)) as stranger,
            ):
                stranger.sendall(said)
                break
        with Run(MEET, indices=[1], MEGAJAX_COORDINATOR=f'127.0.0.1:{port}') as other:
            other.codes(timeout=15)
        # Each ends when it has met the other, without a word of farewell.
        run.codes(timeout=15)
        assert not any(
            'Traceback' in line or 'come' in line for line in run.lines[0] + other.lines[1]
        )
