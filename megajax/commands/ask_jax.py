"""Start jax for `megajax doctor`, and print the devices that it finds as a line of JSON."""

import json
from typing import Any

from megajax.core.hardware.memory import host_memory

HEAD_DIMS, DTYPES = range(8, 513, 8), ('bfloat16', 'float32')
MARK = 'megajax doctor: '  # precedes the answer, because plugins also print


def ask_jax() -> dict[str, Any]:
    """Return jax's devices by kind, and the kernels of the first device, for `diagnose`."""
    import jax

    from megajax.runtime.processes.certificates import JAX_OPTION
    from megajax.xla.miscompiles import target_of

    devices = jax.local_devices()
    kinds = [(device.platform, device.device_kind, _memory(device)) for device in devices]
    lines = [f'{kinds.count(kind)} x {kind[1]} ({kind[0]}{kind[2]})' for kind in sorted({*kinds})]
    kind = devices[0].platform
    return {
        'devices': lines,
        'attention': ', '.join(f'{dtype}: {kernel_of(devices[0], dtype)}' for dtype in DTYPES),
        'experts': ', '.join(
            f'{dtype}: {matmuls_of_experts(devices[0], dtype)}' for dtype in DTYPES
        ),
        'platform': kind,
        'count': len(devices),
        'target': target_of(devices[0]),
        'has_mutual_tls': hasattr(jax.config, JAX_OPTION),
    }


def kernel_of(device: Any, dtype: str) -> str:
    """Describe the attention kernel on a device: cuDNN's, with the supported heads, or XLA's."""
    from megajax.core.counts.flash import missing_for_flash
    from megajax.core.hardware.targets import capability_of, is_nvidia

    if not is_nvidia(device):
        return 'XLA'
    capability = capability_of(device)
    fits = [dim for dim in HEAD_DIMS if not missing_for_flash(dtype, dim, capability)]
    return f'cuDNN flash up to head dim {fits[-1]}, any window' if fits else 'XLA'


def matmuls_of_experts(device: Any, dtype: str) -> str:
    """Describe how a device multiplies the rows of dropless experts: with kernels, or in a loop."""
    from megajax.core.counts.expert_kernels import KERNEL_STEP, missing_for_kernels
    from megajax.core.hardware.targets import capability_of, is_nvidia

    sizes = KERNEL_STEP, KERNEL_STEP
    if is_nvidia(device) and not missing_for_kernels(
        dtype, sizes, KERNEL_STEP, capability_of(device)
    ):
        return f'Mosaic GPU kernels for features that are multiples of {KERNEL_STEP}'
    return 'loop'


def _memory(device: Any) -> str:
    """Return the memory of a device, such as ', 80.0 GB for jax', or '' if it is unknown."""
    if device.platform == 'cpu':
        memory = host_memory()
        return f', {memory / 1e9:.1f} GB of the host' if memory else ''
    limit = (device.memory_stats() or {}).get('bytes_limit')
    return f', {limit / 1e9:.1f} GB for jax' if limit else ''


if __name__ == '__main__':
    print(f'{MARK}{json.dumps(ask_jax())}')
