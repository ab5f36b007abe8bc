"""The mixture of experts that Megatron-LM's arguments describe. Imports no jax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megajax.interop.megatron.command_line.frequency import frequency_of

Keys = dict[str, Any]


class Only(NamedTuple):
    """The supported values of an argument, and what to do instead of using other values."""

    allowed: tuple[Any, ...]  # the argument may always be absent
    instead: str


NO_NOISE = 'a router has no noise: leave it out'
# The supported values of arguments for experts.
ONLY: dict[str, Only] = {
    'moe_router_score_function': Only(('softmax', 'sigmoid'), 'give softmax or sigmoid'),
    'moe_router_dtype': Only(('fp32',), 'routers compute in fp32: give fp32'),
    'moe_router_topk_limited_devices': Only(
        (), 'give --moe-router-num-groups and --moe-router-group-topk'
    ),
    'moe_router_force_load_balancing': Only((False,), NO_NOISE),
    'moe_router_force_biased': Only((), NO_NOISE),
    'moe_input_jitter_eps': Only((0.0,), NO_NOISE),
    'moe_shared_expert_gate': Only((False,), 'a shared expert has no gate: leave it out'),
    'moe_apply_probs_on_input': Only(
        (False,), "the weights multiply the experts' outputs: leave it out"
    ),
    'moe_latent_size': Only((), 'experts have the hidden size of the model: leave it out'),
    'moe_mlp_glu_interleave_size': Only((), 'the gate is a half of linear_fc1: leave it out'),
    'moe_shared_expert_glu_interleave_size': Only(
        (), 'the gate is a half of linear_fc1: leave it out'
    ),
    'moe_expert_rank_capacity_factor': Only((), 'set model.experts.capacity in the YAML'),
    'moe_use_upcycling': Only((False,), 'experts start with random weights: leave it out'),
}
# Arguments in ONLY, or from `unsupported`, on which a trained model does not depend.
OF_TRAINING = (
    'moe_router_dtype',
    'moe_router_force_load_balancing',
    'moe_router_force_biased',
    'moe_input_jitter_eps',
    'moe_expert_rank_capacity_factor',
    'moe_expert_capacity_factor',
    'moe_use_upcycling',
    'moe_aux_loss_coeff',
)
BALANCE = {'aux_loss': 'sequence', 'seq_aux_loss': 'sequence', 'global_aux_loss': 'batch'}


def unsupported(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and an alternative for each argument of experts that others make invalid."""

    def get(name: str, default: Any = None) -> Any:
        return _get(arguments, f'moe_{name}', default)

    try:
        if arguments.get('num_layers') and all(dense_layers(arguments)):
            yield 'moe_layer_freq', 'no layer would have experts: omit --num-experts'
    except ValueError as error:
        yield 'moe_layer_freq', str(error)
    active, groups = get('router_topk', 2), get('router_group_topk')
    is_softmax = get('router_score_function', 'softmax') == 'softmax'
    # Whether the softmax comes after the choice of experts.
    is_after = is_softmax and not get('router_pre_softmax', False)
    if active == 1 and is_after:
        yield 'moe_router_topk', 'with one expert, give --moe-router-pre-softmax too'
    if get('router_enable_expert_bias') and is_softmax:
        yield 'moe_router_enable_expert_bias', 'give --moe-router-score-function sigmoid too'
    if groups and (is_after or active // groups != 2 or not get('router_num_groups')):
        yield (
            'moe_router_group_topk',
            "a group's score is the sum of its two best scores: give --moe-router-num-groups, "
            '--moe-router-topk twice as large as --moe-router-group-topk, and with softmax '
            '--moe-router-pre-softmax',
        )
    yield from _balance(arguments)
    if (get('expert_capacity_factor') or -1) >= 0:
        is_whole = _is_one_sequence(arguments) and (arguments.get('context_parallel_size') or 1) < 2
        if get('token_drop_policy', 'probs') != 'position' or not is_whole:
            yield (
                'moe_expert_capacity_factor',
                'the last tokens of a sequence are dropped: give --moe-token-drop-policy position '
                'and --micro-batch-size 1 without context parallelism, or set '
                'model.experts.capacity in the YAML',
            )


def _balance(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    losses = _auxiliary_losses(arguments)
    kinds = [kind for kind, coefficient in losses.items() if coefficient]
    if any(kind not in (*BALANCE, 'none') for kind in losses):
        yield (
            'moe_router_load_balancing_type',
            f'give one of {", ".join(BALANCE)} and none',
        )
    elif len(kinds) > 1:
        yield 'moe_aux_loss_coeff', f'give one of {", ".join(kinds)}: their sum is not supported'
    elif 'aux_loss' in kinds and not _is_one_sequence(arguments):
        yield (
            'moe_aux_loss_coeff',
            'aux_loss counts the tokens of a microbatch: give --moe-router-load-balancing-type '
            'seq_aux_loss or global_aux_loss, or --micro-batch-size 1',
        )
    elif 'global_aux_loss' in kinds and (
        arguments.get('moe_router_enable_expert_bias') or arguments.get('moe_router_group_topk')
    ):
        yield (
            'moe_aux_loss_coeff',
            'global_aux_loss counts the experts with the best scores, whether or not the expert '
            'bias and the groups choose them: give --moe-router-load-balancing-type seq_aux_loss',
        )


def experts_of(arguments: Mapping[str, Any], ffn_size: int) -> Keys | None:
    """Return the keys of `model.experts`; None for a model without experts.

    Values that equal megajax's defaults are omitted. `ffn_size` is the size of an MLP.
    """

    def get(name: str, default: Any = None) -> Any:
        return _get(arguments, f'moe_{name}', default)

    if not (count := arguments.get('num_experts')):
        return None
    active, is_sigmoid = get('router_topk', 2), get('router_score_function') == 'sigmoid'
    losses = _auxiliary_losses(arguments)
    keys: Keys = {
        'count': count,
        'active': active,
        'ffn_size': get('ffn_hidden_size', ffn_size),
        'first_dense': first_dense(dense_layers(arguments)) or None,
        'shared_ffn_size': get('shared_expert_intermediate_size'),
        'z_loss': get('z_loss_coeff') or None,
        'scale': get('router_topk_scaling_factor') or None,
        'scores': 'sigmoid' if is_sigmoid else None,
        'router_bias': _get(arguments, 'add_bias_linear', True) or None,
    }
    if active == 1 if is_sigmoid else get('router_pre_softmax'):
        keys['normalize'] = False
    if get('router_enable_expert_bias'):
        keys |= {'selection_bias': True, 'bias_rate': get('router_bias_update_rate')}
    if active_groups := get('router_group_topk'):
        keys |= {'groups': get('router_num_groups'), 'active_groups': active_groups}
    for kind, coefficient in ((kind, x) for kind, x in losses.items() if x):  # at most one
        # Megatron divides the gradient by the number of data shards, each of which has a part of
        # it.
        shards = _get(arguments, 'data_parallel_size', 1) if kind == 'global_aux_loss' else 1
        keys |= {'balance_loss': coefficient / shards, 'balance_over': BALANCE[kind]}
    if (capacity := get('expert_capacity_factor') or -1) >= 0:
        length, ranks = arguments['seq_length'], _get(arguments, 'tensor_model_parallel_size', 1)
        keys |= {'capacity': capacity, 'capacity_group': length // ranks}
    return {key: value for key, value in keys.items() if value is not None}


def _get(arguments: Mapping[str, Any], name: str, default: Any) -> Any:
    value = arguments.get(name)
    return default if value is None else value


def _auxiliary_losses(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return the coefficient of each auxiliary loss by its kind; `none` has none."""
    kinds = _get(arguments, 'moe_router_load_balancing_type', 'aux_loss')
    coefficients = _get(arguments, 'moe_aux_loss_coeff', 0.0)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    return {
        kind: 0.0 if kind == 'none' else float(coefficient)
        for kind, coefficient in zip(kinds, coefficients, strict=True)
    }


def dense_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """Return for each layer of a model with experts whether it has an MLP instead of experts.

    Raises ValueError for an argument that is neither a number nor a list.
    """
    frequency = frequency_of(arguments, 'moe_layer_freq')
    layers = range(arguments['num_layers'])
    if frequency is None or isinstance(frequency, int):
        return [index % (frequency or 1) != 0 for index in layers]
    return [not frequency[index] for index in layers]


def first_dense(is_dense: Sequence[bool]) -> int:
    """Return how many layers have an MLP if these are the first layers; 0 otherwise."""
    return sum(is_dense) if sorted(is_dense, reverse=True) == [*is_dense] else 0


def _is_one_sequence(arguments: Mapping[str, Any]) -> bool:
    """Whether a microbatch of a data shard is one sequence."""
    return _get(arguments, 'micro_batch_size', 1) == 1
