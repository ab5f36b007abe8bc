"""Check the scaling of rotary frequencies, and the share of a head that is rotated."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.layer import RopeScaling
from megajax.core.config.model import ModelConfig

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

# The keys of a scaling that apply only to some types.
OF_TYPES = {
    **dict.fromkeys(('low_freq_factor', 'high_freq_factor'), ('llama3',)),
    **dict.fromkeys(('beta_fast', 'beta_slow', 'truncate'), ('yarn',)),
    **dict.fromkeys(('short_factor', 'long_factor'), ('longrope',)),
    'attention_factor': ('yarn', 'longrope'),
    'original_max_seq_len': ('llama3', 'yarn', 'longrope'),
}


def of_scaling(config: 'Config') -> Iterator[Problem]:
    """Check `rope_scaling`, of the model and of the layers of its pattern."""
    model, own = config.model, 'model.rope_scaling'
    if model.rope_scaling is None and not model.layers:
        return
    given = [(own, '', model.rope_scaling)]
    for index, entry in enumerate(model.layers):
        given.append(('model.layers', f'[{index}].rope_scaling: ', entry.rope_scaling))
    for path, place, scaling in given:
        if scaling is None:
            continue
        for message in (*_faults(scaling), *_faults_of_pairs(scaling, model)):
            yield Problem(path, place + message)
        if scaling.type == 'longrope' and model.max_seq_len > scaling.original_max_seq_len:
            message = (
                f'{model.max_seq_len} exceeds original_max_seq_len={scaling.original_max_seq_len}: '
                'longer sequences are not supported with longrope; '
                f'use at most {scaling.original_max_seq_len}'
            )
            yield Problem('model.max_seq_len', message, others=(path,))
    for layer in (model, *model.pattern):
        if layer.rope_scaling and layer.rope_scaling.type == 'yarn' and layer.rope_theta <= 1:
            path = 'model.rope_theta' if layer.rope_theta == model.rope_theta else 'model.layers'
            message = f'rope_theta {layer.rope_theta} must be above 1 with yarn; use 10000.0'
            yield Problem(path, message, others=(own,))
            return


def _faults(scaling: RopeScaling) -> Iterator[str]:
    kind = scaling.type
    plain = RopeScaling(type=kind, factor=scaling.factor)
    for name, types in OF_TYPES.items():
        if kind not in types and getattr(scaling, name) != getattr(plain, name):
            yield f'{name} has no effect with type={kind}; remove it'
    if kind == 'llama3' and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f'high_freq_factor {scaling.high_freq_factor} must be above '
            f'low_freq_factor {scaling.low_freq_factor}'
        )
    if kind in ('linear', 'llama3'):
        return
    if 'original_max_seq_len' not in scaling.model_fields_set:
        yield (
            f'{kind} needs original_max_seq_len, the longest sequence in pre-training; '
            'add it, for example original_max_seq_len=4096'
        )
    if scaling.factor < 1:
        yield f'factor {scaling.factor} would shorten sequences; use at least 1'
    if kind == 'yarn' and scaling.beta_fast <= scaling.beta_slow:
        yield f'beta_fast {scaling.beta_fast} must be above beta_slow {scaling.beta_slow}'


def _faults_of_pairs(scaling: RopeScaling, model: ModelConfig) -> Iterator[str]:
    pairs = model.rotary_dim // 2
    for name in ('short_factor', 'long_factor') if scaling.type == 'longrope' else ():
        numbers = len(getattr(scaling, name))
        if numbers != pairs:
            yield f'{name} has {numbers} numbers, not one for each of the {pairs} rotary pairs'


def of_fraction(config: 'Config') -> Iterator[Problem]:
    """Check that `model.rotary_fraction` of a head dim is an even number of dims."""
    model, path = config.model, 'model.rotary_fraction'
    if model.rotary_fraction == 1:
        return
    if all(layer.position != 'rope' for layer in model.pattern):
        message = (
            f'{model.rotary_fraction} needs model.position=rope, not {model.position}; remove it'
        )
        yield Problem(path, message, others=('model.position',))
    elif model.rotary_dim % 2 or not model.rotary_dim:
        message = (
            f'{model.rotary_fraction} of model.head_dim={model.head_dim} is {model.rotary_dim} '
            f'dims, but they are rotated in pairs; use {_near_fractions(model)}'
        )
        yield Problem(path, message, others=('model.head_dim',))


def _near_fractions(model: ModelConfig) -> str:
    """Return the nearest fractions of the head dim that are an even number of dims, as text."""
    head_dim, below = model.head_dim, model.rotary_dim // 2 * 2
    return ' or '.join(
        # In floating point, n / head_dim * head_dim may be just below n.
        str(next(x for x in (n / head_dim, math.nextafter(n / head_dim, 1)) if head_dim * x >= n))
        for n in (below, below + 2)
        if 0 < n <= head_dim
    )
