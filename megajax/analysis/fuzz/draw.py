"""Draw random valid configs: a seed and a number determine one config on every machine.

Every key is drawn independently. If the config's own rules report a problem, one of the problem's
keys is drawn again, until no rule reports a problem. LAYOUTS configs in a row differ in their
layout only: computing their expected results would otherwise take a third of the time.
"""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from megajax.analysis.fuzz.choices import (
    LAYERS,
    PRESENT,
    Values,
    choices,
    of_pattern,
    pick,
    required,
)
from megajax.analysis.inspect.one_device import LAYOUT
from megajax.base.errors import ConfigError, Problem, mistake
from megajax.core.config import Config, reload
from megajax.core.config.overrides import KEYS, read_overrides
from megajax.core.config.schema import SECTIONS
from megajax.core.config.vision import FINEST

# How often a key is not at its default. A step with many features covers more combinations.
SHARE = 0.35
SHARES = {
    'train.dtype': 0.75,
    'optim.kind': 0.15,
    'optim.shard': 0.6,
    'model.position': 0.6,
    LAYERS: 0.4,
    'vision': 0.3,
    'vision.patch_size': 1.0,
    'vision.max_patches': 1.0,
    'relevance': 0.1,
    # Many other keys conflict with these, and then they are often drawn again.
    'mesh.stages': 0.65,
    'mesh.context': 0.45,
    'mesh.model_rows': 0.5,
}
OF_MESH, OF_GROUP = 0.5, 0.25
MOST_DEVICES = 8
LAYOUTS = 8  # per model
MULTIPLE = 64  # of tokens in a sequence with images, so that context shards can divide it
REDRAWS, RESTARTS = 300, 5
DEFAULT = object()
DRAWN_ALWAYS = 'train.batch_size', 'train.seq_len'
PLACE = 'drawn'
Settings = dict[str, Any]


def draw(seed: int, number: int, fixed: Sequence[str] = ()) -> Config:
    """Return the config with this number; `fixed` lists the KEY=VALUE settings that are not drawn.

    Raises ConfigError if no drawn config is valid with the fixed settings.
    """
    model, place = divmod(number, LAYOUTS)
    settings, pinned = _of_model(f'{seed} {model}', tuple(fixed))
    if place:
        others = {path: values for path, values in choices().items() if _is_of_layout(path)}
        with contextlib.suppress(ConfigError):  # some models have one layout
            settings = _valid(Random(f'{seed} {model} {place}'), others, settings, pinned)
    return _checked(settings, pinned)


@functools.lru_cache(maxsize=8)  # the layouts of a model are drawn in a row
def _of_model(seed: str, fixed: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a model, which its layouts change, and the fixed ones."""
    problems: list[Problem] = []
    pinned = {path: setting.value for path, setting in read_overrides(fixed, problems).items()}
    if problems:
        raise ConfigError(*problems)
    return _valid(Random(seed), choices(), {}, pinned), pinned


def _is_of_layout(path: str) -> bool:
    section, _, key = path.partition('.')
    return key in LAYOUT.get(section, {})


def _valid(
    random: Random, free: Mapping[str, Values], settings: Settings, pinned: Mapping[str, Any]
) -> Settings:
    """Return `settings` with a drawn value for each free key, so that the config is valid."""
    found: Sequence[Problem] = ()
    for _ in range(RESTARTS):
        drawn = settings | {path: _value(path, values, random) for path, values in free.items()}
        for _ in range(REDRAWS):
            try:
                _checked(drawn, pinned)
                return drawn
            except ConfigError as error:
                found = [each for each in error.problems if isinstance(each, Problem)]
                path = _to_change(pick(found, random), free, pinned, random)
                drawn[path] = _value(path, free[path], random)
    raise ConfigError(
        f'found no config of at most {MOST_DEVICES} devices with these settings; '
        'the last one drawn:',
        *found,
    )


def described(config: Config) -> str:
    """Return the keys that were given and differ from their defaults, as KEY=VALUE."""
    written = config.model_dump(mode='json', exclude_unset=True)
    return ' '.join(
        f'{section}.{key}={_text(value)}'
        for section, keys in written.items()
        for key, value in keys.items()
        if value != SECTIONS[section].model_fields[key].default
    )


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace('none', 'null')
    if isinstance(value, Mapping):
        return '{' + ', '.join(f'{key}: {_text(each)}' for key, each in value.items()) + '}'
    if isinstance(value, Sequence) and not isinstance(value, str):
        return '[' + ', '.join(map(_text, value)) + ']'
    return str(value)


def _value(path: str, values: Sequence[Any], random: Random) -> Any:
    share = OF_GROUP if PRESENT in values else OF_MESH if path.startswith('mesh.') else SHARE
    share = SHARES.get(path, share)
    departs = random.random() < share
    if path == LAYERS:
        return of_pattern(random) if departs else DEFAULT
    value = pick(values, random)
    return value if departs or required(path) or path in DRAWN_ALWAYS else DEFAULT


def _to_change(
    problem: Problem, free: Mapping[str, Values], pinned: Mapping[str, Any], random: Random
) -> str:
    """Return a free key of a problem, or one on which the default of such a key depends."""
    named = tuple(f'{name}.' for name in (problem.path, *problem.others))
    fixed = tuple(f'{path}.' for path in pinned)
    paths = [path for path in free if not f'{path}.'.startswith(fixed)]
    return pick([path for path in paths if f'{path}.'.startswith(named)] or paths, random)


def _checked(settings: Settings, pinned: Mapping[str, Any]) -> Config:
    """Return the config with drawn settings. Raises ConfigError with the rules that it breaks."""
    config = reload(_sections(settings, pinned), place=PLACE)
    if not 1 < config.mesh.num_devices <= MOST_DEVICES:
        axes = [f'mesh.{axis}' for axis in ('stages', 'data', 'context', 'model_rows', 'model')]
        message = f'{config.mesh.num_devices} devices'
        raise mistake(axes[0], message, *axes[1:])
    return config


def _sections(settings: Settings, pinned: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        *groups, key = path.split('.')
        if value is DEFAULT or not _is_present(settings, groups):
            continue
        _group(sections, groups)[key] = {} if value is PRESENT else value
    for path, value in pinned.items():
        if path in KEYS:
            section, key = path.split('.')
            sections.setdefault(section, {})[key] = value
        elif path in SECTIONS:  # without the section
            sections.pop(path, None)
    _complete(sections, pinned)
    return sections


def _is_present(settings: Settings, groups: Sequence[str]) -> bool:
    """Return whether no group around a key is absent."""
    paths = ('.'.join(groups[: place + 1]) for place in range(len(groups)))
    return all(settings[path] is PRESENT for path in paths if path in settings)


def _group(sections: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    for name in groups:
        sections = sections.setdefault(name, {})
    return sections


def _complete(sections: dict[str, dict[str, Any]], pinned: Mapping[str, Any]) -> None:
    """Add keys that follow from others, such as the number of positions or longrope's divisors."""
    model, train = (sections.setdefault(name, {}) for name in ('model', 'train'))
    vision, relevance = sections.get('vision'), sections.get('relevance', {})
    if vision is not None and {'regions', 'total_tokens'} <= {*relevance}:
        patches = math.prod(relevance['regions']) * FINEST**2
        # With patches merged by fours, attention would take 16 times as much memory.
        vision |= {'merge_size': 1, 'max_patches': patches}
        if vision.get('fusion') != 'cross_attention' and 'train.seq_len' not in pinned:
            tokens = vision.get('images', 1) * relevance['total_tokens'] + 1  # and text
            train['seq_len'] = max(train['seq_len'], math.ceil(tokens / MULTIPLE) * MULTIPLE)
    model.setdefault('max_seq_len', train['seq_len'])
    scaling = model.get('rope_scaling') or {}
    if scaling.get('type') == 'longrope' and 'short_factor' not in scaling:
        head_dim = model.get('head_dim', model['hidden_size'] // model['num_heads'])
        pairs = int(head_dim * model.get('rotary_fraction', 1.0)) // 2
        divisors = [1 + place / max(pairs, 1) for place in range(pairs)]
        scaling |= {'short_factor': divisors, 'long_factor': divisors}
