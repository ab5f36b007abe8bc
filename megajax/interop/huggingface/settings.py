"""Readers and writers of settings that families share. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from megajax.core.config import ModelConfig
from megajax.core.config.vision import VisionConfig
from megajax.interop.huggingface.reader import Keys, Reader

GELUS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}


# For each key of megajax, the key of config.json and transformers' default if it is missing.
Names = Mapping[str, tuple[str, Any]]
SIZES: Names = {
    'num_layers': ('num_hidden_layers', ...),
    'hidden_size': ('hidden_size', ...),
    'num_heads': ('num_attention_heads', ...),
    'ffn_size': ('intermediate_size', ...),
    'max_seq_len': ('max_position_embeddings', ...),
    'vocab_size': ('vocab_size', ...),
}


def read_names(read: Reader, names: Names, section: str = 'model') -> Keys:
    """Read the keys of a section; `names` gives their names in config.json."""
    return {ours: read.take(key, f'{section}.{ours}', x) for ours, (key, x) in names.items()}


def write_names(section: ModelConfig | VisionConfig, names: Names) -> Keys:
    """Return the keys of config.json that `read_names` reads."""
    return {key: getattr(section, ours) for ours, (key, _) in names.items()}


def check_layers(read: Reader, *, causal: bool = True) -> None:
    """Reject settings with which transformers 5 changes the layers of any family."""
    read.only('per_layer_config', None, default=None)  # other sizes of some layers
    if causal:
        read.only('is_causal', True, default=True)  # otherwise, attention is bidirectional


def check_heads(
    read: Reader, hidden: str = 'hidden_size', heads: str = 'num_attention_heads'
) -> None:
    """Reject a number of heads that does not divide the hidden size, even with a head_dim.

    Some families in transformers have this limit.
    """
    size, number = read.keys.get(hidden), read.keys.get(heads)
    if type(size) is int and type(number) is int and number > 0 and size % number:
        read.refuse(heads, number, f'does not divide {hidden}={size}')


def read_gelu(read: Reader, key: str, default: str) -> str | None:
    """Read the activation, which must be a GELU, as `model.activation`."""
    activation = read.get(key, default)
    if not isinstance(activation, str) or activation not in GELUS:
        read.refuse(key, activation, f'only {", ".join(GELUS)} are supported')
        return None
    return GELUS.get(activation)


def read_dropouts(read: Reader, *keys: str, attention: str) -> dict[str, float]:
    """Read `model.dropout`, which all of `keys` must agree on, and `model.attention_dropout`."""
    rates = {key: read.take(key, 'model.dropout', 0.1) for key in keys}
    if len(set(rates.values())) > 1:
        reason = f'the dropout rates of {" and ".join(keys)} must be equal, but are {rates}'
        read.refuse(keys[-1], rates[keys[-1]], reason)
    of_attention = read.take(attention, 'model.attention_dropout', 0.1)
    return {'dropout': rates[keys[0]], 'attention_dropout': of_attention}
