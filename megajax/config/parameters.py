"""How many parameters a decoder has, counted without building it.

D model, N query heads, K key/value heads, H head dim, F feed-forward.
"""

from megajax.config.schema import ModelConfig


def num_parameters(model: ModelConfig, *, padded: bool = False, shards: int = 1) -> int:
    """Count the decoder's parameters exactly, with the vocabulary as the tokenizer has it or, if `padded`, as the arrays hold it.

    With `shards`, those on each device of a tensor-parallel group of Megatron's, where a key/value head lies on one device at least.
    """
    embedding = (model.padded_vocab_size if padded else model.vocab_size) // shards * model.hidden_size
    positions = model.max_seq_len * model.hidden_size if model.position == 'learned' else 0
    tables = embedding + positions + (0 if model.tie_embeddings else embedding)
    return tables + model.num_layers * _layer(model, shards) + _norm(model, model.hidden_size)


def _layer(model: ModelConfig, shards: int) -> int:
    D, N, K, H, F = model.hidden_size, model.num_heads, max(model.num_kv_heads, shards), model.head_dim, model.ffn_size
    qkv, out, down = (N + 2 * K) * H // shards, N * H // shards, F // shards
    up = 2 * down if model.activation == 'swiglu' else down
    weights = D * (qkv + out + up + down)
    biases = qkv + up + 2 * D if model.bias else 0  # those after a row-parallel product are whole on each shard
    norms = 2 * _norm(model, D) + (2 * _norm(model, H) if model.qk_norm else 0)
    return weights + biases + norms


def _norm(model: ModelConfig, size: int) -> int:
    return 2 * size if model.norm == 'layernorm' else size
