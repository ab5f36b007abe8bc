"""GPUs that are not there: what XLA's compiler must know of them, and meshes over hosts full of them.

To add one, write its figures as a `Gpu` below; they are the vendor's, and those of its architecture in the CUDA programming guide.
"""

import dataclasses
import importlib.util
from typing import Any

from megajax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Figures of one GPU: bytes, bytes per second, gigahertz."""

    name: str
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int
    shared_memory_per_block: int
    shared_memory_per_core: int


_H100 = Gpu(
    name='NVIDIA H100 80GB HBM3', capability=(9, 0), cores=132, clock_ghz=1.98, memory=84_978_434_048, bandwidth=3_352_320_000_000,
    l2_cache=52428800, shared_memory_per_block=232448, shared_memory_per_core=233472,
)  # fmt: skip
GPUS = {
    'a100': Gpu(
        name='NVIDIA A100-SXM4-80GB', capability=(8, 0), cores=108, clock_ghz=1.41, memory=85_031_714_816, bandwidth=2_039_000_000_000,
        l2_cache=41943040, shared_memory_per_block=166912, shared_memory_per_core=167936,
    ),
    'h100': _H100,
    'h200': dataclasses.replace(_H100, name='NVIDIA H200', memory=150_754_820_096, bandwidth=4_800_000_000_000),
    'b200': Gpu(
        name='NVIDIA B200', capability=(10, 0), cores=148, clock_ghz=1.965, memory=191_514_017_792, bandwidth=8_000_000_000_000,
        l2_cache=132644864, shared_memory_per_block=232448, shared_memory_per_core=233472,
    ),
}  # fmt: skip
TARGETS = 'cpu', *GPUS
DEVICES_PER_HOST = 8
NOT_NVIDIA = 'AMD', 'gfx', 'Intel'  # how the kinds of other makers' GPUs begin, which jax calls gpu too
# Autotuning would need a GPU, and nobody runs the machine code: without its optimization the HLO is
# the same to the letter, a sixth sooner.
WITHOUT_GPU: dict[str, Any] = {'xla_gpu_autotune_level': 0, 'xla_backend_optimization_level': 0}


def gpu_devices(target: str, *, hosts: int, per_host: int) -> list[Any]:
    """Abstract devices of one target, host by host; needs XLA's GPU compiler but no GPU."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform='cuda', topology=f'1x{hosts}x{per_host}', target_config=_description(GPUS[target]))
    return list(topology.devices)


def has_compiler() -> bool:
    """Whether XLA's GPU compiler is installed; it needs no GPU."""
    if importlib.util.find_spec('jax_plugins') is None:
        return False
    return any(importlib.util.find_spec(f'jax_plugins.xla_cuda{version}') for version in (12, 13))


def is_nvidia(device: Any) -> bool:
    """Whether a device, which may be an abstract one, is a GPU that CUDA's libraries run on."""
    return device.platform in ('gpu', 'cuda') and not device.device_kind.startswith(NOT_NVIDIA)


def check_target(target: str) -> None:
    """Raise ConfigError unless the step can be compiled for it here."""
    if target not in TARGETS:
        raise ConfigError(f'target {target}: choose among {", ".join(TARGETS)}')
    if target != 'cpu' and not has_compiler():
        raise ConfigError(f"target {target} needs XLA's GPU compiler (no GPU): pip install 'megajax[gpu-compile]'")


def num_hosts(devices: int, wanted: int | None = None) -> int:
    """As many as wanted, or the fewest with equal shares of at most 8 devices. Raises ConfigError if the devices do not divide."""
    fits = [hosts for hosts in range(1, devices + 1) if devices % hosts == 0]
    if wanted is None:
        return next(hosts for hosts in fits if devices <= hosts * DEVICES_PER_HOST)
    if wanted not in fits:
        raise ConfigError(f'{wanted} hosts do not divide the {devices} devices of the mesh: choose among {", ".join(map(str, fits))}')
    return wanted


def _description(gpu: Gpu) -> str:
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
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.name}"
'''
