"""Start jax for `megajax doctor`, and print the devices that it finds as a line of JSON."""

import json
import os
from typing import Any

HEAD_DIMS = (64, 128)
MARK = 'megajax doctor: '  # precedes the answer, because plugins print too


def ask_jax() -> dict[str, Any]:
    """Return jax's devices by kind, and the attention kernel of the first one, for `diagnose`."""
    import jax

    from megajax.core.model.flash import can_flash
    from megajax.runtime.processes.certificates import JAX_OPTION
    from megajax.xla.miscompiles import target_of

    devices = jax.local_devices()
    kinds = [(device.platform, device.device_kind, _memory(device)) for device in devices]
    lines = [f'{kinds.count(kind)} x {kind[1]} ({kind[0]}{kind[2]})' for kind in sorted({*kinds})]
    kind = devices[0].platform
    flash = {
        dtype: all(can_flash(devices[0], dtype, head_dim) for head_dim in HEAD_DIMS)
        for dtype in ('bfloat16', 'float32')
    }
    attention = ', '.join(
        f'{dtype}: {"cuDNN flash" if can else "XLA"}' for dtype, can in flash.items()
    )
    return {
        'devices': lines,
        'attention': attention,
        'platform': kind,
        'count': len(devices),
        'target': target_of(devices[0]),
        'has_mutual_tls': hasattr(jax.config, JAX_OPTION),
    }


def _memory(device: Any) -> str:
    """Return the memory of a device, such as ', 80.0 GB for jax', or '' if it is unknown."""
    if device.platform == 'cpu':
        return (
            f', {os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9:.1f} GB of the host'
        )
    limit = (device.memory_stats() or {}).get('bytes_limit')
    return f', {limit / 1e9:.1f} GB for jax' if limit else ''


if __name__ == '__main__':
    print(f'{MARK}{json.dumps(ask_jax())}')
