"""Seconds of each collective on the wire, and seconds of these that matrix products hide."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from megajax.config import Config
from megajax.counts.megatron import HLO_DTYPES
from megajax.hardware.records import Hardware, hardware
from megajax.hlo.collectives import Collective
from megajax.hlo.groups import Groups, crosses_hosts
from megajax.hlo.products import Product
from megajax.hlo.program import Program
from megajax.hlo.schedule import Place, Sent, hidden_seconds
from megajax.inspect.result import Rates


def rates_of(config: Config, target: str) -> Rates:
    """The rates of a GPU target: its peaks, efficiencies and links, as `megajax plan` uses them."""
    gpu, dtype = hardware(target), config.train.dtype
    products = gpu.product_rate(dtype, is_attention=False)
    attention = gpu.product_rate(dtype, is_attention=True)
    return Rates(
        hardware=gpu.name,
        dtype=dtype,
        products=products,
        attention=attention,
        inside_host=gpu.inside_host.bandwidth,
        between_hosts=gpu.across_hosts.bandwidth,
    )


def transfer_seconds(
    program: Program,
    placed: Sequence[Collective],
    target: str,
    devices_per_host: int,
) -> list[tuple[float, float]]:
    """Seconds of each collective on the wire, and those that products hide, each time it runs.

    Arrays that XLA joined in one instruction share its hidden seconds in proportion to their bytes.
    """
    gpu = hardware(target)
    places = [(collective.computation, collective.instruction) for collective in placed]
    seconds = [
        collective.wire_bytes / _bandwidth(gpu, collective.groups, devices_per_host)
        for collective in placed
    ]
    sent: dict[Place, Sent] = {}
    totals = defaultdict[Place, float](float)
    for collective, place, on_wire in zip(placed, places, seconds, strict=True):
        totals[place] += on_wire
        crosses = crosses_hosts(collective.groups, devices_per_host)
        sent[place] = Sent('between hosts' if crosses else 'inside a host', totals[place])
    hidden = hidden_seconds(program, sent, lambda product: product_seconds(product, gpu))
    shares = {place: hidden[place] / total if total else 0.0 for place, total in totals.items()}
    return [(on_wire, on_wire * shares[at]) for at, on_wire in zip(places, seconds, strict=True)]


def product_seconds(product: Product, gpu: Hardware) -> float:
    """Seconds of a matrix product or an attention kernel; a causal kernel skips half its FLOPs."""
    name = next((name for name, dtype in HLO_DTYPES.items() if dtype == product.dtype), '')
    flops = product.flops / 2 if product.is_causal else product.flops
    return flops / gpu.product_rate(name, is_attention=product.is_attention)


def _bandwidth(gpu: Hardware, groups: Groups, devices_per_host: int) -> float:
    """The bandwidth of the slowest group, in bytes per second."""
    on_hosts = [Counter(device // devices_per_host for device in group) for group in groups]
    return min(
        (gpu.ring_bandwidth(members=min(hosts.values()), hosts=len(hosts)) for hosts in on_hosts),
        default=gpu.inside_host.bandwidth,
    )
