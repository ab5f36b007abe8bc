"""The time of a training step on GPUs that need not be present.

It is the sum of matrix products, operations bound by memory, launches and collectives. Products run
at a share of the peak that depends on their sizes, other operations at a share of the memory's
bandwidth, collectives by `network.py`. Compiled programs tell what a collective overlaps with
(`overlap.py`); only the exposed rest of its time counts.
"""

import dataclasses
from collections import defaultdict

from megajax.config import Config, ConfigError
from megajax.counts.flops import Flops, step_flops
from megajax.counts.products import Phase, Product, products
from megajax.plan.launches import launch_seconds
from megajax.plan.memory import BYTES
from megajax.plan.memory_traffic import Traffic, traffic
from megajax.plan.network import Cluster
from megajax.plan.programs import MEGAJAX, Attention, Software


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTransfer:
    """The collectives of one site, phase, axis and kind, in one step.

    Of the `seconds` on the wire, `hidden` lie beside matrix products.
    """

    site: str
    phase: Phase
    axis: str
    kind: str
    times: int
    wire_bytes: float
    crosses_hosts: bool
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        """Seconds that no matrix product hides, in which a GPU waits."""
        return self.seconds - self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one training step, and the rates that follow from them."""

    products: float
    memory_bound: float
    launches: float  # seconds that launching short kernels takes beyond their work
    transfers: tuple[PlannedTransfer, ...]
    flops: Flops
    tokens: int
    devices: int
    peak_flops: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.products + self.memory_bound + self.launches + self.waits()

    def waits(self, axis: str | None = None) -> float:
        """Return the seconds in which a GPU waits for collectives, of one axis or of all."""
        return sum(transfer.exposed for transfer in self.transfers if axis in (None, transfer.axis))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.total

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one GPU; recomputation does not count."""
        return self.flops.model / self.total / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak."""
        return self.flops_per_gpu / self.peak_flops

    @property
    def hfu(self) -> float:
        """FLOP/s over the peak, recomputation included."""
        return self.flops.hardware / self.total / self.devices / self.peak_flops

    def share(self, axis: str | None = None) -> float:
        """Return the share of the step in which a GPU waits for collectives, as in `waits`."""
        return self.waits(axis) / self.total

    def days(self, tokens: float) -> float:
        """Return the days that training on `tokens` takes."""
        return tokens / self.tokens_per_second / 86400


def step_time(config: Config, cluster: Cluster, program: Software = MEGAJAX) -> StepTime:
    """Return the time of a step of `config` on its mesh of the cluster's GPUs.

    Raises ConfigError if the GPU does not compute in the config's dtype.
    """
    peak = peak_flops(config, cluster)
    attention = program.attention if program.uses_flash(config) else None
    flash = (
        attention is not None and cluster.hardware.efficiency.of_attention(attention) is not None
    )
    work = products(config, flash=flash, recomputes_last=program.recomputes_last)
    moved = traffic(config, flash=flash, adds_shards=program.adds_shards)
    of_products = [product_seconds(product, config, cluster, program.attention) for product in work]
    of_traffic = [traffic_seconds(operation, cluster) for operation in moved]
    times = [product.times for product in work] + [operation.times for operation in moved]
    parts = [*zip(times, of_products + of_traffic, strict=True)]
    seconds = defaultdict[tuple[str, Phase], float](float)
    for product, product_time in zip(work, of_products, strict=True):
        seconds[product.name, product.phase] += product_time
    return StepTime(
        products=sum(seconds.values()),
        memory_bound=sum(of_traffic),
        launches=launch_seconds(parts, program.num_launches(config)),
        transfers=tuple(_transfers(config, cluster, program, seconds)),
        flops=step_flops(config, flash=flash),
        tokens=config.train.batch_size * config.train.seq_len,
        devices=config.mesh.data * config.mesh.model,
        peak_flops=peak,
    )


def peak_flops(config: Config, cluster: Cluster) -> float:
    """Return the GPU's peak FLOP/s in the config's dtype.

    Raises ConfigError if the GPU does not compute in it.
    """
    peaks = cluster.hardware.peak_flops
    if config.train.dtype not in peaks:
        raise ConfigError(
            f'train.dtype={config.train.dtype}: {cluster.hardware.name} computes in '
            f'{", ".join(peaks)}; use one of them'
        )
    return peaks[config.train.dtype]


def product_seconds(
    product: Product, config: Config, cluster: Cluster, attention: Attention = 'flash'
) -> float:
    """Return the seconds that a product takes in all its runs of a step.

    It is bound by its FLOPs, of which flash attention skips the masked half, or by the bytes that
    it moves.
    """
    hardware, peak = cluster.hardware, peak_flops(config, cluster)
    if product.flash:
        done = product.flops / 2 if config.model.causal else product.flops
        return (
            product.times
            * done
            / (peak * (hardware.efficiency.of_attention(attention) or hardware.efficiency.matmul))
        )
    compute = product.flops / (peak * hardware.efficiency.of_product(*product.sizes))
    moved = product.elements * BYTES[config.train.dtype]
    return product.times * max(
        compute, moved / (hardware.memory_bandwidth * hardware.efficiency.memory)
    )


def traffic_seconds(operation: Traffic, cluster: Cluster) -> float:
    """Return the seconds that an operation bound by memory takes in all its runs of a step."""
    return (
        operation.times
        * operation.bytes
        / (cluster.hardware.memory_bandwidth * cluster.hardware.efficiency.memory)
    )


def _transfers(
    config: Config, cluster: Cluster, program: Software, seconds: dict[tuple[str, Phase], float]
) -> list[PlannedTransfer]:
    """Return the transfers of a step.

    Collectives that overlap with the same products share the seconds of these, in the order given.
    Of each transfer the smaller of its time and of the products beside it is hidden. If only a
    share of the transfers overlaps, that share of the products runs beside them.
    """
    left = dict(seconds)
    transfers = []
    for collective in program.collectives(config):
        site = collective.site
        wire = collective.wire_bytes * (
            program.gradient_bytes / 4 if site.name == 'gradients' else 1
        )
        ring = cluster.ring(config, site.axis)
        needed = collective.times * ring.seconds(collective.kind, wire)
        share, names, phase = program.beside(collective, config)
        hidden = 0.0
        for name in names:
            key = name, phase or site.phase
            covered = min(
                share * needed - hidden, share * seconds.get(key, 0.0), left.get(key, 0.0)
            )
            left[key] = left.get(key, 0.0) - covered
            hidden += covered
        transfers.append(
            PlannedTransfer(
                site=site.name,
                phase=site.phase,
                axis=site.axis,
                kind=collective.kind,
                times=collective.times,
                wire_bytes=collective.times * wire,
                crosses_hosts=ring.hosts > 1,
                seconds=needed,
                hidden=hidden,
            )
        )
    return transfers
