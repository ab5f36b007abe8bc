"""Conversion of the weights of Hugging Face families: three tables of tensor names and dims."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx

from megajax.checkpoint.open import abstract_params
from megajax.config import Config, ConfigError, ModelConfig
from megajax.interop.pieces import (
    Piece,
    Pieces,
    Shape,
    check,
    check_finite,
    dims_here,
    make_pieces,
    place,
    shapes_of,
    tensors_of,
)

HEAD = 'lm_head.weight'
# With tied embeddings: copies that a directory may hold, and how the name of the original ends.
TIED = {
    HEAD: ('wte.weight', 'embed_tokens.weight'),
    'cls.predictions.decoder.weight': ('word_embeddings.weight',),
    'cls.predictions.decoder.bias': ('cls.predictions.bias',),
}
# Buffers that older versions of transformers saved and that nobody reads.
BUFFERS = re.compile(
    r'(.*\.)?(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq|embeddings\.position_ids)'
)
QUERIES, KEY, VALUE = slice(None, -2), slice(-2, -1), slice(-1, None)
GATE, UP = slice(0, 1), slice(1, 2)


class There(NamedTuple):
    """A tensor of a Hugging Face directory, and the part of a parameter that it holds."""

    name: str  # {} stands for the layer's index
    dims: str
    columns: slice = slice(None)  # of C, the columns of a head group, or of U, gate and up


# GPT-2: linear layers are [in, out]. All queries come before all keys, and these before all values.
GPT2 = {
    'embedding.table': [There('transformer.wte.weight', 'VD')],
    'position.table': [There('transformer.wpe.weight', 'SD')],
    'layers.attention_norm.weight': [There('transformer.h.{}.ln_1.weight', 'D')],
    'layers.attention_norm.bias': [There('transformer.h.{}.ln_1.bias', 'D')],
    'layers.attention.qkv.weight': [There('transformer.h.{}.attn.c_attn.weight', 'D(CKH)')],
    'layers.attention.qkv.bias': [There('transformer.h.{}.attn.c_attn.bias', '(CKH)')],
    'layers.attention.out.weight': [There('transformer.h.{}.attn.c_proj.weight', '(NH)D')],
    'layers.attention.out.bias': [There('transformer.h.{}.attn.c_proj.bias', 'D')],
    'layers.mlp_norm.weight': [There('transformer.h.{}.ln_2.weight', 'D')],
    'layers.mlp_norm.bias': [There('transformer.h.{}.ln_2.bias', 'D')],
    'layers.mlp.up.weight': [There('transformer.h.{}.mlp.c_fc.weight', 'DF')],
    'layers.mlp.up.bias': [There('transformer.h.{}.mlp.c_fc.bias', 'F')],
    'layers.mlp.down.weight': [There('transformer.h.{}.mlp.c_proj.weight', 'FD')],
    'layers.mlp.down.bias': [There('transformer.h.{}.mlp.c_proj.bias', 'D')],
    'norm.weight': [There('transformer.ln_f.weight', 'D')],
    'norm.bias': [There('transformer.ln_f.bias', 'D')],
    'head': [There(HEAD, 'VD')],
}

# Llama, Mistral, Qwen2 and Qwen3: linear layers are [out, in]. The queries of a key/value head are
# adjacent, as in megajax.
LLAMA = {
    'embedding.table': [There('model.embed_tokens.weight', 'VD')],
    'layers.attention_norm.weight': [There('model.layers.{}.input_layernorm.weight', 'D')],
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
    'layers.mlp_norm.weight': [There('model.layers.{}.post_attention_layernorm.weight', 'D')],
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


# MegatronBert, BERT with the norms before the matrix products: linear layers are [out, in].
MEGATRON_BERT = {
    'embedding.table': [There('bert.embeddings.word_embeddings.weight', 'VD')],
    'position.table': [There('bert.embeddings.position_embeddings.weight', 'SD')],
    'token_type.table': [There('bert.embeddings.token_type_embeddings.weight', 'OD')],
    'layers.attention_norm.weight': [There('bert.encoder.layer.{}.attention.ln.weight', 'D')],
    'layers.attention_norm.bias': [There('bert.encoder.layer.{}.attention.ln.bias', 'D')],
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
    'layers.mlp_norm.weight': [There('bert.encoder.layer.{}.ln.weight', 'D')],
    'layers.mlp_norm.bias': [There('bert.encoder.layer.{}.ln.bias', 'D')],
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


def huggingface_pieces(model: ModelConfig, shapes: Mapping[str, Shape]) -> Pieces:
    """The pieces of each parameter in a family's tensors, which omit the vocabulary's padding."""
    tables = {'bert': MEGATRON_BERT, 'gpt2': GPT2, 'llama': LLAMA}
    family = _family(model)
    dims, vocab = dims_here(model), slice(0, model.vocab_size)

    def pieces(path: str, shape: Shape) -> list[Piece]:
        pieces_of_path = []
        for there in tensors_of(tables[family], path, family):
            ranges = {'C': there.columns, 'U': there.columns, 'V': vocab}
            pieces_of_path += make_pieces(there.name, there.dims, dims[path], shape, ranges)
        return pieces_of_path

    return {path: pieces(path, shape) for path, shape in shapes.items()}


def _family(model: ModelConfig) -> str:
    if model.is_bert:
        return 'bert'
    return 'gpt2' if model.position == 'learned' else 'llama'


def from_huggingface(
    config: Config, tensors: Mapping[str, np.ndarray], *, source: str
) -> nnx.State:
    """Return a family's tensors as parameters: in fp32, placed on the current mesh.

    The vocabulary is padded with zeros. Memory-mapped `tensors` are read once, and each process
    reads only what its devices get. Raises ConfigError, which names `source`, for tensors that do
    not fit the model.
    """
    abstract = abstract_params(config)
    pieces = huggingface_pieces(config.model, shapes_of(abstract))
    tensors = _named_as_saved(config.model, tensors, source)
    check(abstract, pieces, tensors, of=source, keys='config.json decides which tensors exist')
    return place(abstract, pieces, tensors, of=source)


def _named_as_saved(
    model: ModelConfig, tensors: Mapping[str, np.ndarray], source: str
) -> dict[str, np.ndarray]:
    """The tensors under the names that `save_pretrained` of the full model gives them.

    Unused buffers, and copies of tied tensors, are left out.
    """
    # GPT-2 was released without the prefix.
    bare = _family(model) == 'gpt2' and not any(name.startswith('transformer.') for name in tensors)
    named = {
        f'transformer.{name}' if bare and name != HEAD else name: x
        for name, x in tensors.items()
        if not BUFFERS.fullmatch(name)
    }
    for copy in TIED.keys() & named.keys() if model.tie_embeddings else ():
        name, x = next(
            ((name, x) for name, x in named.items() if name.endswith(TIED[copy])), ('', None)
        )
        if x is not None and not np.array_equal(named[copy], x):
            check_finite(name, x, of=source)  # NaN would differ even from itself
            what = 'the embedding' if copy.endswith('weight') else name
            raise ConfigError(
                f'{source}: {copy} differs from {what}, but tie_word_embeddings says they are tied'
            )
        del named[copy]
    return named
