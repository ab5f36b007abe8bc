"""The GPUs that this process may use. Imports no jax."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

DEVICES = Path('/dev')


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that a process on this machine may use.

    If CUDA_VISIBLE_DEVICES is set, only the GPUs in it count; with JAX_PLATFORMS=cpu, there are
    none. GPUs that nvidia-smi does not list, because it is missing or fails, count if they have a
    device file.
    """
    if environ.get('JAX_PLATFORMS', '').startswith('cpu'):
        return 0
    if (chosen := environ.get('CUDA_VISIBLE_DEVICES')) is not None:
        return sum(name.strip() not in ('', '-1') for name in chosen.split(','))
    return _listed() or sum(
        re.fullmatch(r'nvidia\d+', device.name) is not None for device in DEVICES.glob('nvidia*')
    )


def _listed() -> int:
    try:
        listed = subprocess.run(
            ['nvidia-smi', '-L'], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith('GPU ') for line in listed.splitlines())
