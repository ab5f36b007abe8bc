"""The GPUs that this process may use. Imports no jax."""

import os
import subprocess
from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that a process on this machine may use.

    If CUDA_VISIBLE_DEVICES is set, only the GPUs in it count; with JAX_PLATFORMS=cpu, there are
    none.
    """
    if environ.get('JAX_PLATFORMS', '').startswith('cpu'):
        return 0
    if (chosen := environ.get('CUDA_VISIBLE_DEVICES')) is not None:
        return sum(name.strip() not in ('', '-1') for name in chosen.split(','))
    try:
        listed = subprocess.run(
            ['nvidia-smi', '-L'], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith('GPU ') for line in listed.splitlines())
