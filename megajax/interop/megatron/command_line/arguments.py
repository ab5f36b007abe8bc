"""The model that Megatron-LM's arguments describe. Imports no jax."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megajax.base.errors import reason
from megajax.core.config import ConfigError
from megajax.core.config.layer import shortest_pattern
from megajax.interop.megatron.command_line import experts
from megajax.interop.megatron.command_line.experts import Only
from megajax.interop.megatron.command_line.frequency import frequency_of

Keys = dict[str, Any]

logger = logging.getLogger(__name__)


# Arguments that must be absent or have one of these values: otherwise Megatron's decoder differs.
ONLY: dict[str, Only] = {
    'multi_latent_attention': Only((False,), 'use --group-query-attention'),
    'heterogeneous_layers_config_path': Only((), 'all layers are the same'),
    'softmax_type': Only(('vanilla',), 'give vanilla'),
    'rotary_interleaved': Only((False,), 'a pair has an element from each half: leave it out'),
    'apply_residual_connection_post_layernorm': Only(
        (False,), 'the residual is taken before the norm, without which deep models do not train'
    ),
    'squared_relu': Only((False,), 'use --swiglu, or GELU without it'),
    'attention_output_gate': Only((False,), 'leave it out'),
    'num_tokentypes': Only((0,), 'only BERT has token types'),
    'parallel_output_gate': Only((False,), 'leave it out'),
    'qk_l2_norm': Only((False,), 'the norm of query and key has a weight: use --qk-layernorm'),
    'softmax_scale': Only((), 'set model.query_scale in the YAML'),
    'use_mup': Only((False,), 'weights, scores and logits have no multipliers: leave it out'),
    'quick_geglu': Only((False,), 'use --swiglu'),
    'glu_linear_offset': Only((0.0,), 'the gate multiplies the projection alone: leave it out'),
    'activation_func_clamp_value': Only((), 'activations are not limited: leave it out'),
    'experimental_attention_variant': Only((), 'every layer has softmax attention: leave it out'),
}
INTERPOLATION = 'rotary_seq_len_interpolation_factor'
MULTIPLE, PADDING = 'make_vocab_size_divisible_by', 128  # with its default
# Arguments that came with megatron-core's layers.
OF_CORE = 'use_mcore_models', 'use_legacy_models', 'deprecated_use_mcore_models'
NULL, EOD = 'NullTokenizer', 'null_tokenizer_eod_id'
SIZED = NULL, 'TikTokenizer'  # tokenizer types that get --vocab-size
# Vocabulary sizes of the tokenizer types that have only one vocabulary.
VOCABULARIES = {
    'GPT2BPETokenizer': 50257,
    'BertWordPieceLowerCase': 30522,
    'BertWordPieceCase': 28996,
    'Llama2Tokenizer': 32000,
}
# Constants in Megatron, which has no arguments for them.
SCALING = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_seq_len': 8192}


def rejected(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and an alternative for each unsupported argument of a decoder."""
    has_experts = bool(arguments.get('num_experts'))
    for name, only in (ONLY | experts.ONLY if has_experts else ONLY).items():
        value = arguments.get(name)
        if not (value is None or any(value is x or value == x for x in only.allowed)):
            yield name, value, only.instead
    if arguments.get(INTERPOLATION) and arguments.get('use_rope_scaling'):
        yield INTERPOLATION, arguments[INTERPOLATION], 'use only one of it and --use-rope-scaling'
    for name, instead in experts.unsupported(arguments) if has_experts else ():
        yield name, arguments.get(name), instead


def of_model(arguments: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return a checkpoint's arguments without unsupported arguments that only affect training.

    Logs a warning for each removed argument. The trained model does not depend on these arguments.
    """
    kept = dict(arguments)
    with _damage_named(file):
        for name, value, _ in rejected(arguments):
            if name in experts.OF_TRAINING:
                logger.warning('%s: left out: %s=%s, of the training', file, name, value)
                del kept[name]
    return kept


@contextmanager
def _damage_named(file: str) -> Iterator[None]:
    """Raise ConfigError with the name of a file if its arguments have values of other types."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, TypeError, ArithmeticError, ValueError, LookupError) as error:
        raise ConfigError(f'{file}: its arguments describe no model: {reason(error)}') from error


def read_arguments(arguments: Mapping[str, Any], file: str) -> Keys:
    """Return the keys of `model` for these arguments; missing arguments have Megatron's defaults.

    Raises ConfigError with each argument that is missing or whose value is not supported.
    """
    with _damage_named(file):
        if problems := _problems(arguments, file):
            raise ConfigError(*problems)
        size = _vocab_size(arguments, file)
        # Releases before `position_embedding_type` have only the second argument.
        rope = arguments.get('position_embedding_type') == 'rope' or bool(
            arguments.get('use_rotary_position_embeddings')
        )
        return _model(arguments, size, rope)


def _problems(arguments: Mapping[str, Any], file: str) -> list[str]:
    problems = [
        f'{file}: {name}={value!r:.80} is not supported: {instead}'
        for name, value, instead in rejected(arguments)
    ]
    needed = ('num_layers', 'hidden_size', 'num_attention_heads', 'max_position_embeddings')
    problems += [
        f'{file}: {name} is missing from its arguments'
        for name in needed
        if arguments.get(name) is None
    ]
    position = arguments.get('position_embedding_type', 'learned_absolute')
    if position not in ('learned_absolute', 'rope'):
        problems.append(
            f'{file}: position_embedding_type={position!s:.80} is not supported, '
            'only learned_absolute and rope'
        )
    return problems


def _model(arguments: Mapping[str, Any], vocab_size: Any, rope: bool) -> Keys:
    def get(name: str, default: Any = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    hidden, heads, bias, gated = (
        get('hidden_size'),
        get('num_attention_heads'),
        get('add_bias_linear', True),
        get('swiglu', False),
    )
    # All of these settings mean the tanh approximation of GELU.
    approximated = (
        (bias and get('bias_gelu_fusion', True))
        or (get('use_te_activation_func', False) and get('transformer_impl') != 'local')
        or (get('openai_gelu', False) and _is_legacy(arguments))
    )
    model = {
        'num_layers': get('num_layers'),
        'hidden_size': hidden,
        'num_heads': heads,
        'num_kv_heads': _num_kv_heads(arguments),
        'head_dim': get('kv_channels', hidden // heads),
        'ffn_size': get('ffn_hidden_size', 4 * hidden),
        'vocab_size': vocab_size,
        'max_seq_len': get('max_position_embeddings'),
        'norm': get('normalization', 'LayerNorm').lower(),
        # The newer name comes first: megatron-core 0.19 copies the older one from the checkpoint
        # that a run starts from, and does not read it.
        'zero_centered_norm': get(
            'layernorm_zero_centered_gamma', get('apply_layernorm_1p', False)
        ),
        'activation': 'swiglu' if gated else 'gelu_tanh' if approximated else 'gelu',
        'position': 'rope' if rope else 'learned',
        'qk_norm': get('qk_layernorm', False),
        'bias': bias,
        'qkv_bias': bias or get('add_qkv_bias', False),
        'tie_embeddings': not get('untie_embeddings_and_output_weights', False),
        'dropout': float(get('hidden_dropout', 0.1)),
        'attention_dropout': float(get('attention_dropout', 0.1)),
        'norm_eps': get('norm_epsilon', get('layernorm_epsilon', 1e-5)),
        'init_std': get('init_method_std', 0.02),
    }
    model['experts'] = experts.experts_of(arguments, model['ffn_size'])
    if rope:
        model['rope_theta'] = float(get('rotary_base', 10000))
        model['rotary_fraction'] = float(get('rotary_percent', 1.0))
    if rope and get(INTERPOLATION):
        model['rope_scaling'] = {'type': 'linear', 'factor': float(get(INTERPOLATION))}
    if rope and get('use_rope_scaling', False):
        model['rope_scaling'] = {
            'type': 'llama3',
            'factor': float(get('rope_scaling_factor', 8.0)),
            **SCALING,
        }
    model |= _of_layers(arguments, get('num_layers'), rope)
    return {key: value for key, value in model.items() if value is not None}


def _num_kv_heads(arguments: Mapping[str, Any]) -> Any:
    groups = arguments.get('num_query_groups', 1)
    if groups is None or not arguments.get('group_query_attention'):
        return arguments['num_attention_heads']
    return groups


def _is_legacy(arguments: Mapping[str, Any]) -> bool:
    """Return whether the layers are Megatron-LM's own, from before megatron-core.

    megatron-core has the argument --openai-gelu, but its layers do not read it.
    """
    if arguments.get('use_legacy_models') or arguments.get('use_mcore_models') is False:
        return True
    return arguments.keys().isdisjoint((*OF_CORE, EOD))


def _vocab_size(arguments: Mapping[str, Any], file: str) -> Any:
    """Return the number of tokens; with the padding if the arguments do not tell their number.

    Logs a warning if only the type of the tokenizer tells the number, or if `vocab_size` is not it.
    """
    given: Any = arguments.get('vocab_size')
    padded: Any = arguments.get('padded_vocab_size')
    kind, multiple = arguments.get('tokenizer_type'), arguments.get(MULTIPLE)
    if given is not None:
        # NullTokenizer added an end-of-document token before megatron-core 0.19, which has EOD.
        given += kind == NULL and EOD not in arguments
        if padded is None or kind in SIZED or _is_padding_of(given, arguments):
            return given
    size = VOCABULARIES.get(kind) if isinstance(kind, str) else None
    of_type = {**arguments, MULTIPLE: multiple or PADDING}
    if size is None or padded is None or not _is_padding_of(size, of_type):
        if given is not None:
            logger.warning(
                '%s: all %s rows of the vocabulary are kept: they are not the padding of '
                'vocab_size=%s tokens; set model.vocab_size to leave padding out',
                *(file, padded, given),
            )
        return padded
    if padded > size:
        logger.warning(
            '%s: left out: %d rows of the vocabulary, the padding of the %d tokens of %s; if the '
            'run had another vocabulary, set model.vocab_size',
            *(file, padded - size, size, kind),
        )
    return size


def _is_padding_of(size: int, arguments: Mapping[str, Any]) -> bool:
    """Return whether this many tokens have the rows of the vocabulary after padding.

    Arguments without a multiple, which are not Megatron-LM's own, allow any padding. It may be
    the padding for a divisor of the tensor-parallel size, because Megatron-LM's converter can
    change the size and keep the rows.
    """
    padded = arguments['padded_vocab_size']
    if not (multiple := arguments.get(MULTIPLE)):
        return bool(size <= padded)
    ranks = arguments.get('tensor_model_parallel_size') or 1
    multiple *= math.gcd(ranks, padded // multiple)
    return bool(padded in (size, -(-size // multiple) * multiple))


def _of_layers(arguments: Mapping[str, Any], num_layers: int, rope: bool) -> Keys:
    """Return the keys for windows and for layers without rotary embeddings."""
    window = _window(arguments.get('window_size'))
    frequency = frequency_of(arguments, 'window_attn_skip_freq')
    without_rope = frequency_of(arguments, 'no_rope_freq') if rope else None
    is_full = [window is None or _is_chosen(frequency, i, mark=0) for i in range(num_layers)]
    is_nope = [_is_chosen(without_rope, i, mark=1) for i in range(num_layers)]
    is_dense = [False] * num_layers
    if arguments.get('num_experts'):
        is_dense = experts.dense_layers(arguments)
        if experts.first_dense(is_dense):  # the keys of `experts` already describe this
            is_dense = [False] * num_layers
    layers = [
        ({} if full else {'window': window})
        | ({'position': 'none'} if nope else {})
        | ({'experts': None} if dense else {})
        for full, nope, dense in zip(is_full, is_nope, is_dense, strict=True)
    ]
    pattern = shortest_pattern(layers or [{}])
    if len(pattern) > 1 or 'position' in pattern[0]:
        return {'layers': pattern}
    return {'window': pattern[0].get('window')}


def _window(value: Any) -> int | None:
    """Return the number of tokens that a token attends to, from Megatron's (before, after)."""
    if value is None:
        return None
    # Megatron's `tuple_type` also reads (127,0).
    numbers = value.strip('()').split(',') if isinstance(value, str) else value
    try:
        before, after = map(int, numbers)
    except ValueError:
        pair = 'not two whole numbers, the tokens before and after'
        raise ValueError(f'window_size={value} is {pair}: give 127,0 to attend to 128') from None
    if after != 0:
        raise ValueError(f'window_size={before},{after} reads later tokens: give {before},0')
    return None if before == -1 else before + 1


def _is_chosen(frequency: int | Sequence[int] | None, layer: int, *, mark: int) -> bool:
    """Return whether a layer is selected by a frequency, or has the number `mark` in a list."""
    if isinstance(frequency, int):
        return (layer + 1) % frequency == 0
    return frequency is not None and frequency[layer] == mark
