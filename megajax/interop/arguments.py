"""The model that Megatron-LM's arguments describe. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError

Keys = dict[str, Any]
# Arguments that must be absent or have one of these values: otherwise Megatron's decoder differs.
ONLY: Mapping[str, tuple[Any, ...]] = {
    'num_experts': (),
    'multi_latent_attention': (False,),
    'heterogeneous_layers_config_path': (),
    'window_size': (),
    'rotary_percent': (1.0,),
    'rotary_interleaved': (False,),
    'rotary_seq_len_interpolation_factor': (),
    'apply_layernorm_1p': (False,),
    'apply_residual_connection_post_layernorm': (False,),
    'squared_relu': (False,),
    'attention_output_gate': (False,),
    'num_tokentypes': (0,),
    'parallel_output_gate': (False,),
}
# Megatron's constants, for which it has no arguments.
SCALING = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_seq_len': 8192}


def read_arguments(arguments: Mapping[str, Any], file: str) -> Keys:
    """Return the keys of `model` for these arguments; absent ones have Megatron's defaults.

    Raises ConfigError with each argument that is missing or whose value is not supported.
    """
    rejected = [
        (name, arguments[name])
        for name, allowed in ONLY.items()
        if arguments.get(name) not in (None, *allowed)
    ]
    problems = [f'{file}: {name}={value} is not supported' for name, value in rejected]
    needed = ('num_layers', 'hidden_size', 'num_attention_heads', 'max_position_embeddings')
    problems += [
        f'{file}: {name} is missing from its arguments'
        for name in needed
        if arguments.get(name) is None
    ]
    position = arguments.get('position_embedding_type', 'learned_absolute')
    if position not in ('learned_absolute', 'rope'):
        problems.append(
            f'{file}: position_embedding_type={position} is not supported, '
            'only learned_absolute and rope'
        )
    if problems:
        raise ConfigError(*problems)
    return _model(arguments, position == 'rope')


def _model(arguments: Mapping[str, Any], rope: bool) -> Keys:
    def get(name: str, default: Any = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    hidden, heads, bias, gated = (
        get('hidden_size'),
        get('num_attention_heads'),
        get('add_bias_linear', True),
        get('swiglu', False),
    )
    # Both are the tanh approximation of GELU.
    fused = get('openai_gelu', False) or (bias and get('bias_gelu_fusion', True))
    model = {
        'num_layers': get('num_layers'),
        'hidden_size': hidden,
        'num_heads': heads,
        'num_kv_heads': get('num_query_groups', heads)
        if get('group_query_attention', False)
        else heads,
        'head_dim': get('kv_channels', hidden // heads),
        'ffn_size': get('ffn_hidden_size', 4 * hidden),
        'vocab_size': get('vocab_size', get('padded_vocab_size')),
        'max_seq_len': get('max_position_embeddings'),
        'norm': get('normalization', 'LayerNorm').lower(),
        'activation': 'swiglu' if gated else 'gelu_tanh' if fused else 'gelu',
        'position': 'rope' if rope else 'learned',
        'qk_norm': get('qk_layernorm', False),
        'bias': bias,
        'qkv_bias': bias or get('add_qkv_bias', False),
        'tie_embeddings': not get('untie_embeddings_and_output_weights', False),
        'dropout': float(get('hidden_dropout', 0.1)),
        'norm_eps': get('norm_epsilon', get('layernorm_epsilon', 1e-5)),
        'init_std': get('init_method_std', 0.02),
    }
    if rope:
        model['rope_theta'] = float(get('rotary_base', 10000))
    if rope and get('use_rope_scaling', False):
        model['rope_scaling'] = {
            'type': 'llama3',
            'factor': float(get('rope_scaling_factor', 8.0)),
            **SCALING,
        }
    return {key: value for key, value in model.items() if value is not None}
