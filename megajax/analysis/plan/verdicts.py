"""Verdicts on tensor and expert parallelism, and on ZeRO, from a search of layouts."""

from megajax.analysis.plan.communication import over_tensor
from megajax.analysis.plan.describe import ZERO_STAGES, group_name, judged, needs
from megajax.analysis.plan.layouts import changed, layout_key
from megajax.analysis.plan.search import Choice, Ranking
from megajax.core.config import Config


def on_tensor_parallelism(ranking: Ranking, available: int) -> str:
    """Say whether tensor parallelism is worth it, and by how much it changes the time."""
    best = ranking.best
    without = ranking.fastest(lambda choice: _group(choice) == 1)
    with_it = ranking.fastest(lambda choice: _group(choice) > 1)
    if without and with_it:
        name, exposed = f'model={group_name(with_it.mesh)}', f'{_share(with_it):.1%} of its step'
        verdict = judged(name, with_it.timed, without.timed, what='layout with it')
        return f'{verdict}; {exposed} is exposed TP communication'
    if without:
        return 'not possible: no layout with it fits or divides the model and the batch'
    least = ranking.smallest(lambda choice: _group(choice) == 1)
    reason = next(
        (why for mesh, why in ranking.impossible.items() if mesh.rows * mesh.model == 1),
        'no layout divides the model and the batch',
    )
    without_it = f'the smallest layout {needs(least.bytes, available)}' if least else reason
    return (
        f'required: without it {without_it}; with model={group_name(best.mesh)}, '
        f'{_share(best):.1%} of the step is exposed TP communication'
    )


def on_sharding(ranking: Ranking) -> str:
    """Name the ZeRO stage of the fastest layout, and what every other stage would cost.

    The other layouts differ from the fastest only in ZeRO stage, replicas and overlap. Each stage
    is shown without replicas, and with the best number of them.
    """
    best = ranking.best
    if best.mesh.data == 1:
        return 'none: mesh.data=1'
    others = dict[tuple[str, bool], Choice]()
    for choice in ranking.all:
        config = choice.config
        if layout_key(config) == layout_key(best.config):
            others.setdefault((config.optim.shard, config.mesh.replicas > 1), choice)
    words = [
        f'{_sharding(choice.config)}: {_loss(choice, best)}'
        for choice in others.values()
        if choice is not best
    ]
    return '; '.join(filter(None, (_sharding(best.config), ', '.join(words))))


def on_experts(ranking: Ranking) -> str | None:
    """Say whether expert parallelism is worth it; None if no layout with it fits."""
    sharded = ranking.fastest(lambda choice: choice.config.mesh.experts > 1)
    whole = ranking.fastest(lambda choice: choice.config.mesh.experts == 1)
    if sharded is None:
        return None
    name = f'experts={sharded.config.mesh.experts}'
    waits = sum(x.exposed for x in sharded.timed.transfers if x.site == 'experts')
    verdict = (
        'required: no layout without it fits'
        if whole is None
        else judged(name, sharded.timed, whole.timed, what='layout with it')
    )
    share = waits / sharded.timed.total
    return f'{verdict}; {share:.1%} of its step is exposed communication of tokens'


def on_grids(ranking: Ranking) -> str | None:
    """Say whether 2-D tensor parallelism is worth it, and how much it sends; None if impossible."""
    grid = ranking.fastest(lambda choice: choice.mesh.rows > 1)
    flat = ranking.fastest(lambda choice: choice.mesh.rows == 1)
    if grid is None:
        return None
    name, devices = group_name(grid.mesh), grid.config.mesh.tensor_parallel
    sends = f'its layers send {grid_ratio(grid.config):.2f}x the bytes of model={devices}'
    if flat is None:
        return f'required: without it no layout fits or divides; {name}: {sends}'
    return f'{judged(name, grid.timed, flat.timed, what="2-D layout")}; {sends}'


def grid_ratio(config: Config) -> float:
    """Return the bytes that the layers send, relative to 1-D tensor parallelism on as many GPUs."""
    flat = changed(config, mesh__model_rows=1, mesh__model=config.mesh.tensor_parallel)
    return _sent_by_layers(config) / _sent_by_layers(flat)


def _sent_by_layers(config: Config) -> float:
    return sum(
        collective.wire_bytes * collective.times
        for collective in over_tensor(config)
        if collective.site.name in ('attention', 'mlp')
    )


def _sharding(config: Config) -> str:
    name = ZERO_STAGES[config.optim.shard] or 'no ZeRO'
    replicas = config.mesh.replicas
    return f'{name} in {replicas} replicas' if replicas > 1 else name


def _loss(choice: Choice, best: Choice) -> str:
    if choice.time is not None:
        return f'{choice.time.total / best.timed.total - 1:+.1%}'
    if choice.at_least is not None:
        return f'at least {choice.at_least / best.timed.total - 1:+.1%}'
    return f'does not fit ({choice.bytes / 1e9:.1f} GB)'


def _group(choice: Choice) -> int:
    return choice.config.mesh.tensor_parallel


def _share(choice: Choice) -> float:
    """Return the share of a step that is exposed communication of tensor parallelism."""
    axes = (axis for axis in choice.timed.axes if {'row', 'model'} & {*axis.split('+')})
    return sum(choice.timed.share(axis) for axis in axes)
