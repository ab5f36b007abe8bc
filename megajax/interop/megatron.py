"""Weights of megatron-core, to megajax and back: a table of names, and for each kind of array how its layout differs.

Megatron's arrays are whole, merged over tensor-parallel ranks (TP=1), and named as in its local layer specification (that of
Transformer Engine has the norms under `linear_qkv` and `linear_fc1`). Its linear weights are [out, in] and each layer has names of
its own; here they are [*in, *out], and layers are stacked along a first dim.

L layers, D model, V vocabulary; `in` and `out` are the dims that a linear layer contracts and makes. Heads and gates come in the
same order on both sides: `linear_qkv` by key/value head, [queries, key, value] x head dim each, `linear_fc1` of SwiGLU [gate, up].
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from megajax.config import Config, ConfigError, ModelConfig
from megajax.train.step import init_state

Shape = tuple[int, ...]
Kind = Literal['column', 'row', 'vocab', 'vector', 'position']

# Path in megajax: (megatron-core's name, where {} is the layer; kind of array)
NAMES: dict[str, tuple[str, Kind]] = {
    'embedding.table': ('embedding.word_embeddings.weight', 'vocab'),
    'position.table': ('embedding.position_embeddings.weight', 'position'),
    'layers.attention_norm.weight': ('decoder.layers.{}.input_layernorm.weight', 'vector'),
    'layers.attention_norm.bias': ('decoder.layers.{}.input_layernorm.bias', 'vector'),
    'layers.attention.qkv.weight': ('decoder.layers.{}.self_attention.linear_qkv.weight', 'column'),
    'layers.attention.qkv.bias': ('decoder.layers.{}.self_attention.linear_qkv.bias', 'vector'),
    'layers.attention.query_norm.weight': ('decoder.layers.{}.self_attention.q_layernorm.weight', 'vector'),
    'layers.attention.query_norm.bias': ('decoder.layers.{}.self_attention.q_layernorm.bias', 'vector'),
    'layers.attention.key_norm.weight': ('decoder.layers.{}.self_attention.k_layernorm.weight', 'vector'),
    'layers.attention.key_norm.bias': ('decoder.layers.{}.self_attention.k_layernorm.bias', 'vector'),
    'layers.attention.out.weight': ('decoder.layers.{}.self_attention.linear_proj.weight', 'row'),
    'layers.attention.out.bias': ('decoder.layers.{}.self_attention.linear_proj.bias', 'vector'),
    'layers.mlp_norm.weight': ('decoder.layers.{}.pre_mlp_layernorm.weight', 'vector'),
    'layers.mlp_norm.bias': ('decoder.layers.{}.pre_mlp_layernorm.bias', 'vector'),
    'layers.mlp.up.weight': ('decoder.layers.{}.mlp.linear_fc1.weight', 'column'),
    'layers.mlp.up.bias': ('decoder.layers.{}.mlp.linear_fc1.bias', 'vector'),
    'layers.mlp.down.weight': ('decoder.layers.{}.mlp.linear_fc2.weight', 'row'),
    'layers.mlp.down.bias': ('decoder.layers.{}.mlp.linear_fc2.bias', 'vector'),
    'norm.weight': ('decoder.final_layernorm.weight', 'vector'),
    'norm.bias': ('decoder.final_layernorm.bias', 'vector'),
    'head': ('output_layer.weight', 'vocab'),
}


def from_megatron(config: Config, weights: Mapping[str, Any]) -> nnx.State:
    """Megatron's weights as the parameters of `init_state(config)`: fp32, in their places on the current mesh.

    The vocabulary has `model.vocab_size` rows in `weights` and is padded with zeros. Host memory holds a copy of one parameter at
    a time. Raises ConfigError with all names that are missing or unexpected and all wrong shapes.
    """
    params = nnx.to_flat_state(jax.eval_shape(lambda: init_state(config).params))
    entries = {path: _entry(path, param.shape, config.model) for path, param in params}
    if problems := list(_problems(list(entries.values()), weights)):
        raise ConfigError(*problems)

    def place(entry: _Entry, param: Any) -> jax.Array:
        layers = [_to_megajax(entry, np.asarray(weights[name], param.dtype)) for name in entry.names]
        return jax.device_put(np.stack(layers).reshape(param.shape), param.sharding.spec)

    return nnx.from_flat_state([(path, param.replace(place(entries[path], param))) for path, param in params])


def to_megatron(config: Config, params: nnx.State) -> dict[str, np.ndarray]:
    """The reverse, bit for bit and without the padding of the vocabulary; of gradients too, which lie as the parameters do."""
    weights: dict[str, np.ndarray] = {}
    for path, param in nnx.to_flat_state(params):
        entry = _entry(path, param.shape, config.model)
        layers = jax.device_get(param[...]).reshape(len(entry.names), *entry.shape)
        weights |= {name: _to_megatron(entry, layer) for name, layer in zip(entry.names, layers, strict=True)}
    return weights


class _Entry(NamedTuple):
    """One parameter of megajax: its names in Megatron, one or one per layer, and the shape of what each names on both sides."""

    names: list[str]
    kind: Kind
    shape: Shape
    megatron_shape: Shape


def _entry(path: tuple[Any, ...], shape: Shape, model: ModelConfig) -> _Entry:
    name, kind = NAMES['.'.join(path)]
    names = [name]
    if '{}' in name:
        names, shape = [name.format(layer) for layer in range(model.num_layers)], shape[1:]
    return _Entry(names, kind, shape, _megatron_shape(kind, shape, model))


def _megatron_shape(kind: Kind, shape: Shape, model: ModelConfig) -> Shape:
    match kind:
        case 'column':  # [D, *out]
            return math.prod(shape[1:]), shape[0]
        case 'row':  # [*in, D]
            return shape[-1], math.prod(shape[:-1])
        case 'vocab':  # [V, D], V padded
            return model.vocab_size, *shape[1:]
        case 'vector':
            return (math.prod(shape),)
        case 'position':
            return shape


def _to_megajax(entry: _Entry, x: np.ndarray) -> np.ndarray:
    if entry.kind in ('column', 'row'):
        return x.T.reshape(entry.shape)
    if entry.kind == 'vocab':
        return np.pad(x, [(0, entry.shape[0] - len(x)), (0, 0)])
    return x.reshape(entry.shape)


def _to_megatron(entry: _Entry, x: np.ndarray) -> np.ndarray:
    if entry.kind in ('column', 'row'):
        x = x.reshape(entry.megatron_shape[::-1]).T
    elif entry.kind == 'vocab':
        x = x[: entry.megatron_shape[0]]
    # A copy: on a CPU, x may be the parameter's own memory, which the next train step is given.
    return np.array(x.reshape(entry.megatron_shape), order='C')


def _problems(entries: list[_Entry], weights: Mapping[str, Any]) -> Iterator[str]:
    expected = {name: entry for entry in entries for name in entry.names}
    keys = 'model.num_layers, norm, position, qk_norm, bias and tie_embeddings decide which there are'
    if missing := [name for name in expected if name not in weights]:
        yield f'Megatron weights: {len(missing)} of {len(expected)} are missing ({keys}): {", ".join(missing)}'
    if unexpected := [name for name in weights if name not in expected]:
        yield f'Megatron weights: {len(unexpected)} are not expected ({keys}): {", ".join(unexpected)}'
    for name, entry in expected.items():
        if name in weights and (got := np.shape(weights[name])) != entry.megatron_shape:
            rows = entry.megatron_shape[0]
            padded = entry.kind == 'vocab' and got[1:] == entry.megatron_shape[1:] and got[0] > rows
            fix = f'; where the rest is padding, pass [:{rows}]' if padded else ''
            yield f'Megatron weights: {name}: expected {entry.megatron_shape}, got {got}{fix}'
