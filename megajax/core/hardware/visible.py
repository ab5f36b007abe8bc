"""The GPUs that this process may use. Imports no jax."""

import itertools
import os
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

DEVICES = Path('/dev')


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that a process on this machine may use.

    If CUDA_VISIBLE_DEVICES is set, only the GPUs in it count, as in CUDA up to the first word that
    is neither an index nor a UUID; with JAX_PLATFORMS=cpu, there are none. If nvidia-smi lists no
    GPU, for example because it is missing or fails, GPUs count whose device file this process may
    open.
    """
    if environ.get('JAX_PLATFORMS', '').startswith('cpu'):
        return 0
    if (chosen := environ.get('CUDA_VISIBLE_DEVICES')) is not None:
        return len(_chosen(chosen))
    files = (file for file in DEVICES.glob('nvidia*') if re.fullmatch(r'nvidia\d+', file.name))
    return len(_listed()) or sum(map(_may_open, files))


def visible_uuids(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the UUIDs of the visible GPUs; empty if there are none or nvidia-smi lists none."""
    if environ.get('JAX_PLATFORMS', '').startswith('cpu'):
        return []
    listed = dict(enumerate(_listed()))
    if (chosen := environ.get('CUDA_VISIBLE_DEVICES')) is None or not listed:
        return [*listed.values()]
    return [listed.get(int(name), name) if name.isdecimal() else name for name in _chosen(chosen)]


def has_cuda_plugin() -> bool:
    """Whether jax's plugin for NVIDIA GPUs is installed."""
    return any('cuda' in plugin.name for plugin in entry_points(group='jax_plugins'))


def lacks_gpus_of_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm gave this process no GPU, although jax's plugin for GPUs is installed.

    With JAX_PLATFORMS, the user wants no GPU or gets jax's error.
    """
    in_slurm = 'SLURM_JOB_ID' in environ and not environ.get('JAX_PLATFORMS')
    return in_slurm and has_cuda_plugin() and not visible_gpus(environ)


def _chosen(devices: str) -> list[str]:
    words = (word.strip() for word in devices.split(','))
    return [*itertools.takewhile(re.compile(r'\d+|(GPU|MIG)-.+').fullmatch, words)]


def _may_open(device: Path) -> bool:
    """Whether the GPU is one of this job's, even if its driver does not work."""
    try:
        os.close(os.open(device, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def _listed() -> list[str]:
    """Return the UUIDs of the GPUs that nvidia-smi lists."""
    try:
        listed = subprocess.run(
            ['nvidia-smi', '-L'], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r'^GPU .*\(UUID: (\S+)\)', listed, re.MULTILINE)
