"""What a process of several does by itself: how it starts jax, and with which code it leaves."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NoReturn

import jax
import pytest

from megajax.core.config import ConfigError
from megajax.core.hardware import visible
from megajax.core.parallel import mesh
from megajax.runtime.processes import distributed, environment, peers
from megajax.runtime.processes.distributed import NO_PROXIES, PROXIES, _avoid_proxies, processes
from megajax.runtime.processes.environment import Start
from megajax.runtime.processes.peers import Peers


@pytest.mark.parametrize(
    ('error', 'code'),
    [
        (
            jax.errors.JaxRuntimeError(
                'UNKNOWN: Gloo context initialization failed: [..] Connect timeout [::1]:8'
            ),
            75,
        ),
        (
            jax.errors.JaxRuntimeError(
                'DEADLINE_EXCEEDED: GetKeyValue() timed out with key: gpu:nccl/0'
            ),
            75,
        ),
        (
            jax.errors.JaxRuntimeError(
                'INTERNAL: NCCL operation ncclCommInitRank(..) failed: unhandled system error'
            ),
            75,
        ),
        (
            jax.errors.JaxRuntimeError(
                'INTERNAL: NCCL operation ncclCommInitRank(..) failed: invalid usage'
            ),
            None,
        ),
        (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'), None),
        (
            ValueError(
                'UNKNOWN: Gloo ReduceScatter failed: [buffer.cc:72] Read timeout [127.0.0.1]:4491'
            ),
            75,
        ),
        (ValueError('run.dir=Gloo all failed: not a folder'), None),
    ],
)
def test_only_what_a_new_start_can_mend_is_taken_for_a_lost_peer(monkeypatch, error, code):
    ended = []
    monkeypatch.setattr(distributed, 'end', lambda line: ended.append((75, line)))
    monkeypatch.setattr(peers, 'OWN_ERROR', 0)
    distributed._end_if_unreached(Peers(1, []), error)  # not the first, which waits for the others
    assert [one for one, _ in ended] == ([code] if code else [])


def test_a_process_that_fails_leaves_with_its_own_code_once_the_error_is_printed():
    code = """
from megajax.runtime.processes.distributed import _exit_without_waiting
from megajax.runtime.processes.peers import Peers
_exit_without_waiting(Peers(1, []), 7)
raise ValueError('what went wrong')
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stderr.endswith('ValueError: what went wrong\n')


@pytest.mark.parametrize(
    ('bind', 'interface'), [('127.0.0.1', '127.0.0.1:1234'), ('::1', '[::1]:1234'), (None, None)]
)
def test_jax_listens_on_the_interface_that_the_environment_names(monkeypatch, bind, interface):
    asked = {}
    start = Start(index=0, count=2, host='a', port=1, bind=bind, timeout=60)
    monkeypatch.setattr(distributed, 'backends_are_initialized', lambda: False)
    monkeypatch.setattr(distributed, 'read_start', lambda _: start)
    monkeypatch.setattr(distributed, 'gather', lambda *_: (Peers(1, []), 1234))
    kept_from_proxies = []
    monkeypatch.setattr(distributed, '_avoid_proxies', kept_from_proxies.append)
    monkeypatch.setattr(jax.config, 'update', lambda *_: None)
    monkeypatch.setattr(
        jax.distributed, 'initialize', lambda *one, **named: asked.update(named, address=one[0])
    )
    distributed.initialize()
    assert asked['coordinator_bind_address'] == interface
    assert (asked['address'], asked['initialization_timeout']) == ('a:1234', 60)
    assert kept_from_proxies == [start]


@pytest.mark.parametrize(('chosen', 'devices'), [(None, (2, 3)), ('0', None)])
def test_jax_gets_the_gpus_of_the_process_unless_the_user_has_chosen(monkeypatch, chosen, devices):
    asked = {}
    start = Start(index=0, count=2, host='a', port=1, bind=None, timeout=60, gpus=(2, 3))
    monkeypatch.setattr(distributed, 'backends_are_initialized', lambda: False)
    monkeypatch.setattr(distributed, 'gather', lambda *_: (Peers(1, []), 1234))
    monkeypatch.setattr(distributed, '_avoid_proxies', lambda _: None)
    monkeypatch.setattr(jax.config, 'update', lambda *_: None)
    monkeypatch.setattr(jax.distributed, 'initialize', lambda *_, **named: asked.update(named))
    monkeypatch.delenv(distributed.LOCAL_DEVICES, raising=False)
    if chosen:
        monkeypatch.setenv(distributed.LOCAL_DEVICES, chosen)
    distributed.initialize(start)
    assert asked['local_device_ids'] == devices


def test_a_process_that_jax_config_keeps_on_the_cpu_uses_no_gpu(monkeypatch):
    used = []
    monkeypatch.setattr(environment, 'has_cuda_plugin', lambda: True)
    monkeypatch.setattr(visible, '_listed', lambda: ['GPU-1'])
    monkeypatch.setattr(distributed, 'backends_are_initialized', lambda: False)
    monkeypatch.delenv('JAX_PLATFORMS')
    for name, value in {'PROCESSES': '2', 'PROCESS': '0', 'COORDINATOR': 'a:1'}.items():
        monkeypatch.setenv(f'MEGAJAX_{name}', value)

    def gather(start: Start, environ: Mapping[str, str] = os.environ) -> NoReturn:
        used.append(start.unlisted_gpus(environ))
        raise ConfigError('it has asked')

    monkeypatch.setattr(distributed, 'gather', gather)
    assert jax.config.jax_platforms == 'cpu'
    with pytest.raises(ConfigError, match='it has asked'):
        distributed.initialize()
    assert used == ['']


def test_a_process_that_uses_jax_already_is_refused_before_it_waits_for_the_others(monkeypatch):
    start = Start(index=1, count=2, host='127.0.0.1', port=9, bind=None, timeout=60)
    monkeypatch.setattr(distributed, 'gather', lambda *_: pytest.fail('it waits'))
    jax.devices()
    with pytest.raises(ConfigError, match='jax is already in use'), processes(start):
        pass


def test_hosts_whose_processes_are_numbered_in_turn_still_hold_whole_groups(monkeypatch):
    monkeypatch.setattr(mesh, 'host_names', lambda: ['a', 'b', 'a', 'b'])
    devices = [
        SimpleNamespace(process_index=process, id=2 * process + i, device_kind='cpu')
        for process in range(4)
        for i in range(2)
    ]
    for sizes in (
        {'data': 2, 'model': 4},
        {'replica': 2, 'data': 4, 'model': 1},
        {'data': 2, 'row': 2, 'model': 2},
    ):
        placed = mesh._within_hosts(devices, sizes, False)
        assert [device.process_index for device in placed] == [0, 0, 2, 2, 1, 1, 3, 3]
    with pytest.raises(ConfigError, match=r'mesh\.model=8 reaches across hosts'):
        mesh._within_hosts(devices, {'data': 1, 'model': 8}, False)


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ({}, None),
        ({'no_proxy': 'a'}, None),
        ({'https_proxy': 'p'}, 'here'),
        ({'http_proxy': 'p', 'no_proxy': 'a,b'}, 'a,b,here'),
        ({'grpc_proxy': 'p', 'no_grpc_proxy': 'c', 'no_proxy': 'a'}, 'c,here'),
    ],
    ids=str,
)
def test_a_proxy_for_the_web_is_not_asked_for_process_0(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.config, 'update', lambda *_: None)
    for name in (*PROXIES, *NO_PROXIES):
        monkeypatch.setenv(name, given.get(name, ''))
    _avoid_proxies(Start(index=1, count=2, host='here', port=1, bind=None, timeout=1))
    assert os.environ[NO_PROXIES[0]] == (expected or given.get('no_grpc_proxy', ''))
