"""The memory that a program may use: its share of a GPU's memory, and this host's memory."""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

# The share of a GPU's memory that jax allocates for a program; CUDA and NCCL need the rest. With
# jax's default, some layouts that fit according to `megajax plan` would not run.
USABLE = 0.92
FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
# If the user has set one of these, it applies; jax rejects two fractions at once.
CHOICES = FRACTION, 'XLA_CLIENT_MEM_FRACTION'
DEFAULT = 0.75  # jax's


def claim_gpu_memory(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let jax allocate the share USABLE of each GPU, unless the environment says otherwise.

    Call it before the first use of jax's devices. A user's own fraction, allocation on demand
    (XLA_PYTHON_CLIENT_PREALLOCATE=false) and CUDA's own allocator (.._ALLOCATOR=platform) are kept.
    """
    is_on_demand = environ.get('XLA_PYTHON_CLIENT_PREALLOCATE', '') in ('false', 'False', '0')
    is_platform = environ.get('XLA_PYTHON_CLIENT_ALLOCATOR', '').lower() == 'platform'
    if not is_on_demand and not is_platform and not any(map(environ.get, CHOICES)):
        environ[FRACTION] = str(USABLE)


def memory_fraction(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of each GPU's memory that jax may allocate."""
    return float(next((value for name in CHOICES if (value := environ.get(name))), DEFAULT))


def host_memory(root: Path = Path('/')) -> int | None:
    """Return the bytes of memory and swap that this process may use, or None if unknown.

    The result is the host's memory, or the lowest limit of a control group (of a container or Slurm
    job) that contains the process. `root` is the root of the file system, which has proc and sys.
    """
    try:
        lines = (root / 'proc/meminfo').read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(':') for x in lines)}
        return min(sizes['MemTotal'], *_limits(root)) + sizes['SwapTotal']
    except (OSError, ValueError, KeyError, IndexError):  # not Linux
        return None


def _limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of the control groups of this process and of their parents."""
    yield 2**63
    for line in (root / 'proc/self/cgroup').read_text().splitlines():
        _, controllers, group = line.split(':', 2)
        if controllers not in ('', 'memory'):
            continue
        mount, name = (
            (root / 'sys/fs/cgroup/memory', 'memory.limit_in_bytes')  # control groups, version 1
            if controllers
            else (root / 'sys/fs/cgroup', 'memory.max')
        )
        # In a container, the path may be the host's, while the mount is the container's own group.
        path = Path(group.lstrip('/'))
        for folder in (path, *path.parents):
            file = mount / folder / name
            text = file.read_text().strip() if file.is_file() else 'max'
            if text != 'max':
                yield int(text)
