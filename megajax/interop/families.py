"""Reading and writing the config.json of the supported Hugging Face families. Imports no jax.

A family is read strictly: a setting that megajax's decoder does not implement is rejected with its
key and value. A model is written as a family only if reading it back gives the same model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config import ConfigError, ModelConfig
from megajax.interop.reader import Keys, Reader

ARCHITECTURES = {
    'gpt2': 'GPT2LMHeadModel',
    'llama': 'LlamaForCausalLM',
    'qwen2': 'Qwen2ForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
    'mistral': 'MistralForCausalLM',
    'megatron-bert': 'MegatronBertForPreTraining',
}
POST_NORM = ('bert', 'roberta')
GELUS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu'}
ROPE = frozenset(
    {'rope_type', 'type', 'rope_theta', 'factor', 'low_freq_factor', 'high_freq_factor'}
    | {'original_max_position_embeddings', 'partial_rotary_factor'}
)
# Keys of `model` that only some families have a key for.
IN_TRAINING = frozenset({'dropout', 'init_std'})


def read_family(keys: Mapping[str, Any], file: str) -> tuple[str, Keys, list[str]]:
    """Read a config.json: its family, the keys of `model`, and the keys that were not used.

    Raises ConfigError with every key and value that is not supported.
    """
    family = keys.get('model_type')
    if family in POST_NORM:
        raise ConfigError(
            f'{file}: model_type: {json.dumps(family)}: '
            'its norms come after the residual connections, '
            'but only models with norms before them are supported, such as "megatron-bert"'
        )
    if family not in ARCHITECTURES:
        raise ConfigError(
            f'{file}: model_type: {json.dumps(family)}: '
            f'only {", ".join(ARCHITECTURES)} are supported'
        )
    read = Reader(keys, file)
    read.only('architectures', [ARCHITECTURES[family]], None, default=None)
    read.only('quantization_config', None, default=None)
    match family:
        case 'gpt2':
            model = _read_gpt2(read)
        case 'megatron-bert':
            model = _read_megatron_bert(read)
        case _:
            model = _read_llama_like(read, family)
    if read.problems:
        raise ConfigError(*read.problems)
    return family, model, read.left


def _read_gpt2(read: Reader) -> Keys:
    read.only('scale_attn_weights', True, default=True)
    read.only('scale_attn_by_inverse_layer_idx', False, default=False)
    read.only('reorder_and_upcast_attn', False, default=False)
    read.only('add_cross_attention', False, default=False)
    activation = read.get('activation_function', 'gelu_new')
    if activation not in GELUS:
        read.refuse('activation_function', activation, f'only {", ".join(GELUS)} are supported')
    dropout = _read_dropouts(read, 'resid_pdrop', 'embd_pdrop', 'attn_pdrop')
    hidden = read.get('n_embd')
    return {
        'num_layers': read.get('n_layer'),
        'hidden_size': hidden,
        'num_heads': read.get('n_head'),
        'ffn_size': read.get('n_inner', None) or 4 * (hidden or 0),
        'vocab_size': read.get('vocab_size'),
        'max_seq_len': read.get('n_positions'),
        'activation': GELUS.get(activation),
        'tie_embeddings': read.get('tie_word_embeddings', True),
        'dropout': dropout,
        'norm_eps': read.get('layer_norm_epsilon', 1e-5),
        'init_std': read.get('initializer_range', 0.02),
    }


def _read_megatron_bert(read: Reader) -> Keys:
    read.only('tie_word_embeddings', True, default=True)
    read.only('type_vocab_size', 2, default=2)
    read.only('position_embedding_type', 'absolute', default='absolute')
    read.only('is_decoder', False, default=False)
    read.only('add_cross_attention', False, default=False)
    activation = read.get('hidden_act', 'gelu')
    if activation not in GELUS:
        read.refuse('hidden_act', activation, f'only {", ".join(GELUS)} are supported')
    return {
        'objective': 'masked_lm',
        'num_layers': read.get('num_hidden_layers'),
        'hidden_size': read.get('hidden_size'),
        'num_heads': read.get('num_attention_heads'),
        'ffn_size': read.get('intermediate_size'),
        'vocab_size': read.get('vocab_size'),
        'max_seq_len': read.get('max_position_embeddings'),
        'activation': GELUS.get(activation),
        'dropout': _read_dropouts(read, 'hidden_dropout_prob', 'attention_probs_dropout_prob'),
        'norm_eps': read.get('layer_norm_eps', 1e-12),
        'init_std': read.get('initializer_range', 0.02),
    }


def _read_dropouts(read: Reader, *keys: str) -> float:
    rates = {key: read.get(key, 0.1) for key in keys}
    if len(set(rates.values())) > 1:
        read.refuse(keys[-1], rates[keys[-1]], f'all dropout rates must be equal, but are {rates}')
    return float(rates[keys[0]])


def _read_llama_like(read: Reader, family: str) -> Keys:
    read.only('hidden_act', 'silu', 'swish', default='silu')
    read.only('attention_dropout', 0, default=0)
    hidden, heads, length = (
        read.get('hidden_size'),
        read.get('num_attention_heads'),
        read.get('max_position_embeddings'),
    )
    _refuse_windows(read, family, length)
    biases = False
    if family in ('llama', 'qwen3'):
        biases = read.get('attention_bias', False)
    if family == 'llama':
        if read.get('mlp_bias', False) != biases:
            read.refuse(
                'mlp_bias',
                not biases,
                f'only the value of attention_bias, {json.dumps(biases)}, is supported',
            )
    elif biases:
        read.refuse('attention_bias', biases, 'only false is supported')
    return {
        'num_layers': read.get('num_hidden_layers'),
        'hidden_size': hidden,
        'num_heads': heads,
        'num_kv_heads': read.get('num_key_value_heads', heads if family == 'llama' else ...),
        'head_dim': read.get('head_dim', 128 if family == 'qwen3' else None)
        or (hidden or 0) // (heads or 1),
        'ffn_size': read.get('intermediate_size'),
        'vocab_size': read.get('vocab_size'),
        'max_seq_len': length,
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        **_read_rope(read),
        'qk_norm': family == 'qwen3',
        'bias': biases,
        'qkv_bias': biases or family == 'qwen2',
        'tie_embeddings': read.get('tie_word_embeddings', False),
        'norm_eps': read.get('rms_norm_eps', 1e-6),
        'init_std': read.get('initializer_range', 0.02),
    }


def _refuse_windows(read: Reader, family: str, length: int | None) -> None:
    """Reject sliding-window attention if the model would use it."""
    if family == 'mistral':
        window = read.get('sliding_window', 4096)
        if window is not None and length is not None and window < length:
            read.refuse(
                'sliding_window',
                window,
                f'only null, or at least max_position_embeddings={length}, is supported',
            )
    elif family in ('qwen2', 'qwen3'):
        read.only('use_sliding_window', False, default=False)
        read.get('sliding_window', None)
    layers = read.get('layer_types', None) or []
    if other := [kind for kind in layers if kind != 'full_attention']:
        read.refuse('layer_types', other[0], 'only "full_attention" is supported')


def _read_rope(read: Reader) -> Keys:
    """Read theta and scaling of the rotary embedding.

    transformers 5 has them in `rope_parameters`, earlier versions in `rope_theta` and
    `rope_scaling`.
    """
    read.only('partial_rotary_factor', 1, default=1)
    old = read.get('rope_theta', 10000.0), read.get('rope_scaling', None) or {}
    new = read.get('rope_parameters', None)
    key, scaling = ('rope_scaling', old[1]) if new is None else ('rope_parameters', new)
    if not isinstance(scaling, Mapping):
        read.refuse(key, scaling, 'only an object is supported')
        return {}
    for name in scaling.keys() - ROPE:
        per_layer = isinstance(scaling[name], Mapping)
        why = 'only one rope for all layers is supported' if per_layer else 'is not supported'
        read.refuse(f'{key}.{name}', scaling[name], why)
    theta = scaling.get('rope_theta', old[0])
    if not isinstance(theta, (int, float)) or not theta > 0:
        read.refuse(
            f'{key}.rope_theta' if 'rope_theta' in scaling else 'rope_theta',
            theta,
            'only a number above 0 is supported',
        )
        return {}
    theta = float(theta)
    if new is not None and 'rope_theta' not in {*scaling, *read.keys}:
        read.problems.append(f'{read.file}: {key}.rope_theta: required, and missing')
    kind = scaling.get('rope_type', scaling.get('type', 'default'))
    if scaling.get('partial_rotary_factor', 1) != 1:
        read.refuse(
            f'{key}.partial_rotary_factor', scaling['partial_rotary_factor'], 'only 1 is supported'
        )
    if kind == 'default':
        return {'rope_theta': theta}
    if kind not in ('linear', 'llama3'):
        read.refuse(f'{key}.rope_type', kind, 'only "default", "linear" and "llama3" are supported')
        return {}
    wanted = {'factor': 'factor'}
    if kind == 'llama3':
        wanted |= {'low_freq_factor': 'low_freq_factor', 'high_freq_factor': 'high_freq_factor'}
        wanted |= {'original_max_seq_len': 'original_max_position_embeddings'}
    if missing := [name for name in wanted.values() if name not in scaling]:
        read.problems.append(
            f'{read.file}: {key}.{missing[0]}: required by rope_type {kind}, and missing'
        )
        return {}
    return {
        'rope_theta': theta,
        'rope_scaling': {'type': kind}
        | {ours: _number(scaling[name]) for ours, name in wanted.items()},
    }


def _number(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def read_config_json(folder: Path) -> tuple[str, Keys, list[str]]:
    """Read a directory's config.json as `read_family` does.

    Raises ConfigError as `read_family` does, and for a file that is missing or cannot be parsed.
    """
    file = folder / 'config.json'
    try:
        keys = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise ConfigError(f'{file}: not JSON: {error}') from error
    if not isinstance(keys, dict):
        raise ConfigError(f'{file}: not a JSON object')
    return read_family(keys, str(file))


def write_family(model: ModelConfig, family: str | None = None) -> tuple[str, Keys]:
    """Return a model's family, by default the first that fits, and its config.json.

    Raises ConfigError, with the keys that are not supported, if no family fits.
    """
    if family and family not in ARCHITECTURES:
        raise ConfigError(f'family {family}: choose among {", ".join(ARCHITECTURES)}')
    problems = []
    for candidate in [family] if family else ARCHITECTURES:
        match candidate:
            case 'gpt2':
                keys = _write_gpt2(model)
            case 'megatron-bert':
                keys = _write_megatron_bert(model)
            case _:
                keys = _write_llama_like(model, candidate)
        keys |= {'architectures': [ARCHITECTURES[candidate]], 'model_type': candidate}
        different = _differences(model, keys)
        if not different:
            return candidate, keys
        problems.append(f'{candidate} does not support {", ".join(different)}')
    raise ConfigError(
        f'no Hugging Face architecture can represent this model: {"; ".join(problems)}'
    )


def _differences(model: ModelConfig, keys: Keys) -> list[str]:
    """The keys of `model`, with their values, that differ when `keys` are read back."""
    try:
        back = ModelConfig(**read_family(keys, 'config.json')[1])
    except ConfigError as error:
        return str(error).splitlines()
    names = ModelConfig.model_fields.keys() - IN_TRAINING
    if model.position == 'learned':
        names -= {'rope_theta'}
    return [
        f'model.{name}={getattr(model, name)}'
        for name in ModelConfig.model_fields
        if name in names and getattr(model, name) != getattr(back, name)
    ]


def _write_gpt2(model: ModelConfig) -> Keys:
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
        **dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), model.dropout),
        'initializer_range': model.init_std,
    }


def _write_megatron_bert(model: ModelConfig) -> Keys:
    return {
        'hidden_act': 'gelu' if model.activation == 'gelu' else 'gelu_new',
        'num_hidden_layers': model.num_layers,
        'hidden_size': model.hidden_size,
        'num_attention_heads': model.num_heads,
        'intermediate_size': model.ffn_size,
        'max_position_embeddings': model.max_seq_len,
        'type_vocab_size': 2,
        'vocab_size': model.vocab_size,
        'layer_norm_eps': model.norm_eps,
        'tie_word_embeddings': model.tie_embeddings,
        **dict.fromkeys(('hidden_dropout_prob', 'attention_probs_dropout_prob'), model.dropout),
        'initializer_range': model.init_std,
    }


def _write_llama_like(model: ModelConfig, family: str) -> Keys:
    keys: Keys = {
        'hidden_act': 'silu',
        'num_hidden_layers': model.num_layers,
        'hidden_size': model.hidden_size,
        'num_attention_heads': model.num_heads,
        'num_key_value_heads': model.num_kv_heads,
        'head_dim': model.head_dim,
        'intermediate_size': model.ffn_size,
        'max_position_embeddings': model.max_seq_len,
        'vocab_size': model.vocab_size,
        'rms_norm_eps': model.norm_eps,
        'rope_theta': model.rope_theta,
        'rope_scaling': _write_scaling(model),
        'tie_word_embeddings': model.tie_embeddings,
        'initializer_range': model.init_std,
        'attention_dropout': 0.0,
    }
    match family:
        case 'llama':
            return keys | {'attention_bias': model.bias, 'mlp_bias': model.bias}
        case 'mistral':
            return keys | {'sliding_window': None}
        case 'qwen2':
            return keys | {'use_sliding_window': False}
        case _:
            return keys | {'use_sliding_window': False, 'attention_bias': model.bias}


def _write_scaling(model: ModelConfig) -> Keys | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys: Keys = {'rope_type': scaling.type, 'factor': scaling.factor}
    if scaling.type == 'llama3':
        keys |= {
            'low_freq_factor': scaling.low_freq_factor,
            'high_freq_factor': scaling.high_freq_factor,
        }
        keys |= {'original_max_position_embeddings': scaling.original_max_seq_len}
    return keys
