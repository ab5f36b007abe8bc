"""The layouts that a search compares: every choice that changes no number of the training run."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, Self

from megajax.config import Config
from megajax.config.divisors import divisors
from megajax.config.mesh_rules import replicas_within_hosts
from megajax.counts.flops import uses_flash


class Mesh(NamedTuple):
    """GPUs along `data`, replicas included, and in each dim of a tensor-parallel group."""

    data: int
    rows: int
    model: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the mesh of a config."""
        return cls(config.mesh.data, config.mesh.model_rows, config.mesh.model)


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


def meshes(num_devices: int, *, has_grids: bool) -> Iterator[Mesh]:
    """Yield every mesh of the devices, those of small tensor-parallel groups first.

    A grid has at most as many rows as columns: it sends least with 0.55 sqrt(t) rows
    (`counts/grid.py`), and more with their numbers exchanged.
    """
    for group in divisors(num_devices):
        for rows in divisors(group) if has_grids else (1,):
            if rows * rows <= group:
                yield Mesh(num_devices // group, rows, group // rows)


def layouts(config: Config, mesh: Mesh, per_host: int) -> Iterator[Config]:
    """Yield the layouts of one mesh; each has all requirements that the first has."""
    if config.train.batch_size % mesh.data:
        return
    group = mesh.rows * mesh.model
    on_mesh = changed(
        config,
        mesh__data=mesh.data,
        mesh__model_rows=mesh.rows,
        mesh__model=mesh.model,
        mesh__replicas=1,
        mesh__allow_model_across_hosts=config.mesh.allow_model_across_hosts or group > per_host,
    )
    sequence_parallel = (True,) if mesh.rows > 1 else (False, True) if group > 1 else (False,)
    # With flash attention, selective recomputation has nothing to do.
    recomputes = ('none', 'full') if uses_flash(config) else ('none', 'selective', 'full')
    overlaps = ('none', 'batch_split') if group > 1 else ('none',)
    counts = divisors(config.train.batch_size // mesh.data)
    for microbatches, sp, overlap, recompute in product(
        counts, sequence_parallel, overlaps, recomputes
    ):
        trained = changed(
            on_mesh,
            mesh__sequence_parallel=sp,
            train__microbatches=microbatches,
            train__recompute=recompute,
            train__overlap=overlap,
        )
        for shard, replicas in _shards(mesh.data, group, per_host):
            yield changed(trained, mesh__replicas=replicas, optim__shard=shard)


def is_frugal(config: Config) -> bool:
    """Whether a layout is one of those of its mesh that need the least memory."""
    return (
        config.train.recompute == 'full'
        and config.optim.shard == ('weights' if config.mesh.data > 1 else 'none')
        and config.mesh.replicas == 1
        and (config.train.microbatches == 1 or config.microbatch_rows <= 2 * config.mesh.model_rows)
    )


def _shards(data: int, group: int, per_host: int) -> Iterator[tuple[str, int]]:
    """Yield what ZeRO shards, and in how many replicas."""
    yield 'none', 1
    if data > 1:
        yield from product(('optimizer', 'gradients', 'weights'), _replicas(data, group, per_host))


def _replicas(data: int, group: int, per_host: int) -> tuple[int, ...]:
    """Return the numbers of replicas to compare.

    Their groups of data shards lie inside a host, if any can. Otherwise they have a power of two of
    shards.
    """
    if data * group <= per_host:
        return (1,)
    within_hosts = [n for n in replicas_within_hosts(data, group, per_host) if n < data]
    if within_hosts:
        return 1, *within_hosts
    powers = (2**i for i in range(1, data.bit_length()))
    return 1, *(data // shards for shards in powers if data % shards == 0 and shards < data)
