"""Layouts in words: what each is, why it lost, and why there is none."""

from collections.abc import Iterator, Mapping

from megajax.analysis.plan.layouts import Mesh
from megajax.analysis.plan.time import StepTime
from megajax.core.config import Config

RUNGS = {'none': '', 'optimizer': 'ZeRO-1', 'gradients': 'ZeRO-2', 'weights': 'ZeRO-3'}
# How many of the meshes that cannot be are given with their reasons: those of small tensor-parallel
# groups first.
REASONS = 8


def group_name(mesh: Mesh) -> str:
    """Return the size of a tensor-parallel group: rows x columns for a grid."""
    return f'{mesh.rows}x{mesh.model}' if mesh.rows > 1 else str(mesh.model)


def mesh_name(mesh: Mesh) -> str:
    """Return a mesh in words."""
    stages = f'stages={mesh.stages} x ' if mesh.stages > 1 else ''
    context = f'context={mesh.context} x ' if mesh.context > 1 else ''
    return f'{stages}data={mesh.data} x {context}model={group_name(mesh)}'


def describe(config: Config) -> str:
    """Return a layout in words; `stages=8x3` are 8 stages of 3 virtual ones."""
    mesh, chunks = config.mesh, config.mesh.virtual_stages
    virtual = f'stages={mesh.stages}x{chunks}' if chunks > 1 else f'stages={mesh.stages}'
    words = [mesh_name(Mesh.of(config)).replace(f'stages={mesh.stages}', virtual)]
    words += ['gpipe'] if config.mesh.stages > 1 and config.train.schedule == 'gpipe' else []
    words += ['ring'] if config.mesh.context > 1 and config.mesh.context_exchange == 'ring' else []
    words += ['sequence parallel'] if config.mesh.sequence_parallel else []
    words += [f'recompute={config.train.recompute}'] if config.train.recompute != 'none' else []
    count = config.train.microbatches
    words += [f'{count} microbatch{"es" if count > 1 else ""} of {config.microbatch_rows}']
    words += [RUNGS[config.optim.shard]] if config.optim.shard != 'none' else []
    words += [f'{config.mesh.replicas} replicas'] if config.mesh.replicas > 1 else []
    words += [config.train.overlap] if config.overlap.is_split else []
    return ', '.join(words)


def too_large(needed: int, available: int) -> str:
    """Say what a layout needs that does not fit."""
    return f'needs {needed / 1e9:.1f} GB of {available / 1e9:.1f} GB'


def why_slower(ours: StepTime, best: StepTime) -> str:
    """Say by how much a step is slower than the best, and where most of that time goes."""
    parts = {
        'matrix products': ours.products - ours.idle - (best.products - best.idle),
        'bubble': ours.idle - best.idle,
        'bound by memory': ours.memory_bound - best.memory_bound,
        'short kernels': ours.launches - best.launches,
    }
    for axis in ours.axes:
        parts[f'collectives over {axis}'] = ours.waits(axis) - best.waits(axis)
    name, most = max(parts.items(), key=lambda item: item[1])
    return f'{ours.total / best.total - 1:+.1%}: {name} {most / best.total:+.1%}'


def no_layout(num_devices: int, impossible: Mapping[Mesh, str]) -> Iterator[str]:
    """Say why no mesh of some GPUs can train a config."""
    yield f'no mesh of {num_devices} GPUs can train this config'
    reasons = [
        f'{mesh_name(mesh)}: {reason}'
        for mesh, reason in impossible.items()
        if mesh.rows == 1 and mesh.is_flat
    ]
    yield from reasons[:REASONS]
    if len(reasons) > REASONS:
        yield f'and {len(reasons) - REASONS} more meshes'
