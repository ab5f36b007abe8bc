"""GPT-2. Imports no jax."""

import re

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.family import HEAD, Family, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.settings import (
    Names,
    check_heads,
    check_layers,
    read_dropouts,
    read_gelu,
    read_names,
    write_names,
)

# Linear layers are [in, out]. All queries come first, then all keys, then all values.
TENSORS = {
    'embedding.table': [There('transformer.wte.weight', 'VD')],
    'position.table': [There('transformer.wpe.weight', 'SD')],
    'layers.attention.norm.weight': [There('transformer.h.{}.ln_1.weight', 'D')],
    'layers.attention.norm.bias': [There('transformer.h.{}.ln_1.bias', 'D')],
    'layers.attention.qkv.weight': [There('transformer.h.{}.attn.c_attn.weight', 'D(CKH)')],
    'layers.attention.qkv.bias': [There('transformer.h.{}.attn.c_attn.bias', '(CKH)')],
    'layers.attention.out.weight': [There('transformer.h.{}.attn.c_proj.weight', '(NH)D')],
    'layers.attention.out.bias': [There('transformer.h.{}.attn.c_proj.bias', 'D')],
    'layers.mlp.norm.weight': [There('transformer.h.{}.ln_2.weight', 'D')],
    'layers.mlp.norm.bias': [There('transformer.h.{}.ln_2.bias', 'D')],
    'layers.mlp.up.weight': [There('transformer.h.{}.mlp.c_fc.weight', 'DF')],
    'layers.mlp.up.bias': [There('transformer.h.{}.mlp.c_fc.bias', 'F')],
    'layers.mlp.down.weight': [There('transformer.h.{}.mlp.c_proj.weight', 'FD')],
    'layers.mlp.down.bias': [There('transformer.h.{}.mlp.c_proj.bias', 'D')],
    'norm.weight': [There('transformer.ln_f.weight', 'D')],
    'norm.bias': [There('transformer.ln_f.bias', 'D')],
    'head': [There(HEAD, 'VD')],
}
NAMES: Names = {
    'num_layers': ('n_layer', ...),
    'hidden_size': ('n_embd', ...),
    'num_heads': ('n_head', ...),
    'ffn_size': ('n_inner', None),
    'max_seq_len': ('n_positions', ...),
    'vocab_size': ('vocab_size', ...),
    'norm_eps': ('layer_norm_epsilon', 1e-5),
    'tie_embeddings': ('tie_word_embeddings', True),
    'init_std': ('initializer_range', 0.02),
}


def read_config(read: Reader) -> Keys:
    """Read the config.json of GPT-2."""
    check_layers(read)
    check_heads(read, 'n_embd', 'n_head')
    read.only('scale_attn_weights', True, default=True)
    read.only('scale_attn_by_inverse_layer_idx', False, default=False)
    read.only('reorder_and_upcast_attn', False, default=False)
    read.only('add_cross_attention', False, default=False)
    activation = read_gelu(read, 'activation_function', 'gelu_new')
    keys = read_names(read, NAMES)
    return {
        **keys,
        'ffn_size': keys['ffn_size'] or 4 * (keys['hidden_size'] or 0),
        'activation': activation,
        **read_dropouts(read, 'resid_pdrop', 'embd_pdrop', attention='attn_pdrop'),
    }


def write_config(model: ModelConfig) -> Keys:
    """Write the config.json of GPT-2."""
    return {
        'activation_function': 'gelu' if model.activation == 'gelu' else 'gelu_new',
        **write_names(model, NAMES),
        **dict.fromkeys(('resid_pdrop', 'embd_pdrop'), model.dropout),
        'attn_pdrop': model.attention_dropout,
    }


FAMILIES = (
    Family(
        name='gpt2',
        architecture='GPT2LMHeadModel',
        read_config=read_config,
        write_config=write_config,
        tensors=TENSORS,
        copies={HEAD: 'wte.weight'},
        buffers=re.compile(r'(.*\.)?h\.\d+\.attn\.(bias|masked_bias)'),
        prefix='transformer.',  # the released GPT-2 has no prefix
    ),
)
