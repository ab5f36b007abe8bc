"""Check the pattern of layers (`model.layers`) and sliding windows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import multiples
from megajax.core.config.unused_rules import Unused

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

KEY = 'model.layers'


def of_pattern(config: 'Config') -> Iterator[Problem]:
    """Check the length of the pattern, and that loops over layers repeat whole patterns."""
    if not config.model.layers:
        return
    model, period = config.model, len(config.model.pattern)
    if model.experts is None and any('experts' in layer.replaced for layer in model.layers):
        message = 'sets experts=null, but model.experts is null for all layers; remove the key'
        yield Problem(KEY, message, others=('model.experts',))
    if period > model.num_layers:
        message = (
            f'has {period} layers, more than model.num_layers={model.num_layers}; '
            f'use at most {model.num_layers}, or model.num_layers at least {period}'
        )
        yield Problem(KEY, message, others=('model.num_layers',))
        return
    chunks = config.mesh.stages * config.mesh.virtual_stages
    if config.mesh.stages > 1 and model.num_layers % chunks == 0:
        in_chunk = model.num_layers // chunks
        if in_chunk % period:
            message = (
                f'has {period} layers, which do not divide the {in_chunk} layers of each pipeline '
                f'stage (all stages run one program); use mesh.stages=1, or model.num_layers '
                f'{multiples(model.num_layers, chunks * period)}'
            )
            yield Problem(KEY, message, others=('mesh.stages', 'mesh.virtual_stages'))
    vision = config.vision
    if vision is not None and vision.is_crossed and vision.cross_every % period:
        message = (
            f'has {period} layers, which do not divide vision.cross_every={vision.cross_every}; '
            f'use vision.cross_every {multiples(vision.cross_every, period)}'
        )
        yield Problem(KEY, message, others=('vision.cross_every',))


def of_positions(config: 'Config') -> Iterator[Problem]:
    """Check that only rotary embeddings differ from layer to layer."""
    model = config.model
    if not model.layers and model.position != 'none':
        return
    keys = {key for layer in model.layers for key in layer.replaced} - {'window', 'experts'}
    if model.position not in ('rope', 'none') and keys:
        message = (
            f'sets {", ".join(sorted(keys))}, which needs model.position=rope, '
            f'not {model.position}; set it, or remove the key'
        )
        yield Problem(KEY, message, others=('model.position',))
    for index, layer in enumerate(model.layers):
        unused = [key for key in ('rope_theta', 'rope_scaling') if layer.replaced.get(key)]
        if unused and layer.replaced.get('position', model.position) == 'none':
            message = f'[{index}] has no positions, so {unused[0]} has no effect; remove it'
            yield Problem(KEY, message, others=('model.position',))
    if model.rope_scaling and all(layer.position == 'none' for layer in model.pattern):
        message = 'has no effect, because no layer has rotary embeddings; remove it'
        yield Unused('model.rope_scaling', message, others=('model.position', KEY))
