"""Read `section.key=value` overrides, including keys in a group, as `model.experts.capacity=1`."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ruamel.yaml.error import YAMLError

from megajax.base.errors import MAX_PROBLEMS, Problem
from megajax.base.render.text import typed
from megajax.core.config.bounded_yaml import explain, has_comment, parse
from megajax.core.config.keys import Key, keys_in
from megajax.core.config.renamed import RENAMED, current
from megajax.core.config.schema import SECTIONS, Config, keys_of
from megajax.core.config.synonyms import key_of_option, nearest_key, without_a_key

KEYS = {f'{name}.{key}': key for name in SECTIONS for key in keys_of(name)}
OPTIONAL = [name for name in SECTIONS if Config.model_fields[name].default is None]
LONGEST_KEY = 100  # characters in a path; in the schema, fewer than 60


class Setting(NamedTuple):
    """A value of a config, and where it is written."""

    value: Any
    place: str


def is_override(argument: str) -> bool:
    """Whether an argument sets a key, and is not the path of a file or folder with `=` in it."""
    key, equals, _ = argument.partition('=')
    return bool(equals) and '/' not in key


def typed_override(path: str, text: object) -> str:
    """Return the override that sets a key to this text, as it is typed in a shell.

    The text is in YAML's quotes if YAML would read it as something else.
    """
    try:
        is_plain = parse(str(text)) == str(text)
    except YAMLError:
        is_plain = False
    return typed(f'{path}={text if is_plain else json.dumps(str(text), ensure_ascii=False)}')


def read_overrides(
    overrides: Sequence[str], problems: list[Problem], written: Mapping[str, Setting] | None = None
) -> dict[str, Setting]:
    """Return the settings of overrides by path; if two set the same key, the last one wins.

    An override of a key in a group changes the group as an earlier override or else the file
    (`written`) sets it. It is also a setting by itself, so that its place can be reported.
    `lora=null` is a setting of the section: it removes the keys that are set before it.
    """
    settings: dict[str, Setting] = {}
    for override in overrides:
        path, equals, text = override.partition('=')
        path = path.strip()
        place = f'override {override}'
        if path in OPTIONAL and text.strip() in ('null', '~'):
            settings = {key: x for key, x in settings.items() if not key.startswith(f'{path}.')}
            settings[path] = Setting(None, place)
        elif not equals or path in SECTIONS or path.startswith('-'):
            key = key_of_option(path, KEYS) if path.startswith('-') else None
            example = f'{key}=VALUE' if key else 'for example train.steps=100'
            example = without_a_key(path.lstrip('-')) or example
            message = f'not of the form section.key=value, {example}'
            problems.append(Problem(place, message))
        elif path not in KEYS and path not in RENAMED and not (siblings := _siblings(path)):
            problems.append(Problem(path, unknown(path, problems), place=place))
        else:
            try:
                path, value = current(path, parse(text), place)
            except YAMLError as error:
                message = f'{explain(error)}; put the value in quotes'
                problems.append(Problem(place, message))
                continue
            if '#' in text and has_comment(text):
                fix = f'remove it, or put the text in quotes: {typed_override(path, text)}'
                problems.append(Problem(place, f'# begins a comment in YAML; {fix}'))
                continue
            if path not in KEYS:
                group, _, key = path.rpartition('.')
                outer = settings.get(group, (written or {}).get(group))
                if outer is None or not isinstance(outer.value, Mapping):
                    message = _whole(group, key, text, siblings)
                    problems.append(Problem(path, message, place=place))
                    continue
                settings[group] = Setting({**outer.value, key: value}, outer.place)
            settings[path] = Setting(value, place)
    return settings


def _siblings(path: str) -> list[Key]:
    """Return the keys of the group that contains this key; none if `path` is not in a group."""
    group = '.'.join(path.split('.')[:2])
    siblings = keys_in(group)[1:] if group in KEYS else []
    return siblings if any(key.path == path for key in siblings) else []


def _whole(group: str, key: str, text: str, siblings: Sequence[Key]) -> str:
    """Return the message for a key in a group that is not set."""
    if group not in KEYS or keys_in(group)[0].type.startswith('list'):
        group = '.'.join(group.split('.')[:2])
        return f'{group} is a list, which is set as a whole; see megajax config keys {group}'
    required = [each.path.rpartition('.')[2] for each in siblings if each.default == 'required']
    values = {**dict.fromkeys(required, 'VALUE'), key: text}
    listed = ', '.join(f'{name}: {value}' for name, value in values.items())
    return f'{group} is not set; set it as a whole: {typed(f"{group}={{{listed}}}")}'


def unknown(path: str, problems: list[Problem]) -> str:
    """Return the message for an unknown path, with the nearest key.

    There is no search for the nearest key if the problem will not be shown or the path is very
    long.
    """
    if len(problems) >= MAX_PROBLEMS or len(path) > LONGEST_KEY:
        return 'unknown key'
    section, _, key = path.partition('.')
    if path in KEYS:
        return f'is not a section; write it under {section}, as {section}: {{{key}: VALUE}}'
    if path.endswith('<<'):
        return 'merges are supported only inside a group such as model.experts; write the keys here'
    if instead := without_a_key(path):
        return f'unknown key; {instead}'
    inside = [each.path for each in keys_in()] if path.count('.') > 1 else []
    near = next(iter(get_close_matches(path, inside, n=1, cutoff=0.9)), nearest_key(path))
    return (
        f'unknown key; did you mean {near}?'
        if near
        else f'unknown key; known keys: {members(section)}'
    )


def members(section: str) -> str:
    """Return the keys of a section, or all sections, as a list in a message."""
    return ', '.join(keys_of(section) if section in SECTIONS else SECTIONS)
