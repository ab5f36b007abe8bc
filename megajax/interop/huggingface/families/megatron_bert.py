"""MegatronBert: BERT with the norms before the matmuls. Imports no jax."""

import re

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.family import KEY, QUERIES, VALUE, Family, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.settings import (
    SIZES,
    check_heads,
    check_layers,
    read_dropouts,
    read_gelu,
    read_names,
    write_names,
)

# Linear layers are [out, in].
TENSORS = {
    'embedding.table': [There('bert.embeddings.word_embeddings.weight', 'VD')],
    'position.table': [There('bert.embeddings.position_embeddings.weight', 'SD')],
    'token_type.table': [There('bert.embeddings.token_type_embeddings.weight', 'OD')],
    'layers.attention.norm.weight': [There('bert.encoder.layer.{}.attention.ln.weight', 'D')],
    'layers.attention.norm.bias': [There('bert.encoder.layer.{}.attention.ln.bias', 'D')],
    'layers.attention.qkv.weight': [
        There('bert.encoder.layer.{}.attention.self.query.weight', '(KCH)D', QUERIES),
        There('bert.encoder.layer.{}.attention.self.key.weight', '(KCH)D', KEY),
        There('bert.encoder.layer.{}.attention.self.value.weight', '(KCH)D', VALUE),
    ],
    'layers.attention.qkv.bias': [
        There('bert.encoder.layer.{}.attention.self.query.bias', '(KCH)', QUERIES),
        There('bert.encoder.layer.{}.attention.self.key.bias', '(KCH)', KEY),
        There('bert.encoder.layer.{}.attention.self.value.bias', '(KCH)', VALUE),
    ],
    'layers.attention.out.weight': [
        There('bert.encoder.layer.{}.attention.output.dense.weight', 'D(NH)')
    ],
    'layers.attention.out.bias': [There('bert.encoder.layer.{}.attention.output.dense.bias', 'D')],
    'layers.mlp.norm.weight': [There('bert.encoder.layer.{}.ln.weight', 'D')],
    'layers.mlp.norm.bias': [There('bert.encoder.layer.{}.ln.bias', 'D')],
    'layers.mlp.up.weight': [There('bert.encoder.layer.{}.intermediate.dense.weight', 'FD')],
    'layers.mlp.up.bias': [There('bert.encoder.layer.{}.intermediate.dense.bias', 'F')],
    'layers.mlp.down.weight': [There('bert.encoder.layer.{}.output.dense.weight', 'DF')],
    'layers.mlp.down.bias': [There('bert.encoder.layer.{}.output.dense.bias', 'D')],
    'norm.weight': [There('bert.encoder.ln.weight', 'D')],
    'norm.bias': [There('bert.encoder.ln.bias', 'D')],
    'masked_head.dense.weight': [There('cls.predictions.transform.dense.weight', 'ED')],
    'masked_head.dense.bias': [There('cls.predictions.transform.dense.bias', 'E')],
    'masked_head.norm.weight': [There('cls.predictions.transform.LayerNorm.weight', 'D')],
    'masked_head.norm.bias': [There('cls.predictions.transform.LayerNorm.bias', 'D')],
    'masked_head.bias': [There('cls.predictions.bias', 'V')],
    'order_head.pooler.weight': [There('bert.pooler.dense.weight', 'ED')],
    'order_head.pooler.bias': [There('bert.pooler.dense.bias', 'E')],
    'order_head.classifier.weight': [There('cls.seq_relationship.weight', 'OD')],
    'order_head.classifier.bias': [There('cls.seq_relationship.bias', 'O')],
}
NAMES = {
    **SIZES,
    'norm_eps': ('layer_norm_eps', 1e-12),
    'init_std': ('initializer_range', 0.02),
}


def read_config(read: Reader) -> Keys:
    """Read the config.json of MegatronBert."""
    check_layers(read, causal=False)
    check_heads(read)
    read.only('tie_word_embeddings', True, default=True)
    read.only('type_vocab_size', 2, default=2)
    read.only('position_embedding_type', 'absolute', default='absolute')
    read.only('is_decoder', False, default=False)
    read.only('add_cross_attention', False, default=False)
    activation = read_gelu(read, 'hidden_act', 'gelu')
    return {
        'objective': 'masked_lm',
        **read_names(read, NAMES),
        'activation': activation,
        **read_dropouts(read, 'hidden_dropout_prob', attention='attention_probs_dropout_prob'),
    }


def write_config(model: ModelConfig) -> Keys:
    """Write the config.json of MegatronBert."""
    return {
        'hidden_act': 'gelu' if model.activation == 'gelu' else 'gelu_new',
        **write_names(model, NAMES),
        'type_vocab_size': 2,
        'tie_word_embeddings': model.tie_embeddings,
        'hidden_dropout_prob': model.dropout,
        'attention_probs_dropout_prob': model.attention_dropout,
    }


FAMILIES = (
    Family(
        name='megatron-bert',
        architecture='MegatronBertForPreTraining',
        read_config=read_config,
        write_config=write_config,
        tensors=TENSORS,
        copies={
            'cls.predictions.decoder.weight': 'word_embeddings.weight',
            'cls.predictions.decoder.bias': 'cls.predictions.bias',
        },
        buffers=re.compile(r'(.*\.)?embeddings\.position_ids'),
    ),
)
