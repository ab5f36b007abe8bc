"""Qwen3-MoE and OLMoE, which name the tensors of experts alike. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama, mixtral, olmo2
from megajax.interop.huggingface.layers import (
    num_layers,
    optional_window,
    replaced_by,
)
from megajax.interop.huggingface.reader import Keys, Reader

NAMES = 'mlp', 'gate_proj', 'up_proj', 'down_proj'
TENSORS = mixtral.tensors(*NAMES)
NORMS = 'layers.attention.query_norm.weight', 'layers.attention.key_norm.weight'
WIDTH = 'moe_intermediate_size'


def _own_qwen3(read: Reader) -> Keys:
    read.only('attention_bias', False, default=False)
    width = read.take(WIDTH, 'experts.ffn_size', 768)
    experts = {'ffn_size': width, 'normalize': _read_normalize(read)}
    return {
        'qk_norm': True,
        'window': optional_window(read, 4096),
        **_read_layers(read),
        'experts': experts,
    }


def _read_layers(read: Reader) -> Keys:
    """Read which layers have an MLP instead of experts."""
    step, dense = read.get('decoder_sparse_step', 1), read.get('mlp_only_layers', None)
    if type(step) is not int or step < 1:
        read.refuse('decoder_sparse_step', step, 'only a number of layers is supported')
        return {}
    if dense is not None and not isinstance(dense, list):
        read.refuse('mlp_only_layers', dense, 'only a list of layers is supported')
        return {}
    layers = [
        {'experts': None} if index in (dense or ()) or (index + 1) % step else {}
        for index in range(num_layers(read))
    ]
    if layers and all(layers):
        key, value = ('mlp_only_layers', dense) if step == 1 else ('decoder_sparse_step', step)
        read.refuse(key, value, 'no layer would have experts: use "qwen3"')
        return {}
    return replaced_by(layers)


def _read_normalize(read: Reader) -> bool | None:
    normalize: bool | None = read.take('norm_topk_prob', 'experts.normalize', False)
    return normalize


def _write_qwen3(model: ModelConfig) -> Keys:
    return mixtral.write_config(model, width=WIDTH) | {
        **_written_normalize(model),
        'attention_bias': False,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [
            index for index, layer in enumerate(model.layer_configs) if layer.experts is None
        ],
        'use_sliding_window': model.window is not None,
        'sliding_window': model.window,
    }


def _written_normalize(model: ModelConfig) -> Keys:
    return {'norm_topk_prob': model.experts is not None and model.experts.normalize}


def _own_olmoe(read: Reader) -> Keys:
    read.only('attention_bias', False, default=False)
    read.only('clip_qkv', None, default=None)
    read.only('sliding_window', None, default=None)
    hidden, heads = read.keys.get('hidden_size'), read.keys.get('num_attention_heads')
    # The QK norm in transformers spans hidden_size columns.
    if type(hidden) is type(heads) is int and heads > 0:
        read.only('head_dim', hidden // heads, None, default=None)
    return {'qk_norm': 'all', 'experts': {'normalize': _read_normalize(read)}}


def _write_olmoe(model: ModelConfig) -> Keys:
    own = {'attention_bias': False, 'clip_qkv': None}
    return mixtral.write_config(model) | _written_normalize(model) | own


FAMILIES = (
    llama.LIKE_LLAMA(
        name='qwen3_moe',
        architecture='Qwen3MoeForCausalLM',
        read_config=partial(mixtral.read_config, own=_own_qwen3, count=128, active=8),
        write_config=_write_qwen3,
        tensors=mixtral.tensors(*NAMES, dense=True),
    ),
    llama.LIKE_LLAMA(
        name='olmoe',
        architecture='OlmoeForCausalLM',
        read_config=partial(
            mixtral.read_config, own=_own_olmoe, count=64, active=8, grouped=False, norm_eps=1e-5
        ),
        write_config=_write_olmoe,
        tensors=TENSORS | {path: olmo2.TENSORS[path] for path in NORMS},
    ),
)
