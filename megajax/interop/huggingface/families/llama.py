"""Llama, Mistral, Ministral, Qwen2 and Qwen3, whose tensors have the same names. Imports no jax."""

import json
import re
from collections.abc import Callable
from functools import partial

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
from megajax.interop.huggingface.layers import (
    FULL,
    SLIDING,
    optional_window,
    read_types,
    read_windows,
    replaced_by,
    write_windows,
)
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope, write_scaling
from megajax.interop.huggingface.settings import (
    SIZES,
    check_heads,
    check_layers,
    read_names,
    write_names,
)

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
    tied: bool = False,
    rope: Callable[[Reader], Keys] = read_rope,
) -> Keys:
    """Read the config.json of a family like Llama.

    `own` reads the keys that only some of these families have, for windows and biases. It returns
    `qk_norm`, `bias` and `qkv_bias`, which default to false, and any key whose value differs from
    Llama's. A family that is `grouped` always has num_key_value_heads. `head_dim` is the default of
    head_dim, if that is not hidden_size divided by the number of heads; `norm_eps` is the default
    of rms_norm_eps, and `tied` of tie_word_embeddings. `rope` reads the keys of the rotary
    embedding.
    """
    check_layers(read)
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
        'tie_embeddings': read.take('tie_word_embeddings', 'model.tie_embeddings', tied),
        'norm_eps': read.take('rms_norm_eps', 'model.norm_eps', norm_eps),
        'init_std': read.take('initializer_range', 'model.init_std', 0.02),
    }


def _read_head_dim(
    read: Reader, default: int | None, hidden: int | None, heads: int | None
) -> int | None:
    own = read.get('head_dim', default)
    if own is not None:
        return read.checked('head_dim', own, 'model.head_dim')
    if hidden is None or heads is None:  # a problem was already reported
        return None
    return read.checked('hidden_size // num_attention_heads', hidden // heads, 'model.head_dim')


def only_layer_type(read: Reader, kind: str, fix: str = '') -> None:
    """Reject layers that do not have the type that all layers of the family have."""
    if other := {*read_types(read, lambda index: kind)} - {kind}:
        read.refuse('layer_types', other.pop(), f'only "{kind}" is supported{fix}')


def _own_llama(read: Reader) -> Keys:
    check_heads(read)
    only_layer_type(read, FULL)
    return read_biases(read)


def read_biases(read: Reader) -> Keys:
    """Read the biases, which either all linear layers have or none."""
    biases = read.take('attention_bias', 'model.bias', False)
    mlp_bias = read.take('mlp_bias', 'model.bias', False)
    if None not in (biases, mlp_bias) and mlp_bias != biases:
        read.refuse(
            'mlp_bias',
            not biases,
            f'only the value of attention_bias, {json.dumps(biases)}, is supported',
        )
    return {'bias': biases, 'qkv_bias': biases}


def read_window(read: Reader, default: int | None) -> Keys:
    """Read the window of all layers."""
    window = read.take('sliding_window', 'model.window', default)
    fix = ' with this sliding_window; a Mistral of both types has the model_type "ministral"'
    only_layer_type(read, FULL if window is None else SLIDING, fix)
    return {'window': window}


def _own_mistral(read: Reader) -> Keys:
    return read_window(read, default=4096)


def _own_ministral(read: Reader) -> Keys:
    window = read.take('sliding_window', 'model.window', 4096)
    default = FULL if window is None else SLIDING
    return replaced_by(read_windows(read, window, lambda index: default))


def _windows_of_qwen(read: Reader) -> Keys:
    window, full_layers = optional_window(read, 4096), read.get('max_window_layers', 28)
    if window is None:
        return replaced_by(read_windows(read, None, lambda index: FULL))
    if type(full_layers) is not int or full_layers < 0:
        read.refuse('max_window_layers', full_layers, 'only a number of layers is supported')
        full_layers = 0
    layers = read_windows(read, window, lambda index: FULL if index < full_layers else SLIDING)
    return replaced_by(layers)


def _own_qwen2(read: Reader) -> Keys:
    return {'qkv_bias': True, **_windows_of_qwen(read)}


def _own_qwen3(read: Reader) -> Keys:
    biases = read.take('attention_bias', 'model.bias', False)
    if biases:
        read.refuse('attention_bias', biases, 'only false is supported')
    return {'qk_norm': True, 'bias': biases, 'qkv_bias': biases, **_windows_of_qwen(read)}


def write_config(model: ModelConfig) -> Keys:
    """Return the keys of config.json that all families like Llama have."""
    rotated = next((layer for layer in model.layer_configs if layer.rotates), model)
    return {
        'hidden_act': 'silu',
        **write_names(model, SIZES),
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_dim,
        'rms_norm_eps': model.norm_eps,
        'rope_theta': rotated.rope_theta,
        'rope_scaling': write_scaling(rotated),
        'tie_word_embeddings': model.tie_embeddings,
        'initializer_range': model.init_std,
        'attention_dropout': 0.0,
    }


def _write_llama(model: ModelConfig) -> Keys:
    return write_config(model) | {'attention_bias': model.bias, 'mlp_bias': model.bias}


def _write_mistral(model: ModelConfig) -> Keys:
    return write_config(model) | {'sliding_window': model.window}


def _write_ministral(model: ModelConfig) -> Keys:
    return write_config(model) | write_windows(model, model.max_seq_len)


def _write_qwen2(model: ModelConfig) -> Keys:
    windows = write_windows(model)
    types = windows['layer_types']
    if SLIDING not in types:
        return write_config(model) | {'use_sliding_window': False}
    own = {'use_sliding_window': True, 'max_window_layers': types.index(SLIDING)}
    return write_config(model) | windows | own


def _write_qwen3(model: ModelConfig) -> Keys:
    return _write_qwen2(model) | {'attention_bias': model.bias}


LIKE_LLAMA = partial(
    Family,
    tensors=TENSORS,
    copies={HEAD: 'embed_tokens.weight'},
    buffers=re.compile(r'(.*\.)?rotary_emb\.inv_freq'),
    prefix='model.',
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
    LIKE_LLAMA(
        name='ministral',
        architecture='MinistralForCausalLM',
        read_config=partial(read_config, own=_own_ministral),
        write_config=_write_ministral,
    ),
)
