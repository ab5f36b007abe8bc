"""Estimate the time of each collective, and how much of it matmuls hide."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from megajax.analysis.inspect.result import Rates
from megajax.core.config import Config
from megajax.core.counts.collective import HLO_DTYPES
from megajax.core.hardware.records import Hardware
from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.groups import Groups, crosses_hosts
from megajax.xla.hlo.kernels import Kernel
from megajax.xla.hlo.products import Product
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.schedule import Place, Sent, hidden_seconds
from megajax.xla.hlo.timeline import Timeline, timeline


def rates_of(config: Config, gpu: Hardware) -> Rates:
    """Return the rates of a GPU, as `megajax plan` uses them."""
    dtype = config.train.dtype
    products = gpu.product_rate(dtype, is_attention=False)
    attention = gpu.product_rate(config.train.compute_dtype, is_attention=True)
    return Rates(
        hardware=gpu.name,
        dtype=dtype,
        products=products,
        attention=attention,
        memory=gpu.memory_bandwidth * gpu.reference.memory,
        inside_host=gpu.inside_host.bandwidth if gpu.inside_host else None,
        between_hosts=gpu.across_hosts.bandwidth if gpu.across_hosts else None,
    )


def transfer_seconds(
    program: Program,
    placed: Sequence[Collective],
    gpu: Hardware,
    devices_per_host: int,
) -> list[tuple[float, float]]:
    """Return the transfer time of each collective, and the part that matmuls hide, per execution.

    Arrays that XLA joined in one instruction share the hidden seconds in proportion to their bytes.
    """
    sent = sent_by(placed, gpu, devices_per_host)
    hidden = hidden_seconds(program, sent, lambda product: product_seconds(product, gpu))
    seconds = []
    for collective in placed:
        on_wire = _seconds(collective, gpu, devices_per_host)
        total = sent[_place(collective)].seconds
        share = hidden[_place(collective)] / total if total else 0.0
        seconds.append((on_wire, share * on_wire))
    return seconds


def timeline_of(
    program: Program,
    placed: Sequence[Collective],
    kernels: Sequence[Kernel],
    gpu: Hardware,
    devices_per_host: int,
) -> Timeline:
    """Return the timeline of a program at the rates of `rates_of`."""
    seconds = {
        (kernel.computation.name, kernel.instruction.name): kernel_seconds(kernel, gpu)
        for kernel in kernels
    }
    return timeline(program, sent_by(placed, gpu, devices_per_host), seconds)


def kernel_seconds(kernel: Kernel, gpu: Hardware) -> float:
    """Return the roofline time of one kernel: the longer of its matmul time and its memory time."""
    products = sum(product_seconds(product, gpu) for product in kernel.products)
    return max(products, kernel.bytes / (gpu.memory_bandwidth * gpu.reference.memory))


def sent_by(
    placed: Sequence[Collective], gpu: Hardware, devices_per_host: int
) -> dict[Place, Sent]:
    """Return the transfer of each instruction, summed over the arrays that XLA joined in it."""
    totals = defaultdict[Place, float](float)
    links: dict[Place, str] = {}
    for collective in placed:
        totals[_place(collective)] += _seconds(collective, gpu, devices_per_host)
        crosses = crosses_hosts(collective.groups, devices_per_host)
        links[_place(collective)] = 'between hosts' if crosses else 'inside a host'
    return {place: Sent(links[place], seconds) for place, seconds in totals.items()}


def product_seconds(product: Product, gpu: Hardware) -> float:
    """Return the time of a matmul or an attention kernel; causal attention skips half its FLOPs."""
    flops = product.flops / 2 if product.is_causal else product.flops
    return flops / gpu.product_rate(dtype_of(product.dtype), is_attention=product.is_attention)


def dtype_of(spelled: str) -> str:
    """Return the name that GPU records use for an HLO dtype; empty if they have none."""
    if spelled.startswith('f8'):
        return 'fp8'
    return next((name for name, dtype in HLO_DTYPES.items() if dtype == spelled), '')


def _place(collective: Collective) -> Place:
    return collective.computation, collective.instruction


def _seconds(collective: Collective, gpu: Hardware, devices_per_host: int) -> float:
    return collective.wire_bytes / _bandwidth(gpu, collective.groups, devices_per_host)


def _bandwidth(gpu: Hardware, groups: Groups, devices_per_host: int) -> float:
    """Return the bandwidth of the slowest group, in bytes per second."""
    on_hosts = [Counter(device // devices_per_host for device in group) for group in groups]
    if not on_hosts:
        return gpu.link('inside_host').bandwidth
    return min(
        gpu.ring_bandwidth(members=min(hosts.values()), hosts=len(hosts)) for hosts in on_hosts
    )
