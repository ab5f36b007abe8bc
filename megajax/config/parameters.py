"""How many parameters a model has, counted without building it.

D model, N query heads, K key/value heads, H head dim, F feed-forward.
"""

from megajax.config.schema import ModelConfig

NUM_TOKEN_TYPES = 2  # the first and the second segment of BERT
NUM_ORDERS = 2  # of its segments: as they were, or swapped


def num_parameters(model: ModelConfig, *, padded: bool = False, shards: int = 1, whole_heads: bool = True) -> int:
    """Count the model's parameters exactly, with the vocabulary as the tokenizer has it or, if `padded`, as the arrays hold it.

    With `shards`, those on each device of a tensor-parallel group: of Megatron's, where a key/value head lies on one device at least,
    or without `whole_heads` of megajax's, where a device has as many of the columns of QKV as any other.
    """
    D, H = model.hidden_size, model.head_dim
    qkv, up = _columns(model, shards, whole_heads)
    positions = model.max_seq_len * D if model.position == 'learned' else 0
    biases = up + 2 * D if model.bias else 0  # those after a row-parallel product are whole on each shard
    biases += qkv if model.qkv_bias else 0
    norms = 2 * _norm(model, D) + (2 * _norm(model, H) if model.qk_norm else 0)
    vectors = positions + model.num_layers * (biases + norms) + _norm(model, D)
    if not model.causal:  # token types; of the heads, the biases and the norm
        vocab = (model.padded_vocab_size if padded else model.vocab_size) // shards
        vectors += NUM_TOKEN_TYPES * D + 2 * D + _norm(model, D) + vocab + NUM_ORDERS
    return num_matrix_parameters(model, padded=padded, shards=shards, whole_heads=whole_heads) + vectors


def num_matrix_parameters(model: ModelConfig, *, padded: bool = False, shards: int = 1, whole_heads: bool = True) -> int:
    """Those of `num_parameters` with which the model computes in `train.dtype`: not norms, biases, learned positions and token types."""
    D = model.hidden_size
    qkv, up = _columns(model, shards, whole_heads)
    embedding = (model.padded_vocab_size if padded else model.vocab_size) // shards * D
    layer = D * (qkv + model.num_heads * model.head_dim // shards + up + model.ffn_size // shards)
    heads = 0 if model.causal else 2 * D**2 + NUM_ORDERS * D  # BERT's, whole on each shard
    return (1 if model.tie_embeddings else 2) * embedding + model.num_layers * layer + heads


def _columns(model: ModelConfig, shards: int, whole_heads: bool) -> tuple[int, int]:
    """Of QKV, and of the MLP's up, or gate and up, on each device."""
    K = max(model.num_kv_heads, shards) if whole_heads else model.num_kv_heads
    qkv = (model.num_heads + 2 * K) * model.head_dim // shards
    return qkv, (2 if model.activation == 'swiglu' else 1) * model.ffn_size // shards


def _norm(model: ModelConfig, size: int) -> int:
    return 2 * size if model.norm == 'layernorm' else size
