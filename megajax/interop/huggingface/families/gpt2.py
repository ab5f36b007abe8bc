"""GPT-2. Imports no jax."""

import re

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.family import HEAD, Family, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.settings import read_dropouts, read_gelu

# Linear layers are [in, out]. All queries come before all keys, and these before all values.
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


def read_config(read: Reader) -> Keys:
    """Read the config.json of GPT-2."""
    read.only('scale_attn_weights', True, default=True)
    read.only('scale_attn_by_inverse_layer_idx', False, default=False)
    read.only('reorder_and_upcast_attn', False, default=False)
    read.only('add_cross_attention', False, default=False)
    activation = read_gelu(read, 'activation_function', 'gelu_new')
    hidden = read.take('n_embd', 'model.hidden_size')
    return {
        'num_layers': read.take('n_layer', 'model.num_layers'),
        'hidden_size': hidden,
        'num_heads': read.take('n_head', 'model.num_heads'),
        'ffn_size': read.take('n_inner', 'model.ffn_size', None) or 4 * (hidden or 0),
        'vocab_size': read.take('vocab_size', 'model.vocab_size'),
        'max_seq_len': read.take('n_positions', 'model.max_seq_len'),
        'activation': activation,
        'tie_embeddings': read.take('tie_word_embeddings', 'model.tie_embeddings', True),
        **read_dropouts(read, 'resid_pdrop', 'embd_pdrop', attention='attn_pdrop'),
        'norm_eps': read.take('layer_norm_epsilon', 'model.norm_eps', 1e-5),
        'init_std': read.take('initializer_range', 'model.init_std', 0.02),
    }


def write_config(model: ModelConfig) -> Keys:
    """Write the config.json of GPT-2."""
    return {
        'activation_function': 'gelu' if model.activation == 'gelu' else 'gelu_new',
        'n_layer': model.num_layers,
        'n_embd': model.hidden_size,
        'n_head': model.num_heads,
        'n_inner': model.ffn_size,
        'n_positions': model.max_seq_len,
        'vocab_size': model.vocab_size,
        'layer_norm_epsilon': model.norm_eps,
        'tie_word_embeddings': model.tie_embeddings,
        **dict.fromkeys(('resid_pdrop', 'embd_pdrop'), model.dropout),
        'attn_pdrop': model.attention_dropout,
        'initializer_range': model.init_std,
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
        prefix='transformer.',  # GPT-2 was released without it
    ),
)
