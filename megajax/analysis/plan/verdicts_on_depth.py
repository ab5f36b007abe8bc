"""The verdicts of a search on pipelines and on context shards."""

from collections.abc import Callable, Iterator

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.search import Choice, Ranking
from megajax.analysis.plan.words import describe, too_large
from megajax.base.render.units import si
from megajax.core.config import Config


def bubble(config: Config) -> float:
    """Return the idle ticks of a stage over its others, (p - 1) / (v m)."""
    mesh = config.mesh
    return (mesh.stages - 1) / (mesh.virtual_stages * config.train.microbatches)


def on_pipelines(ranking: Ranking, available: int) -> str | None:
    """Say whether a pipeline is worth it, and why not; None if none can be."""
    piped, flat = _split(ranking, lambda choice: choice.mesh.stages > 1)
    if piped is None:
        least = _smallest(ranking, lambda choice: choice.mesh.stages > 1)
        return None if least is None else f'no: the smallest {too_large(least.bytes, available)}'
    words = [f'its bubble is {bubble(piped.config):.1%}', *_crossing(piped)]
    if flat is None:
        least = _smallest(ranking, lambda choice: choice.mesh.stages == 1)
        why = too_large(least.bytes, available) if least else 'does not divide'
        verdict = f'yes: without one the smallest layout {why}; with {_stages(piped)}'
    else:
        verdict = _compared('stages', piped, flat, ranking)
    return '; '.join([verdict, ', '.join(words), *_alternatives(ranking, piped, available)])


def on_contexts(ranking: Ranking, available: int) -> str | None:
    """Say whether context shards are worth it; None if none can be."""
    sharded, whole = _split(ranking, lambda choice: choice.mesh.context > 1)
    if sharded is None:
        least = _smallest(ranking, lambda choice: choice.mesh.context > 1)
        return None if least is None else f'no: the smallest {too_large(least.bytes, available)}'
    waits = sum(sharded.timed.share(axis) for axis in sharded.timed.axes if axis == 'context')
    if whole is None:
        least = _smallest(ranking, lambda choice: choice.mesh.context == 1)
        why = too_large(least.bytes, available) if least else 'does not divide'
        verdict = f'yes: without them the smallest layout {why}'
    else:
        verdict = _compared('context', sharded, whole, ranking)
    return f'{verdict}; a GPU waits {waits:.1%} of it for keys and values'


def _split(ranking: Ranking, has: Callable[[Choice], bool]) -> tuple[Choice | None, Choice | None]:
    """Return the fastest layout that has something, and the fastest without it."""
    return (
        next((choice for choice in ranking.fitting if has(choice)), None),
        next((choice for choice in ranking.fitting if not has(choice)), None),
    )


def _smallest(ranking: Ranking, has: Callable[[Choice], bool]) -> Choice | None:
    return min(
        (choice for choice in ranking.too_large if has(choice)),
        key=lambda choice: choice.bytes,
        default=None,
    )


def _compared(name: str, one: Choice, other: Choice, ranking: Ranking) -> str:
    ratio = one.timed.total / other.timed.total
    if one is ranking.best:
        return (
            f'yes: {1 / ratio - 1:.1%} faster than the fastest without ({describe(other.config)})'
        )
    return f'no: the fastest, {name}={getattr(one.mesh, name)}, takes {ratio - 1:.1%} longer'


def _stages(choice: Choice) -> str:
    mesh = choice.config.mesh
    chunks = f' x {mesh.virtual_stages} virtual' if mesh.virtual_stages > 1 else ''
    return f'stages={mesh.stages}{chunks}'


def _crossing(choice: Choice) -> Iterator[str]:
    """Yield what a GPU sends along stages, and waits for."""
    sent = [transfer for transfer in choice.timed.transfers if transfer.axis == 'stage']
    size = sum(transfer.wire_bytes for transfer in sent)
    where = 'across hosts' if any(transfer.crosses_hosts for transfer in sent) else 'inside a host'
    waits = choice.timed.share('stage')
    yield f'a GPU sends {si(size)} {where} along stages and waits {waits:.1%} of the step for it'


def _alternatives(ranking: Ranking, piped: Choice, available: int) -> Iterator[str]:
    """Yield what the same pipeline would need or take by GPipe, and with fewer virtual stages."""
    by_gpipe = changed(piped.config, train__schedule='gpipe')
    needed = memory(by_gpipe, capacity_bytes=available).total
    fits = too_large(needed, available) if needed > available else f'needs {needed / 1e9:.1f} GB'
    yield f'by gpipe it {fits} where 1f1b needs {piped.bytes / 1e9:.1f} GB'
    if piped.config.mesh.virtual_stages > 1:
        plain = changed(piped.config, mesh__virtual_stages=1)
        yield f'without virtual stages the bubble is {bubble(plain):.1%}'
