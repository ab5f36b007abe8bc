"""Reject keys that have no effect, because of the values of other keys."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.base.render.text import shorten
from megajax.core.config.section import Section

if TYPE_CHECKING:
    from megajax.core.config.schema import Config


def of_learning_rate(config: 'Config') -> Iterator[Problem]:
    """Check that keys of the learning rate have an effect on its schedule."""
    optim = config.optim
    if optim.schedule != 'wsd':
        for name in ('wsd_steps', 'wsd_decay'):
            yield from _unused(optim, 'optim', name, f'schedule={optim.schedule}', 'schedule=wsd')
    if not optim.warmup_steps:
        yield from _unused(optim, 'optim', 'warmup_init', 'warmup_steps=0', 'warmup_steps=100')


def of_scaling(config: 'Config') -> Iterator[Problem]:
    """Check that the scaling of fp8 has an effect."""
    train = config.train
    if train.dtype != 'fp8':
        yield from _unused(train, 'train', 'fp8_scaling', f'dtype={train.dtype}', 'dtype=fp8')


def of_model(config: 'Config') -> Iterator[Problem]:
    """Check that keys of positions and experts have an effect."""
    model, position = config.model, f'position={config.model.position}'
    if model.position == 'learned':
        yield from _unused(model, 'model', 'rope_theta', position, 'position=rope')
    if model.position not in ('mrope', 'rope_2d'):  # a text model with rope_2d is rejected
        yield from _unused(model, 'model', 'mrope_section', position, 'position=mrope')
    if (experts := model.experts) and not experts.selection_bias:
        needed = 'selection_bias=true'
        yield from _unused(experts, 'model.experts', 'bias_rate', 'selection_bias=false', needed)


def _unused(section: Section, path: str, name: str, setting: str, needed: str) -> Iterator[Problem]:
    """Yield a problem if a key differs from its default; `needed` would give it an effect."""
    value = getattr(section, name)
    if value != type(section).model_fields[name].default:
        shown = list(value) if isinstance(value, tuple) else value
        message = (
            f'{shorten(str(shown))} has no effect with {path}.{setting}; '
            f'remove it, or set {path}.{needed}'
        )
        other = f'{path}.{setting.partition("=")[0]}'
        yield Problem(path=f'{path}.{name}', message=message, others=(other,))
