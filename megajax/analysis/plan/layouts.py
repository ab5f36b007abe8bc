"""List the layouts that a search compares: all choices that leave training results unchanged."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, Self

from megajax.core.config import Config
from megajax.core.config.divisors import divisors
from megajax.core.config.mesh_rules import of_context, replicas_within_hosts
from megajax.core.config.optim import ZERO_STAGES
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.context import own_over_context
from megajax.core.counts.flash import HOPPER, uses_flash
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.hardware.records import Capability

SHORTEST = 4096  # fewest tokens of a sequence on a context shard
# Most tokens in a pipeline's microbatch; more tokens lengthen the bubble without speeding up
# matmuls.
MOST_TOKENS = 32768


class Mesh(NamedTuple):
    """The number of GPUs along `data` (with replicas), in each dim of a tensor-parallel group,
    of pipeline stages, and of shards of a sequence.
    """

    data: int
    rows: int
    model: int
    stages: int = 1
    context: int = 1

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the mesh of a config."""
        mesh = config.mesh
        return cls(mesh.data, mesh.model_rows, mesh.model, mesh.stages, mesh.context)

    @property
    def is_flat(self) -> bool:
        """Return whether the mesh has neither pipeline nor context parallelism."""
        return self.stages == self.context == 1


def changed(config: Config, **keys: object) -> Config:
    """Return the config with changed values, `section__key=value`, which are not checked.

    Check the result with `incompatibilities`.
    """
    sections: dict[str, dict[str, object]] = {}
    for path, value in keys.items():
        section, key = path.split('__')
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).changed(**values) for name, values in sections.items()}
    )


def layout_key(config: Config) -> tuple[object, ...]:
    """Return the values of a layout's keys except ZeRO stage, replicas, schedule and overlap."""
    mesh, train = config.mesh, config.train
    return (
        *Mesh.of(config),
        *(mesh.virtual_stages, mesh.context_exchange, mesh.experts, mesh.sequence_parallel),
        *(train.microbatches, train.recompute),
    )


def meshes(num_devices: int, *, has_grids: bool) -> Iterator[Mesh]:
    """Yield every mesh of the devices, small tensor-parallel groups first.

    2-D groups have at most as many rows as columns: they send the fewest bytes with 0.55 sqrt(t)
    rows (`core/counts/grid.py`), and more with rows and columns exchanged.
    """
    for group in divisors(num_devices):
        for rows in divisors(group) if has_grids else (1,):
            if rows * rows <= group:
                yield Mesh(num_devices // group, rows, group // rows)


def deep_meshes(config: Config, num_devices: int, per_host: int) -> Iterator[Mesh]:
    """Yield every mesh with pipeline or context parallelism that divides the model and its batch.

    Tensor-parallel groups stay within a host. With several hosts, stages span hosts.
    """
    model, train = config.model, config.train
    lengths = train.seq_len // SHORTEST
    for stages in _repetitions(model.num_layers, config):
        for context in (n for n in divisors(train.seq_len) if n <= max(1, lengths)):
            rest, remainder = divmod(num_devices, stages * context)
            if remainder or stages == context == 1:
                continue
            for group in divisors(rest):
                data = rest // group
                rows, indivisible = divmod(train.batch_size, data)
                if group <= per_host and not indivisible and rows >= stages:
                    yield Mesh(data, 1, group, stages, context)


def _on(mesh: Mesh, config: Config) -> Config:
    return changed(
        config,
        mesh__data=mesh.data,
        mesh__model_rows=mesh.rows,
        mesh__model=mesh.model,
        mesh__stages=mesh.stages,
        mesh__context=mesh.context,
        mesh__virtual_stages=1,
        mesh__replicas=1,
        mesh__experts=1,
        train__schedule='1f1b',
    )


def _repetitions(layers: int, config: Config) -> tuple[int, ...]:
    """Return the numbers of chunks that divide `layers` into whole periods of the pattern."""
    periods, left_over = divmod(layers, len(config.model.pattern))
    return (1,) if left_over else divisors(periods)


def deep_layouts(
    config: Config,
    mesh: Mesh,
    per_host: int,
    capability: Capability | None = HOPPER,
    zero: tuple[str, ...] = ZERO_STAGES,
) -> Iterator[Config]:
    """Yield the layouts of a mesh with pipeline or context parallelism.

    They use sequence parallelism with tensor parallelism. Pipelines use ZeRO-1 or no ZeRO, unless
    the software has neither (`zero`). GPipe is excluded, because it takes at least as long as 1F1B
    and needs at least as much memory. Rings in pipelines are also excluded, because their hops
    compete with transfers between stages.
    """
    on_mesh = changed(
        _on(mesh, config),
        mesh__sequence_parallel=mesh.model > 1,
        train__overlap='none',
        train__unroll=False,
    )
    rows = config.train.batch_size // mesh.data
    most = max(1, MOST_TOKENS * mesh.context // config.train.seq_len)
    counts = [n for n in divisors(rows) if mesh.stages == 1 or rows // n <= most]
    chunks = _repetitions(layers_of_chunk(on_mesh), config) if mesh.stages > 1 else (1,)
    flash = uses_flash(config, capability)
    recomputes = ('none', 'full') if flash else ('none', 'selective', 'full')
    shards: tuple[str, ...] = ('none',)
    if mesh.data * mesh.context > 1:
        in_pipelines = tuple(shard for shard in zero if shard in ('none', 'optimizer')) or zero
        shards = in_pipelines if mesh.stages > 1 else zero
    for recompute in recomputes:
        trained = changed(on_mesh, train__recompute=recompute)
        exchanges = _exchanges(trained)
        for count, virtual, exchange in product(counts, chunks, exchanges):
            if count < mesh.stages or (virtual > 1 and count % mesh.stages):
                continue
            exchanged = changed(
                trained,
                train__microbatches=count,
                mesh__virtual_stages=virtual,
                mesh__context_exchange=exchange,
            )
            for shard in shards:
                yield from _expert_degrees(changed(exchanged, optim__shard=shard), per_host)


def _exchanges(config: Config) -> list[str]:
    """Return the exchanges of context shards to compare.

    Nothing overlaps with an all-gather or an exchange of heads, so the one that sends fewer bytes
    is compared, unless a mask of documents or padding needs more memory with heads. A ring overlaps
    with attention. A window longer than half of a shard leaves only the exchange of heads.
    """
    if config.mesh.context == 1:
        return ['gather']
    on = {name: changed(config, mesh__context_exchange=name) for name in ('gather', 'all_to_all')}
    # If neither is possible, the message is about the all-gather.
    exposed = [name for name in on if not any(of_context(on[name]))] or ['gather']
    rings = ['ring'] if config.mesh.stages == 1 and 'gather' in exposed else []
    if config.data.document_mask or config.model.is_bert:
        return exposed + rings

    def sent(exchange: str) -> float:
        of_layers = own_over_context(on[exchange], config.model.num_layers)
        return sum(collective.wire_bytes * collective.times for collective in of_layers)

    return [min(exposed, key=sent), *rings]


def layouts(
    config: Config,
    mesh: Mesh,
    per_host: int,
    capability: Capability | None = HOPPER,
    zero: tuple[str, ...] = ZERO_STAGES,
) -> Iterator[Config]:
    """Yield the layouts of one mesh; if the first is not possible, no layout of the mesh is.

    `zero` are the ZeRO stages that the software has.
    """
    if config.train.batch_size % mesh.data:
        return
    if not mesh.is_flat:
        yield from deep_layouts(config, mesh, per_host, capability, zero)
        return
    group, on_mesh = mesh.rows * mesh.model, _on(mesh, config)
    sequence_parallel = (True,) if mesh.rows > 1 else (False, True) if group > 1 else (False,)
    # With flash attention, selective recomputation has no effect.
    flash = uses_flash(config, capability)
    recomputes = ('none', 'full') if flash else ('none', 'selective', 'full')
    counts = divisors(config.train.batch_size // mesh.data)
    for microbatches, sp, recompute in product(counts, sequence_parallel, recomputes):
        trained = changed(
            on_mesh,
            mesh__sequence_parallel=sp,
            train__microbatches=microbatches,
            train__recompute=recompute,
        )
        for shard, replicas in _shards(mesh.data, group, per_host, zero):
            sharded = changed(trained, mesh__replicas=replicas, optim__shard=shard)
            for layout in _expert_degrees(sharded, per_host):
                yield from _overlaps(layout)


def _expert_degrees(config: Config, per_host: int) -> Iterator[Config]:
    """Yield a layout without expert parallelism, and with each degree to compare.

    The degrees are the largest within a host and, without pipeline and context parallelism, the
    largest possible. Layouts with replicas have no expert parallelism.
    """
    yield config
    experts, mesh = config.model.experts, config.mesh
    if experts is None or mesh.replicas > 1:
        return
    degrees = divisors(math.gcd(experts.count, mesh.data_shards))
    inside = max((n for n in degrees if n * mesh.context * mesh.model <= per_host), default=1)
    largest = degrees[-1] if mesh.stages * mesh.context == 1 else inside
    for degree in sorted({inside, largest} - {1}):
        yield changed(config, mesh__experts=degree)


def _overlaps(config: Config) -> Iterator[Config]:
    """Yield a layout with each overlap to compare: the GPU default, perhaps batch_split."""
    layout = resolved(config, on_gpu=True)
    yield layout
    is_auto = config.train.overlap == 'auto'
    is_dense = config.model.experts is None
    if is_auto and layout.train.overlap == 'none' and config.mesh.tensor_parallel > 1 and is_dense:
        yield changed(layout, train__overlap='batch_split')


def is_frugal(config: Config) -> bool:
    """Return whether a layout needs the least memory on its mesh, or nearly so.

    Every mesh that can be divided has such a layout. With context shards, rings are left out,
    because each mesh also has a layout with an all-gather or an exchange of heads.
    """
    shards = ('weights',) if config.mesh.stages == 1 else ('optimizer', 'weights')
    is_sharded = config.mesh.data * config.mesh.context > 1
    return (
        config.train.recompute == 'full'
        and config.optim.shard in (shards if is_sharded else ('none',))
        and config.mesh.replicas == 1
        and (config.train.microbatches == 1 or config.microbatch_rows <= 2 * config.mesh.model_rows)
        and (config.mesh.context == 1 or config.mesh.context_exchange != 'ring')
    )


def _shards(
    data: int, group: int, per_host: int, zero: tuple[str, ...]
) -> Iterator[tuple[str, int]]:
    """Yield each ZeRO stage with each number of replicas."""
    if data == 1 or 'none' in zero:
        yield 'none', 1
    if data > 1:
        sharded = [shard for shard in zero if shard != 'none']
        yield from product(sharded, _replicas(data, group, per_host))


def _replicas(data: int, group: int, per_host: int) -> tuple[int, ...]:
    """Return the numbers of replicas to compare.

    Each replica's data shards stay within a host if that is possible. Otherwise the number of data
    shards per replica is a power of two.
    """
    if data * group <= per_host:
        return (1,)
    within_hosts = [n for n in replicas_within_hosts(data, group, per_host) if n < data]
    if within_hosts:
        return 1, *within_hosts
    powers = (2**i for i in range(1, data.bit_length()))
    return 1, *(data // shards for shards in powers if data % shards == 0 and shards < data)
