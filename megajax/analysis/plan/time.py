"""Predict the time of a training step, without a GPU.

The time is the sum of matmuls, memory-bound operations, launch overhead and exposed communication.
Matmuls run at a share of the peak that depends on their sizes, other operations at a share of the
memory bandwidth, and collectives as in `network.py`. The matmuls that a collective overlaps were
read from compiled programs (`overlap.py`); only the exposed rest of its time counts.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from megajax.analysis.plan.experts import of_busiest
from megajax.analysis.plan.kernel_time import (
    in_parts,
    peak_flops,
    product_seconds,
    rounding_seconds,
    traffic_seconds,
)
from megajax.analysis.plan.launches import launch_seconds
from megajax.analysis.plan.layouts import changed, layout_key
from megajax.analysis.plan.memory_traffic import (
    traffic_of_images,
    traffic_of_layers,
    traffic_of_loss,
    traffic_of_weights,
)
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, Software
from megajax.analysis.plan.transfers import PlannedTransfer, ProductKey, Waiting, transfers
from megajax.core.config import Config
from megajax.core.counts.flops import Flops, flops_once, step_flops
from megajax.core.counts.muon import newton_schulz
from megajax.core.counts.product import DENSE, Product
from megajax.core.counts.products import products
from megajax.core.counts.runs import Runs, ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a training step, and the rates that follow from them."""

    products: float
    idle: float  # seconds of `products` in the idle ticks of a pipeline
    memory_bound: float
    launches: float  # launch overhead: seconds beyond the work of short kernels
    transfers: tuple[PlannedTransfer, ...]
    flops: Flops
    tokens: int
    devices: int
    peak_flops: float

    @cached_property
    def total(self) -> float:
        """Return the seconds of the step."""
        return self.products + self.memory_bound + self.launches + self.waits()

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes of the transfers; `row+model` is over both."""
        return tuple(dict.fromkeys(transfer.axis for transfer in self.transfers))

    def waits(self, axis: str | None = None) -> float:
        """Return the seconds of exposed communication, of one axis or of all."""
        return sum(transfer.exposed for transfer in self.transfers if axis in (None, transfer.axis))

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all GPUs together."""
        return self.tokens / self.total

    @property
    def flops_per_gpu(self) -> float:
        """Return the model FLOP/s of one GPU, without recomputation."""
        return self.flops.model / self.total / self.devices

    @property
    def mfu(self) -> float:
        """Return the model FLOP/s divided by the peak."""
        return self.flops_per_gpu / self.peak_flops

    @property
    def hfu(self) -> float:
        """Return the FLOP/s, including recomputation, divided by the peak."""
        return self.flops.hardware / self.total / self.devices / self.peak_flops

    def share(self, axis: str | None = None) -> float:
        """Return exposed communication, of one axis or of all, as a share of the step."""
        return self.waits(axis) / self.total

    def days(self, tokens: float) -> float:
        """Return the days that training on `tokens` takes."""
        return tokens / self.tokens_per_second / 86400


def step_time(config: Config, cluster: Cluster, program: Software = MEGAJAX) -> StepTime:
    """Return the time of a step of `config` on its mesh of the cluster's GPUs.

    Raises ConfigError if the GPU does not compute in the config's dtype.
    """
    return Timer(cluster, program).step(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _InGroup:
    """The part of a step of a tensor-parallel group that does not depend on ZeRO."""

    config: Config
    cluster: Cluster
    program: Software
    # Number of runs and seconds of each matmul and memory-bound operation.
    parts: list[tuple[float, float]]
    seconds: Mapping[ProductKey, float]  # seconds of matmuls
    idle: float
    memory_bound: float
    flash: bool

    @cached_property
    def products(self) -> float:
        """Return the seconds of all matmuls."""
        return sum(self.seconds.values())

    @property
    def transfers(self) -> tuple[PlannedTransfer, ...]:
        """Return the group's collectives."""
        return self._sent[0]

    @property
    def waiting(self) -> Waiting:
        """Return the matmuls' seconds, less those that hide the group's collectives."""
        return self._sent[1].copy()

    @cached_property
    def _sent(self) -> tuple[tuple[PlannedTransfer, ...], Waiting]:
        waiting, collectives = Waiting.of(self.seconds), self.program.sent_in_passes(self.config)
        sent = transfers(collectives, self.config, self.cluster, self.program, waiting)
        return tuple(sent), waiting


class Timer:
    """The times of the steps of one model and batch on a cluster, in any layout.

    Parts that layouts have in common are computed once.
    """

    def __init__(self, cluster: Cluster, program: Software = MEGAJAX):
        self.cluster, self.program = _with_half_size(cluster, program), program
        self._in_groups: dict[tuple[object, ...], _InGroup] = {}
        self._flops: dict[tuple[object, ...], Flops] = {}
        self._once: dict[bool, Flops] = {}
        self._forward: tuple[float, float, float] | None = None

    def step(self, config: Config) -> StepTime:
        """Return the time of a step of `config`."""
        cluster, program, asked = self.cluster, self.program, config
        group, config = self._in_group(config), program.evened(config)
        moved = traffic_of_weights(
            config,
            adds_shards=program.adds_shards,
            accumulated_bytes=program.accumulated_bytes,
        )
        of_weights = [(moves.times, traffic_seconds(moves, cluster)) for moves in moved]
        iterated = newton_schulz(config)
        of_muon = [(x.times, product_seconds(x, config, cluster)) for x in iterated]
        over_data = transfers(program.over_data(config), config, cluster, program, group.waiting)
        return StepTime(
            products=group.products + sum(seconds for _, seconds in of_muon),
            idle=group.idle,
            memory_bound=group.memory_bound + sum(seconds for _, seconds in of_weights),
            launches=launch_seconds(
                [*group.parts, *of_weights, *of_muon], program.num_launches(config)
            ),
            transfers=(*group.transfers, *over_data),
            flops=self._flops_of(asked, flash=group.flash),
            tokens=config.train.batch_size * config.train.seq_len,
            devices=config.mesh.num_devices,
            peak_flops=peak_flops(config, cluster),
        )

    def floor(self, config: Config) -> float:
        """Return a lower bound on the seconds of a step's matmuls, without listing them."""
        mesh, train, rates = config.mesh, config.train, self.cluster.hardware.efficiency
        forward, head, left_out = self._flops_forward(config)
        # All matmuls of a layer but its last, at least half of the FLOPs; none of a frozen encoder.
        recomputed = (forward - (left_out / 2 if config.vision else 0)) / 2
        layers = 3 * forward - left_out + (recomputed if train.recompute == 'full' else 0)
        if mesh.stages > 1:
            layers *= ticks(config) / (mesh.virtual_stages * train.microbatches)
        fastest = max(rates.matmul, rates.flash or 0.0, rates.flash_2 or 0.0)
        return (layers + 3 * head) / mesh.num_devices / (peak_flops(config, self.cluster) * fastest)

    def _flops_forward(self, config: Config) -> tuple[float, float, float]:
        """Return the FLOPs of layers and head in a forward pass, and `Flops.left_out`."""
        if self._forward is None:
            flops = step_flops(changed(config, train__recompute='none', train__overlap='none'))
            attention = flops.attention / 2 if config.model.causal else flops.attention
            self._forward = flops.layers + attention, flops.head, flops.left_out
        return self._forward

    def computing(self, config: Config) -> float:
        """Return a lower bound on the seconds of a step of `config`, without any collectives."""
        group = self._in_group(config)
        return group.products + group.memory_bound

    def at_least(self, config: Config) -> float:
        """Return a lower bound on the seconds of a step of `config` with any ZeRO stage."""
        exposed = sum(sent.exposed for sent in self._in_group(config).transfers)
        return self.computing(config) + exposed

    def _flops_of(self, config: Config, *, flash: bool) -> Flops:
        if (key := _whatever_is_sharded(config)) not in self._flops:
            if flash not in self._once:
                self._once[flash] = flops_once(config, flash=flash)
            self._flops[key] = step_flops(config, flash=flash, once=self._once[flash])
        return self._flops[key]

    def _in_group(self, config: Config) -> _InGroup:
        if (key := _whatever_is_sharded(config)) not in self._in_groups:
            self._in_groups[key] = self._time_group(config)
        return self._in_groups[key]

    def _time_group(self, asked: Config) -> _InGroup:
        cluster, program = self.cluster, self.program
        config = program.evened(asked)
        peak_flops(config, cluster)  # raises if the GPU does not compute in the dtype
        capability = cluster.hardware.compute_capability
        attention = program.attention if program.uses_flash(config, capability) else None
        efficiency, length = cluster.hardware.efficiency, config.train.seq_len
        flash = attention is not None and efficiency.of_attention(attention, length) is not None
        work = _matmuls(config, program, flash=flash)
        at_head = config
        if config.mesh.stages > 1 and not program.shares_head:
            at_head = changed(config, mesh__stages=1, mesh__virtual_stages=1)
        of_products = [
            program.slowdown * product_seconds(product, config, cluster, program.attention)
            for product in work
        ]
        at_experts = program.at_experts(config)
        if config is not asked:
            of_products = _with_shorter_end(work, of_products, config)
        of_layers = traffic_of_layers(
            config, capability, flash=flash, in_buffers=program.sends_buffers, at_experts=at_experts
        )
        of_images = traffic_of_images(config, flash=flash, capability=capability)
        moved = [*of_layers, *traffic_of_loss(at_head), *of_images]
        of_traffic = [traffic_seconds(operation, cluster) for operation in moved]
        times = [product.times for product in work] + [operation.times for operation in moved]
        if config.train.dtype == 'fp8':
            times += [product.times for product in work]
            of_traffic += [
                rounding_seconds(x, at_experts if x.of_experts else config, cluster, program)
                for x in work
            ]
        seconds = defaultdict[ProductKey, float](float)
        for product, product_time in zip(work, of_products, strict=True):
            seconds[product.name, product.phase] += product_time
        in_layers = sum(
            time for x, time in zip(work, of_products, strict=True) if x.where != 'head'
        )
        return _InGroup(
            config=config,
            cluster=cluster,
            program=program,
            parts=[*zip(times, of_products + of_traffic, strict=True)],
            seconds=seconds,
            idle=_idle_share(config) * in_layers,
            memory_bound=sum(of_traffic),
            flash=flash,
        )


def _with_half_size(cluster: Cluster, program: Software) -> Cluster:
    """Return the cluster with the efficiency of a program's matmuls."""
    if not program.half_size:
        return cluster
    gpu = cluster.hardware
    half_size = gpu.efficiency.half_size + program.half_size
    efficiency = gpu.efficiency.model_copy(update={'half_size': half_size})
    hardware = gpu.model_copy(update={'efficiency': efficiency})
    return dataclasses.replace(cluster, hardware=hardware)


def _whatever_is_sharded(config: Config) -> tuple[object, ...]:
    train = config.train
    return *layout_key(config), train.schedule, train.overlap, train.unroll


def _idle_share(config: Config) -> float:
    """Return the share of the ticks in which a pipeline stage is idle."""
    return 1 - config.mesh.virtual_stages * config.train.microbatches / ticks(config)


def _matmuls(config: Config, program: Software, *, flash: bool) -> list[Product]:
    """Return the matmuls of a step on the device that has the most."""
    work = products(config, flash=flash, recomputes_last=program.recomputes_last)
    if config.model.experts is not None:
        at_experts = program.at_experts(config)
        there = products(at_experts, flash=flash, recomputes_last=program.recomputes_last)
        work = [product for product in work if not product.of_experts]
        work += [of_busiest(x, at_experts, program.imbalance) for x in there if x.of_experts]
    if config.train.recompute == 'selective':
        work += _repeated(work, program.repeats(config.model))
    if config.mesh.stages > 1 and not program.shares_head:
        at_head = changed(config, mesh__stages=1, mesh__virtual_stages=1)
        alone = [x for x in products(at_head, flash=flash) if x.where == 'head']
        work = [*(product for product in work if product.where != 'head'), *alone]
    if program.has_order and config.overlap.in_order:
        work = [in_parts(product, config.overlap.num_parts) for product in work]
    return work


def _repeated(work: Sequence[Product], shares: Mapping[str, float]) -> list[Product]:
    """Return the matmuls of a forward pass that are repeated, by each matmul's repeated share."""
    repeated = []
    for product in work:
        if product.phase == 'forward' and (
            share := shares.get(product.name.removeprefix(DENSE), 0.0)
        ):
            m, n, k = product.sizes
            sizes = m, round(share * n), k
            repeated.append(dataclasses.replace(product, phase='recompute', sizes=sizes))
    return repeated


def _with_shorter_end(
    work: Sequence[Product], seconds: Sequence[float], config: Config
) -> list[float]:
    """Return the seconds of matmuls on the last stage, whose last chunk has one layer fewer.

    The head takes that layer's place, so only the additional time of the head counts.
    """
    count, layers = config.train.microbatches, Runs.of_stages(config).layers
    of_layer = sum(s for x, s in zip(work, seconds, strict=True) if x.where != 'head') / layers
    of_head = sum(s for x, s in zip(work, seconds, strict=True) if x.where == 'head') / count
    left = max(0.0, 1 - of_layer / of_head)
    return [left * s if x.where == 'head' else s for x, s in zip(work, seconds, strict=True)]
