"""The models that Megatron-LM can express, in its files or in its arguments. Imports no jax."""

from megajax.core.config import ConfigError, ModelConfig
from megajax.core.config.experts import ExpertsConfig
from megajax.core.config.layer import RopeScaling
from megajax.interop.megatron.command_line.arguments import SCALING


def check_arguments(model: ModelConfig) -> None:
    """Raise ConfigError for a model that Megatron-LM's arguments cannot describe.

    Its files can hold the weights of such a model, but Megatron-LM would compute something else.
    """
    _check_layers(model)
    if model.experts is not None:
        _check_router(model, model.experts)


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for a model that Megatron-LM's files cannot represent."""
    ropes = _ropes(model)
    if len(ropes) > 1 or any(x and x.type not in ('linear', 'llama3') for _, x in ropes):
        raise ConfigError(
            'model.rope_scaling: Megatron-LM has one rotary embedding for all layers, and no YaRN; '
            'such a model can be exported with `megajax export hf`'
        )
    if model.is_bert:
        raise ConfigError(
            f'model.objective={model.objective}: '
            "only next-token models can be converted from and to Megatron-LM's format"
        )
    if model.norm_position != 'before' or model.norms_all_heads:
        raise ConfigError(
            f'model.norm_position={model.norm_position}, model.qk_norm={model.qk_norm}: '
            "Megatron-LM's format has norms before sublayers, and of queries and keys by the head; "
            'a model like OLMo 2 can be exported with `megajax export hf`'
        )
    if model.embedding_scale != 1:
        raise ConfigError(
            f"model.embedding_scale={model.embedding_scale:g}: Megatron-LM's format has embeddings "
            'without a scale; such a model can be exported with `megajax export hf`'
        )
    if model.attention_sinks:
        raise ConfigError(
            "model.attention_sinks=true: sinks cannot be converted from or to Megatron-LM's format"
        )
    if model.query_scale != model.head_dim**-0.5:
        raise ConfigError(
            f"model.query_scale={model.query_scale:g}: Megatron-LM's files name no scale of the "
            f'scores, which is read as head_dim ** -0.5, {model.head_dim**-0.5:g}'
        )
    if model.is_gated and model.activation != 'swiglu':
        raise ConfigError(
            f"model.activation={model.activation}: Megatron-LM's files name no activation, and a "
            'gated MLP is read as SwiGLU; use model.activation=swiglu'
        )


def _ropes(model: ModelConfig) -> set[tuple[float, RopeScaling | None]]:
    return {(layer.rope_theta, layer.rope_scaling) for layer in model.pattern if layer.rotates}


def scaling_of(model: ModelConfig) -> RopeScaling | None:
    """Return the scaling of the rotary embeddings, which all layers that have them share."""
    return next((scaling for _, scaling in _ropes(model)), None)


def _check_layers(model: ModelConfig) -> None:
    for scaling in (x for _, x in _ropes(model) if x and x.type == 'linear'):
        if scaling.factor % 1:
            raise ConfigError(
                f'model.rope_scaling.factor={scaling.factor:g}: Megatron-LM has only whole factors '
                'of linear scaling; such a model can be exported with `megajax export hf`'
            )
    for scaling in (x for _, x in _ropes(model) if x and x.type == 'llama3'):
        for key, value in SCALING.items():
            if getattr(scaling, key) != value:
                raise ConfigError(
                    f'model.rope_scaling.{key}={getattr(scaling, key):g}: Megatron-LM computes '
                    f'llama3 scaling with {value:g}; such a model can be exported with '
                    '`megajax export hf`'
                )
    windows = sorted({layer.window for layer in model.pattern if layer.window is not None})
    if len(windows) > 1:
        raise ConfigError(
            f'model.window={windows[0]} and {windows[1]}: Megatron-LM has one window for all '
            'layers that have one; such a model can be exported with `megajax export hf`'
        )


def _check_router(model: ModelConfig, experts: ExpertsConfig) -> None:
    key = 'model.experts'
    if experts.router_bias != model.bias:
        raise ConfigError(
            f'{key}.router_bias={_yaml(experts.router_bias)}: in Megatron-LM, a router has a bias '
            f'exactly if other linear layers have one; use {_yaml(model.bias)}, as in model.bias'
        )
    is_softmax, is_normalized = experts.scores == 'softmax', experts.active > 1
    if (not is_softmax or not is_normalized) and experts.normalize != is_normalized:
        raise ConfigError(
            f'{key}.normalize={_yaml(experts.normalize)}: with scores={experts.scores} and '
            f'active={experts.active}, Megatron-LM has only normalize={_yaml(is_normalized)}'
        )
    if is_softmax and experts.selection_bias:
        raise ConfigError(
            f'{key}.selection_bias=true: Megatron-LM has this bias only with scores=sigmoid'
        )
    if experts.active_groups < experts.groups and (
        (is_softmax and experts.normalize) or experts.active // experts.active_groups != 2
    ):
        raise ConfigError(
            f'{key}.groups={experts.groups}: Megatron-LM scores a group by its two best experts '
            'only if active // active_groups is 2, and, with scores=softmax, normalize=false'
        )


def _yaml(value: bool) -> str:
    return str(value).lower()
