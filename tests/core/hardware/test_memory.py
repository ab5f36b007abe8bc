"""What a program may use of a GPU's memory and of its host's."""

import os
from pathlib import Path

import jax
import pytest

from megajax.core.hardware.memory import FRACTION, USABLE, claim_gpu_memory, host_memory
from megajax.core.parallel.mesh import make_mesh

GB = 10**9


@pytest.mark.parametrize(
    ('environ', 'is_claimed'),
    [
        ({}, True),
        ({'XLA_PYTHON_CLIENT_PREALLOCATE': 'true'}, True),
        ({'XLA_PYTHON_CLIENT_ALLOCATOR': 'bfc'}, True),
        ({'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}, False),
        ({'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform'}, False),
        ({FRACTION: '0.5'}, False),
        ({'XLA_CLIENT_MEM_FRACTION': '0.5'}, False),  # jax refuses it beside the other
    ],
)
def test_jax_gets_the_share_that_plan_counts_with_unless_the_user_has_chosen(environ, is_claimed):
    after = dict(environ)
    claim_gpu_memory(after)
    assert after == (environ | {FRACTION: str(USABLE)} if is_claimed else environ)


def test_a_mesh_claims_the_memory_before_jax_makes_its_devices(monkeypatch):
    seen, devices = [], jax.devices
    monkeypatch.setenv(FRACTION, '')  # so that it is removed again
    monkeypatch.setattr(jax, 'devices', lambda: (seen.append(os.environ[FRACTION]), devices())[1])
    make_mesh(2)
    assert seen == [str(USABLE)]


def host(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A file system whose host has 16 GiB of memory and 1 GiB of swap."""
    gib = 1 << 20  # in kB
    files = {
        'proc/meminfo': f'MemTotal: {16 * gib} kB\nSwapTotal: {gib} kB\nHugePages_Total: 0\n',
        'proc/self/cgroup': cgroup,
        **{f'sys/fs/cgroup/{name}': text for name, text in limits.items()},
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ('cgroup', 'limits', 'gib'),
    [
        ('0::/\n', {}, 16),
        ('0::/\n', {'memory.max': f'{5 << 30}\n'}, 5),  # a container with a namespace of its own
        ('0::/job/step\n', {'job/memory.max': f'{3 << 30}', 'job/step/memory.max': 'max'}, 3),
        ('0::/docker/1\n', {'memory.max': f'{2 << 30}'}, 2),
        ('5:cpu:/a\n4:memory:/a\n', {'memory/a/memory.limit_in_bytes': f'{4 << 30}'}, 4),
        ('4:memory:/a\n', {'memory/a/memory.limit_in_bytes': '9223372036854771712'}, 16),
    ],
)
def test_a_host_has_the_least_limit_of_its_control_groups_and_its_swap(
    tmp_path, cgroup, limits, gib
):
    assert host_memory(host(tmp_path, cgroup, limits)) == (gib + 1) << 30


def test_memory_of_an_unknown_system_is_unknown(tmp_path):
    assert host_memory(tmp_path) is None
    assert (host_memory() or 0) > GB
