"""Tensor parallelism over PCIe and experts across hosts are named, with what would be better."""

from pathlib import Path

import pytest

from megajax.core.hardware.topology import Topology, read_topology
from megajax.core.parallel.hosts import Hosts
from megajax.core.parallel.mesh import make_mesh
from megajax.runtime.run.nvlink_check import experts_across_hosts, gpus_of_host, slow_links

TOPOLOGIES = Path(__file__).parents[2] / 'core/hardware/topologies'


def note(name: str, data: int, model: int, **environ: str) -> str | None:
    topology = read_topology((TOPOLOGIES / f'{name}.txt').read_text())
    assert isinstance(topology, Topology)
    mesh = make_mesh(data, model)
    return slow_links(mesh, topology, gpus_of_host(mesh, environ))


@pytest.mark.parametrize(
    ('name', 'data', 'model'), [('dgx_h100', 1, 8), ('nvlink_pairs', 2, 2), ('pcie_a100', 8, 1)]
)
def test_groups_with_nvlink_or_of_one_gpu_need_no_note(name: str, data: int, model: int) -> None:
    assert note(name, data, model) is None


def test_a_group_over_two_pairs_is_named_with_the_size_that_fits() -> None:
    assert note('nvlink_pairs', 1, 4) == (
        'model=4 joins GPUs 0, 1, 2, 3 over PCIe (SYS); '
        'at most 2 GPUs of this host share NVLink: use mesh.model of at most that'
    )


def test_a_group_of_several_processes_is_judged_by_the_gpus_of_its_host() -> None:
    topology = read_topology((TOPOLOGIES / 'nvlink_pairs.txt').read_text())
    mesh = make_mesh(1, 4)
    ids = [device.id for device in mesh.devices.flat]
    said = slow_links(mesh, topology, dict(zip(ids[:2], (1, 2), strict=True)))
    assert said.startswith('model=4 joins GPUs 1, 2 over PCIe')
    assert slow_links(mesh, topology, dict(zip(ids[:2], (2, 3), strict=True))) is None


def test_without_nvlink_data_parallelism_is_advised() -> None:
    said = note('pcie_a100', 4, 2)
    assert said is not None
    assert said.startswith('model=2 joins GPUs 0, 1 over PCIe (PXB); no GPUs of this host')


def test_hidden_gpus_keep_their_numbers() -> None:
    assert note('nvlink_pairs', 1, 2, CUDA_VISIBLE_DEVICES='2,3') is None
    said = note('nvlink_pairs', 1, 2, CUDA_VISIBLE_DEVICES='1, 2')
    assert said is not None
    assert said.startswith('model=2 joins GPUs 1, 2 over PCIe')
    assert note('nvlink_pairs', 1, 2, CUDA_VISIBLE_DEVICES='GPU-8f6a,GPU-11b2') is None


@pytest.mark.parametrize(
    ('sizes', 'advice'),
    [
        ({'data': 2, 'expert': 4, 'model': 1}, None),
        ({'data': 1, 'expert': 8, 'model': 1}, 'use mesh.experts=4 to stay within a host'),
        ({'data': 1, 'expert': 4, 'model': 2}, 'use mesh.experts=2 to stay within a host'),
        ({'data': 1, 'expert': 2, 'context': 2, 'model': 2}, 'use mesh.experts=1'),
        ({'stage': 2, 'data': 1, 'expert': 2, 'model': 2}, None),
    ],
)
def test_experts_on_several_hosts_are_named_with_the_number_that_fits(
    sizes: dict[str, int], advice: str | None
) -> None:
    said = experts_across_hosts(Hosts(['a'] * 4 + ['b'] * 4), sizes)
    if advice is None:
        assert said is None
    else:
        assert said is not None
        assert f'mesh.experts={sizes["expert"]} reaches across hosts (a, b)' in said
        assert advice in said
