"""Llama, Mistral, Qwen2 and Qwen3, whose tensors have the same names. Imports no jax."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.family import (
    GATE,
    HEAD,
    KEY,
    QUERIES,
    UP,
    VALUE,
    Family,
    There,
)
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope, write_scaling
from megajax.interop.huggingface.settings import SIZES, read_names, write_names

# Linear layers are [out, in]. The queries of a key/value head are adjacent, as in megajax.
TENSORS = {
    'embedding.table': [There('model.embed_tokens.weight', 'VD')],
    'layers.attention.norm.weight': [There('model.layers.{}.input_layernorm.weight', 'D')],
    'layers.attention.qkv.weight': [
        There('model.layers.{}.self_attn.q_proj.weight', '(KCH)D', QUERIES),
        There('model.layers.{}.self_attn.k_proj.weight', '(KCH)D', KEY),
        There('model.layers.{}.self_attn.v_proj.weight', '(KCH)D', VALUE),
    ],
    'layers.attention.qkv.bias': [
        There('model.layers.{}.self_attn.q_proj.bias', '(KCH)', QUERIES),
        There('model.layers.{}.self_attn.k_proj.bias', '(KCH)', KEY),
        There('model.layers.{}.self_attn.v_proj.bias', '(KCH)', VALUE),
    ],
    'layers.attention.query_norm.weight': [There('model.layers.{}.self_attn.q_norm.weight', 'H')],
    'layers.attention.key_norm.weight': [There('model.layers.{}.self_attn.k_norm.weight', 'H')],
    'layers.attention.out.weight': [There('model.layers.{}.self_attn.o_proj.weight', 'D(NH)')],
    'layers.attention.out.bias': [There('model.layers.{}.self_attn.o_proj.bias', 'D')],
    'layers.mlp.norm.weight': [There('model.layers.{}.post_attention_layernorm.weight', 'D')],
    'layers.mlp.up.weight': [
        There('model.layers.{}.mlp.gate_proj.weight', '(UF)D', GATE),
        There('model.layers.{}.mlp.up_proj.weight', '(UF)D', UP),
    ],
    'layers.mlp.up.bias': [
        There('model.layers.{}.mlp.gate_proj.bias', '(UF)', GATE),
        There('model.layers.{}.mlp.up_proj.bias', '(UF)', UP),
    ],
    'layers.mlp.down.weight': [There('model.layers.{}.mlp.down_proj.weight', 'DF')],
    'layers.mlp.down.bias': [There('model.layers.{}.mlp.down_proj.bias', 'D')],
    'norm.weight': [There('model.norm.weight', 'D')],
    'head': [There(HEAD, 'VD')],
}


def read_config(
    read: Reader,
    own: Callable[[Reader], Keys],
    *,
    grouped: bool = True,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rope: Callable[[Reader], Keys] = read_rope,
) -> Keys:
    """Read the config.json of a family like Llama.

    `own` reads the keys that only some of these families have, for windows and biases. It returns
    `qk_norm`, `bias` and `qkv_bias`, which default to false. A family that is `grouped` always has
    num_key_value_heads. `head_dim` is the default of head_dim, if not hidden_size over the heads,
    and `norm_eps` the default of rms_norm_eps. `rope` reads the keys of the rotary embedding.
    """
    read.only('hidden_act', 'silu', 'swish', default='silu')
    read.only('attention_dropout', 0, default=0)
    sizes = read_names(read, SIZES)
    hidden, heads, decided = sizes['hidden_size'], sizes['num_heads'], own(read)
    return {
        **sizes,
        'num_kv_heads': read.take(
            'num_key_value_heads', 'model.num_kv_heads', ... if grouped else heads
        ),
        'head_dim': _read_head_dim(read, head_dim, hidden, heads),
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        **rope(read),
        **{'qk_norm': False, 'bias': False, 'qkv_bias': False, **decided},
        'tie_embeddings': read.take('tie_word_embeddings', 'model.tie_embeddings', False),
        'norm_eps': read.take('rms_norm_eps', 'model.norm_eps', norm_eps),
        'init_std': read.take('initializer_range', 'model.init_std', 0.02),
    }


def _read_head_dim(
    read: Reader, default: int | None, hidden: int | None, heads: int | None
) -> int | None:
    own = read.get('head_dim', default)
    if own is not None:
        return read.checked('head_dim', own, 'model.head_dim')
    if hidden is None or heads is None:  # there is a problem already
        return None
    return read.checked('hidden_size // num_attention_heads', hidden // heads, 'model.head_dim')


def refuse_layer_types(read: Reader) -> None:
    """Reject layers without full attention."""
    layers = read.get('layer_types', None) or []
    if not isinstance(layers, list):
        read.refuse('layer_types', layers, 'only a list is supported')
    elif other := [kind for kind in layers if kind != 'full_attention']:
        read.refuse('layer_types', other[0], 'only "full_attention" is supported')


def _own_llama(read: Reader) -> Keys:
    refuse_layer_types(read)
    biases = read.take('attention_bias', 'model.bias', False)
    mlp_bias = read.take('mlp_bias', 'model.bias', False)
    if None not in (biases, mlp_bias) and mlp_bias != biases:
        read.refuse(
            'mlp_bias',
            not biases,
            f'only the value of attention_bias, {json.dumps(biases)}, is supported',
        )
    return {'bias': biases, 'qkv_bias': biases}


def _covers(window: Any, length: Any) -> bool:
    if window is None or not isinstance(length, int):  # which has a problem of its own
        return True
    return isinstance(window, int) and window >= length


def refuse_windows(read: Reader, *, default: int | None) -> None:
    """Reject a window of attention that is shorter than the longest sequence."""
    window, length = read.get('sliding_window', default), read.keys.get('max_position_embeddings')
    if not _covers(window, length):
        read.refuse(
            'sliding_window',
            window,
            f'only null, or at least max_position_embeddings={length}, is supported',
        )
    refuse_layer_types(read)


def _own_mistral(read: Reader) -> Keys:
    refuse_windows(read, default=4096)
    return {}


def _refuse_windows_of_qwen(read: Reader) -> None:
    read.only('use_sliding_window', False, default=False)
    read.get('sliding_window', None)
    refuse_layer_types(read)


def _own_qwen2(read: Reader) -> Keys:
    _refuse_windows_of_qwen(read)
    return {'qkv_bias': True}


def _own_qwen3(read: Reader) -> Keys:
    _refuse_windows_of_qwen(read)
    biases = read.take('attention_bias', 'model.bias', False)
    if biases:
        read.refuse('attention_bias', biases, 'only false is supported')
    return {'qk_norm': True, 'bias': biases, 'qkv_bias': biases}


def write_config(model: ModelConfig) -> Keys:
    """Return the keys of config.json that all families like Llama have."""
    return {
        'hidden_act': 'silu',
        **write_names(model, SIZES),
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_dim,
        'rms_norm_eps': model.norm_eps,
        'rope_theta': model.rope_theta,
        'rope_scaling': write_scaling(model),
        'tie_word_embeddings': model.tie_embeddings,
        'initializer_range': model.init_std,
        'attention_dropout': 0.0,
    }


def _write_llama(model: ModelConfig) -> Keys:
    return write_config(model) | {'attention_bias': model.bias, 'mlp_bias': model.bias}


def _write_mistral(model: ModelConfig) -> Keys:
    return write_config(model) | {'sliding_window': None}


def _write_qwen2(model: ModelConfig) -> Keys:
    return write_config(model) | {'use_sliding_window': False}


def _write_qwen3(model: ModelConfig) -> Keys:
    return write_config(model) | {'use_sliding_window': False, 'attention_bias': model.bias}


LIKE_LLAMA = partial(
    Family,
    tensors=TENSORS,
    copies={HEAD: 'embed_tokens.weight'},
    buffers=re.compile(r'(.*\.)?rotary_emb\.inv_freq'),
)
FAMILIES = (
    LIKE_LLAMA(
        name='llama',
        architecture='LlamaForCausalLM',
        read_config=partial(read_config, own=_own_llama, grouped=False),
        write_config=_write_llama,
    ),
    LIKE_LLAMA(
        name='qwen2',
        architecture='Qwen2ForCausalLM',
        read_config=partial(read_config, own=_own_qwen2),
        write_config=_write_qwen2,
    ),
    LIKE_LLAMA(
        name='qwen3',
        architecture='Qwen3ForCausalLM',
        read_config=partial(read_config, own=_own_qwen3, head_dim=128),
        write_config=_write_qwen3,
    ),
    LIKE_LLAMA(
        name='mistral',
        architecture='MistralForCausalLM',
        read_config=partial(read_config, own=_own_mistral),
        write_config=_write_mistral,
    ),
)
