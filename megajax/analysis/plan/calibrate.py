"""Measure this machine's devices and write the file for `megajax plan --gpu FILE.yaml`."""

import functools
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from ruamel.yaml import YAML

from megajax.analysis.plan.real_step import busy, config_for, fitted_to_step, real_seconds
from megajax.base.files.outputs import write_output
from megajax.base.render.units import rounded
from megajax.core.config import ConfigError
from megajax.core.hardware.dies import Efficiency, Reference
from megajax.core.hardware.memory import host_memory, memory_fraction
from megajax.core.hardware.records import Dtype, Hardware, Link, hardware, hardware_of
from megajax.core.hardware.targets import capability_of, is_nvidia
from megajax.core.parallel.layout import batch_layout
from megajax.core.parallel.mesh import usable_devices

SIZES = 128, 256, 512, 1024, 2048, 4096, 8192
ELEMENTS = tuple(1 << power for power in range(14, 27, 3))  # sizes of the all-reduced arrays
MEMORY_ELEMENTS = 1 << 27  # 537 MB, four times the L2 cache of a B200
SHORTEST = 3e-5  # seconds; shorter matmuls measure the launch, not the rate
MEMORY_TIMES = 16
MOST_TIMES, LOOP_SECONDS = 256, 0.02  # for a loop that repeats a short matmul
SIMULATED_LATENCY = 1e-5  # seconds; an assumption


class Rate(NamedTuple):
    """The FLOP/s of a matmul [size, size] x [size, size]."""

    size: int
    rate: float


def calibrate(out: Path, *, seconds: float) -> Iterator[str]:
    """Measure the devices, yield lines with the results, and write a hardware file.

    `seconds` bounds each kind of measurement. For a known GPU, peaks and memory are the vendor's.
    If the peak is unknown, as on a CPU, the rate of the fastest measured matmul replaces it.
    Standalone matmuls are the reference; the efficiency in training comes from five real steps.
    """
    device = usable_devices()[0]
    if warning := busy():
        yield warning
    known = hardware_of(device.device_kind)
    memory = known.memory if known else _memory(device)
    yield f'{len(jax.devices())} x {device.device_kind}'
    narrow = _narrow(device, known)
    dtypes: tuple[Dtype, ...] = ('float32', narrow)
    rates = {}
    for dtype in dtypes:
        rates[dtype] = list(_product_rates(dtype, seconds / len(dtypes)))
        yield (
            f'matmul TFLOP/s by size, {dtype}: '
            + ', '.join(f'{size}: {rounded(rate / 1e12)}' for size, rate in rates[dtype])
        )
    bandwidth = _memory_bandwidth(seconds)
    yield f'memory bandwidth: {bandwidth / 1e9:.1f} GB/s'
    if known and bandwidth > known.memory_bandwidth:
        yield f'the record has {known.memory_bandwidth / 1e9:.1f} GB/s: the file has 100% of that'
    link = _link(seconds) if len(jax.devices()) > 1 else None
    if link:
        yield (
            f'all-reduce over {len(jax.devices())} devices: {link.bandwidth / 1e9:.2f} GB/s, '
            f'{1e6 * link.latency:.1f} us per step'
        )
    alone = _hardware(device, known, rates, memory, bandwidth, link)
    is_sold = known is not None and known.devices_per_host == alone.devices_per_host
    yield f'devices per host: {alone.devices_per_host}{", as sold" if is_sold else ""}'
    is_gpu = device.platform == 'gpu'
    config = config_for(len(jax.devices()), is_gpu=is_gpu, narrow=narrow)
    step_seconds = real_seconds(config)
    fitted = fitted_to_step(alone, config, step_seconds)
    fastest, slowest = 1e3 * min(step_seconds), 1e3 * max(step_seconds)
    yield (
        f'{len(step_seconds)} training steps: {1e3 * median(step_seconds):,.1f} ms '
        f'({fastest:,.1f} to {slowest:,.1f}); matmuls reach {fitted.efficiency.matmul:.1%} of peak '
        f'in training, {alone.efficiency.matmul:.1%} standalone'
    )
    write_output(out, _yaml(fitted))
    missing = [key for key in ('inside_host', 'across_hosts', 'power') if not getattr(fitted, key)]
    if missing:
        yield f'not measured: {", ".join(missing)}; set what your plans need in the file'
    yield f'written to {out}'


def _narrow(device: jax.Device, known: Hardware | None) -> Dtype:
    """Return the dtype of 16 bits in which a device computes fastest.

    GPUs before compute capability 8.0 emulate bfloat16.
    """
    if known:
        return 'bfloat16' if 'bfloat16' in known.peak_flops else 'float16'
    capability = capability_of(device) if is_nvidia(device) else None
    return 'float16' if capability and capability < (8, 0) else 'bfloat16'


def fit_products(rates: list[Rate], peak: float) -> tuple[float, float]:
    """Return the `matmul` and `half_size` with the least squared logarithmic error.

    Matmuls shorter than SHORTEST do not count, unless fewer than two are longer.
    """
    long = [each for each in rates if 2 * each.size**3 / each.rate >= SHORTEST]
    rates = long if len(long) > 1 else rates[-2:]

    def loss(matmul: float, half_size: float) -> float:
        return sum(
            float(np.log(matmul * peak * (size / (size + half_size)) ** 3 / rate)) ** 2
            for size, rate in rates
        )

    grid = ((percent / 100, float(half)) for percent in range(5, 101) for half in range(0, 513, 8))
    return min(grid, key=lambda pair: loss(*pair))


def fit_link(bytes_and_seconds: list[tuple[float, float]], devices: int) -> Link:
    """Return the bandwidth and latency of a ring of t devices.

    It fits bytes / bandwidth + 2(t-1) latency to the seconds by least squares of the relative
    errors.
    """
    wire = np.array([wire_bytes for wire_bytes, _ in bytes_and_seconds])
    seconds = np.array([measured for _, measured in bytes_and_seconds])
    steps = 2.0 * (devices - 1)
    columns = np.stack([wire / seconds, np.full_like(wire, steps) / seconds], axis=1)
    (per_byte, latency), *_ = np.linalg.lstsq(columns, np.ones_like(wire), rcond=None)
    if per_byte <= 0 or latency < 0:  # dominated by noise: use only the largest message
        per_byte, latency = seconds[-1] / wire[-1], 0.0
    return Link(bandwidth=float(1 / per_byte), latency=float(latency))


def _mesh() -> Mesh:
    return jax.make_mesh((len(jax.devices()),), ('data',), axis_types=(AxisType.Auto,))


def _on_every_device(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return one array per device, so that all devices work at once, as in a training step."""
    # The numbers are random, because a GPU is faster on constant data.
    size = len(jax.devices()), *shape
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), size).astype(dtype),
        out_shardings=NamedSharding(_mesh(), batch_layout(['data'])('B')),
    )
    return make()


def _product_rates(dtype: str, seconds: float) -> Iterator[Rate]:
    for size in SIZES:
        # Scale the matrix, so that repeated matmuls do not overflow.
        x = _on_every_device((size, size), dtype) * size**-0.5
        each = _product_seconds(x, most=seconds / len(SIZES))
        yield Rate(size, 2 * size**3 / each)
        # The next size takes eight times as long, and runs at least four times.
        if size >= 512 and 8 * 4 * each > seconds / 2:
            break


def _memory_bandwidth(seconds: float) -> float:
    # The devices of a CPU share its memory.
    shared = len(jax.devices()) if jax.devices()[0].platform == 'cpu' else 1
    held = [_on_every_device((MEMORY_ELEMENTS // shared,), 'float32')]

    def adds(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, MEMORY_TIMES, lambda _, x: x + 1, x)

    add = jax.jit(adds, donate_argnums=0)

    def run() -> jax.Array:
        held[0] = add(held[0])
        return held[0]

    moved = 2 * MEMORY_TIMES * held[0].nbytes / len(jax.devices())
    return moved / _seconds(run, most=seconds)


def _product_seconds(x: jax.Array, *, most: float) -> float:
    """Return the seconds of the matmul of x with itself.

    A short matmul is repeated in a loop on the device, because its launch takes longer than the
    kernel.
    """

    def in_turn(times: int) -> Callable[[], jax.Array]:
        last = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, y: x @ y, x))
        return functools.partial(last, x)

    each = _seconds(in_turn(1), most=most / 2)
    times = min(MOST_TIMES, int(LOOP_SECONDS / each))
    return _seconds(in_turn(times), most=most / 2) / times if times > 1 else each


def _link(seconds: float) -> Link:
    devices = len(jax.devices())
    measurements = []
    for elements in ELEMENTS:
        x = _on_every_device((elements,), 'float32')
        reduce = jax.jit(
            lambda x: x.sum(0), out_shardings=NamedSharding(_mesh(), batch_layout(['data'])(''))
        )
        each = _seconds(functools.partial(reduce, x), most=seconds / len(ELEMENTS))
        measurements.append((2 * (devices - 1) / devices * 4 * elements, each))
    return fit_link(measurements, devices)


def _seconds(run: Callable[[], Any], *, most: float = 2.0) -> float:
    """Return the median seconds of several runs, after a first run that compiles."""
    jax.block_until_ready(run())
    seconds = list[float]()
    while len(seconds) < 3 or (len(seconds) < 20 and sum(seconds) < most / 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _hardware(
    device: jax.Device,
    known: Hardware | None,
    rates: dict[Dtype, list[Rate]],
    memory: int,
    bandwidth: float,
    link: Link | None,
) -> Hardware:
    """Return the record of a known GPU, or of the device, with what was measured."""
    best = {dtype: max(rate for _, rate in measured) for dtype, measured in rates.items()}
    by = f'measured by megajax plan calibrate, jax {jax.__version__}'
    record = known or _unknown(device, best, memory, bandwidth, by)
    training: Dtype = max(best, key=best.__getitem__)
    peak = record.peak_flops[training]
    matmul, half_size = fit_products(rates[training], peak)
    # A part of the GPUs of a known host does not say how many the host has.
    visible, per_host = jax.local_device_count(), record.devices_per_host
    per_host = visible if per_host % visible else per_host
    is_pcie = record.pcie is not None and record.pcie == record.inside_host
    of_memory = min(1.0, bandwidth / record.memory_bandwidth)
    # The kernels of a training step reach a share of a copy's rate.
    trained = record.efficiency.memory / record.reference.memory
    by_h200 = ', as on the H200, an assumption' if trained < 1 and not known else ''
    assumed = "flash is the A100's, an assumption" if record.efficiency.flash else 'no flash'
    others = "the others are the known GPU's" if known else assumed
    sources = {
        'efficiency': f'{by}: half_size from matmuls in {training}, matmul from training '
        f"steps, memory {rounded(trained)} of a copy's rate{by_h200}; {others}",
        'reference': f'{by}: the fastest matmul in {training}, and a copy in memory; {others}',
    }
    return record.model_copy(
        update={
            'name': device.device_kind,
            'devices_per_host': per_host,
            'inside_host': link or record.inside_host,
            # A GPU that is sold with PCIe has one link, under two names.
            'pcie': link if link and is_pcie else record.pcie,
            'efficiency': record.efficiency.changed(
                matmul=matmul,
                half_size=half_size,
                memory=trained * min(of_memory, record.reference.memory),
            ),
            'reference': record.reference.changed(
                matmul=min(1.0, best[training] / peak), memory=of_memory
            ),
            'die': None,  # which has other efficiencies
            'sources': record.sources | sources | ({'inside_host': by} if link else {}),
        }
    )


def _unknown(
    device: jax.Device, peaks: dict[Dtype, float], memory: int, bandwidth: float, by: str
) -> Hardware:
    """Return the record of a device whose peaks are the highest rates that were measured."""
    is_cpu = device.platform == 'cpu'
    capability = capability_of(device) if is_nvidia(device) else None
    # Memory is planned for flash attention on such a GPU, so the time must be, too.
    has_flash = capability is not None and capability >= (8, 0)
    a100 = hardware('a100')
    reached, alone = (x.flash if has_flash else None for x in (a100.efficiency, a100.reference))
    h200 = hardware('h200')
    trained = 1.0 if is_cpu else round(h200.efficiency.memory / h200.reference.memory, 2)
    # Simulated devices of a CPU copy from its memory to its memory.
    copies = Link(bandwidth=bandwidth / 2, latency=SIMULATED_LATENCY)
    return Hardware(
        name=device.device_kind,
        device_kinds=(device.device_kind,),
        peak_flops=peaks,
        memory=memory,
        memory_bandwidth=bandwidth,
        power=None,
        devices_per_host=jax.local_device_count(),
        inside_host=copies if is_cpu else None,
        across_hosts=None,
        efficiency=Efficiency(matmul=1.0, half_size=0.0, flash=reached, memory=trained),
        reference=Reference(matmul=1.0, flash=alone, memory=1.0),
        capability=capability,
        sources={
            'peak_flops': f'the fastest matmul, {by}',
            'memory_bandwidth': by,
            'power': 'not measured',
            'inside_host': f'not measured{"; simulated devices, an assumption" if is_cpu else ""}',
            'across_hosts': 'not measured',
            'memory': 'of this machine, by jax',
        },
    )


def _memory(device: jax.Device) -> int:
    """Return the bytes of a GPU, or a CPU device's equal share of the memory of this process.

    Raises ConfigError if jax does not report a GPU's memory.
    """
    limit = (device.memory_stats() or {}).get('bytes_limit')
    if limit:
        return round(limit / memory_fraction())
    if device.platform != 'cpu':
        raise ConfigError(
            'plan calibrate: jax does not report the memory of this device; unset '
            'XLA_PYTHON_CLIENT_ALLOCATOR'
        )
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    # A container or a Slurm job may have less than the host.
    return min(memory, host_memory() or memory) // jax.local_device_count()


def _yaml(record: Hardware) -> str:
    stream = io.StringIO()
    yaml: Any = YAML(typ='safe', pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(_rounded(record.model_dump(mode='json')), stream)
    return stream.getvalue()


def _rounded(value: Any) -> Any:
    """Return the value with all numbers rounded to four digits, the most that are measured."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f'{value:.4g}') if isinstance(value, float) else value
