"""Search all layouts of a model on a number of GPUs.

The result shows which layouts fit, how fast each is, and why the others were not chosen.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator

from megajax.analysis.plan.accepted import accepted
from megajax.analysis.plan.describe import describe, needs, no_layout
from megajax.analysis.plan.kernel_time import peak_flops
from megajax.analysis.plan.layouts import Mesh, changed, deep_meshes, is_frugal, layouts, meshes
from megajax.analysis.plan.memory import UNDERCOUNT, StepMemory, memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, Software
from megajax.analysis.plan.sizes import NO_SAVINGS, Savings
from megajax.analysis.plan.time import StepTime, Timer
from megajax.base.errors import Problem
from megajax.core.config import Config, ConfigError
from megajax.core.config.optim import ZERO_STAGES
from megajax.core.config.overlap_rules import resolved
from megajax.core.config.section import Section
from megajax.core.hardware.memory import USABLE

MOST_GPUS = 65536  # upper limit of the search for a number of GPUs on which a model fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout: its config, the bytes that it needs on a GPU, and its time if it fits.

    A layout that cannot be the fastest of its mesh is not timed; its step takes `at_least` seconds
    or more.
    """

    config: Config
    bytes: int
    time: StepTime | None = None
    at_least: float | None = None

    @property
    def mesh(self) -> Mesh:
        """The GPUs along each axis."""
        return Mesh.of(self.config)

    @property
    def timed(self) -> StepTime:
        """The time of a layout that fits and was timed."""
        assert self.time is not None
        return self.time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """All layouts on a number of GPUs."""

    fitting: tuple[Choice, ...]  # the layouts that fit and were timed, fastest first
    # Layouts that fit but are slower than a different layout of their mesh.
    slower: tuple[Choice, ...]
    too_large: tuple[Choice, ...]  # the layouts that do not fit, smallest first
    impossible: dict[Mesh, str]  # for each mesh without a layout, the reason

    @property
    def best(self) -> Choice:
        """The fastest layout that fits."""
        return self.fitting[0]

    @property
    def all(self) -> tuple[Choice, ...]:
        """All layouts, in the order of the fields above."""
        return *self.fitting, *self.slower, *self.too_large

    def fastest(self, has: Callable[[Choice], bool]) -> Choice | None:
        """Return the fastest of the layouts that fit for which `has` is true."""
        return next(filter(has, self.fitting), None)

    def smallest(self, has: Callable[[Choice], bool]) -> Choice | None:
        """Return the smallest of the layouts that do not fit for which `has` is true."""
        return next(filter(has, self.too_large), None)


def search(
    config: Config, cluster: Cluster, program: Software = MEGAJAX, *, prune: bool = True
) -> Ranking:
    """Rank every layout for the batch of `config` on all GPUs of the cluster.

    A layout is a choice of stages, virtual stages, data, replicas, context and its exchange, model,
    model_rows, sequence parallelism, overlap, recompute, microbatches and ZeRO stage. Without
    `prune`, layouts that cannot be the fastest of their mesh are timed too. Raises ConfigError if
    no layout fits; the error says what would fit.
    """
    peak_flops(config, cluster)  # raises if the GPU does not compute in the dtype
    config = _on_cpu(program.without_order(config), cluster)
    timer, available = Timer(cluster, program), usable_memory(cluster)
    fitting, slower, too_large = list[Choice](), list[Choice](), list[Choice]()
    impossible = dict[Mesh, str]()
    for mesh in _meshes(config, cluster, program):
        possible, reason = _possible(config, mesh, cluster, program)
        if not possible:
            impossible[mesh] = reason
        too_large += [choice for choice in possible if choice.bytes > available]
        for is_parallel in (False, True):
            fits = (
                choice
                for choice in possible
                if choice.bytes <= available and choice.config.mesh.sequence_parallel == is_parallel
            )
            for choice in _timed(fits, timer, prune=prune):
                (slower if choice.time is None else fitting).append(choice)
    if not fitting:
        raise ConfigError(*_why_none(config, cluster, program, too_large, impossible))
    return Ranking(
        fitting=tuple(sorted(fitting, key=_order)),
        slower=tuple(sorted(slower, key=lambda choice: choice.at_least or 0.0)),
        too_large=tuple(sorted(too_large, key=lambda choice: choice.bytes)),
        impossible=impossible,
    )


def _on_cpu(config: Config, cluster: Cluster) -> Config:
    """Return a config with `auto` resolved if the cluster is a CPU; layouts resolve it for GPUs."""
    return config if cluster.hardware.is_gpu else resolved(config, on_gpu=False)


def _meshes(config: Config, cluster: Cluster, program: Software) -> Iterator[Mesh]:
    yield from meshes(cluster.num_devices, has_grids=program.has_grids)
    yield from deep_meshes(config, cluster.num_devices, cluster.smallest_domain)


def _possible(
    config: Config, mesh: Mesh, cluster: Cluster, program: Software
) -> tuple[list[Choice], str]:
    """Return the possible layouts of a mesh, not timed yet; if there are none, the reason."""
    choices, reason = list[Choice](), ''
    checked = dict[tuple[Section, ...], list[Problem]]()
    capability = cluster.hardware.compute_capability
    per_host, zero = cluster.smallest_domain, program.zero
    for listed in layouts(config, mesh, per_host, capability, zero):
        candidate = accepted(listed, cluster)
        if candidate is None:
            continue
        # Any layout can recompute its activations.
        train = candidate.train.changed(recompute='none')
        alike = candidate.mesh, train, candidate.optim
        if alike not in checked:
            checked[alike] = program.problems(candidate)
        if problems := checked[alike]:
            reason = reason or str(problems[0])
            if not choices:  # the reason of the first layout, which has the fewest requirements
                break
            continue
        needed = memory_on(candidate, cluster).total
        choices.append(Choice(config=candidate, bytes=needed))
    return choices, reason or _indivisible(config, mesh.data)


def _timed(choices: Iterable[Choice], timer: Timer, *, prune: bool) -> Iterator[Choice]:
    """Time layouts of one mesh until no remaining layout can be the fastest."""
    best = float('inf')
    # The layouts are sorted by a lower bound of their time. The bounds come in the order of their
    # cost, and the next one is computed if the ones before are below the fastest time.
    bounds = timer.floor, timer.computing, timer.at_least
    waiting = [(0.0, order, 0, choice) for order, choice in enumerate(choices)]
    while waiting:
        at_least, order, known, choice = heapq.heappop(waiting)
        if prune and at_least > best:
            yield dataclasses.replace(choice, at_least=at_least)
        elif prune and known < len(bounds):
            at_least = max(at_least, bounds[known](choice.config))
            heapq.heappush(waiting, (at_least, order, known + 1, choice))
        else:
            time = timer.step(choice.config)
            best = min(best, time.total)
            yield dataclasses.replace(choice, time=time)


def usable_memory(cluster: Cluster) -> int:
    """Return the usable bytes per GPU, minus a margin for UNDERCOUNT."""
    return int(USABLE * cluster.hardware.memory / (1 + UNDERCOUNT))


def memory_on(config: Config, cluster: Cluster, savings: Savings = NO_SAVINGS) -> StepMemory:
    """Return the bytes that a step of `config` needs on each GPU of the cluster."""
    capability, available = cluster.hardware.compute_capability, usable_memory(cluster)
    return memory(config, capacity_bytes=available, capability=capability, savings=savings)


def _order(choice: Choice) -> tuple[float | int, ...]:
    """Return a sort key: the fastest layout first; if equally fast, the simplest first."""
    config = choice.config
    return (
        choice.timed.total,
        config.mesh.stages * config.mesh.context,
        config.mesh.virtual_stages,
        config.mesh.context_exchange != 'gather',
        config.mesh.tensor_parallel,
        config.mesh.model_rows,
        config.overlap.is_split,
        ZERO_STAGES.index(config.optim.shard),
        config.mesh.replicas,
        ('none', 'selective', 'full').index(config.train.recompute),
        config.train.microbatches,
    )


def _indivisible(config: Config, data: int) -> str:
    batch = config.train.batch_size
    near = ' or '.join(str(n) for n in (batch // data * data, -(-batch // data) * data) if n)
    return f'train.batch_size: {batch} is not a multiple of mesh.data={data}; use {near}'


def _why_none(
    config: Config,
    cluster: Cluster,
    program: Software,
    too_large: list[Choice],
    impossible: dict[Mesh, str],
) -> Iterator[str]:
    if not too_large:
        yield from no_layout(cluster.num_devices, impossible)
        return
    least, have = min(too_large, key=lambda choice: choice.bytes), usable_memory(cluster)
    yield (
        f'no layout fits on {cluster.num_devices} x {cluster.hardware.name}: the smallest '
        f'{needs(least.bytes, have)}, with {describe(least.config)}'
    )
    count = 2 * cluster.num_devices
    while count <= MOST_GPUS:
        if enough := that_fits(config, count, cluster, program):
            yield f'it fits on {count} GPUs with {describe(enough)}'
            break
        count *= 2
    rounded = changed(config, optim__moments_dtype='bfloat16')
    if enough := that_fits(rounded, cluster.num_devices, cluster, program):
        yield (
            "with optim.moments_dtype=bfloat16, which rounds AdamW's moments between steps, "
            f'{describe(enough)} fits'
        )
    yield (
        f'or use GPUs with at least {least.bytes / 1e9:.0f} GB, a shorter train.seq_len, '
        'or a smaller model'
    )


def that_fits(
    config: Config,
    num_devices: int,
    cluster: Cluster,
    program: Software,
    savings: Savings = NO_SAVINGS,
) -> Config | None:
    """Return a layout with the same batch that fits on a number of GPUs; None if none does."""
    config, resized = _on_cpu(config, cluster), cluster.resized(num_devices)
    # Devices of a CPU share its memory, so more of them have less each.
    have, capability = usable_memory(resized), resized.hardware.compute_capability
    for mesh in _meshes(config, resized, program):
        candidates = layouts(config, mesh, resized.smallest_domain, capability, program.zero)
        for listed in filter(is_frugal, candidates):
            candidate = accepted(listed, resized)
            if candidate is None or program.problems(candidate):
                continue
            if memory_on(candidate, resized, savings).total <= have:
                return candidate
    return None


def fewest_gpus(
    config: Config, cluster: Cluster, program: Software, savings: Savings = NO_SAVINGS
) -> int | None:
    """Return the smallest number of GPUs that a layout of the same batch fits on.

    It is a power of two, that many full hosts, or the size of the cluster; None if no layout fits.
    """
    most = cluster.num_devices
    for count in sorted({*cluster.counts(most), most}):
        fewer = Cluster.of(cluster.hardware, count, cluster.devices_per_host)
        if that_fits(config, count, fewer, program, savings):
            return count
    return None
