"""Compile targets: abstract devices, and their hosts, for GPUs and TPUs that you do not have."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from megajax.core.config import Config, ConfigError
from megajax.core.config.extras import install
from megajax.core.hardware.records import (
    Capability,
    Hardware,
    check_dtype,
    compiled_for,
    hardware,
    hardware_of,
)
from megajax.core.hardware.tpus import TPUS, check_config_for_tpu, check_tpu, num_tpu_hosts

GPUS = compiled_for()
TARGETS = 'cpu', *GPUS, *TPUS
DEVICES_PER_HOST = 8
# Prefixes of the device kinds of other vendors' GPUs; jax calls their platform gpu, too.
NOT_NVIDIA = ('AMD', 'gfx', 'Intel')
# Autotuning would need a GPU. The machine code is never run, so it is not optimized: the HLO is
# exactly the same, and compiles in a sixth less time.
WITHOUT_GPU: dict[str, Any] = {'xla_gpu_autotune_level': 0, 'xla_backend_optimization_level': 0}

NO_TILES = "Couldn't find output tile sizes", 'No backend with default config found'


def gpu_devices(target: str, *, hosts: int, per_host: int) -> list[Any]:
    """Return abstract devices of a target, host by host; needs XLA's GPU compiler but no GPU."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform='cuda',
        topology=f'1x{hosts}x{per_host}',
        target_config=target_description(hardware(target)),
    )
    return list(topology.devices)


def compile_without_gpu(
    compile_with: Callable[[dict[str, Any]], Any], options: Mapping[str, Any]
) -> Any:
    """Call `compile_with` with these options and the options that a compiler without a GPU needs.

    jax 0.10's XLA starts with Triton tiles that do not fit every fp32 matmul, and without a GPU it
    cannot search for others. jax 0.12's XLA has no tiles for a deterministic step. In these cases,
    `compile_with` is called again, with the matmuls left to cuBLAS.
    """
    import jax

    try:
        return compile_with({**WITHOUT_GPU, **options})
    except jax.errors.JaxRuntimeError as error:
        if not any(message in str(error) for message in NO_TILES):
            raise
        return compile_with({**WITHOUT_GPU, **options, 'xla_gpu_enable_triton_gemm': False})


def has_compiler() -> bool:
    """Whether XLA's GPU compiler is installed; it needs no GPU."""
    if importlib.util.find_spec('jax_plugins') is None:
        return False
    return any(importlib.util.find_spec(f'jax_plugins.xla_cuda{version}') for version in (12, 13))


def is_nvidia(device: Any) -> bool:
    """Whether a device, which may be abstract, is a GPU that CUDA's libraries support."""
    return device.platform in ('gpu', 'cuda') and not device.device_kind.startswith(NOT_NVIDIA)


def capability_of(device: Any) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU, which may be an abstract device.

    It comes from the GPU's record, or from a GPU of this kind in this machine. Without either, it
    is None.
    """
    import jax

    known = hardware_of(device.device_kind)
    if known is not None and known.compute_capability is not None:
        return known.compute_capability
    for local in jax.local_devices():
        if local.device_kind == device.device_kind:
            major, minor = map(int, local.compute_capability.split('.'))
            return major, minor
    return None


def check_target(target: str, dtype: str | None = None) -> None:
    """Raise ConfigError unless a step can be compiled for a target here, with `dtype` if given."""
    if target not in TARGETS:
        raise ConfigError(
            f'target {target}: choose among {", ".join(TARGETS)}; docs/extend.md adds others'
        )
    if target == 'cpu':
        return
    if target in TPUS:
        return check_tpu(target)
    if dtype is not None:
        check_dtype(dtype, hardware(target))
    if not has_compiler():
        raise ConfigError(
            f"target {target} needs XLA's GPU compiler, but no GPU: {install('gpu-compile')}"
        )


def hosts_of(config: Config, target: str, wanted: int | None = None) -> int:
    """Return the number of hosts to compile a config for.

    Raises ConfigError for an impossible target, a config that the target does not support, and an
    impossible number of hosts.
    """
    check_target(target, config.train.dtype)
    devices = config.mesh.num_devices
    if target not in TPUS:
        return num_hosts(devices, wanted)
    check_config_for_tpu(config, target)
    return num_tpu_hosts(target, devices, wanted)


def num_hosts(devices: int, wanted: int | None = None) -> int:
    """Return `wanted`, or the smallest number of hosts with at most 8 devices each.

    All hosts have the same number of devices. Raises ConfigError if `wanted` does not divide the
    devices.
    """
    fits = [hosts for hosts in range(1, devices + 1) if devices % hosts == 0]
    if wanted is None:
        return next(hosts for hosts in fits if devices <= hosts * DEVICES_PER_HOST)
    if wanted not in fits:
        raise ConfigError(
            f'{wanted} hosts do not divide the {devices} devices of the mesh: '
            f'choose among {", ".join(map(str, fits))}'
        )
    return wanted


def target_description(hardware: Hardware) -> str:
    """Return the text that describes a GPU to XLA's compiler."""
    gpu = hardware.compiler
    assert gpu is not None
    major, minor = gpu.capability
    return f'''gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {64 if gpu.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {hardware.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "12.9.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.name}"
'''
