"""The line on the mesh: for known GPUs, in the first process, in time, and never an error."""

from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from megajax.analysis.plan import advice
from megajax.commands import mesh_advice
from megajax.core.config import load
from megajax.core.hardware.records import hardware
from megajax.core.parallel.mesh import mesh_for
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.run import _describe

CONFIG = load('tiny', ['mesh.data=4', 'mesh.model=1'])


def mesh_of(kind: str, processes: tuple[int, ...] = (0, 0, 0, 0)) -> Any:
    devices = [SimpleNamespace(device_kind=kind, process_index=index) for index in processes]
    return cast(Any, SimpleNamespace(devices=np.array(devices)))


H100 = mesh_of(hardware('h100').device_kinds[0])


def test_known_gpus_get_a_line_of_the_plan():
    assert mesh_advice.mesh_advice(CONFIG, H100).startswith('plan       ')


@pytest.mark.parametrize('kind', ['cpu', 'NVIDIA B9000'])
def test_other_devices_get_none(kind):
    assert mesh_advice.mesh_advice(CONFIG, mesh_of(kind)) == ''


def test_the_other_processes_search_nothing(monkeypatch):
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    assert mesh_advice.mesh_advice(CONFIG, H100) == ''


@pytest.mark.parametrize(
    ('processes', 'per_host'), [((0, 0, 1, 1), 2), ((0, 1, 2, 3), 1), ((0, 1, 1, 1), None)]
)
def test_the_hosts_of_the_plan_are_those_of_the_run(processes, per_host, monkeypatch):
    """A process has a host here; with unequal hosts, there is no line."""
    monkeypatch.setattr(mesh_advice, 'host_names', lambda: ['a', 'b', 'c', 'd'])
    asked = []

    def advise(config, gpu, gpus_per_host):
        asked.append(gpus_per_host)
        yield 'a line'

    monkeypatch.setattr(advice, 'advice', advise)
    kind = hardware('h100').device_kinds[0]
    line = mesh_advice.mesh_advice(CONFIG, mesh_of(kind, processes))
    assert (line, asked) == (('plan       a line', [per_host]) if per_host else ('', []))


def test_a_mistake_of_the_plan_costs_the_line_alone(monkeypatch):
    monkeypatch.setattr(advice, 'Cluster', None)
    assert mesh_advice.mesh_advice(CONFIG, H100) == ''


def test_a_search_that_takes_long_is_not_waited_for(monkeypatch):
    late = Event()
    monkeypatch.setattr(mesh_advice, 'PATIENCE', 0.1)
    monkeypatch.setattr(advice, 'search', lambda *_: late.wait(60))
    line = mesh_advice.mesh_advice(CONFIG, H100)
    late.set()
    assert line.endswith(' per step expected')


def test_a_run_prints_the_line_below_its_mesh(capsys):
    config = load('tiny')
    _describe(config, mesh_for(config), Report(), lambda *_: 'plan       fits')
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith('mesh       data=2 x model=2')
    assert rest == ['plan       fits']
