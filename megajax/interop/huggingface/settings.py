"""Readers of settings that GPT-2 and MegatronBert share. Imports no jax."""

from megajax.interop.huggingface.reader import Reader

GELUS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}


def read_gelu(read: Reader, key: str, default: str) -> str | None:
    """Read the activation, which must be a GELU, as `model.activation`."""
    activation = read.get(key, default)
    if activation not in GELUS:
        read.refuse(key, activation, f'only {", ".join(GELUS)} are supported')
    return GELUS.get(activation)


def read_dropouts(read: Reader, *keys: str) -> float:
    """Read the dropout rates, which must be equal, as `model.dropout`."""
    rates = {key: read.get(key, 0.1) for key in keys}
    if len(set(rates.values())) > 1:
        read.refuse(keys[-1], rates[keys[-1]], f'all dropout rates must be equal, but are {rates}')
    return float(rates[keys[0]])
