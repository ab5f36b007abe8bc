"""How long a training step takes on a GPU that need not be there: products, operations bound by memory, launches and collectives.

Products run at a share of the peak that depends on their sizes, the rest at a share of the memory's bandwidth, collectives by
`network.py`. What a collective overlaps with is known from compiled programs (`overlap.py`); only what is left of it counts.
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
from megajax.plan.programs import MEGAJAX, Attention, Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """The collectives of one site, phase, axis and kind: seconds in a step, and those beside products."""

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
    """Seconds of one training step, and what follows from them."""

    products: float
    memory_bound: float
    launches: float  # what kernels take that are too short to matter by their work
    transfers: tuple[Transfer, ...]
    flops: Flops
    tokens: int
    devices: int
    peak_flops: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.products + self.memory_bound + self.launches + self.waits()

    def waits(self, axis: str | None = None) -> float:
        """Seconds in which a GPU waits for collectives, of one axis or of all."""
        return sum(one.exposed for one in self.transfers if axis in (None, one.axis))

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.total

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s: what is computed again does not count."""
        return self.flops.model / self.total / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak."""
        return self.flops_per_gpu / self.peak_flops

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return self.flops.hardware / self.total / self.devices / self.peak_flops

    def share(self, axis: str | None = None) -> float:
        """The same as a share of the step."""
        return self.waits(axis) / self.total

    def days(self, tokens: float) -> float:
        """To train on so many."""
        return tokens / self.tokens_per_second / 86400


def step_time(config: Config, cluster: Cluster, program: Program = MEGAJAX) -> StepTime:
    """Of `config` on its mesh of GPUs of the cluster. Raises ConfigError where the GPU has no such dtype."""
    peak = peak_flops(config, cluster)
    attention = program.attention if program.uses_flash(config) else None
    flash = (
        attention is not None and cluster.hardware.efficiency.of_attention(attention) is not None
    )
    work = products(config, flash=flash, recomputes_last=program.recomputes_last)
    moved = traffic(config, flash=flash, adds_shards=program.adds_shards)
    of_products = [product_seconds(one, config, cluster, program.attention) for one in work]
    of_traffic = [traffic_seconds(one, cluster) for one in moved]
    times = [one.times for one in work] + [one.times for one in moved]
    parts = [*zip(times, of_products + of_traffic, strict=True)]
    seconds = defaultdict[tuple[str, Phase], float](float)
    for one, taken in zip(work, of_products, strict=True):
        seconds[one.name, one.phase] += taken
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
    """Of the config's dtype."""
    peaks = cluster.hardware.peak_flops
    if config.train.dtype not in peaks:
        raise ConfigError(
            f'train.dtype={config.train.dtype}: {cluster.hardware.name} computes in {", ".join(peaks)}; use one of them'
        )
    return peaks[config.train.dtype]


def product_seconds(
    one: Product, config: Config, cluster: Cluster, attention: Attention = 'flash'
) -> float:
    """All times that it runs in a step: bound by its FLOPs, of which flash attention skips the masked half, or by what it moves."""
    hardware, peak = cluster.hardware, peak_flops(config, cluster)
    if one.flash:
        done = one.flops / 2 if config.model.causal else one.flops
        return (
            one.times
            * done
            / (peak * (hardware.efficiency.of_attention(attention) or hardware.efficiency.matmul))
        )
    compute = one.flops / (peak * hardware.efficiency.of_product(*one.sizes))
    moved = one.elements * BYTES[config.train.dtype]
    return one.times * max(
        compute, moved / (hardware.memory_bandwidth * hardware.efficiency.memory)
    )


def traffic_seconds(one: Traffic, cluster: Cluster) -> float:
    """All times that it runs in a step."""
    return (
        one.times
        * one.bytes
        / (cluster.hardware.memory_bandwidth * cluster.hardware.efficiency.memory)
    )


def _transfers(
    config: Config, cluster: Cluster, program: Program, seconds: dict[tuple[str, Phase], float]
) -> list[Transfer]:
    """Collectives that overlap with the same products share their seconds, in the order given.

    Of each transfer the smaller of its time and of the products beside it is hidden: where a share
    of the transfers overlaps, that share of the products runs beside them.
    """
    left = dict(seconds)
    found = []
    for one in program.collectives(config):
        axis = one.site.axis
        wire = one.wire_bytes * (program.gradient_bytes / 4 if one.site.name == 'gradients' else 1)
        ring = cluster.ring(config, axis)
        needed = one.times * ring.seconds(one.kind, wire)
        share, names, phase = program.beside(one, config)
        hidden = 0.0
        for name in names:
            at = name, phase or one.site.phase
            taken = min(share * needed - hidden, share * seconds.get(at, 0.0), left.get(at, 0.0))
            left[at] = left.get(at, 0.0) - taken
            hidden += taken
        found.append(
            Transfer(
                site=one.site.name,
                phase=one.site.phase,
                axis=axis,
                kind=one.kind,
                times=one.times,
                wire_bytes=one.times * wire,
                crosses_hosts=ring.hosts > 1,
                seconds=needed,
                hidden=hidden,
            )
        )
    return found
