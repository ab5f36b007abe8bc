"""`megajax launch`: processes that start together, speak in turn and end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import gone
from support import megajax, more

from megajax.core.config import ConfigError
from megajax.runtime.processes.launch_plan import make_plan

ROOT = Path(__file__).parents[2]
SAME_SECONDS = 0.4  # between signals of one wish, instead of a second
GRACE = 0.3  # seconds until SIGKILL, for which a test waits if a process ignores SIGTERM
# Process 0 and 1 of a plan that needs no jax: each runs its own line.
PAIR = """
import os, sys
from megajax.runtime.processes import signals
from megajax.runtime.processes.launch import launch
from megajax.runtime.processes.launch_plan import LaunchPlan
plan = LaunchPlan(
    command=(sys.executable, '-c', 'import os; exec(os.environ["DO"])'),
    variables=tuple({'DO': do} for do in sys.argv[1:]),
)
signals.SAME_SECONDS = float(os.environ['SAME'])
sys.exit(launch(plan, grace=float(os.environ['GRACE'])))
"""
# Host 0 or 1 of two, each of two processes that say who they are among how many. If there is a
# second argument, the last process then finds a mistake in its config.
HOST = """
import sys
from dataclasses import replace
from megajax.runtime.processes.launch import launch
from megajax.runtime.processes.launch_plan import make_plan
meet = (
    'import sys, time, jax\\n'
    'from megajax.base.errors import ConfigError\\n'
    'from megajax.runtime.processes.distributed import processes\\n'
    'with processes():\\n'
    '    print("met", jax.process_index(), jax.process_count(), len(jax.devices()))\\n'
    '    if sys.argv[1:]:\\n'
    '        if jax.process_index() == 3: raise ConfigError("mistake")\\n'
    '        time.sleep(60)\\n'
)
plan = make_plan([], processes=2, needed=4, hosts=2, host=int(sys.argv[1]))
sys.exit(launch(replace(plan, command=(sys.executable, '-c', meet, *sys.argv[2:]))))
"""
IGNORE = (
    'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); '
    'time.sleep(60)'
)
COUNT = (
    'import signal, time\n'
    'for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1:\n'
    '    signal.signal(number, lambda number, _: print("got", number))\n'
    'print(os.getpid())\n'
    'end = time.monotonic() + 60\n'
    'while time.monotonic() < end: time.sleep(0.1)'
)


def start(*command, folder=ROOT, environ=None):
    own = {'PYTHONPATH': str(ROOT), 'SAME': str(SAME_SECONDS), 'GRACE': str(GRACE)}
    environ = os.environ | own | (environ or {})
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(process, count=2):
    found = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, process.communicate()
        found += [int(word) for word in re.findall(r'^\[\d\] (\d+)$', line)]
    return found


def test_on_cpus_each_process_simulates_its_share_of_the_mesh_and_all_meet_on_loopback():
    plan = make_plan(
        ['train', 'tiny'],
        processes=2,
        needed=4,
        environ={'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_mine=1', 'MEGAJAX_BIND': '10.0.0.5'},
    )
    assert {one['MEGAJAX_BIND'] for one in plan.variables} == {'127.0.0.1'}
    assert plan.command == (sys.executable, '-m', 'megajax', 'train', 'tiny')
    first, second = plan.variables
    assert (first['MEGAJAX_PROCESS'], second['MEGAJAX_PROCESS']) == ('0', '1')
    assert re.fullmatch(r'127\.0\.0\.1:\d+', first['MEGAJAX_COORDINATOR'])
    assert {**first, 'MEGAJAX_PROCESS': '1'} == second
    assert (first['MEGAJAX_PROCESSES'], first['JAX_NUM_CPU_DEVICES'], first['JAX_PLATFORMS']) == (
        '2',
        '2',
        'cpu',
    )
    assert first['XLA_FLAGS'].startswith('--xla_mine=1 ')


def gpus(monkeypatch, *, plugin=True):
    monkeypatch.setattr('megajax.runtime.processes.launch_plan.visible_gpus', lambda environ: 8)
    monkeypatch.setattr(
        'megajax.core.hardware.visible.entry_points',
        lambda group: [type('Plugin', (), {'name': 'xla_cuda12'})] if plugin else [],
    )


def test_on_gpus_each_process_gets_its_own(monkeypatch):
    gpus(monkeypatch)
    plan = make_plan(['train'], processes=4, needed=8, environ={})
    assert [one['JAX_LOCAL_DEVICE_IDS'] for one in plan.variables] == ['0,1', '2,3', '4,5', '6,7']
    assert not any('JAX_PLATFORMS' in one or 'JAX_NUM_CPU_DEVICES' in one for one in plan.variables)


def test_several_hosts_number_their_processes_one_after_the_other(monkeypatch):
    gpus(monkeypatch)
    there = {'MEGAJAX_COORDINATOR': 'node1:8476'}
    plans = [
        make_plan(['train'], processes=8, needed=16, hosts=2, host=0, environ=there),
        make_plan(
            ['train'],
            processes=8,
            needed=16,
            hosts=2,
            environ=there | {'JOB_COMPLETION_INDEX': '1'},
        ),
    ]
    for first, plan in zip((0, 8), plans, strict=True):
        assert str(plan).startswith(f'[{first}] MEGAJAX_COORDINATOR=node1:8476 ')
        numbers = [int(one['MEGAJAX_PROCESS']) for one in plan.variables]
        assert numbers == list(range(first, first + 8))
        assert {one['MEGAJAX_PROCESSES'] for one in plan.variables} == {'16'}
        assert [one['JAX_LOCAL_DEVICE_IDS'] for one in plan.variables] == list('01234567')


@pytest.mark.parametrize(
    ('host', 'needed', 'environ', 'message'),
    [
        (None, 16, {}, '--hosts 2 without --host: say which of them this is, from 0'),
        (2, 16, {}, '--host 2 is not among the 2 of --hosts: use 0 to 1'),
        (-1, 16, {}, '--host -1 is not among the 2 of --hosts'),
        (None, 16, {'JOB_COMPLETION_INDEX': '4'}, 'JOB_COMPLETION_INDEX=4 is not among the 2'),
        (0, 16, {}, '--hosts 2 without MEGAJAX_COORDINATOR: export it on each host'),
        (0, 8, {}, '2 hosts x 8 processes x 1 devices are 16, but the mesh'),
    ],
)
def test_a_host_without_its_place_is_refused(monkeypatch, host, needed, environ, message):
    gpus(monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_plan(['train'], processes=8, needed=needed, hosts=2, host=host, environ=environ)


@pytest.mark.slow
@pytest.mark.parametrize('mistake', [(), ('mistake',)])
def test_the_launches_of_two_hosts_meet_as_one_run_and_end_with_one_code(mistake):
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    environ = {'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}', 'MEGAJAX_TOKEN': 64 * '5'}
    environ['JAX_PLATFORMS'] = 'cpu'
    hosts = [start('-c', HOST, str(host), *mistake, environ=environ) for host in (0, 1)]
    said = [process.communicate(timeout=120) for process in hosts]
    assert [process.returncode for process in hosts] == 2 * [2 if mistake else 0], said
    assert [sorted(out.splitlines()) for out, _ in said] == [
        ['[0] met 0 4 4', '[1] met 1 4 4'],
        ['[2] met 2 4 4', '[3] met 3 4 4'],
    ]


@pytest.mark.parametrize(
    ('processes', 'devices', 'needed', 'message'),
    [
        (2, 2, 4, '2 processes x 2 devices are 4, but 8 GPUs are visible'),
        (3, None, 8, '3 processes x 2 devices are 6, but 8 GPUs are visible'),
        (16, None, 16, '16 processes x 1 devices are 16, but 8 GPUs are visible'),
        (
            8,
            None,
            4,
            '8 processes x 1 devices are 8, but the mesh of the config (mesh.stages x mesh.data x '
            'mesh.context x mesh.model_rows x mesh.model) needs 4',
        ),
    ],
)
def test_gpus_that_would_be_idle_or_shared_are_refused(
    monkeypatch, processes, devices, needed, message
):
    gpus(monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_plan(
            ['train'], processes=processes, needed=needed, devices_per_process=devices, environ={}
        )


def test_gpus_that_jax_cannot_use_are_refused(monkeypatch):
    gpus(monkeypatch, plugin=False)
    with pytest.raises(ConfigError, match='8 GPUs are visible and jax has no plugin for them'):
        make_plan(['train'], processes=8, needed=8, environ={})


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--processes', '2', '--', 'train', 'tiny', 'mesh.model=3'],
            'error: override mesh.model=3: model.num_heads: 8',
        ),
        (
            ['--processes', '3', '--', 'train', 'tiny'],
            'error: 3 processes x 1 devices are 3, '
            'but the mesh of the config (mesh.stages x mesh.data x mesh.context x '
            'mesh.model_rows x mesh.model) needs 4',
        ),
        (['--processes', '2', '--', 'inspect', 'tiny'], 'error: launch starts train, not inspect'),
    ],
)
def test_a_mistake_exits_2_before_anything_starts(arguments, message):
    done = megajax('launch', *arguments)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith(message)


def test_a_dry_run_prints_each_process_and_imports_no_jax():
    program = (
        'import sys; from megajax.commands.main import main\ntry: main()\nexcept SystemExit as e: '
        "print(e.code, 'jax' in sys.modules)"
    )
    out, err = start(
        '-c',
        program,
        'launch',
        '--processes',
        '2',
        '--dry-run',
        '--',
        'train',
        'tiny',
        'mesh.data=1',
    ).communicate(timeout=60)
    *lines, last = out.splitlines()
    assert (last, err) == ('0 False', '')
    assert [
        line.startswith(f'[{index}] MEGAJAX_COORDINATOR=127.0.0.1:')
        for index, line in enumerate(lines)
    ] == [True, True]
    assert all(
        line.endswith(f'{sys.executable} -m megajax train tiny mesh.data=1') for line in lines
    )


def test_the_processes_of_a_launch_share_a_fresh_token_that_no_dry_run_prints():
    show = 'print(os.environ["MEGAJAX_TOKEN"])'
    launches = [start('-c', PAIR, show, show).communicate(timeout=60)[0] for _ in range(2)]
    found = [set(re.findall(r'^\[\d\] ([0-9a-f]{64})$', out, flags=re.M)) for out in launches]
    assert [len(tokens) for tokens in found] == [1, 1]
    assert found[0] != found[1]
    plan = make_plan(['train'], processes=2, needed=2, environ={'JAX_PLATFORMS': 'cpu'})
    assert 'MEGAJAX_TOKEN' not in f'{plan} {plan!r}'


def test_lines_carry_the_number_of_their_process_and_the_streams_stay_apart():
    process = start('-c', PAIR, 'print("one\\ntwo")', 'import sys; print("three", file=sys.stderr)')
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.splitlines() == ['[0] one', '[0] two']
    assert err.splitlines() == ['[1] three']


@pytest.mark.parametrize(
    ('failure', 'code', 'described'),
    [
        more('os._exit(7)', 7, 'exit code 7'),
        (
            'os.kill(os.getpid(), 9)',
            75,
            'signal SIGKILL (137), and the launch exits with 75: start it again',
        ),
        more(
            'os.kill(os.getpid(), 6)',
            75,
            'signal SIGABRT (134), and the launch exits with 75: start it again',
        ),
        more('os.kill(os.getpid(), 11)', 139, 'signal SIGSEGV (139)'),
    ],
)
def test_when_one_fails_the_others_are_ended_though_they_ignore_sigterm(failure, code, described):
    process = start(
        '-c', PAIR, IGNORE, f'print("last words"); import time; time.sleep(0.3); {failure}'
    )
    began = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert process.returncode == code
    assert err.splitlines() == [
        f'launch: process 1 of 2 failed with {described}; its last lines:',
        '    last words',
    ]
    assert gone(int(re.search(r'\[0\] (\d+)', out)[1]))


@pytest.mark.parametrize(
    ('first', 'later', 'code'),
    [
        more(75, 'os._exit(3)', 3),
        (75, 'import time; time.sleep(0.2); os._exit(3)', 3),
        # The cause is on another host: a scheduler must not start this one again, either.
        (75, 'os._exit(82)', 2),
        more(83, 'os._exit(1)', 1),
    ],
)
def test_the_first_cause_is_named_and_not_the_process_that_ended_because_of_it(first, later, code):
    # This ends when both processes have ended, however much later a busy machine starts one.
    process = start('-c', PAIR, f'os._exit({first})', later, environ={'GRACE': '20'})
    said = process.communicate(timeout=30)[1]
    assert f'process 1 of 2 failed with exit code {code};' in said
    assert process.returncode == code


@pytest.mark.parametrize(
    'number', [signal.SIGTERM, *map(more, (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))]
)
def test_a_signal_is_passed_on_once_and_a_later_sigint_kills(number):
    process = start('-c', PAIR, COUNT, COUNT)
    children = pids(process)
    for _ in range(2):  # within milliseconds, as Slurm does
        process.send_signal(number)
    assert sorted(process.stdout.readline() for _ in children) == [
        f'[{index}] got {number}\n' for index in (0, 1)
    ]
    time.sleep(1.2 * SAME_SECONDS)
    if number != signal.SIGINT:
        process.send_signal(number)
        time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (out, err, process.returncode) == ('', f'launch: ended by {number.name}\n', 75)
    assert all(gone(pid) for pid in children)


def test_all_processes_are_asked_where_they_stand_and_go_on():
    ask = COUNT.replace('signal.SIGUSR1:', 'signal.SIGUSR2:')
    process = start('-c', PAIR, ask, ask)
    children = pids(process)
    for _ in range(2):
        process.send_signal(signal.SIGUSR2)
        assert sorted(process.stdout.readline() for _ in children) == [
            f'[{index}] got {signal.SIGUSR2}\n' for index in (0, 1)
        ]
    process.kill()
    process.communicate()


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere nothing ends them')
def test_nothing_outlives_a_launch_that_is_killed():
    process = start('-c', PAIR, IGNORE, IGNORE)
    children = pids(process)
    process.kill()
    assert all(gone(pid) for pid in children)
    process.communicate()
