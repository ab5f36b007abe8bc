"""Readers of settings that GPT-2 and MegatronBert share. Imports no jax."""

from megajax.interop.huggingface.reader import Reader

GELUS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}


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
