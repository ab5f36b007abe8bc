"""A search of every layout of a model on a number of GPUs.

It says which layouts fit, how fast each is, and why the others lost.
"""

import dataclasses
from collections.abc import Iterator
from itertools import product

from megajax.config import Config, ConfigError, Problem
from megajax.config.rules import divisors, incompatibilities
from megajax.counts.flops import uses_flash
from megajax.plan.memory import UNDERCOUNT, memory
from megajax.plan.network import Cluster
from megajax.plan.programs import MEGAJAX, Software
from megajax.plan.time import StepTime, peak_flops, step_time

# The share of a GPU's memory that a program can use with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92; CUDA
# and NCCL need the rest.
USABLE = 0.92
# How many of the meshes that cannot be are given with their reasons: those of small tensor-parallel
# groups first.
REASONS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout: its config, the bytes that it needs on a GPU, and its time if it fits."""

    config: Config
    bytes: int
    time: StepTime | None

    @property
    def mesh(self) -> tuple[int, int]:
        """GPUs along `data` and `model`."""
        return self.config.mesh.data, self.config.mesh.model

    @property
    def timed(self) -> StepTime:
        """The time of a layout that fits."""
        assert self.time is not None
        return self.time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """All layouts on a number of GPUs."""

    fitting: tuple[Choice, ...]  # the layouts that fit, fastest first
    too_large: tuple[Choice, ...]  # the layouts that do not fit, smallest first
    impossible: dict[tuple[int, int], str]  # the reason for each mesh without a layout

    @property
    def best(self) -> Choice:
        """The fastest layout that fits."""
        return self.fitting[0]


def search(config: Config, cluster: Cluster, program: Software = MEGAJAX) -> Ranking:
    """Rank every layout for the batch of `config` on all GPUs of the cluster.

    A layout is one choice of data, model, sequence parallelism, overlap, recompute, microbatches
    and ZeRO-1. Raises ConfigError if none fits; the error says what would.
    """
    peak_flops(config, cluster)  # raises if the GPU does not compute in the dtype
    fitting, too_large, impossible = list[Choice](), list[Choice](), dict[tuple[int, int], str]()
    for model in divisors(cluster.num_devices):
        data = cluster.num_devices // model
        num_possible = 0
        for candidate in _layouts(config, data, model, cluster.devices_per_host):
            if problems := _problems(candidate, program):
                impossible.setdefault((data, model), str(problems[0]))
                if not num_possible:  # the first layout has the fewest requirements
                    break
                continue
            num_possible += 1
            needed = memory(candidate, capacity_bytes=usable_memory(cluster)).total
            fits = needed <= usable_memory(cluster)
            choice = Choice(
                config=candidate,
                bytes=needed,
                time=step_time(candidate, cluster, program) if fits else None,
            )
            (fitting if fits else too_large).append(choice)
        if num_possible:
            impossible.pop((data, model), None)
        elif (data, model) not in impossible:
            impossible[data, model] = _indivisible(config, data)
    fitting.sort(key=_order)
    too_large.sort(key=lambda choice: choice.bytes)
    if not fitting:
        raise ConfigError(*_why_none(config, cluster, too_large, impossible))
    return Ranking(fitting=tuple(fitting), too_large=tuple(too_large), impossible=impossible)


def _problems(config: Config, program: Software) -> list[Problem]:
    """Return the reasons why a program cannot run the config."""
    return incompatibilities(changed(config, optim__shard=False) if program.pads_shards else config)


def usable_memory(cluster: Cluster) -> int:
    """Return the bytes on each GPU that a program can use, minus a margin for UNDERCOUNT."""
    return int(USABLE * cluster.hardware.memory / (1 + UNDERCOUNT))


def changed(config: Config, **keys: object) -> Config:
    """Return the config with other values, `section__key=value`, unchecked.

    `incompatibilities` says whether they work together.
    """
    sections: dict[str, dict[str, object]] = {}
    for path, value in keys.items():
        section, key = path.split('__')
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )


def _layouts(config: Config, data: int, model: int, per_host: int) -> Iterator[Config]:
    """Yield the layouts of one mesh; each has all requirements that the first has."""
    if config.train.batch_size % data:
        return
    sequence_parallel = (False, True) if model > 1 else (False,)
    # With flash attention, selective recomputation has nothing to do.
    recomputes = ('none', 'full') if uses_flash(config) else ('none', 'selective', 'full')
    shards = (False, True) if data > 1 else (False,)
    overlaps = ('none', 'batch_split') if model > 1 else ('none',)
    counts = divisors(config.train.batch_size // data)
    for microbatches, sp, overlap, recompute, shard in product(
        counts, sequence_parallel, overlaps, recomputes, shards
    ):
        yield changed(
            config,
            mesh__data=data,
            mesh__model=model,
            mesh__sequence_parallel=sp,
            mesh__allow_model_across_hosts=config.mesh.allow_model_across_hosts or model > per_host,
            train__microbatches=microbatches,
            train__recompute=recompute,
            train__overlap=overlap,
            optim__shard=shard,
        )


def _order(choice: Choice) -> tuple[float, int, bool, bool, int, int]:
    """Return a sort key: fastest first; of equals, the simpler."""
    config = choice.config
    recompute = ('none', 'selective', 'full').index(config.train.recompute)
    overlap = config.train.overlap == 'batch_split'
    return (
        choice.timed.total,
        config.mesh.model,
        overlap,
        config.optim.shard,
        recompute,
        config.train.microbatches,
    )


def _indivisible(config: Config, data: int) -> str:
    batch = config.train.batch_size
    near = ' or '.join(str(n) for n in (batch // data * data, -(-batch // data) * data) if n)
    return f'train.batch_size: {batch} is not a multiple of mesh.data={data}; use {near}'


def _why_none(
    config: Config,
    cluster: Cluster,
    too_large: list[Choice],
    impossible: dict[tuple[int, int], str],
) -> Iterator[str]:
    if not too_large:
        yield f'no mesh of {cluster.num_devices} GPUs can train this config'
        reasons = [
            f'data={data} x model={model}: {reason}' for (data, model), reason in impossible.items()
        ]
        yield from reasons[:REASONS]
        if len(reasons) > REASONS:
            yield f'and {len(reasons) - REASONS} more meshes'
        return
    least, have = too_large[0], usable_memory(cluster)
    yield (
        f'nothing fits on {cluster.num_devices} x {cluster.hardware.name}: the smallest layout '
        f'needs {least.bytes / 1e9:.1f} GB of {have / 1e9:.1f} GB, with {describe(least.config)}'
    )
    if fix := _enough(config, cluster, have):
        yield fix
    yield (
        f'or use GPUs with at least {least.bytes / 1e9:.0f} GB, a shorter train.seq_len, '
        'or a smaller model'
    )


def _enough(config: Config, cluster: Cluster, have: int) -> str | None:
    """Say on how many GPUs, by doubling their number, some layout fits the same batch."""
    count = 2 * cluster.num_devices
    while count <= 65536:
        for model in divisors(count):
            for candidate in _layouts(config, count // model, model, cluster.devices_per_host):
                if (
                    not incompatibilities(candidate)
                    and memory(candidate, capacity_bytes=have).total <= have
                ):
                    return f'it fits on {count} GPUs with {describe(candidate)}'
        count *= 2
    return None


def describe(config: Config) -> str:
    """Return a layout in words."""
    words = [f'data={config.mesh.data} x model={config.mesh.model}']
    words += ['sequence parallel'] if config.mesh.sequence_parallel else []
    words += [f'recompute={config.train.recompute}'] if config.train.recompute != 'none' else []
    count = config.train.microbatches
    words += [f'{count} microbatch{"es" if count > 1 else ""} of {config.microbatch_rows}']
    words += ['ZeRO-1'] if config.optim.shard else []
    words += ['overlap'] if config.train.overlap == 'batch_split' else []
    return ', '.join(words)


def why_slower(choice: Choice, best: Choice) -> str:
    """Say by how much a layout is slower than the best, and where most of that time goes."""
    ours, theirs = choice.timed, best.timed
    parts = {
        'matrix products': ours.products - theirs.products,
        'bound by memory': ours.memory_bound - theirs.memory_bound,
        'short kernels': ours.launches - theirs.launches,
        'collectives over model': ours.waits('model') - theirs.waits('model'),
        'collectives over data': ours.waits('data') - theirs.waits('data'),
    }
    name, most = max(parts.items(), key=lambda item: item[1])
    return f'{ours.total / theirs.total - 1:+.1%}: {name} {most / theirs.total:+.1%}'
