"""Check the values of keys one by one, before the rules between keys."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megajax.base.errors import Problem
from megajax.base.render.text import shorten
from megajax.core.config import values
from megajax.core.config.overrides import Setting
from megajax.core.config.schema import SECTIONS, Config, keys_of


def validate(
    settings: Mapping[str, Setting], file: str, problems: list[Problem]
) -> tuple[dict[str, Any], set[str]]:
    """Return the sections, and the paths whose invalid values were replaced by placeholders.

    Rules must not report problems that depend on a placeholder.
    """
    sections: dict[str, Any] = {}
    unsettled: set[str] = set()
    for name, section in SECTIONS.items():
        given = {
            key: settings[f'{name}.{key}'].value
            for key in keys_of(name)
            if f'{name}.{key}' in settings
        }
        is_absent = name not in settings or settings[name].value is None
        if not given and is_absent and Config.model_fields[name].default is None:
            continue
        try:
            sections[name] = section.model_validate(given)
        except ValidationError as error:
            # Errors of defaults that depend on an invalid key come first, so that the error of the
            # key itself, which may be in the same group, takes their place.
            errors = sorted(
                error.errors(include_url=False), key=lambda detail: not _follows(detail)
            )
            details = {str(detail['loc'][0]): detail for detail in errors}
            for key, detail in details.items():
                path = f'{name}.{key}'
                unsettled.add(path)
                if not _follows(detail):
                    inside = [f'{path}.{part}' for part in detail['loc'][1:2]]
                    places = [settings[at].place for at in (*inside, path, name) if at in settings]
                    place = next(iter(places), file)
                    # the rest of the path, if the value is inside a group or a list
                    inner = ''.join(
                        f'[{part}]' if isinstance(part, int) else f'.{shorten(part)}'
                        for part in detail['loc'][1:]
                    )
                    message = f'{inner.removeprefix(".")} {values.explain(detail)}'.lstrip()
                    problems.append(Problem(path, message, place=place))
            valid = {key: value for key, value in given.items() if key not in details}
            # Every key without a default is a size, so 1 is valid.
            placeholders = {key: 1 for key in details if section.model_fields[key].is_required()}
            sections[name] = section.model_validate(valid | placeholders)
    return sections, unsettled


def _follows(detail: ErrorDetails) -> bool:
    """Whether an error is only that a default could not be computed from another, invalid key."""
    return detail['type'] == 'default_factory_not_called'
