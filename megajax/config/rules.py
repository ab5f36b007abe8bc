"""The rules between keys of a config, checked before jax is imported or anything compiles."""

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megajax.config.combinations import excluded
from megajax.config.errors import Problem

if TYPE_CHECKING:
    from megajax.config.schema import Config


SHORTEST_PAIR = 16  # minimum tokens of a BERT sequence
LARGEST_LOSS_SCALE = 2**32  # Megatron's initial loss scale


def incompatibilities(config: 'Config') -> list[Problem]:
    """Return a problem for every pair of keys that cannot work together."""
    rules = (
        _heads,
        _rope,
        _kv_heads,
        _widths,
        _batches,
        _replicas,
        _grid,
        _stages,
        _context,
        _loss_scale,
        _optimizer,
        _profile,
        _data,
        _masked,
    )
    return [*(problem for rule in rules for problem in rule(config)), *excluded(config)]


def _heads(config: 'Config') -> Iterator[Problem]:
    model, shards = config.model, config.mesh.model
    if 'head_dim' not in model.model_fields_set and model.hidden_size % model.num_heads:
        near = _multiples(model.hidden_size, model.num_heads)
        message = (
            f'{model.hidden_size} is not a multiple of model.num_heads={model.num_heads}; '
            f'use {near}, or set model.head_dim'
        )
        yield Problem(
            path='model.hidden_size', message=message, others=('model.num_heads', 'model.head_dim')
        )
    yield from _divides(
        'model.num_heads', model.num_heads, 'model.num_kv_heads', model.num_kv_heads
    )
    yield from _divides('model.num_heads', model.num_heads, 'mesh.model', shards)
    if model.position == 'rope' and model.head_dim % 2:
        message = (
            f'{model.head_dim} is odd, and model.position=rope rotates pairs; '
            f'use {_multiples(model.head_dim, 2)}'
        )
        yield Problem(path='model.head_dim', message=message, others=('model.position',))


def _rope(config: 'Config') -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling is None:
        return
    if scaling.type == 'llama3' and scaling.high_freq_factor <= scaling.low_freq_factor:
        message = (
            f'high_freq_factor {scaling.high_freq_factor} must be above '
            f'low_freq_factor {scaling.low_freq_factor}'
        )
        yield Problem(path='model.rope_scaling', message=message)


def _kv_heads(config: 'Config') -> Iterator[Problem]:
    model, shards = config.model, config.mesh.model
    if model.num_kv_heads == model.num_heads:  # `_heads` has checked num_heads
        return
    if config.mesh.is_grid:
        if model.num_kv_heads % shards:
            message = (
                f'{model.num_kv_heads} is not a multiple of mesh.model={shards}, and the columns '
                f'of a grid (mesh.model_rows={config.mesh.model_rows}) have complete key/value '
                f'heads; use mesh.model {_nearest(divisors(model.num_kv_heads), shards)}, '
                'or mesh.model_rows=1'
            )
            yield Problem(
                path='model.num_kv_heads', message=message, others=('mesh.model', 'mesh.model_rows')
            )
        return

    def fits(n: int) -> bool:
        return model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0

    if not fits(shards):
        near = _nearest([n for n in range(1, 2 * model.num_kv_heads + 1) if fits(n)], shards)
        message = (
            f'{model.num_kv_heads} is neither a multiple nor a divisor of mesh.model={shards}; '
            f'use mesh.model {near}'
        )
        yield Problem(path='model.num_kv_heads', message=message, others=('mesh.model',))
    # With fewer key/value heads than shards the fused QKV is sharded over head_dim.
    elif shards > model.num_kv_heads and model.head_dim % shards:
        near = _multiples(model.head_dim, shards)
        message = (
            f'{model.head_dim} is not a multiple of mesh.model={shards}, which has to divide it '
            f'where it exceeds model.num_kv_heads={model.num_kv_heads}; '
            f'use {near}, or mesh.model at most {model.num_kv_heads}'
        )
        yield Problem(
            path='model.head_dim', message=message, others=('mesh.model', 'model.num_kv_heads')
        )


def _widths(config: 'Config') -> Iterator[Problem]:
    model, shards, seq_len = config.model, config.mesh.model, config.train.seq_len
    yield from _divides('model.ffn_size', model.ffn_size, 'mesh.model', shards)
    yield from _vocabulary(config)
    if seq_len > model.max_seq_len:
        message = (
            f'{seq_len} exceeds model.max_seq_len={model.max_seq_len}; '
            f'use at most {model.max_seq_len}, or raise model.max_seq_len'
        )
        yield Problem(path='train.seq_len', message=message, others=('model.max_seq_len',))
    if config.mesh.sequence_parallel and config.mesh.context == 1:
        yield from _divides(
            'train.seq_len', seq_len, 'mesh.model', shards, under='mesh.sequence_parallel'
        )


def _vocabulary(config: 'Config') -> Iterator[Problem]:
    """Yield what the vocabulary needs, which a grid shards over its rows and its columns."""
    model, mesh = config.model, config.mesh
    padded, rows = model.padded_vocab_size, mesh.model_rows
    if padded % rows:
        by, key = f'mesh.model_rows={rows}', 'mesh.model_rows'
        near = _nearest(divisors(padded), rows)
    elif padded % mesh.tensor_parallel:
        by, key = f'mesh.model={mesh.model}', 'mesh.model'
        near = _nearest(divisors(padded // rows), mesh.model)
        if mesh.is_grid:
            by = f'mesh.model_rows={rows} x {by} = {mesh.tensor_parallel}'
    else:
        return
    message = (
        f'{model.vocab_size} is padded to {padded}, which {by} does not divide; use {key} {near}'
    )
    yield Problem(path='model.vocab_size', message=message, others=(key,))


def _batches(config: 'Config') -> Iterator[Problem]:
    train, data, rows = config.train, config.mesh.data, config.mesh.model_rows
    batch_size, shares = train.batch_size, data * train.microbatches
    if batch_size % shares:
        message = (
            f'{batch_size} is not a multiple of mesh.data={data} x '
            f'train.microbatches={train.microbatches} = {shares}; '
            f'use {_multiples(batch_size, shares)}'
        )
        yield Problem(
            path='train.batch_size', message=message, others=('mesh.data', 'train.microbatches')
        )
        return
    reasons = {}
    if train.overlap == 'batch_split':
        reasons['train.overlap'] = 'train.overlap=batch_split cuts them in half'
    if rows > 1:
        reasons['mesh.model_rows'] = f'mesh.model_rows={rows} shards them in attention and MLP'
    parts = rows * (2 if 'train.overlap' in reasons else 1)
    if config.microbatch_rows % parts:
        message = (
            f'{batch_size} gives each data shard {config.microbatch_rows} rows of a microbatch, '
            f'and {" and ".join(reasons.values())}; use {_multiples(batch_size, parts * shares)}'
        )
        if parts == 2 and 'train.overlap' in reasons:
            message += ', or train.overlap=none'
        yield Problem(
            path='train.batch_size',
            message=message,
            others=(*reasons, 'mesh.data', 'train.microbatches'),
        )


def _loss_scale(config: 'Config') -> Iterator[Problem]:
    train, path = config.train, 'train.loss_scale'
    if train.loss_scale == 'auto':
        return
    if train.dtype != 'float16':
        message = (
            f'{train.loss_scale:g}, and only float16 has a loss scale, '
            f'not train.dtype={train.dtype}; leave it out'
        )
        yield Problem(path=path, message=message, others=('train.dtype',))
    below = min(2 ** max(math.floor(math.log2(train.loss_scale)), 0), LARGEST_LOSS_SCALE)
    if train.loss_scale != below:
        near = f'{below} or {2 * below}' if below < train.loss_scale < LARGEST_LOSS_SCALE else below
        message = (
            f'{train.loss_scale:g} is not a power of two from 1 to {LARGEST_LOSS_SCALE}, '
            f'by which nothing is rounded; use {near}'
        )
        yield Problem(path=path, message=message)


def _optimizer(config: 'Config') -> Iterator[Problem]:
    optim, steps = config.optim, config.train.steps
    if optim.min_lr > optim.lr:
        message = (
            f'{optim.min_lr} exceeds optim.lr={optim.lr}; '
            f'use at most {optim.lr}, for example {optim.lr / 10:g}'
        )
        yield Problem(path='optim.min_lr', message=message, others=('optim.lr',))
    if optim.warmup_steps >= steps:
        message = (
            f'{optim.warmup_steps} leaves nothing of train.steps={steps}; '
            f'use at most {steps - 1}, or raise train.steps'
        )
        yield Problem(path='optim.warmup_steps', message=message, others=('train.steps',))


def _replicas(config: 'Config') -> Iterator[Problem]:
    mesh = config.mesh
    yield from _divides('mesh.data', mesh.data, 'mesh.replicas', mesh.replicas)


def _grid(config: 'Config') -> Iterator[Problem]:
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
    yield from _divides('model.hidden_size', model.hidden_size, 'mesh.model_rows', rows)
    part, shards = model.hidden_size // rows, mesh.data_shards
    if config.optim.shard != 'none' and model.hidden_size % rows == 0 and part % shards:
        near = _nearest([n * mesh.replicas for n in divisors(part)], mesh.data)
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


def _stages(config: 'Config') -> Iterator[Problem]:
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
        ways = [f'mesh.stages {_nearest(fits, stages)}'] if max(fits, default=1) > 1 else []
        if chunks > 1 and layers % stages == 0:
            ways.append(f'mesh.virtual_stages {_nearest(divisors(layers // stages), chunks)}')
        ways.append(f'model.num_layers {_multiples(layers, stages * chunks)}')
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
            f'use {_multiples(count, stages)}, or mesh.virtual_stages=1'
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


def _context(config: 'Config') -> Iterator[Problem]:
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
            f'use {_multiples(length, divisor)}',
            others=('mesh.context', 'mesh.model', 'mesh.sequence_parallel'),
        )


def _profile(config: 'Config') -> Iterator[Problem]:
    profile, steps = config.train.profile, config.train.steps
    if profile and profile.start + profile.steps > steps:
        message = (
            f'start {profile.start} and {profile.steps} steps end at step '
            f'{profile.start + profile.steps}, after train.steps={steps}; '
            f'use at most start {max(steps - profile.steps, 0)} '
            f'and {min(profile.steps, steps)} steps'
        )
        yield Problem(path='train.profile', message=message, others=('train.steps',))


def _data(config: 'Config') -> Iterator[Problem]:
    if config.data.blend and config.data.corpus != type(config.data).model_fields['corpus'].default:
        message = (
            f'{config.data.corpus}, and data.blend names {", ".join(config.data.blend)}; '
            'set one of the two'
        )
        yield Problem(path='data.corpus', message=message, others=('data.blend',))
    try:
        parts = [float(part) for part in config.data.split.split(',')]
    except ValueError:
        parts = []
    if not (len(parts) == 3 and parts[0] > 0 and all(0 <= part < float('inf') for part in parts)):
        message = (
            f'{config.data.split!r} is not three numbers, none negative and the first above zero; '
            "write for example '95,5,0'"
        )
        yield Problem(path='data.split', message=message)


def _masked(config: 'Config') -> Iterator[Problem]:
    if config.model.objective == 'masked_lm' and config.train.seq_len < SHORTEST_PAIR:
        message = (
            f'{config.train.seq_len} is too short for two segments and three special tokens; '
            f'use at least {SHORTEST_PAIR}'
        )
        yield Problem(path='train.seq_len', message=message, others=('model.objective',))


def _divides(
    path: str, value: int, by: str, divisor: int, *, under: str | None = None
) -> Iterator[Problem]:
    if value % divisor:
        fixes = f'{_multiples(value, divisor)}, or {by} {_nearest(divisors(value), divisor)}'
        limit = f'{by}={divisor}' + (f' under {under}' if under else '')
        yield Problem(
            path=path,
            message=f'{value} is not a multiple of {limit}; use {fixes}',
            others=(by, under) if under else (by,),
        )


def _multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f'{below} or {below + divisor}' if below else str(divisor)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _nearest(allowed: Sequence[int], value: int) -> str:
    """Return the neighbors of `value` among `allowed`, which is ascending and lacks `value`."""
    at = bisect.bisect(allowed, value)
    return ' or '.join(str(n) for n in allowed[max(0, at - 1) : at + 1])


def replicas_within_hosts(data: int, tensor_parallel: int, devices_per_host: int) -> list[int]:
    """Return the values of mesh.replicas whose groups of data shards each lie inside a host."""
    return [
        replicas
        for replicas in divisors(data)
        if devices_per_host % (data // replicas * tensor_parallel) == 0
    ]
