"""The names of sites, in the order in which a pass computes them. Imports no jax."""

from megajax.core.config import ModelConfig
from megajax.core.counts.layers import sublayers

# The parts of a layer, and the parts outside the layers, in the order of a backward pass.
WITHIN = (
    *('mlp.output_norm', 'mlp.down', 'mlp.up', 'mlp.norm', 'experts.output_norm', 'experts.down'),
    *('experts.shared_down', 'experts.up', 'experts.shared_up', 'experts.router', 'experts.norm'),
    *('attention.output_norm', 'attention.out', 'attention.sinks', 'attention.key_norm'),
    *('attention.query_norm', 'attention.qkv', 'attention.norm'),
)
LAST = 'position', 'token_type', 'embedding'
LAYERS = 'layers.'


def site_names(model: ModelConfig) -> list[str]:
    """Return the names of a forward pass's sites, in order."""
    in_layers = list[str]()
    for index, config in enumerate(model.layer_configs):
        layer = f'{LAYERS}{index}'
        in_layers += [*(f'{layer}.{site}' for site in sites(config)), layer]
    return ['embedding', *in_layers, 'norm', 'logits']


def sites(model: ModelConfig) -> list[str]:
    """Return the sites of a layer with this config: the norm and the result of each sublayer.

    The result is the one before `norm` if the model norms only the outputs of sublayers.
    """
    order = 1 if model.norms_inputs else -1
    return [site for name in sublayers(model) for site in (f'{name}.norm', name)[::order]]


def backward_order(name: str, *, norms_inputs: bool = True) -> tuple[int, int, int, str]:
    """Return a key that sorts parameters in the order in which a backward pass reaches them.

    `norms_inputs` says whether `norm` is at the beginning of a sublayer rather than at its end.
    """
    if name.startswith(LAYERS):
        _, layer, part = name.split('.', 2)
        part = part if norms_inputs else part.replace('.norm.', '.output_norm.')
        place = next((i for i, start in enumerate(WITHIN) if part.startswith(start)), len(WITHIN))
        return 2, -int(layer), place, name
    if name.startswith('norm.'):
        return 1, 0, 0, name
    place = next((i for i, start in enumerate(LAST) if name.startswith(start)), -1)
    return (0 if place < 0 else 3), 0, place, name
