"""Explain why a key of a config cannot have a value."""

import functools
import re
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megajax.base.render.text import shorten
from megajax.base.render.units import count
from megajax.core.config.experts import ExpertsConfig
from megajax.core.config.layer import LayerConfig, RopeScaling
from megajax.core.config.schema import SECTIONS
from megajax.core.config.section import Section
from megajax.core.config.synonyms import value_meant

PLAIN_WORDS = {
    'bool_type': 'true or false',
    'string_type': 'text (in quotes if it looks like another type)',
    'tuple_type': 'a list',
    'model_type': 'a group of keys',
    'dict_type': 'a group of keys',
    'none_required': 'null',
}
_GROUPS: dict[str, type[Section]] = {
    **SECTIONS,
    'rope_scaling': RopeScaling,
    'experts': ExpertsConfig,
}


def explain(detail: ErrorDetails) -> str:
    """Return a line of bounded length that explains what is wrong with a value."""
    if detail['type'] == 'missing' and isinstance(detail['loc'][-1], int):
        return 'missing from the list; add it'
    if detail['type'] == 'missing':
        return 'required, and has no default; add it'
    if detail['type'] == 'extra_forbidden':  # the key is inside a value that is a group
        if detail['loc'][0] == 'layers' and len(detail['loc']) == 3:
            return f'is not a key of a layer; known keys: {", ".join(LayerConfig.model_fields)}'
        return 'is not a key; remove it'
    allowed = PLAIN_WORDS.get(detail['type']) or detail['msg'].removeprefix('Input should be ')
    limits = detail.get('ctx', {})
    if detail['type'] == 'too_short':
        allowed = f'a list of at least {count(limits["min_length"], "value")}'
    if detail['type'] == 'too_long':
        allowed = f'a list of at most {count(limits["max_length"], "value")}'
    least = limits.get('ge')
    if isinstance(least, float) and 0 < least < 1e-4:  # pydantic writes all zeros of 1.2e-38
        allowed = f'greater than or equal to {least}'
    value = 'null' if detail['input'] is None else shorten(repr(detail['input']))
    meant = None
    if detail['type'] == 'literal_error':
        meant = value_meant(detail['input'], re.findall("'([^']*)'", allowed))
    elif detail['loc'] == ('layers',) and isinstance(detail['input'], int):
        meant = f'model.num_layers={detail["input"]}'
    elif detail['loc'][-1:] == ('window',) and detail['type'] == 'greater_than':
        meant = 'null, for no window'
    return f'must be {allowed}, not {value}' + (f'; did you mean {meant}?' if meant else '')


def fault(path: str, value: Any) -> str | None:
    """Return why a key such as `model.norm_eps` cannot have this value, or None if it can.

    Rules that involve other keys are not checked.
    """
    try:
        _adapter(path).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        detail['loc'] = path.rpartition('.')[2], *detail['loc']
        return explain(detail)
    return None


def valid(path: str, value: Any) -> Any:
    """Return a value as a config has it, or None if the key cannot have it."""
    return None if fault(path, value) else _adapter(path).validate_python(value)


@functools.cache
def _adapter(path: str) -> TypeAdapter[Any]:
    section, _, name = path.partition('.')
    field = _GROUPS[section].model_fields[name]
    kind: Any = field.annotation
    for limit in field.metadata:
        kind = Annotated[kind, limit]
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
