"""Check the sizes that tensor parallelism shards, and find the degrees that it can have."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides, divisors, multiples, nearest
from megajax.core.config.overlap_rules import PARTS

if TYPE_CHECKING:
    from megajax.core.config.schema import Config


def model_degrees(config: 'Config') -> list[int]:
    """Return the values of mesh.model that all sizes of a config allow, in ascending order."""
    model, mesh, experts = config.model, config.mesh, config.model.experts
    sizes = [model.num_heads]
    if mesh.is_grid:
        sizes.append(model.num_kv_heads)
    if _has_mlps(config):
        sizes.append(model.ffn_size)
    if experts is not None:
        sizes += [experts.ffn_size, experts.shared_ffn_size]
    shared = [(model.padded_vocab_size, mesh.model_rows)]
    if mesh.sequence_parallel:
        parts = PARTS if config.overlap.splits_tokens else mesh.context
        shared.append((config.train.seq_len, parts))
    if mesh.exchanges_heads:
        shared.append((model.num_kv_heads, mesh.context))
    sizes += [_part(*each) for each in shared]
    return [n for n in divisors(math.gcd(*sizes)) if mesh.is_grid or _shards_kv(config, n)]


def row_degrees(config: 'Config') -> list[int]:
    """Return the values of mesh.model_rows that all sizes of a config allow, in ascending order."""
    model, mesh = config.model, config.mesh
    shared = [(model.padded_vocab_size, mesh.model)]
    if config.optim.shard != 'none' and mesh.data % mesh.replicas == 0:
        shared.append((model.hidden_size, mesh.data_shards))
    return list(divisors(math.gcd(model.hidden_size, *(_part(*each) for each in shared))))


def _part(size: int, parts: int) -> int:
    """Return a part of a size, which a degree must divide; the whole if there are no such parts.

    Then no degree helps, and another message names the other axis.
    """
    return size if size % parts else size // parts


def of_heads(config: 'Config') -> Iterator[Problem]:
    """Check the number of heads and their size."""
    model = config.model
    if 'head_dim' not in model.model_fields_set and model.hidden_size % model.num_heads:
        near = multiples(model.hidden_size, model.num_heads)
        message = (
            f'{model.hidden_size} is not a multiple of model.num_heads={model.num_heads}; '
            f'use {near}, or set model.head_dim'
        )
        yield Problem('model.hidden_size', message, others=('model.num_heads', 'model.head_dim'))
    yield from divides('model.num_heads', model.num_heads, 'model.num_kv_heads', model.num_kv_heads)
    yield from sharded(config, 'model.num_heads', model.num_heads)
    if any(layer.rotates for layer in model.pattern) and model.head_dim % 2:
        message = (
            f'{model.head_dim} is odd, but model.position={model.position} rotates pairs; '
            f'use {multiples(model.head_dim, 2)}'
        )
        yield Problem('model.head_dim', message, others=('model.position',))


def of_kv_heads(config: 'Config') -> Iterator[Problem]:
    """Check the number of key/value heads, unless it is the number of heads."""
    model, shards = config.model, config.mesh.model
    if model.num_kv_heads == model.num_heads:
        return
    if config.mesh.is_grid:
        if model.num_kv_heads % shards:
            message = (
                f'{model.num_kv_heads} is not a multiple of mesh.model={shards}, and the columns '
                f'of a grid (mesh.model_rows={config.mesh.model_rows}) have complete key/value '
                f'heads; use mesh.model {nearest(model_degrees(config), shards)}, '
                'or mesh.model_rows=1'
            )
            yield Problem('model.num_kv_heads', message, others=('mesh.model', 'mesh.model_rows'))
        return
    if _shards_kv(config, shards):
        return
    near = nearest(model_degrees(config), shards)
    if shards > model.num_kv_heads and shards % model.num_kv_heads == 0:
        message = (
            f'{model.head_dim} must be a multiple of mesh.model={shards} when mesh.model exceeds '
            f'model.num_kv_heads={model.num_kv_heads}; '
            f'use {multiples(model.head_dim, shards)}, or mesh.model {near}'
        )
        yield Problem('model.head_dim', message, others=('mesh.model', 'model.num_kv_heads'))
    else:
        message = (
            f'{model.num_kv_heads} is neither a multiple nor a divisor of mesh.model={shards}; '
            f'use mesh.model {near}'
        )
        yield Problem('model.num_kv_heads', message, others=('mesh.model',))


def of_widths(config: 'Config') -> Iterator[Problem]:
    """Check the widths of MLPs, the vocabulary and the shards of sequence parallelism."""
    model, mesh, seq_len = config.model, config.mesh, config.train.seq_len
    if _has_mlps(config):
        yield from sharded(config, 'model.ffn_size', model.ffn_size)
    yield from _vocabulary(config)
    if mesh.sequence_parallel and mesh.context == 1:
        yield from sharded(config, 'train.seq_len', seq_len, under='mesh.sequence_parallel')


def sharded(
    config: 'Config', path: str, size: int, *, under: str | None = None
) -> Iterator[Problem]:
    """Yield a problem unless mesh.model divides the size of the key `path`."""
    shards = config.mesh.model
    if size % shards:
        allowed = model_degrees(config)
        yield from divides(path, size, 'mesh.model', shards, under=under, allowed=allowed)


def _vocabulary(config: 'Config') -> Iterator[Problem]:
    """Check the padded vocabulary, which 2-D tensor parallelism shards over rows and columns."""
    model, mesh = config.model, config.mesh
    padded, rows = model.padded_vocab_size, mesh.model_rows
    if padded % rows:
        by, key = f'mesh.model_rows={rows}', 'mesh.model_rows'
        near = nearest(row_degrees(config), rows)
    elif padded % mesh.tensor_parallel:
        by, key = f'mesh.model={mesh.model}', 'mesh.model'
        near = nearest(model_degrees(config), mesh.model)
        if mesh.is_grid:
            by = f'mesh.model_rows={rows} x {by} = {mesh.tensor_parallel}'
    else:
        return
    message = (
        f'{model.vocab_size} is padded to {padded}, which {by} does not divide; use {key} {near}'
    )
    yield Problem('model.vocab_size', message, others=(key,))


def _has_mlps(config: 'Config') -> bool:
    """Whether a layer has an MLP of model.ffn_size."""
    model, vision = config.model, config.vision
    # each layer of cross-attention has an MLP, also in a model with experts
    has_crossed = vision is not None and vision.is_crossed
    return model.experts is None or model.has_dense_and_experts or has_crossed


def _shards_kv(config: 'Config', shards: int) -> bool:
    """Whether the key/value heads, or else parts of each of them, can be on this many devices."""
    heads, head_dim = config.model.num_kv_heads, config.model.head_dim
    if shards <= heads or heads == config.model.num_heads:
        return heads % shards == 0
    # With fewer key/value heads than shards the fused QKV is sharded over head_dim.
    return shards % heads == 0 and head_dim % shards == 0
