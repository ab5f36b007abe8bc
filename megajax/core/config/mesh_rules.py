"""The rules of the mesh: replicas, grids, stages and context shards."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides, divisors, multiples, nearest

if TYPE_CHECKING:
    from megajax.core.config.schema import Config


def of_replicas(config: 'Config') -> Iterator[Problem]:
    """Yield what replicas of the data shards need."""
    mesh = config.mesh
    yield from divides('mesh.data', mesh.data, 'mesh.replicas', mesh.replicas)


def of_grid(config: 'Config') -> Iterator[Problem]:
    """Yield what the rows of a 2-D tensor-parallel grid need."""
    model, mesh, rows = config.model, config.mesh, config.mesh.model_rows
    if not mesh.is_grid:
        return
    if not mesh.sequence_parallel:
        message = (
            f'{rows} needs mesh.sequence_parallel=true: a grid shards the residual stream over '
            'its rows and its columns; set it, or mesh.model_rows=1'
        )
        yield Problem(path='mesh.model_rows', message=message, others=('mesh.sequence_parallel',))
    yield from divides('model.hidden_size', model.hidden_size, 'mesh.model_rows', rows)
    if config.optim.shard == 'none' or model.hidden_size % rows or mesh.data % mesh.replicas:
        return
    part, shards = model.hidden_size // rows, mesh.data_shards
    if part % shards:
        near = nearest([n * mesh.replicas for n in divisors(part)], mesh.data)
        message = (
            f'{model.hidden_size} over mesh.model_rows={rows} is {part}, not a multiple of the '
            f'{shards} data shards that optim.shard={config.optim.shard} divides it among; '
            f'use mesh.data {near}'
        )
        yield Problem(
            path='model.hidden_size',
            message=message,
            others=('mesh.model_rows', 'mesh.data', 'optim.shard'),
        )


def of_stages(config: 'Config') -> Iterator[Problem]:
    """Yield what the stages of a pipeline need."""
    mesh, train, layers = config.mesh, config.train, config.model.num_layers
    stages, chunks, count = mesh.stages, mesh.virtual_stages, train.microbatches
    if stages == 1:
        if chunks > 1:
            message = f'{chunks} are parts of a stage, and mesh.stages=1 has no pipeline; use 1'
            yield Problem(path='mesh.virtual_stages', message=message, others=('mesh.stages',))
        return
    if layers % (stages * chunks):
        fits = [n for n in divisors(layers) if layers % (n * chunks) == 0]
        ways = [f'mesh.stages {nearest(fits, stages)}'] if max(fits, default=1) > 1 else []
        if chunks > 1 and layers % stages == 0:
            ways.append(f'mesh.virtual_stages {nearest(divisors(layers // stages), chunks)}')
        ways.append(f'model.num_layers {multiples(layers, stages * chunks)}')
        by = f'mesh.stages={stages}' + (f' x mesh.virtual_stages={chunks}' if chunks > 1 else '')
        total = f' = {stages * chunks}' if chunks > 1 else ''
        yield Problem(
            path='model.num_layers',
            message=f'{layers} is not a multiple of {by}{total}; use {", or ".join(ways)}',
            others=('mesh.stages', 'mesh.virtual_stages'),
        )
    if count < stages:
        message = (
            f'{count} leaves some of mesh.stages={stages} idle in every tick; '
            f'use at least {stages}, or mesh.stages at most {count}'
        )
        yield Problem(path='train.microbatches', message=message, others=('mesh.stages',))
    elif chunks > 1 and count % stages:
        message = (
            f'{count} is not a multiple of mesh.stages={stages}, and with mesh.virtual_stages='
            f'{chunks} groups of as many microbatches go through all chunks; '
            f'use {multiples(count, stages)}, or mesh.virtual_stages=1'
        )
        yield Problem(
            path='train.microbatches',
            message=message,
            others=('mesh.stages', 'mesh.virtual_stages'),
        )
    if config.optim.shard in ('gradients', 'weights'):
        sent = 8 * count if config.optim.shard == 'weights' else 2 + 4 * count
        message = (
            f'{config.optim.shard} would send about {sent} bytes a parameter and step over data, '
            f'some in each of train.microbatches={count} microbatches, where optimizer sends 6; '
            f'and mesh.stages={stages} has divided the state already; use optimizer or none'
        )
        yield Problem(path='optim.shard', message=message, others=('mesh.stages',))


def of_context(config: 'Config') -> Iterator[Problem]:
    """Yield what the context shards of a sequence need."""
    mesh, length = config.mesh, config.train.seq_len
    if mesh.context == 1:
        return
    tensor = mesh.model if mesh.sequence_parallel else 1
    divisor = mesh.context * math.lcm(2, tensor)
    if length % divisor:
        why = f'two chunks for each of mesh.context={mesh.context} shards'
        if tensor > 1:
            why += f', and equal parts for mesh.model={tensor} under mesh.sequence_parallel'
        yield Problem(
            path='train.seq_len',
            message=f'{length} is not a multiple of {divisor}: {why}; '
            f'use {multiples(length, divisor)}',
            others=('mesh.context', 'mesh.model', 'mesh.sequence_parallel'),
        )


def replicas_within_hosts(data: int, tensor_parallel: int, devices_per_host: int) -> list[int]:
    """Return the values of mesh.replicas whose groups of data shards each lie inside a host."""
    return [
        replicas
        for replicas in divisors(data)
        if devices_per_host % (data // replicas * tensor_parallel) == 0
    ]
