"""The values that a random config can have for each key, from the schema.

Booleans, enumerations and optional groups are drawn from their types, so a new key of these kinds
needs no change here. A number needs an entry in SIZES. A key that does not change the compiled step
needs an entry in NOT_DRAWN.
"""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megajax.core.config.layer import LayerConfig
from megajax.core.config.schema import SECTIONS, Config
from megajax.core.config.section import Section

Values = Sequence[Any]
PRESENT = object()  # the value of a group of keys that is present
LAYERS = 'model.layers'

# Few and small numbers: small steps are enough to show a fault, and a CPU can execute them.
SIZES: Mapping[str, Values] = {
    'model.num_layers': (1, 1, 1, 2, 2, 4),  # a GPU program of two layers takes twice as long
    'model.hidden_size': (64, 128),
    'model.num_heads': (2, 4, 8),
    'model.num_kv_heads': (1, 2, 4),
    'model.head_dim': (64, 16, 128),
    'model.ffn_size': (128, 192),
    'model.vocab_size': (1000, 1024, 1500),
    'model.window': (1, 4, 8),
    'model.rope_theta': (1e4, 1e6),
    'model.rope_scaling.factor': (4.0,),
    'model.rope_scaling.original_max_seq_len': (8, 16),
    'model.rotary_fraction': (0.5, 0.25),
    'model.query_scale': (0.25,),
    'model.embedding_scale': (8.0,),
    'model.dropout': (0.1,),
    'model.attention_dropout': (0.0, 0.1),
    'model.experts.count': (4, 8),
    'model.experts.active': (1, 2),
    'model.experts.ffn_size': (64, 128),
    'model.experts.shared_ffn_size': (64, 128),
    'model.experts.first_dense': (1,),
    'model.experts.scale': (2.5,),
    'model.experts.groups': (2, 4),
    'model.experts.active_groups': (1, 2),
    'model.experts.balance_loss': (1e-2,),
    'model.experts.z_loss': (1e-3,),
    'model.experts.capacity': (0.75, 1.25),
    'model.experts.capacity_group': (4, 8),
    'vision.num_layers': (1, 2),
    'vision.hidden_size': (32, 64),
    'vision.num_heads': (2, 4),
    'vision.ffn_size': (64, 128),
    'vision.patch_size': (4,),
    'vision.frames': (2,),
    'vision.merge_size': (1,),
    'vision.positions': (4,),
    'vision.deepstack': ((0,),),
    'vision.cross_every': (1, 2),
    'vision.cross_gate': (1.0,),
    'vision.images': (2,),
    'vision.max_patches': (16, 32),
    'relevance.regions': ((2, 1), (1, 2)),
    'relevance.total_tokens': (164, 208),  # from 164 on, two regions can differ in their tokens
    'relevance.scorer_size': (16, 32),
    'lora.rank': (4, 8),
    'lora.alpha': (16.0,),
    'mesh.stages': (2, 2, 4),
    'mesh.virtual_stages': (2,),
    'mesh.data': (2, 2, 2, 3, 4, 8),
    'mesh.replicas': (2,),
    'mesh.experts': (2, 4),
    'mesh.context': (2, 2, 4),
    'mesh.model_rows': (2,),
    'mesh.model': (2, 2, 2, 4, 8),
    'train.microbatches': (2, 3, 4),
    'train.seq_len': (16, 32, 64),
    'loss.label_smoothing': (0.1,),
    'loss.z_loss': (1e-3,),
    'train.batch_size': (8, 16, 24),
}
# Keys that do not change the compiled step, that another drawn key determines, that the comparison
# itself sets (`emulated_step.SMOOTH`), or that only scale a number.
NOT_DRAWN = frozenset(
    {
        *(f'{section}.{key}' for section in ('checkpoint', 'run')
          for key in SECTIONS[section].model_fields),
        *(f'data.{key}' for key in SECTIONS['data'].model_fields if key != 'document_mask'),
        *(f'train.{key}' for key in (
            'steps', 'eval_every', 'eval_batches', 'log_every', 'profile', 'sample_prompts',
            'nonfinite', 'spike', 'seed', 'replay_every', 'loss_scale')),
        *(f'optim.{key}' for key in (
            'lr', 'min_lr', 'warmup_steps', 'warmup_init', 'decay_steps', 'schedule', 'wsd_steps',
            'wsd_decay', 'weight_decay', 'beta1', 'beta2', 'eps', 'momentum', 'grad_clip',
            'moments_dtype', 'ns_steps')),
        *(f'model.rope_scaling.{key}' for key in (
            'low_freq_factor', 'high_freq_factor', 'beta_fast', 'beta_slow', 'short_factor',
            'long_factor', 'attention_factor')),
        'model.max_seq_len', 'model.mrope_section', 'model.norm_eps', 'model.init_std',
        'model.experts.bias_rate', 'mesh.allow_model_across_hosts', 'vision.min_patches',
        'vision.image_token',
    }
)  # fmt: skip
MOST_ENTRIES = 3  # most entries of a pattern of layers


@functools.cache
def choices() -> Mapping[str, Values]:
    """Return the values of each drawn key by path, without the key's default.

    A group, such as `model.experts` or `lora`, has the value PRESENT.
    """
    found: dict[str, Values] = {}
    for name in SECTIONS:
        if Config.model_fields[name].default is None:
            found[name] = (PRESENT,)
        found |= dict(_of_section(name, SECTIONS[name]))
    return found


def required(path: str) -> bool:
    """Return whether a key has no default in its section."""
    return path in _REQUIRED


def pick(values: Values, random: Random) -> Any:
    """Return one of the values; only `Random.random` is the same in all versions of Python."""
    return values[int(random.random() * len(values))]


def of_pattern(random: Random) -> list[dict[str, Any]]:
    """Draw the entries of `model.layers`: any keys of a layer, each with one of its values."""
    entries = []
    for _ in range(pick(range(1, MOST_ENTRIES + 1), random)):
        entry = {}
        for key, field in LayerConfig.model_fields.items():
            if key != 'repeat' and random.random() < 0.4:
                value = pick(_values(f'model.{key}', field), random)
                # PRESENT would be the model's own group, which the entry does not change
                if value is not PRESENT:
                    entry[key] = value
        entries.append(entry)
    return entries


def _of_section(name: str, section: type[Section]) -> Iterator[tuple[str, Values]]:
    for key, field in section.model_fields.items():
        path = f'{name}.{key}'
        if field.exclude or path in NOT_DRAWN:
            continue
        if path == LAYERS:
            yield path, (PRESENT,)
            continue
        values = tuple(value for value in _values(path, field) if value != field.default)
        if values:
            yield path, values
        if group := _group(field.annotation):
            yield from _of_section(path, group)


def _values(path: str, field: FieldInfo) -> Values:
    return (*dict.fromkeys(_of_type(field.annotation)), *SIZES.get(path, ()))


def _of_type(annotation: Any) -> Iterator[Any]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        yield from (False, True)
    elif annotation is type(None):
        yield None
    elif origin is Literal:
        yield from parts
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _of_type(part)
    elif origin is tuple and get_origin(parts[0]) is Literal:
        names = get_args(parts[0])
        yield from (names, *((name,) for name in names))
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield PRESENT


def _group(annotation: Any) -> type[Section] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def _all_required() -> Iterator[str]:
    for name in SECTIONS:
        yield from _required_of(name, SECTIONS[name])


def _required_of(name: str, section: type[Section]) -> Iterator[str]:
    for key, field in section.model_fields.items():
        if field.is_required():
            yield f'{name}.{key}'
        if (group := _group(field.annotation)) and group is not LayerConfig:
            yield from _required_of(f'{name}.{key}', group)


_REQUIRED = frozenset(_all_required())
