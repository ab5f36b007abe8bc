"""What NCCL depends on is told, and each problem has a fix."""

from pathlib import Path

import pytest

from megajax.commands import doctor_links
from megajax.commands.diagnosis import Diagnosis
from megajax.core.hardware.topology import read_topology

TOPOLOGIES = Path(__file__).parents[1] / 'core/hardware/topologies'


@pytest.mark.parametrize(
    ('release', 'machine', 'problem'),
    [
        ('2.29.2', 'x86_64', 'NCCL 2.29.2 may hang'),
        ('2.28.9', 'aarch64', 'NCCL 2.28.9 can run out of proxy slots on ARM and hang'),
        ('2.28.9', 'x86_64', None),
        ('2.29.3', 'aarch64', None),
        ('2.31.2', 'x86_64', None),
    ],
)
def test_known_bad_releases_are_named(release: str, machine: str, problem: str | None) -> None:
    diagnosis = Diagnosis()
    doctor_links._release(diagnosis, release, machine)
    assert diagnosis.facts == [('nccl', release)]
    assert [finding.what[: len(problem or '')] for finding in diagnosis.findings] == (
        [problem] if problem else []
    )


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('dgx_h100', 'GPUs 0, 1, 2, 3, 4, 5, 6, 7 are connected by NVLink'),
        ('pcie_a100', 'all communicate over PCIe (NODE, PXB, SYS)'),
        (
            'nvlink_pairs',
            'GPUs 0, 1 are connected by NVLink; GPUs 2, 3 are connected by NVLink; '
            'the rest communicate over PCIe (SYS)',
        ),
    ],
)
def test_links_are_told(name: str, said: str) -> None:
    diagnosis = Diagnosis()
    doctor_links._links(diagnosis, read_topology((TOPOLOGIES / f'{name}.txt').read_text()))
    assert diagnosis.facts == [('links', said)]
    assert diagnosis.findings == []


def test_little_shared_memory_is_a_problem() -> None:
    diagnosis = Diagnosis()
    doctor_links._shared_memory(diagnosis, 64 << 20)
    assert diagnosis.facts == [('shared memory', '0.1 GB in /dev/shm')]
    assert '--shm-size' in diagnosis.findings[0].fix
    doctor_links._shared_memory(enough := Diagnosis(), 16e9)
    assert enough.findings == []


def test_variables_that_forbid_a_way_are_named() -> None:
    diagnosis = Diagnosis()
    environ = {'NCCL_DEBUG': 'INFO', 'NCCL_P2P_DISABLE': '1', 'NCCL_IB_DISABLE': '0', 'HOME': '/'}
    doctor_links.look_at_nccl(diagnosis, 0, environ)
    assert dict(diagnosis.facts)['variables'] == (
        'NCCL_DEBUG=INFO, NCCL_IB_DISABLE=0, NCCL_P2P_DISABLE=1'
    )
    assert [finding.fix for finding in diagnosis.findings] == ['unset NCCL_P2P_DISABLE']


def test_a_host_with_gpus_whose_links_are_unknown_says_so(monkeypatch) -> None:
    monkeypatch.setattr(doctor_links, 'topology_of_host', lambda: None)
    diagnosis = Diagnosis()
    doctor_links.look_at_nccl(diagnosis, 8, {})
    assert dict(diagnosis.facts)['links'].startswith('unknown')
