"""How many parameters a decoder has, counted without building it.

D model, N query heads, K key/value heads, H head dim, F feed-forward.
"""

from megajax.config.schema import ModelConfig


def num_parameters(model: ModelConfig, *, padded: bool = False) -> int:
    """Count the decoder's parameters exactly, with the vocabulary as the tokenizer has it or, if `padded`, as the arrays hold it."""
    embedding = (model.padded_vocab_size if padded else model.vocab_size) * model.hidden_size
    positions = model.max_seq_len * model.hidden_size if model.position == 'learned' else 0
    tables = embedding + positions + (0 if model.tie_embeddings else embedding)
    return tables + model.num_layers * _layer(model) + _norm(model, model.hidden_size)


def _layer(model: ModelConfig) -> int:
    D, N, K, H, F = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size
    up = 2 * F if model.activation == 'swiglu' else F
    linears = [(D, (N + 2 * K) * H), (N * H, D), (D, up), (F, D)]
    weights = sum(inputs * outputs for inputs, outputs in linears)
    biases = sum(outputs for _, outputs in linears) if model.bias else 0
    norms = 2 * _norm(model, D) + (2 * _norm(model, H) if model.qk_norm else 0)
    return weights + biases + norms


def _norm(model: ModelConfig, size: int) -> int:
    return 2 * size if model.norm == 'layernorm' else size
