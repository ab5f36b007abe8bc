"""The verdicts of a search: on tensor parallelism, on ZeRO and on 2-D grids."""

from megajax.analysis.plan.communication import over_tensor
from megajax.analysis.plan.layouts import Mesh, changed
from megajax.analysis.plan.search import Choice, Ranking
from megajax.analysis.plan.words import RUNGS, group_name, too_large
from megajax.core.config import Config


def on_tensor_parallelism(ranking: Ranking, available: int) -> str:
    """Say whether tensor parallelism is worth it, and by how much."""
    best = ranking.best
    without = next((choice for choice in ranking.fitting if _group(choice) == 1), None)
    with_it = next((choice for choice in ranking.fitting if _group(choice) > 1), None)
    if without and with_it:
        ratio = with_it.timed.total / without.timed.total
        waits = f'a GPU waits {_share(with_it):.1%} of it for its collectives'
        name = f'model={group_name(with_it.mesh)}'
        if best is without:
            return f'no: the fastest step with it, {name}, takes {ratio - 1:.1%} longer; {waits}'
        return (
            f'yes: a step with {name} is {1 / ratio - 1:.1%} faster than the fastest step '
            f'without it; {waits}'
        )
    if without:
        return 'no: no layout with it fits or divides'
    least = min((choice.bytes for choice in ranking.too_large if _group(choice) == 1), default=None)
    reason = next(
        (why for mesh, why in ranking.impossible.items() if mesh.rows * mesh.model == 1),
        'nothing divides',
    )
    without_it = f'the smallest layout {too_large(least, available)}' if least else reason
    return (
        f'yes: without it {without_it}; with model={group_name(best.mesh)} a GPU waits '
        f'{_share(best):.1%} of the step for its collectives'
    )


def on_sharding(ranking: Ranking, available: int) -> str:
    """Say what is sharded over data shards in the fastest layout, and why not more or less.

    The others are the same layout with another rung of ZeRO, or in other replicas, and with the
    overlap that is best for it: of each rung without replicas and with the best number of them.
    """
    best = ranking.best
    if best.mesh.data == 1:
        return 'nothing: there is one data shard'
    others = dict[tuple[str, bool], Choice]()
    for choice in ranking.all:
        config = choice.config
        if _apart_from_sharding(config) == _apart_from_sharding(best.config):
            others.setdefault((config.optim.shard, config.mesh.replicas > 1), choice)
    words = [
        f'{_sharding(choice.config)} {_loss(choice, best, available)}'
        for choice in others.values()
        if choice is not best
    ]
    return f'{_sharding(best.config)}; {", ".join(words)}'


def on_grids(ranking: Ranking) -> str | None:
    """Say whether a 2-D grid is worth it, and what it sends; None if no grid can be."""
    grid = next((choice for choice in ranking.fitting if choice.mesh.rows > 1), None)
    flat = next((choice for choice in ranking.fitting if choice.mesh.rows == 1), None)
    if grid is None:
        return None
    name, devices = group_name(grid.mesh), grid.config.mesh.tensor_parallel
    sends = f'its layers send {grid_ratio(grid.config):.2f} times the bytes of model={devices}'
    if flat is None:
        return f'yes: nothing fits or divides without one; {sends}'
    ratio = grid.timed.total / flat.timed.total
    if grid is ranking.best:
        return f'yes: {name} is {1 / ratio - 1:.1%} faster than any other; {sends}'
    return f'no: the fastest one, {name}, takes {ratio - 1:.1%} longer; {sends}'


def grid_ratio(config: Config) -> float:
    """Return the bytes that the layers send in a grid, over those of 1-D on as many devices."""
    flat = changed(config, mesh__model_rows=1, mesh__model=config.mesh.tensor_parallel)
    return _sent_by_layers(config) / _sent_by_layers(flat)


def _sent_by_layers(config: Config) -> float:
    return sum(
        collective.wire_bytes * collective.times
        for collective in over_tensor(config)
        if collective.site.name in ('attention', 'mlp')
    )


def _apart_from_sharding(config: Config) -> tuple[object, ...]:
    mesh, train = config.mesh, config.train
    return (
        *Mesh.of(config),
        *(mesh.virtual_stages, mesh.context_exchange),
        mesh.sequence_parallel,
        *(train.microbatches, train.recompute),
    )


def _sharding(config: Config) -> str:
    name = RUNGS[config.optim.shard] or 'no ZeRO'
    replicas = config.mesh.replicas
    return f'{name} in {replicas} replicas' if replicas > 1 else name


def _loss(choice: Choice, best: Choice, available: int) -> str:
    if choice.time is None:
        return too_large(choice.bytes, available)
    return f'{choice.time.total / best.timed.total - 1:+.1%}'


def _group(choice: Choice) -> int:
    return choice.config.mesh.tensor_parallel


def _share(choice: Choice) -> float:
    """The share of a step in which a GPU waits for its tensor-parallel group."""
    axes = (axis for axis in choice.timed.axes if {'row', 'model'} & {*axis.split('+')})
    return sum(choice.timed.share(axis) for axis in axes)
