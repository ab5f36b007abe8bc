"""Verdicts on pipeline and context parallelism, from a search of layouts."""

from megajax.analysis.plan.describe import describe, judged, needs
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import Choice, Ranking, memory_on, usable_memory
from megajax.base.render.units import si
from megajax.core.config import Config


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
