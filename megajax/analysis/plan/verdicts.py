"""Verdicts on the axes of a mesh and ZeRO, from a search of layouts, and on sliding windows."""

from megajax.analysis.plan.communication import over_tensor
from megajax.analysis.plan.describe import ZERO_NAMES, describe, group_name, judged, needs
from megajax.analysis.plan.layouts import changed, layout_key
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Software
from megajax.analysis.plan.search import Choice, Ranking, memory_on, usable_memory
from megajax.analysis.plan.time import StepTime, step_time
from megajax.base.render.units import si
from megajax.core.config import Config
from megajax.core.counts.products import products


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
    name = ZERO_NAMES[config.optim.shard] or 'no ZeRO'
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


def bubble(config: Config) -> float:
    """Return the ratio of a stage's idle ticks to its busy ticks, (p - 1) / (v m)."""
    mesh = config.mesh
    return (mesh.stages - 1) / (mesh.virtual_stages * config.train.microbatches)


def on_pipelines(ranking: Ranking, cluster: Cluster) -> str | None:
    """Say whether pipeline parallelism is worth it, and why not; None if it is not possible."""
    available = usable_memory(cluster)
    piped = ranking.fastest(lambda choice: choice.mesh.stages > 1)
    flat = ranking.fastest(lambda choice: choice.mesh.stages == 1)
    if piped is None:
        return _too_large(ranking.smallest(lambda choice: choice.mesh.stages > 1), available)
    if flat is None:
        least = ranking.smallest(lambda choice: choice.mesh.stages == 1)
        why = needs(least.bytes, available) if least else 'does not divide'
        verdict = f'required: without it the smallest layout {why}; with {_stages(piped)}'
    else:
        name = f'stages={piped.mesh.stages}'
        verdict = judged(name, piped.timed, flat.timed, what='pipeline', than=describe(flat.config))
    return '; '.join([verdict, _bubbles(piped), _crossing(piped), _memory(piped, cluster)])


def on_contexts(ranking: Ranking, available: int) -> str | None:
    """Say whether context parallelism is worth it; None if it is not possible."""
    sharded = ranking.fastest(lambda choice: choice.mesh.context > 1)
    whole = ranking.fastest(lambda choice: choice.mesh.context == 1)
    if sharded is None:
        return _too_large(ranking.smallest(lambda choice: choice.mesh.context > 1), available)
    waits = sum(sharded.timed.share(axis) for axis in sharded.timed.axes if axis == 'context')
    if whole is None:
        least = ranking.smallest(lambda choice: choice.mesh.context == 1)
        why = needs(least.bytes, available) if least else 'does not divide'
        verdict = f'required: without it the smallest layout {why}'
    else:
        name, than = f'context={sharded.mesh.context}', describe(whole.config)
        verdict = judged(name, sharded.timed, whole.timed, what='layout with it', than=than)
    return f'{verdict}; {waits:.1%} of its step is exposed communication of keys and values'


def _too_large(least: Choice | None, available: int) -> str | None:
    if least is None:
        return None
    return f'does not fit: the smallest layout {needs(least.bytes, available)}'


def _stages(choice: Choice) -> str:
    mesh = choice.config.mesh
    chunks = f' x {mesh.virtual_stages} virtual' if mesh.virtual_stages > 1 else ''
    return f'stages={mesh.stages}{chunks}'


def _bubbles(choice: Choice) -> str:
    """Say how large a pipeline's bubble is, and how large without virtual stages."""
    text = f'bubble {bubble(choice.config):.1%}'
    if choice.config.mesh.virtual_stages == 1:
        return text
    plain = changed(choice.config, mesh__virtual_stages=1)
    return f'{text} ({bubble(plain):.1%} without virtual stages)'


def _crossing(choice: Choice) -> str:
    """Say how much each GPU sends to the next stage, and how much of this time is exposed."""
    sent = [transfer for transfer in choice.timed.transfers if transfer.axis == 'stage']
    size = sum(transfer.wire_bytes for transfer in sent)
    link = 'inter-host' if any(transfer.crosses_hosts for transfer in sent) else 'intra-host'
    waits = choice.timed.share('stage')
    return f'each GPU sends {si(size)} to its neighbors ({link}), {waits:.1%} of the step exposed'


def _memory(piped: Choice, cluster: Cluster) -> str:
    """Say how much memory a pipeline needs, and how much with the GPipe schedule."""
    by_gpipe = changed(piped.config, train__schedule='gpipe')
    needed = memory_on(by_gpipe, cluster).total
    fits = ' (does not fit)' if needed > usable_memory(cluster) else ''
    return f'memory {piped.bytes / 1e9:.1f} GB with 1f1b, {needed / 1e9:.1f} GB with gpipe{fits}'


def on_windows(config: Config, time: StepTime, cluster: Cluster, program: Software) -> str | None:
    """Say how much windows save in attention and in the step time; None without windows.

    The comparison assumes that a causal kernel without a window also skips masked scores.
    """
    if not config.model.has_windows:
        return None
    without = _without_windows(config)
    flash = program.uses_flash(config, cluster.hardware.compute_capability)
    ours, theirs = (_attention_flops(each, flash=flash) / 1e12 for each in (config, without))
    ratio = step_time(without, cluster, program).total / time.total
    slower = f'{ratio - 1:.1%} longer' if ratio < 1.5 else f'{ratio:.2f}x as long'
    layers = config.model.layer_configs
    with_window = sum(layer.window is not None for layer in layers)
    return (
        f'in {with_window} of {len(layers)} layers: attention takes {ours:,.1f} TFLOP per '
        f'GPU and step, {theirs:,.1f} without windows; without them the step takes {slower}'
    )


def _without_windows(config: Config) -> Config:
    """Return the config with the same layers, but no windows."""
    model = config.model
    layers = tuple(
        entry.model_copy(update={'window': None}) if entry.window else entry
        for entry in model.layers
    )
    whole = model.model_copy(update={'window': None, 'layers': layers})
    return config.model_copy(update={'model': whole})


def _attention_flops(config: Config, *, flash: bool) -> float:
    """Return the FLOPs of attention in a step on a GPU; a causal flash kernel skips half of them.

    Not every block is causal: blocks of other context shards and a vision encoder have no mask.
    """
    return sum(
        product.times * product.flops / (2 if product.flash and product.is_causal else 1)
        for product in products(config, flash=flash)
        if product.where == 'attention'
    )
