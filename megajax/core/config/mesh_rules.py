"""Check the mesh: replicas, 2-D tensor parallelism, pipeline stages and context parallelism."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides, divisors, multiples, nearest
from megajax.core.config.tensor_rules import row_degrees

if TYPE_CHECKING:
    from megajax.core.config.schema import Config


def of_replicas(config: 'Config') -> Iterator[Problem]:
    """Check the replicas of the data shards (HSDP)."""
    mesh = config.mesh
    yield from divides('mesh.data', mesh.data, 'mesh.replicas', mesh.replicas)


def of_grid(config: 'Config') -> Iterator[Problem]:
    """Check 2-D tensor parallelism."""
    model, mesh, rows = config.model, config.mesh, config.mesh.model_rows
    if not mesh.is_grid:
        return
    if not mesh.sequence_parallel:
        message = (
            f'{rows} needs mesh.sequence_parallel=true, because 2-D tensor parallelism shards the '
            'residual stream over rows and columns; set it, or mesh.model_rows=1'
        )
        yield Problem('mesh.model_rows', message, others=('mesh.sequence_parallel',))
    allowed = row_degrees(config) if model.hidden_size % rows else None
    size = model.hidden_size
    yield from divides('model.hidden_size', size, 'mesh.model_rows', rows, allowed=allowed)
    if config.optim.shard == 'none' or model.hidden_size % rows or mesh.data % mesh.replicas:
        return
    part, shards = model.hidden_size // rows, mesh.data_shards
    if part % shards:
        near = nearest([n * mesh.replicas for n in divisors(part)], mesh.data)
        message = (
            f'{model.hidden_size} over mesh.model_rows={rows} is {part}, not a multiple of '
            f'{shards} data shards, which optim.shard={config.optim.shard} needs; '
            f'use mesh.data {near}'
        )
        yield Problem(
            'model.hidden_size', message, others=('mesh.model_rows', 'mesh.data', 'optim.shard')
        )


def of_stages(config: 'Config') -> Iterator[Problem]:
    """Check the chunks of pipeline stages and their ZeRO stage."""
    mesh, train, layers = config.mesh, config.train, config.model.num_layers
    stages, chunks, count = mesh.stages, mesh.virtual_stages, train.microbatches
    if stages == 1:
        if chunks > 1:
            message = f'{chunks} needs pipeline parallelism, and mesh.stages=1; use 1'
            yield Problem('mesh.virtual_stages', message, others=('mesh.stages',))
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
            'model.num_layers',
            f'{layers} is not a multiple of {by}{total}; use {", or ".join(ways)}',
            others=('mesh.stages', 'mesh.virtual_stages'),
        )
    if config.optim.shard in ('gradients', 'weights'):
        sent = 8 * count if config.optim.shard == 'weights' else 2 + 4 * count
        message = (
            f'{config.optim.shard} is not supported with pipeline parallelism: with '
            f'train.microbatches={count} it would send about {sent} bytes per parameter and step '
            'over data, and optimizer sends 6; use optimizer or none'
        )
        yield Problem('optim.shard', message, others=('mesh.stages',))


def of_microbatches(config: 'Config') -> Iterator[Problem]:
    """Check that pipeline stages have enough microbatches."""
    mesh, count = config.mesh, config.train.microbatches
    stages, chunks = mesh.stages, mesh.virtual_stages
    if count < stages:
        message = (
            f'{count} is fewer than mesh.stages={stages}, so some stages would always idle; '
            f'use at least {stages}, or mesh.stages at most {count}'
        )
        yield Problem('train.microbatches', message, others=('mesh.stages',))
    elif chunks > 1 and count % stages:
        message = (
            f'{count} is not a multiple of mesh.stages={stages}, which mesh.virtual_stages='
            f'{chunks} needs; '
            f'use {multiples(count, stages)}, or mesh.virtual_stages=1'
        )
        yield Problem('train.microbatches', message, others=('mesh.stages', 'mesh.virtual_stages'))


def of_context(config: 'Config') -> Iterator[Problem]:
    """Check the sequence length, and the windows or heads, of context parallelism.

    A window may reach back only one chunk, unless the shards exchange heads. Then the heads must be
    divisible among them.
    """
    mesh, model, length = config.mesh, config.model, config.train.seq_len
    if mesh.context == 1:
        return
    tensor = mesh.model if mesh.sequence_parallel else 1
    divisor = mesh.context * math.lcm(2, tensor)
    if length % divisor:
        why = f'mesh.context={mesh.context} needs two chunks per shard'
        if tensor > 1:
            why += f', and mesh.sequence_parallel splits each over mesh.model={tensor}'
        yield Problem(
            'train.seq_len',
            f'{length} is not a multiple of {divisor}: {why}; use {multiples(length, divisor)}',
            others=('mesh.context', 'mesh.model', 'mesh.sequence_parallel'),
        )
        return
    if mesh.exchanges_heads:
        yield from _heads_of_shards(config)
        return
    chunk = length // (2 * mesh.context)
    windows = (layer.window or 0 for layer in model.pattern)
    longest = max((window for window in windows if window < length), default=0)
    if longest > chunk:
        shorter = [n for n in divisors(length // math.lcm(2, tensor)) if 2 * n * longest <= length]
        longer = math.ceil(2 * mesh.context * longest / divisor) * divisor
        by_heads = '' if any(_heads_of_shards(config)) else ' mesh.context_exchange=all_to_all,'
        yield Problem(
            'model.window' if longest == model.window else 'model.layers',
            f'a window of {longest} tokens is longer than half of a context shard, '
            f'{chunk} tokens with mesh.context={mesh.context} and train.seq_len={length}; '
            f'use at most {chunk},{by_heads} mesh.context {max(shorter, default=1)}, or '
            f'train.seq_len at least {longer}',
            others=('mesh.context', 'mesh.context_exchange', 'train.seq_len'),
        )


def _heads_of_shards(config: 'Config') -> Iterator[Problem]:
    """Check that each device gets whole key/value heads."""
    mesh, heads = config.mesh, config.model.num_kv_heads
    if heads % (mesh.context * mesh.model) == 0:
        return
    of_model = '' if mesh.model == 1 else f' x mesh.model={mesh.model}'
    fits = [n for n in divisors(heads // mesh.model) if n > 1] if heads % mesh.model == 0 else []
    ways = [f'mesh.context {nearest(fits, mesh.context)}'] if fits else []
    ways.append('mesh.context_exchange gather or ring')
    yield Problem(
        'mesh.context_exchange',
        f'all_to_all needs whole key/value heads on each device, but model.num_kv_heads='
        f'{heads} is not a multiple of mesh.context={mesh.context}{of_model}; '
        f'use {", or ".join(ways)}',
        others=('mesh.context', 'mesh.model', 'model.num_kv_heads'),
    )


def replicas_within_hosts(data: int, tensor_parallel: int, devices_per_host: int) -> list[int]:
    """Return the values of mesh.replicas with which each group of data shards fits in one host."""
    return [
        replicas
        for replicas in divisors(data)
        if devices_per_host % (data // replicas * tensor_parallel) == 0
    ]
