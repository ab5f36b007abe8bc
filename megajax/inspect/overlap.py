"""How long each collective is on the wire, and for how long matrix products run beside it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from megajax.config import Config
from megajax.counts.megatron import DTYPES
from megajax.hardware.records import Hardware, hardware
from megajax.hlo.collectives import Collective
from megajax.hlo.groups import Groups, crosses_hosts
from megajax.hlo.products import Product
from megajax.hlo.program import Program
from megajax.hlo.schedule import Place, Sent, hidden_seconds
from megajax.inspect.result import Rates


def rates_of(config: Config, target: str) -> Rates:
    """The rates of a GPU target: its peaks, efficiencies and links, as `megajax plan` has them."""
    gpu, dtype = hardware(target), config.train.dtype
    products, attention = (gpu.product_rate(dtype, is_attention=one) for one in (False, True))
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

    Arrays that XLA joined in one instruction share what is hidden of it by their bytes.
    """
    gpu = hardware(target)
    places = [(one.computation, one.instruction) for one in placed]
    seconds = [one.wire_bytes / _bandwidth(gpu, one.groups, devices_per_host) for one in placed]
    sent: dict[Place, Sent] = {}
    total = defaultdict[Place, float](float)
    for one, place, on_wire in zip(placed, places, seconds, strict=True):
        total[place] += on_wire
        link = 'between hosts' if crosses_hosts(one.groups, devices_per_host) else 'inside a host'
        sent[place] = Sent(link, total[place])
    hidden = hidden_seconds(program, sent, lambda product: product_seconds(product, gpu))
    shares = {place: hidden[place] / whole if whole else 0.0 for place, whole in total.items()}
    return [(on_wire, on_wire * shares[at]) for at, on_wire in zip(places, seconds, strict=True)]


def product_seconds(product: Product, gpu: Hardware) -> float:
    """A matrix product, or an attention kernel, of which a causal one skips half."""
    name = next((name for name, dtype in DTYPES.items() if dtype == product.dtype), '')
    done = product.flops / 2 if product.is_causal else product.flops
    return done / gpu.product_rate(name, is_attention=product.is_attention)


def _bandwidth(gpu: Hardware, groups: Groups, devices_per_host: int) -> float:
    """The rate of the slowest group."""
    on_hosts = [Counter(device // devices_per_host for device in group) for group in groups]
    return min(
        (gpu.ring_bandwidth(members=min(hosts.values()), hosts=len(hosts)) for hosts in on_hosts),
        default=gpu.inside_host.bandwidth,
    )
