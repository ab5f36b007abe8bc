"""Check keys of a config against each other, before jax is imported or anything compiles."""

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.base.render.text import shorten
from megajax.core.config import (
    layer_rules,
    mesh_rules,
    overlap_rules,
    relevance_rules,
    rope_rules,
    tensor_rules,
    unused_rules,
    vision_rules,
)
from megajax.core.config.conflicts import excluded
from megajax.core.config.divisors import multiples
from megajax.core.config.experts import of_experts

if TYPE_CHECKING:
    from megajax.core.config.optim import OptimConfig
    from megajax.core.config.schema import Config


SHORTEST_PAIR = 16  # tokens, the minimum length of a BERT sequence
LARGEST_LOSS_SCALE = 2**32  # Megatron's initial loss scale


def incompatibilities(
    config: 'Config', *, own: bool = True, chosen: Collection[str] = ()
) -> list[Problem]:
    """Return a problem for every pair of keys that conflict.

    Without `own`, leave out the conflicts that only megajax has. Leave out conflicts with keys that
    are still to be `chosen`.
    """
    rules = (
        layer_rules.of_pattern,
        layer_rules.of_positions,
        tensor_rules.of_heads,
        rope_rules.of_scaling,
        rope_rules.of_fraction,
        unused_rules.of_model,
        unused_rules.of_learning_rate,
        unused_rules.of_muon,
        tensor_rules.of_kv_heads,
        tensor_rules.of_widths,
        _length,
        _batches,
        mesh_rules.of_replicas,
        of_experts,
        mesh_rules.of_grid,
        mesh_rules.of_stages,
        mesh_rules.of_microbatches,
        mesh_rules.of_context,
        overlap_rules.of_halves,
        overlap_rules.of_adapters,
        vision_rules.of_positions,
        vision_rules.of_encoder,
        relevance_rules.of_relevance,
        _loss_scale,
        unused_rules.of_training,
        unused_rules.of_vision,
        unused_rules.of_data,
        _optimizer,
        _profile,
        _replay,
        _data,
        _masked,
    )
    applied = [rule for rule in rules if own or rule not in _OWN]
    problems = [problem for rule in applied for problem in rule(config)]
    problems += excluded(config) if own else ()
    return [one for one in problems if {*chosen}.isdisjoint((one.path, *one.others))]


def of_batch(config: 'Config', rows: int, length: int) -> list[Problem]:
    """Return the problems that a batch with so many rows of so many tokens adds to a config."""

    def found(config: 'Config') -> list[Problem]:
        rules = (
            tensor_rules.of_widths,
            _length,
            _batches,
            of_experts,
            mesh_rules.of_context,
            overlap_rules.of_halves,
        )
        return [problem for rule in rules for problem in rule(config)]

    train = config.train.model_copy(update={'batch_size': rows, 'seq_len': length})
    given, known = config.model_copy(update={'train': train}), found(config)
    return [problem for problem in found(given) if problem not in known]


# The rules that only megajax has, in addition to the table of `conflicts.py`.
_OWN = (mesh_rules.of_stages, mesh_rules.of_context, overlap_rules.of_halves)


def _length(config: 'Config') -> Iterator[Problem]:
    model, seq_len = config.model, config.train.seq_len
    if seq_len > model.max_seq_len:
        message = (
            f'{seq_len} exceeds model.max_seq_len={model.max_seq_len}; '
            f'use at most {model.max_seq_len}, or raise model.max_seq_len'
        )
        yield Problem('train.seq_len', message, others=('model.max_seq_len',))


def batch_multiple(config: 'Config') -> int:
    """Return the number of which `train.batch_size` must be a multiple."""
    train, mesh = config.train, config.mesh
    is_split = train.overlap == 'batch_split' and config.overlap.num_parts > 1
    return mesh.data * train.microbatches * mesh.model_rows * (2 if is_split else 1)


def _batches(config: 'Config') -> Iterator[Problem]:
    train, data, rows = config.train, config.mesh.data, config.mesh.model_rows
    batch_size, shares = train.batch_size, data * train.microbatches
    if batch_size % shares:
        message = (
            f'{batch_size} is not a multiple of mesh.data={data} x '
            f'train.microbatches={train.microbatches} = {shares}; '
            f'use {multiples(batch_size, shares)}'
        )
        yield Problem('train.batch_size', message, others=('mesh.data', 'train.microbatches'))
        return
    reasons, others = {}, ['mesh.data', 'train.microbatches']
    if train.overlap == 'batch_split' and config.overlap.num_parts > 1:
        reasons['train.overlap'] = 'train.overlap=batch_split splits them in half'
        others += overlap_rules.PARTS_FOLLOW_FROM
    if rows > 1:
        reasons['mesh.model_rows'] = f'mesh.model_rows={rows} shards them'
    parts = batch_multiple(config) // shares
    if config.microbatch_rows % parts:
        message = (
            f'{batch_size} gives {config.microbatch_rows} sequences per microbatch and data shard, '
            f'but {" and ".join(reasons.values())}; use {multiples(batch_size, parts * shares)}'
        )
        if parts == 2 and 'train.overlap' in reasons:
            message += ', or train.overlap=none'
        yield Problem('train.batch_size', message, others=(*reasons, *others))


def _loss_scale(config: 'Config') -> Iterator[Problem]:
    train, path = config.train, 'train.loss_scale'
    if train.loss_scale == 'auto':
        return
    if train.dtype != 'float16':
        message = (
            f'{train.loss_scale:g} has no effect with train.dtype={train.dtype} '
            '(loss scaling is for float16); remove it'
        )
        yield unused_rules.Unused(path, message, others=('train.dtype',))
        return
    below = min(2 ** max(math.floor(math.log2(train.loss_scale)), 0), LARGEST_LOSS_SCALE)
    if train.loss_scale != below:
        near = f'{below} or {2 * below}' if below < train.loss_scale < LARGEST_LOSS_SCALE else below
        message = (
            f'{train.loss_scale:g} is not a power of two between 1 and {LARGEST_LOSS_SCALE}, '
            f'which scaling without rounding needs; use {near}'
        )
        yield Problem(path, message)


def _optimizer(config: 'Config') -> Iterator[Problem]:
    optim, steps = config.optim, config.train.steps
    if optim.min_lr > optim.lr:
        message = (
            f'{optim.min_lr} exceeds optim.lr={optim.lr}; '
            f'use less than {optim.lr}, for example {optim.lr / 10:g}'
        )
        yield Problem('optim.min_lr', message, others=('optim.lr',))
    if optim.warmup_init is not None and optim.warmup_init > optim.lr:
        message = f'{optim.warmup_init} exceeds optim.lr={optim.lr}; use at most {optim.lr}, or 0'
        yield Problem('optim.warmup_init', message, others=('optim.lr',))
    yield from _schedule(optim, steps)
    if optim.kind == 'muon' and (key := what_freezes_layers(config)):
        message = f'muon has no matrices to update: {key} freezes the layers; use adamw'
        yield Problem('optim.kind', message, others=(key,))


def what_freezes_layers(config: 'Config') -> str | None:
    """Return the key that freezes all matrices of the decoder's layers, or None."""
    vision = config.vision
    if vision is not None and 'decoder' in vision.freeze and not vision.is_crossed:
        return 'vision.freeze'
    return 'lora' if config.lora is not None else None


def _schedule(optim: 'OptimConfig', steps: int) -> Iterator[Problem]:
    if optim.decay_steps is None and optim.warmup_steps >= steps:
        message = (
            f'{optim.warmup_steps} must be less than train.steps={steps}; '
            f'use at most {steps - 1}, or raise train.steps'
        )
        yield Problem('optim.warmup_steps', message, others=('train.steps',))
    if optim.decay_steps is not None and optim.decay_steps <= optim.warmup_steps:
        message = (
            f'{optim.decay_steps} must be more than optim.warmup_steps={optim.warmup_steps}; '
            f'use at least {math.floor(optim.warmup_steps) + 1}, or remove it'
        )
        yield Problem('optim.decay_steps', message, others=('optim.warmup_steps',))
    if optim.schedule == 'inverse_sqrt' and not optim.warmup_steps:
        message = (
            '0 is not supported with optim.schedule=inverse_sqrt; '
            f'use for example {unused_rules.warmup_for(optim, steps)}'
        )
        yield Problem('optim.warmup_steps', message, others=('optim.schedule',))
    after = (optim.decay_steps or steps) - optim.warmup_steps
    others = ('optim.decay_steps', 'optim.warmup_steps', 'train.steps')
    if optim.wsd_steps is not None and 0 < after < optim.wsd_steps:
        message = (
            f'{optim.wsd_steps} is more than the {after} steps after warm-up; use at most {after}'
        )
        yield Problem('optim.wsd_steps', message, others=others)


def _profile(config: 'Config') -> Iterator[Problem]:
    profile, steps = config.train.profile, config.train.steps
    if profile and profile.start + profile.steps > steps:
        message = (
            f'start {profile.start} and {profile.steps} steps end at step '
            f'{profile.start + profile.steps}, after train.steps={steps}; '
            f'use at most start {max(steps - profile.steps, 0)} '
            f'and {min(profile.steps, steps)} steps'
        )
        yield Problem('train.profile', message, others=('train.steps',))


def _replay(config: 'Config') -> Iterator[Problem]:
    train = config.train
    if train.replay_every and not train.deterministic:
        message = (
            f'{train.replay_every} compares repeated steps bit for bit, which needs reproducible '
            'results; set train.deterministic=true, or train.replay_every=0'
        )
        yield Problem('train.replay_every', message, others=('train.deterministic',))


def _data(config: 'Config') -> Iterator[Problem]:
    default = type(config.data).model_fields['corpus'].default
    if config.data.blend and config.data.corpus != default:
        message = (
            f'{config.data.corpus} cannot be combined with data.blend='
            f'{", ".join(config.data.blend)}; set only one of them (to remove the one that a file '
            f'sets, add data.corpus={default} or data.blend={{}})'
        )
        yield Problem('data.corpus', message, others=('data.blend',))
    try:
        parts = [float(part) for part in config.data.split.split(',')]
    except ValueError:
        parts = []
    if not (
        len(parts) == 3
        and parts[0] > 0
        and all(part >= 0 for part in parts)
        and math.isfinite(sum(parts))
    ):
        message = (
            f'{shorten(repr(config.data.split))} is not three finite numbers, the first positive '
            "and the others at least 0; use for example '95,5,0'"
        )
        yield Problem('data.split', message)


def _masked(config: 'Config') -> Iterator[Problem]:
    if config.model.objective == 'masked_lm' and config.train.seq_len < SHORTEST_PAIR:
        message = (
            f'{config.train.seq_len} is too short for two segments and three special tokens; '
            f'use at least {SHORTEST_PAIR}'
        )
        yield Problem('train.seq_len', message, others=('model.objective',))
