"""Convert megatron-core's weights to megajax's and back, using a table of names and dims.

The names follow megatron-core's local layer specification; FUSED has the names that differ in
Transformer Engine's. Linear weights are [out, in], and each layer has its own names.
Heads and gates have the same order in both formats: `linear_qkv` by key/value head, [queries, key,
value] x head dim each, `linear_fc1` of SwiGLU [gate, up].

A dim in SHARDED_BY_MEGATRON is split over the ranks of a tensor-parallel group, in equal parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from megajax.core.config import Config, ConfigError, ModelConfig
from megajax.core.counts.layers import layers_of
from megajax.core.counts.parameters import SHARDED_BY_MEGATRON
from megajax.core.parallel.layer_order import tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.interop.megatron.limits import check_model
from megajax.interop.pieces import (
    Piece,
    Pieces,
    Shape,
    check,
    cut,
    dims_here,
    make_pieces,
    name_of,
    place,
    shapes_of,
    tensors_of,
)
from megajax.runtime.checkpoint.open import abstract_params

TABLE, HEAD = 'embedding.table', 'output_layer.weight'
ATTENTION, MLP = 'decoder.layers.{}.self_attention', 'decoder.layers.{}.mlp'
EXPERT = f'{MLP}.experts.local_experts.{{}}'
# megajax's parameter: (megatron-core's name, in which {} is replaced by the layer's index, and a
# second {} by the expert's; its dims)
NAMES: dict[str, tuple[str, str]] = {
    TABLE: ('embedding.word_embeddings.weight', 'VD'),
    'position.table': ('embedding.position_embeddings.weight', 'SD'),
    'layers.attention.norm.weight': ('decoder.layers.{}.input_layernorm.weight', 'D'),
    'layers.attention.norm.bias': ('decoder.layers.{}.input_layernorm.bias', 'D'),
    'layers.attention.qkv.weight': (f'{ATTENTION}.linear_qkv.weight', '(KCH)D'),
    'layers.attention.qkv.bias': (f'{ATTENTION}.linear_qkv.bias', '(KCH)'),
    'layers.attention.query_norm.weight': (f'{ATTENTION}.q_layernorm.weight', 'H'),
    'layers.attention.query_norm.bias': (f'{ATTENTION}.q_layernorm.bias', 'H'),
    'layers.attention.key_norm.weight': (f'{ATTENTION}.k_layernorm.weight', 'H'),
    'layers.attention.key_norm.bias': (f'{ATTENTION}.k_layernorm.bias', 'H'),
    'layers.attention.out.weight': (f'{ATTENTION}.linear_proj.weight', 'D(NH)'),
    'layers.attention.out.bias': (f'{ATTENTION}.linear_proj.bias', 'D'),
    'layers.mlp.norm.weight': ('decoder.layers.{}.pre_mlp_layernorm.weight', 'D'),
    'layers.mlp.norm.bias': ('decoder.layers.{}.pre_mlp_layernorm.bias', 'D'),
    'layers.mlp.up.weight': (f'{MLP}.linear_fc1.weight', '(UF)D'),
    'layers.mlp.up.bias': (f'{MLP}.linear_fc1.bias', '(UF)'),
    'layers.mlp.down.weight': (f'{MLP}.linear_fc2.weight', 'DF'),
    'layers.mlp.down.bias': (f'{MLP}.linear_fc2.bias', 'D'),
    'layers.experts.norm.weight': ('decoder.layers.{}.pre_mlp_layernorm.weight', 'D'),
    'layers.experts.norm.bias': ('decoder.layers.{}.pre_mlp_layernorm.bias', 'D'),
    'layers.experts.router.weight': (f'{MLP}.router.weight', 'XD'),
    'layers.experts.router.bias': (f'{MLP}.router.bias', 'X'),
    'layers.experts.router.selection_bias': (f'{MLP}.router.expert_bias', 'X'),
    'layers.experts.up.weight': (f'{EXPERT}.linear_fc1.weight', '(UA)D'),
    'layers.experts.up.bias': (f'{EXPERT}.linear_fc1.bias', '(UA)'),
    'layers.experts.down.weight': (f'{EXPERT}.linear_fc2.weight', 'DA'),
    'layers.experts.down.bias': (f'{EXPERT}.linear_fc2.bias', 'D'),
    'layers.experts.shared_up.weight': (f'{MLP}.shared_experts.linear_fc1.weight', '(UM)D'),
    'layers.experts.shared_down.weight': (f'{MLP}.shared_experts.linear_fc2.weight', 'DM'),
    'norm.weight': ('decoder.final_layernorm.weight', 'D'),
    'norm.bias': ('decoder.final_layernorm.bias', 'D'),
    'head': (HEAD, 'VD'),
}
# Transformer Engine computes a norm in the linear layer that follows it. The norm before a router
# is a module of its own, and so are the norms of queries and keys.
FUSED: dict[str, tuple[str, str]] = {
    'layers.attention.norm.weight': (f'{ATTENTION}.linear_qkv.layer_norm_weight', 'D'),
    'layers.attention.norm.bias': (f'{ATTENTION}.linear_qkv.layer_norm_bias', 'D'),
    'layers.mlp.norm.weight': (f'{MLP}.linear_fc1.layer_norm_weight', 'D'),
    'layers.mlp.norm.bias': (f'{MLP}.linear_fc1.layer_norm_bias', 'D'),
}
KEYS = (
    'model.num_layers, norm, position, qk_norm, bias, qkv_bias and tie_embeddings '
    'decide which tensors exist'
)


class Chunk(NamedTuple):
    """The part of a model on one pipeline stage: some layers, perhaps embedding or head."""

    layers: range  # numbered from 0 in Megatron's names
    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the head


def chunks_of(sizes: Sequence[int]) -> list[Chunk]:
    """Return the chunks of a model, in the order of the layers, with these numbers of layers."""
    ends, last = list(accumulate(sizes)), len(sizes) - 1
    return [
        Chunk(range(end - size, end), index == 0, index == last)
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def from_megatron(config: Config, weights: Mapping[str, Any]) -> nnx.State:
    """Return Megatron's weights, which are already merged over ranks, as parameters in fp32.

    The parameters have their stored sharding on the current mesh. The vocabulary has
    `model.vocab_size` rows in `weights` and is padded with zeros. Raises ConfigError with all
    missing and unexpected names and all wrong shapes and dtypes.
    """
    abstract = abstract_params(config)
    pieces = megatron_pieces(config.model, shapes_of(config.model))
    check(abstract, pieces, weights, of='Megatron weights', keys=KEYS)
    params = place(abstract, pieces, weights, of='Megatron weights')
    return tree_on_stages(params, Layout.of(config))


def to_megatron(config: Config, params: nnx.State) -> dict[str, np.ndarray]:
    """Return parameters as Megatron's weights, bit for bit, without the vocabulary's padding.

    It also converts gradients, because they have the same names and dims.
    """
    weights: dict[str, np.ndarray] = {}
    pieces, layout = megatron_pieces(config.model, shapes_of(config.model)), Layout.of(config)
    for path, param in nnx.to_flat_state(params):
        x = jax.device_get(param[...])
        if param.declared.is_stacked:
            x = x[np.argsort(layout.layer_order(len(x)))]
        weights |= {piece.name: cut(x, piece) for piece in pieces[name_of(path)]}
    return weights


def megatron_pieces(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    *,
    rank: int = 0,
    ranks: int = 1,
    vocab_rows: int | None = None,
    chunk: Chunk | None = None,
    is_fused: bool = False,
) -> Pieces:
    """Return the pieces of each parameter on one rank of a tensor-parallel group.

    `vocab_rows` is the number of rows of the vocabulary on all ranks together, padding included.
    For a pipeline, only the pieces in `chunk` are returned. With `is_fused`, the norms have
    Transformer Engine's names. Raises ConfigError for a model that Megatron-LM's files cannot
    represent, and if the ranks do not divide it.
    """
    chunk = chunk or chunks_of([model.num_layers])[0]
    check_model(model)
    rows = (vocab_rows or model.vocab_size) // ranks
    widths = _widths(model)
    if any(width % ranks for width in widths.values()):
        listed = ' and '.join(f'{key}={width}' for key, width in widths.items())
        raise ConfigError(f'{ranks} tensor-parallel ranks must divide {listed}')
    pieces, dims, names = {}, dims_here(model), NAMES | FUSED if is_fused else NAMES
    for path, shape in shapes.items():
        (name, there), here = tensors_of(names, path, 'Megatron-LM'), dims[path]
        ends = dict(zip(here, shape, strict=True))
        parts = {
            dim: (end // ranks, end) for dim, end in ends.items() if dim in SHARDED_BY_MEGATRON
        } | {'V': (rows, model.vocab_size)}
        ranges = {
            dim: slice(min(rank * part, end), min((rank + 1) * part, end))
            for dim, (part, end) in parts.items()
        }
        made = make_pieces(name, there, here, shape, ranges, {'V': rows})
        pieces[path] = list(_in_chunk(path, name, made, chunk, model, layers_of(model, here[0])))
    return pieces


def _widths(model: ModelConfig) -> dict[str, int]:
    """Return each size that the tensor-parallel ranks must divide, by its key."""
    widths, experts = {'model.num_kv_heads': model.num_kv_heads}, model.experts
    if experts is None or model.has_dense_and_experts:
        widths['model.ffn_size'] = model.ffn_size
    if experts is not None:
        widths['model.experts.ffn_size'] = experts.ffn_size
        if experts.shared_ffn_size:
            widths['model.experts.shared_ffn_size'] = experts.shared_ffn_size
    return widths


def _in_chunk(
    path: str,
    name: str,
    pieces: Sequence[Piece],
    chunk: Chunk,
    model: ModelConfig,
    layers: Sequence[int],
) -> Iterator[Piece]:
    """Yield a parameter's pieces in a chunk, with Megatron's names; `layers` have the parameter.

    A last chunk that is not also the first has a copy of a tied embedding as its head's weight.
    """
    if path.startswith('layers.'):
        each = len(pieces) // len(layers)  # 1, or the number of experts
        for place, layer in enumerate(layers):
            if layer in chunk.layers:
                index = layer - chunk.layers.start
                for n, piece in enumerate(pieces[each * place : each * (place + 1)]):
                    yield piece._replace(name=name.format(index, n))
    elif path.startswith(('embedding.', 'position.')):
        if chunk.is_first:
            yield from pieces
        elif chunk.is_last and model.tie_embeddings and path == TABLE:
            yield from (piece._replace(name=HEAD) for piece in pieces)
    elif chunk.is_last:
        yield from pieces
