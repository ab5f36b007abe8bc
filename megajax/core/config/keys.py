"""Every key that a config file may set, with its type, unit, default and meaning.

All of it comes from the schema: types and defaults from the fields, meanings from the docstrings
below them.
"""

import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megajax.base.errors import ConfigError
from megajax.core.config.schema import SECTIONS
from megajax.core.config.section import Section, Unit
from megajax.core.config.synonyms import nearest_key

_NAMES = {int: 'integer', float: 'number', str: 'text', bool: 'true | false', type(None): 'null'}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config file; a key in a group has two dots, such as train.profile.start."""

    path: str
    type: str  # name of the type, or its choices, such as 'auto | integer > 0'
    unit: str  # name of the unit in the plural, or ''
    default: str  # the default as in YAML, 'required', or a formula of other keys
    meaning: str


def keys_in(path: str | None = None) -> list[Key]:
    """Return the keys of a section or group, or a single key; without a path, return all.

    Raises ConfigError for an unknown path, and suggests the nearest one.
    """
    every = [key for name, section in SECTIONS.items() for key in _keys(name, section)]
    if path is None:
        return every
    if found := [key for key in every if f'{key.path}.'.startswith(f'{path}.')]:
        return found
    close = get_close_matches(path, [key.path for key in every], n=1, cutoff=0.9)
    near = next(iter(close), nearest_key(path))
    fix = f'did you mean {near}?' if near else f'sections: {", ".join(SECTIONS)}'
    raise ConfigError(f'{path}: no such section or key; {fix}')


def sources(path: str) -> list[str]:
    """Return the keys from which the default of a key, such as model.head_dim, is computed."""
    name, _, key = path.partition('.')
    return [f'{name}.{other}' for other in formula_keys(SECTIONS[name], key)]


def formula_keys(section: type[Section], key: str) -> list[str]:
    """Return the keys of a section or group from which the default of another is computed."""
    fields = section.model_fields
    extra = fields[key].json_schema_extra if key in fields else None
    formula = re.findall(r'\w+', str(extra['default'])) if isinstance(extra, dict) else []
    return [other for other in fields if other in formula]


def _keys(path: str, section: type[Section]) -> Iterator[Key]:
    annotations = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        annotation = annotations[name]
        yield Key(
            path=f'{path}.{name}',
            type=' | '.join(dict.fromkeys(_alternatives(annotation))),
            unit=next((part.name for part in _parts(annotation) if isinstance(part, Unit)), ''),
            default=_default(field),
            meaning=' '.join((field.description or '').split()),
        )
        for part in _parts(annotation):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _keys(f'{path}.{name}', part)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and its arguments, recursively."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _alternatives(annotation: Any) -> Iterator[str]:
    """Yield the choices of an annotation, or the name of its type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = ' and '.join(filter(None, map(_limit, parts[1:])))
        yield from (f'{one} {limits}'.rstrip() for one in _alternatives(parts[0]))
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _alternatives(part)
    elif origin is Literal:
        yield from map(str, parts)
    elif origin is tuple:
        count = '' if parts[-1] is ... else f'{len(parts)} '
        yield f'list of {count}{" | ".join(_alternatives(parts[0]))}'
    elif origin is dict:
        key, value = (' | '.join(_alternatives(part)) for part in parts)
        yield f'{{{key}: {value}}}'
    elif issubclass(annotation, Section):
        yield f'{{{", ".join(annotation.model_fields)}}}'
    else:
        yield _NAMES[annotation]


def _limit(constraint: Any) -> str:
    if isinstance(constraint, FieldInfo):
        return ' and '.join(filter(None, map(_limit, constraint.metadata)))
    signs = ((Gt, '>', 'gt'), (Ge, '>=', 'ge'), (Lt, '<', 'lt'), (Le, '<=', 'le'))
    return next(
        (
            f'{sign} {getattr(constraint, name)}'
            for kind, sign, name in signs
            if isinstance(constraint, kind)
        ),
        '',
    )


def _default(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra['default'])
    if field.default is PydanticUndefined:
        return 'required'
    return field.default if isinstance(field.default, str) else json.dumps(field.default)
