"""Reject keys that have no effect, because of the values of other keys."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megajax.base.errors import Problem
from megajax.base.render.text import shorten
from megajax.core.config.section import Section
from megajax.core.config.vision import DRAWN

if TYPE_CHECKING:
    from megajax.core.config.optim import OptimConfig
    from megajax.core.config.schema import Config


@dataclass(frozen=True)
class Unused(Problem):
    """A key that has no effect; a config that a run recorded may have such keys (`load.reload`)."""

    # the value that has the same effect, if it is not the default, for any values of other keys
    # except `unless`
    same: Any = None
    unless: tuple[str, ...] = ()


def of_learning_rate(config: 'Config') -> Iterator[Problem]:
    """Check that keys of the learning rate have an effect on its schedule."""
    optim = config.optim
    schedule = f'optim.schedule={optim.schedule}'
    if optim.schedule != 'wsd':
        for name in ('wsd_steps', 'wsd_decay'):
            yield from _unused(optim, f'optim.{name}', schedule, 'optim.schedule=wsd')
    # a constant rate does not use min_lr either, but most presets give it, for any schedule
    if optim.schedule == 'constant':
        yield from _unused(optim, 'optim.decay_steps', schedule, 'optim.schedule=cosine')
    elif optim.min_lr == optim.lr:
        message = (
            f'{optim.schedule} has no effect with optim.min_lr={optim.min_lr:g}, which equals '
            f'optim.lr; set optim.min_lr={optim.lr / 10:g}, or optim.schedule=constant'
        )
        others = 'optim.min_lr', 'optim.lr'
        yield Unused('optim.schedule', message, others=others, same='constant', unless=others)
    if not optim.warmup_steps:
        needed = f'optim.warmup_steps={warmup_for(optim, config.train.steps)}'
        yield from _unused(optim, 'optim.warmup_init', 'optim.warmup_steps=0', needed)
    yield from _ratios(optim, config.train.steps)


def _ratios(optim: 'OptimConfig', steps: int) -> Iterator[Problem]:
    """Check that no length is a ratio, such as transformers' `warmup_steps=0.03`."""
    end = optim.decay_steps or steps
    lengths = {
        'decay_steps': (steps, 'train.steps', 1),
        'warmup_steps': (end, 'the schedule', None),
        'wsd_steps': (end - optim.warmup_steps, 'the steps after warm-up', 1),
    }
    # Megatron-LM's warm-up may be one sample; inverse_sqrt uses it for the rate of every step
    if optim.warmup_init is not None or optim.schedule == 'inverse_sqrt':
        del lengths['warmup_steps']
    for name, (whole, phrase, same) in lengths.items():
        ratio = getattr(optim, name)
        if ratio is not None and 0 < ratio < 1 < whole:
            fix = max(1, min(round(ratio * whole), math.ceil(whole) - 1))
            message = f'{ratio} is less than one step; for {ratio} of {phrase}, use {fix}'
            yield Unused(f'optim.{name}', message, others=('train.steps',), same=same)


def of_muon(config: 'Config') -> Iterator[Problem]:
    """Check that keys of Muon have an effect."""
    optim = config.optim
    if optim.kind != 'muon':
        for name in ('momentum', 'nesterov', 'ns_steps', 'ns_coefficients'):
            kind = f'optim.kind={optim.kind}'
            yield from _unused(optim, f'optim.{name}', kind, 'optim.kind=muon')


def warmup_for(optim: 'OptimConfig', steps: int) -> float:
    """Return a warm-up for a message to offer: a tenth of the schedule, and at most 100 steps."""
    end = optim.decay_steps or steps
    return min(100, max(1, math.floor(end) // 10)) if end > 1 else end / 2


def of_training(config: 'Config') -> Iterator[Problem]:
    """Check that the scaling of fp8, a schedule of stages and a dtype of sums have an effect."""
    train, reduce_dtype = config.train, config.optim.reduce_dtype
    if reduce_dtype != 'float32' and config.lora is not None:
        message = (
            f'{reduce_dtype} has no effect with lora, whose gradients are summed in float32; '
            'remove it'
        )
        yield Unused('optim.reduce_dtype', message, others=('lora',))
    if train.dtype != 'fp8':
        dtype = f'train.dtype={train.dtype}'
        yield from _unused(train, 'train.fp8_scaling', dtype, 'train.dtype=fp8')
    if config.mesh.stages == 1:
        yield from _unused(train, 'train.schedule', 'mesh.stages=1', 'mesh.stages=2')
    # mesh.context_exchange may be given without context shards: a preset gives it for its own mesh,
    # which other meshes often replace


def of_model(config: 'Config') -> Iterator[Problem]:
    """Check that keys of positions and experts have an effect."""
    model, position = config.model, f'model.position={config.model.position}'
    if not any(layer.rotates for layer in model.pattern):
        is_of_layers = model.position not in ('learned', 'none')
        setting = 'model.layers, none of which rotates' if is_of_layers else position
        needed = 'model.layers=[]' if is_of_layers else 'model.position=rope'
        yield from _unused(model, 'model.rope_theta', setting, needed)
    if model.position not in ('mrope', 'rope_2d'):  # a text model with rope_2d is rejected
        yield from _unused(model, 'model.mrope_section', position, 'model.position=mrope')
    if (experts := model.experts) is None:
        return
    path = 'model.experts'
    if not experts.selection_bias:
        without, needed = f'{path}.selection_bias=false', f'{path}.selection_bias=true'
        yield from _unused(experts, f'{path}.bias_rate', without, needed)
    elif config.lora is not None:
        yield from _unused(experts, f'{path}.bias_rate', 'lora')
    elif config.vision is not None and 'decoder' in config.vision.freeze:
        yield from _unused(experts, f'{path}.bias_rate', 'vision.freeze=[decoder]')
    if not experts.balance_loss:
        without, needed = f'{path}.balance_loss=0', f'{path}.balance_loss=0.01'
        yield from _unused(experts, f'{path}.balance_over', without, needed)


def of_vision(config: 'Config') -> Iterator[Problem]:
    """Check that keys of cross-attention, image sizes and frozen parts have an effect."""
    if (vision := config.vision) is None:
        return
    if not vision.is_crossed:
        crossed = 'vision.fusion=cross_attention'
        for name in ('cross_every', 'cross_gate'):
            yield from _unused(vision, f'vision.{name}', f'vision.fusion={vision.fusion}', crossed)
    if vision.min_patches and config.relevance is not None:
        message = (
            f'{vision.min_patches} has no effect with relevance, which scales every image to '
            'vision.max_patches; use 0, or remove relevance'
        )
        yield Unused('vision.min_patches', message, others=('relevance',))
    if vision.freeze and config.lora is not None:
        message = (
            f'{list(vision.freeze)} has no effect with lora, which freezes everything except its '
            'adapters; remove it, or remove lora'
        )
        yield Unused('vision.freeze', message, others=('lora',))


def of_data(config: 'Config') -> Iterator[Problem]:
    """Check that keys of a corpus of files have an effect."""
    data = config.data
    if data.corpus in DRAWN:
        for name in ('split', 'order', 'chat_template', 'ignored_keys'):
            yield from _unused(data, f'data.{name}', f'data.corpus={data.corpus}')


def _unused(
    section: Section, path: str, setting: str, needed: str | None = None
) -> Iterator[Problem]:
    """Yield a problem if a key differs from its default; `needed` would give it an effect."""
    name = path.rpartition('.')[2]
    value = getattr(section, name)
    if value != type(section).model_fields[name].default:
        shown = list(value) if isinstance(value, tuple) else value
        message = f'{shorten(str(shown))} has no effect with {setting}; remove it'
        if needed is not None:
            message += f', or set {needed}'
        yield Unused(path, message, others=(re.split('[=,]', setting)[0],))
