"""Run the pass of a Hugging Face directory with transformers itself.

The modules are found by the names of their parameters in the family's table.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

import megajax
from megajax.analysis.compare.recording import About, Arrays, Recording
from megajax.analysis.compare.site_names import site_names, sites
from megajax.analysis.compare.sources import Source
from megajax.base.render.text import typed
from megajax.core.config import Config, ConfigError, MeshConfig, ModelConfig, OptimConfig
from megajax.core.config.experts import OF_ROUTING
from megajax.core.config.extras import install
from megajax.interop.huggingface.families import FAMILIES

EXTRA = 'test-hf'
# For each site of a layer, one of its parameters, and how many levels the parameter is below the
# site's module in transformers.
SITES = {
    'attention.norm': ('layers.attention.norm.weight', 1),
    'attention': ('layers.attention.out.weight', 2),
    'mlp.norm': ('layers.mlp.norm.weight', 1),
    'mlp': ('layers.mlp.down.weight', 2),
    'experts.norm': ('layers.experts.norm.weight', 1),
}


def check_installed() -> None:
    """Raise ConfigError unless torch and transformers are installed."""
    if missing := [name for name in ('torch', 'transformers') if find_spec(name) is None]:
        raise ConfigError(
            f'--transformers needs {" and ".join(missing)}, which '
            f'{"is" if len(missing) == 1 else "are"} not installed: {install(EXTRA)}'
        )


def execute_with_transformers(
    source: Source, config: Config, batch: Mapping[str, np.ndarray]
) -> Recording:
    """Return the numbers of a directory's pass over a batch, in fp32 on the CPU.

    Weights and gradients are in the form of megajax's parameters. Raises ConfigError for a model
    or a batch for which transformers computes a different loss.
    """
    _check(source, config, batch)
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.path,
        dtype=torch.float32,
        attn_implementation='eager',
        use_safetensors=True,  # never a pickle
    ).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # torch would only skip the gradient of this row
    forward = _forward(model, source, config, batch)
    forward['loss'].backward()
    of_parameters, weights = _as_parameters(source, config, _gradients(model))
    about = About(
        source=source.name,
        config=config.model_dump(mode='json'),
        executed_with=f'transformers {transformers.__version__}',
        megajax=megajax.__version__,
        platform='cpu',
        weights=weights,
    )
    return Recording(
        about=about,
        batch=dict(batch),
        forward={name: _array(x) for name, x in forward.items()},
        gradients=of_parameters,
    )


def _check(source: Source, config: Config, batch: Mapping[str, np.ndarray]) -> None:
    if config.model.is_bert:
        raise ConfigError(
            f'{source.name}: transformers computes a different loss for {source.family}; '
            'remove --transformers'
        )
    if config.loss.label_smoothing or config.loss.z_loss or 'segment_ids' in batch:
        raise ConfigError(
            '--transformers supports plain cross entropy without document masks: set '
            'loss.label_smoothing=0 loss.z_loss=0 data.document_mask=false, '
            'or remove --transformers'
        )
    experts = config.model.experts
    if experts and (experts.balance_loss or experts.z_loss or experts.capacity is not None):
        without = {key: type(experts).model_fields[key].default for key in sorted(OF_ROUTING)}
        fix = ' '.join(
            typed(f'model.experts.{key}={"null" if value is None else value}')
            for key, value in without.items()
            if getattr(experts, key) != value
        )
        raise ConfigError(
            '--transformers supports routers without losses of their own and without a capacity: '
            f'set {fix}, or remove --transformers'
        )


def _forward(
    model: Any, source: Source, config: Config, batch: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the result of each site as a tensor, in the order of megajax."""
    import torch

    kept = dict[str, Any]()
    layers = model.get_submodule(_layers(source))
    _keep_input(layers[0], kept)
    for index, layer in enumerate(layers):
        for name, path in _modules(source, config.model.layer_config(index)).items():
            _keep(model.get_submodule(path.format(index)), kept, f'layers.{index}.{name}')
        _keep(layer, kept, f'layers.{index}')
    _keep(model.get_submodule(_path(source, 'norm.weight', 1)), kept, 'norm')
    tokens, labels = (torch.from_numpy(batch[name]).long() for name in ('tokens', 'labels'))
    kept['logits'] = model(tokens, use_cache=False).logits
    mask = torch.from_numpy(np.array(batch['loss_mask']))
    nll = torch.nn.functional.cross_entropy(
        kept['logits'].flatten(0, 1), labels.flatten(), reduction='none'
    )
    kept['loss'] = (nll * mask.flatten()).sum() / mask.sum().clamp(min=1)
    return {name: kept[name] for name in [*site_names(config.model), 'loss']}


def _modules(source: Source, model: ModelConfig) -> dict[str, str]:
    """Return the path of the module of each site of a layer with this config; {} is the layer."""
    # The module of experts has one name in all families, but Mixtral's files name it differently.
    experts = {'experts': f'{_layers(source)}.{{}}.mlp'}
    return {name: experts.get(name) or _path(source, *SITES[name]) for name in sites(model)}


def _layers(source: Source) -> str:
    return _path(source, *SITES['attention']).partition('.{}')[0]


def _path(source: Source, parameter: str, depth: int) -> str:
    """Return the path of the module `depth` levels above a parameter's tensor; {} is the layer."""
    assert source.family is not None
    return FAMILIES[source.family].tensors[parameter][0].name.rsplit('.', depth)[0]


def _keep(module: Any, kept: dict[str, Any], site: str) -> None:
    def hook(_module: Any, _arguments: Any, result: Any) -> None:
        kept[site] = result[0] if isinstance(result, tuple) else result

    module.register_forward_hook(hook)


def _keep_input(module: Any, kept: dict[str, Any]) -> None:
    def hook(_module: Any, arguments: Any, keywords: Any) -> None:
        kept['embedding'] = arguments[0] if arguments else keywords['hidden_states']

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _gradients(model: Any) -> dict[str, Any]:
    """Return the gradient of each tensor of the model's file."""
    from transformers.core_model_loading import revert_weight_conversion

    # A router's bias that only selects experts is a buffer, which has no gradient.
    stored = model.state_dict()
    gradients = {name: x.new_zeros(x.shape) for name, x in model.named_buffers() if name in stored}
    gradients |= {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    # When transformers reads a file, it fuses the experts into one tensor.
    converted: dict[str, Any] = revert_weight_conversion(model, gradients)
    return converted


def _as_parameters(
    source: Source, config: Config, gradients: Mapping[str, Any]
) -> tuple[Arrays, dict[str, str]]:
    """Return gradients by the names of megajax's parameters, and the digests of the weights."""
    import jax

    from megajax.analysis.compare.parameters import by_layer, digests
    from megajax.core.model.parameters import trainable
    from megajax.core.parallel.mesh import mesh_for
    from megajax.interop.huggingface.weights import from_huggingface

    one = config.model_copy(update={'mesh': MeshConfig(), 'optim': OptimConfig()})
    arrays = {name: _array(x) for name, x in gradients.items()}
    with jax.set_mesh(mesh_for(one)):
        where = f'the gradients of {source.name}'
        state = from_huggingface(one, arrays, source=where, family=source.family)
        return by_layer(trainable(state), one), digests(source.load(one), one)


def _array(x: Any) -> np.ndarray:
    return np.array(x.detach().float().numpy())
