"""Describe layouts: their names, why they are slower than the best, and why none exists."""

from collections.abc import Iterator, Mapping

from megajax.analysis.plan.layouts import Mesh
from megajax.analysis.plan.time import StepTime
from megajax.base.render.units import count
from megajax.core.config import Config

ZERO_NAMES = {'none': '', 'optimizer': 'ZeRO-1', 'gradients': 'ZeRO-2', 'weights': 'ZeRO-3'}
# Maximum number of impossible meshes that are listed with the reason, small tensor-parallel groups
# first.
REASONS = 8


def group_name(mesh: Mesh) -> str:
    """Return the size of a tensor-parallel group, as rows x columns if it is 2-D."""
    return f'{mesh.rows}x{mesh.model}' if mesh.rows > 1 else str(mesh.model)


def mesh_name(mesh: Mesh) -> str:
    """Describe a mesh."""
    stages = f'stages={mesh.stages} x ' if mesh.stages > 1 else ''
    context = f'context={mesh.context} x ' if mesh.context > 1 else ''
    return f'{stages}data={mesh.data} x {context}model={group_name(mesh)}'


def describe(config: Config) -> str:
    """Describe a layout; `stages=8x3` means 8 stages with 3 virtual stages each."""
    mesh, chunks = config.mesh, config.mesh.virtual_stages
    virtual = f'stages={mesh.stages}x{chunks}' if chunks > 1 else f'stages={mesh.stages}'
    words = [mesh_name(Mesh.of(config)).replace(f'stages={mesh.stages}', virtual)]
    words += ['gpipe'] if config.mesh.stages > 1 and config.train.schedule == 'gpipe' else []
    if config.mesh.context > 1 and config.mesh.context_exchange != 'gather':
        words.append({'ring': 'ring', 'all_to_all': 'all-to-all'}[config.mesh.context_exchange])
    words += [f'experts={config.mesh.experts}'] if config.mesh.experts > 1 else []
    words += ['sequence parallel'] if config.mesh.sequence_parallel else []
    words += [f'recompute={config.train.recompute}'] if config.train.recompute != 'none' else []
    microbatches = count(config.train.microbatches, 'microbatch', 'microbatches')
    words += [f'{microbatches} of {config.microbatch_rows}']
    words += [ZERO_NAMES[config.optim.shard]] if config.optim.shard != 'none' else []
    words += [f'{config.mesh.replicas} replicas'] if config.mesh.replicas > 1 else []
    words += [config.train.overlap] if config.overlap.is_split else []
    return ', '.join(words)


def needs(needed: int, available: int) -> str:
    """Say how much memory a layout needs, and how much a program can use."""
    return f'needs {needed / 1e9:.1f} GB per GPU ({available / 1e9:.1f} GB usable)'


def judged(name: str, one: StepTime, other: StepTime, *, what: str, than: str = '') -> str:
    """Say whether the best layout with something is worth it, against the best without it.

    `name` is its setting, such as model=4, and `than` describes the layout without it.
    """
    ratio = other.total / one.total
    if ratio <= 1:
        longer = f'{1 / ratio - 1:.1%} longer' if ratio > 1 / 1.5 else f'{1 / ratio:.2f}x as long'
        return f'not worth it: the best {what} ({name}) takes {longer}'
    faster = f'{ratio - 1:.1%} faster than' if ratio < 1.5 else f'{ratio:.2f}x as fast as'
    return f'worth it: {name} is {faster} the best layout without it{than and f" ({than})"}'


def why_slower(ours: StepTime, best: StepTime) -> str:
    """Say by how much a step is slower than the best step, and name the largest cause."""
    parts = {
        'matmul': ours.products - ours.idle - (best.products - best.idle),
        'pipeline bubble': ours.idle - best.idle,
        'memory-bound ops': ours.memory_bound - best.memory_bound,
        'launch overhead': ours.launches - best.launches,
    }
    for axis in ours.axes:
        parts[f'exposed collectives, {axis}'] = ours.waits(axis) - best.waits(axis)
    name, most = max(parts.items(), key=lambda item: item[1])
    return f'{ours.total / best.total - 1:+.1%}: {name} {most / best.total:+.1%}'


def no_layout(num_devices: int, impossible: Mapping[Mesh, str]) -> Iterator[str]:
    """Say why no mesh of this many GPUs can train a config."""
    yield f'no mesh of {num_devices} GPUs can train this config'
    reasons = [
        f'{mesh_name(mesh)}: {reason}'
        for mesh, reason in impossible.items()
        if mesh.rows == 1 and mesh.is_flat
    ]
    yield from reasons[:REASONS]
    if len(reasons) > REASONS:
        yield f'and {count(len(reasons) - REASONS, "more mesh", "more meshes")}'
