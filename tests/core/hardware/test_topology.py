"""What nvidia-smi tells of links is read: which GPUs share NVLink, and which only PCIe."""

from pathlib import Path

import pytest

from megajax.core.hardware import topology
from megajax.core.hardware.topology import Topology, read_topology, topology_of_host

FOLDER = Path(__file__).parent / 'topologies'


def of(name: str) -> Topology:
    found = read_topology((FOLDER / f'{name}.txt').read_text())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ('name', 'groups'),
    [
        ('dgx_h100', [[*range(8)]]),
        ('pcie_a100', [[gpu] for gpu in range(8)]),
        ('nvlink_pairs', [[0, 1], [2, 3]]),
    ],
)
def test_gpus_are_grouped_by_nvlink(name: str, groups: list[list[int]]) -> None:
    assert of(name).nvlink_groups == groups


def test_the_pairs_of_a_group_that_need_pcie_are_named() -> None:
    pairs = of('nvlink_pairs')
    assert pairs.over_pcie([2, 3]) == []
    assert pairs.over_pcie([1, 2]) == [(1, 2)]
    assert pairs.words(pairs.over_pcie([0, 1, 2, 3])) == 'SYS'
    assert of('pcie_a100').words(of('pcie_a100').over_pcie([0, 1, 2])) == 'NODE, PXB'


@pytest.mark.parametrize(
    'text',
    [
        '',
        'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.\n',
        '\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \n',
        '\tCPU Affinity\n',
    ],
)
def test_what_is_no_table_is_none(text: str) -> None:
    assert read_topology(text) is None


def test_one_gpu_is_a_group() -> None:
    found = read_topology('\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n')
    assert found is not None
    assert found.nvlink_groups == [[0]]


def test_a_host_has_the_links_that_its_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    table = '\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n'
    monkeypatch.setattr(topology, 'COMMAND', ['printf', table])
    assert topology_of_host() == read_topology(table)


def test_a_host_without_the_command_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, 'COMMAND', ['/nowhere/nvidia-smi'])
    assert topology_of_host() is None
