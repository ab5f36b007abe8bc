"""Change a recorded config, in which a run has written every key, by overrides of some keys."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.base.errors import Problem
from megajax.base.files.exists import is_file
from megajax.core.config import values
from megajax.core.config.keys import formula_keys
from megajax.core.config.overrides import Setting
from megajax.core.config.section import Section
from megajax.core.config.validate import validate

Settings = dict[str, Setting]
# Keys of `run` that belong to one start; the config in a run's folder does not keep them.
OF_START = 'dir', 'resume', 'allow_changed_data'
LOCK = 'lock'  # file name in the folder of a run


def is_written_by_run(folder: Path) -> bool:
    """Whether a run, or an import, has written to a folder.

    A run locks its folder before it writes anything else, and the file of the lock stays there.
    Checkpoints have a record.
    """
    return is_file(folder / LOCK) or any(folder.glob('checkpoints/[0-9]*/record.json'))


def without_start(written: Settings, folder: Path) -> Settings:
    """Return the settings of a run's config without the keys of the start that wrote it.

    Earlier versions wrote them. A `run.dir` that is the file's own folder stays; any other names
    the run of which `folder` is a copy.
    """
    dropped = {f'run.{key}' for key in OF_START}
    path = values.valid('run.dir', written['run.dir'].value) if 'run.dir' in written else None
    if path and os.path.realpath(path) == os.path.realpath(folder):
        dropped.remove('run.dir')
    return {key: setting for key, setting in written.items() if key not in dropped}


def without_old_corpus(written: Settings, overridden: Settings) -> Settings:
    """Return the recorded settings without the corpus or blend that an override replaces."""
    keys = {'data.corpus', 'data.blend'}
    new = {key for key in keys & overridden.keys() if overridden[key].value}
    replaced = keys - new if new else set()
    return {key: setting for key, setting in written.items() if key not in replaced}


def with_new_defaults(written: Settings, overridden: Settings) -> tuple[Settings, Settings]:
    """Return both settings without recorded defaults of which an override changes a source.

    For example, `model.head_dim` follows from `model.hidden_size` again. A recorded value that
    differs from its formula was set by the user, and stays.
    """
    if not overridden:
        return written, overridden
    mistakes: list[Problem] = []
    sections, _ = validate(written, '', mistakes)
    if mistakes:
        return written, overridden
    kept, changes = dict(written), dict(overridden)
    for name, section in sections.items():
        for path in _old_defaults(name, section, overridden):
            kept.pop(path, None)
            group, _, key = path.rpartition('.')
            # an override inside a group has set the other keys of the group too, as in the file
            if group in kept and group in changes and changes[group].place == kept[group].place:
                value = {own: x for own, x in changes[group].value.items() if own != key}
                changes[group] = changes[group]._replace(value=value)
    return kept, changes


def _old_defaults(name: str, section: Section, overridden: Mapping[str, Setting]) -> Iterator[str]:
    """Yield the keys whose values are defaults that no longer hold after these overrides."""
    changed = {*overridden}
    for key, field in type(section).model_fields.items():
        path, value = f'{name}.{key}', section.__dict__[key]
        sources = {f'{name}.{source}' for source in formula_keys(type(section), key)}
        if isinstance(value, Section) and not field.exclude:
            yield from _old_defaults(path, value, overridden)
        elif path not in overridden and not changed.isdisjoint(sources):
            compute: Any = field.default_factory
            if compute is not None and value == compute(section.__dict__):
                changed.add(path)
                yield path
