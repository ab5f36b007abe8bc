"""Weights of megatron-core, to megajax and back: a table of names and dims.

Its arrays are named as in its local layer specification (that of Transformer Engine has the norms under `linear_qkv` and
`linear_fc1`). Its linear weights are [out, in], and each layer has names of its own. Heads and gates come in the same order on both
sides: `linear_qkv` by key/value head, [queries, key, value] x head dim each, `linear_fc1` of SwiGLU [gate, up].

The letters are those of `parallel/layout.py`; a dim in
SHARDED_BY_MEGATRON is cut over the ranks of a tensor-parallel group, in equal parts.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from megajax.checkpoint.open import abstract_params
from megajax.config import Config, ConfigError, ModelConfig
from megajax.counts.parameters import SHARDED_BY_MEGATRON
from megajax.interop.pieces import (
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

# The parameter here: (megatron-core's name, where {} is the layer; its dims)
NAMES: dict[str, tuple[str, str]] = {
    'embedding.table': ('embedding.word_embeddings.weight', 'VD'),
    'position.table': ('embedding.position_embeddings.weight', 'SD'),
    'layers.attention_norm.weight': ('decoder.layers.{}.input_layernorm.weight', 'D'),
    'layers.attention_norm.bias': ('decoder.layers.{}.input_layernorm.bias', 'D'),
    'layers.attention.qkv.weight': ('decoder.layers.{}.self_attention.linear_qkv.weight', '(KCH)D'),
    'layers.attention.qkv.bias': ('decoder.layers.{}.self_attention.linear_qkv.bias', '(KCH)'),
    'layers.attention.query_norm.weight': (
        'decoder.layers.{}.self_attention.q_layernorm.weight',
        'H',
    ),
    'layers.attention.query_norm.bias': ('decoder.layers.{}.self_attention.q_layernorm.bias', 'H'),
    'layers.attention.key_norm.weight': (
        'decoder.layers.{}.self_attention.k_layernorm.weight',
        'H',
    ),
    'layers.attention.key_norm.bias': ('decoder.layers.{}.self_attention.k_layernorm.bias', 'H'),
    'layers.attention.out.weight': ('decoder.layers.{}.self_attention.linear_proj.weight', 'D(NH)'),
    'layers.attention.out.bias': ('decoder.layers.{}.self_attention.linear_proj.bias', 'D'),
    'layers.mlp_norm.weight': ('decoder.layers.{}.pre_mlp_layernorm.weight', 'D'),
    'layers.mlp_norm.bias': ('decoder.layers.{}.pre_mlp_layernorm.bias', 'D'),
    'layers.mlp.up.weight': ('decoder.layers.{}.mlp.linear_fc1.weight', '(UF)D'),
    'layers.mlp.up.bias': ('decoder.layers.{}.mlp.linear_fc1.bias', '(UF)'),
    'layers.mlp.down.weight': ('decoder.layers.{}.mlp.linear_fc2.weight', 'DF'),
    'layers.mlp.down.bias': ('decoder.layers.{}.mlp.linear_fc2.bias', 'D'),
    'norm.weight': ('decoder.final_layernorm.weight', 'D'),
    'norm.bias': ('decoder.final_layernorm.bias', 'D'),
    'head': ('output_layer.weight', 'VD'),
}
KEYS = 'model.num_layers, norm, position, qk_norm, bias, qkv_bias and tie_embeddings decide which there are'


def from_megatron(config: Config, weights: Mapping[str, Any]) -> nnx.State:
    """Megatron's weights, merged over its ranks, as parameters: fp32, in their places on the current mesh.

    The vocabulary has `model.vocab_size` rows in `weights` and is padded with zeros. Raises ConfigError with all names that are
    missing or not expected and all wrong shapes and dtypes.
    """
    abstract = abstract_params(config)
    pieces = megatron_pieces(config.model, shapes_of(abstract))
    check(abstract, pieces, weights, of='Megatron weights', keys=KEYS)
    return place(abstract, pieces, weights, of='Megatron weights')


def to_megatron(config: Config, params: nnx.State) -> dict[str, np.ndarray]:
    """The reverse, bit for bit and without the padding of the vocabulary; of gradients too, which lie as the parameters do."""
    weights: dict[str, np.ndarray] = {}
    pieces = megatron_pieces(config.model, shapes_of(params))
    for path, param in nnx.to_flat_state(params):
        x = jax.device_get(param[...])
        weights |= {piece.name: cut(x, piece) for piece in pieces[name_of(path)]}
    return weights


def megatron_pieces(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    *,
    rank: int = 0,
    ranks: int = 1,
    vocab_rows: int | None = None,
) -> Pieces:
    """What each parameter is made of, on one rank of a tensor-parallel group; `vocab_rows` are those of all ranks, padding too."""
    if model.is_bert:
        raise ConfigError(
            f'model.objective={model.objective}: only models of next tokens are read and written as Megatron-LM has them'
        )
    rows = (vocab_rows or model.vocab_size) // ranks
    if model.num_kv_heads % ranks or model.ffn_size % ranks:
        raise ConfigError(
            f'{ranks} tensor-parallel ranks must divide model.num_kv_heads={model.num_kv_heads} and model.ffn_size={model.ffn_size}'
        )
    pieces, dims = {}, dims_here(model)
    for path, shape in shapes.items():
        (name, there), here = tensors_of(NAMES, path, 'Megatron-LM'), dims[path]
        ends = dict(zip(here, shape, strict=True))
        parts = {
            dim: (end // ranks, end) for dim, end in ends.items() if dim in SHARDED_BY_MEGATRON
        } | {'V': (rows, model.vocab_size)}
        ranges = {
            dim: slice(min(rank * part, end), min((rank + 1) * part, end))
            for dim, (part, end) in parts.items()
        }
        pieces[path] = make_pieces(name, there, here, shape, ranges, {'V': rows})
    return pieces
