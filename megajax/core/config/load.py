"""Load a Config from a preset or a YAML file and `section.key=value` overrides.

All mistakes are reported at once. It is a mistake to write a key twice. `bounded_yaml.py` limits
the size of a file.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from megajax.base.errors import ConfigError, Problem
from megajax.core.config import values
from megajax.core.config.bounded_yaml import Yaml, compose, construct, explain, read_text
from megajax.core.config.keys import sources
from megajax.core.config.overrides import (
    KEYS,
    Setting,
    is_override,
    members,
    read_overrides,
    typed_override,
    unknown,
)
from megajax.core.config.recorded import (
    is_written_by_run,
    with_new_defaults,
    without_old_corpus,
    without_start,
)
from megajax.core.config.renamed import RENAMED, current
from megajax.core.config.rules import incompatibilities
from megajax.core.config.schema import SECTIONS, Checked, Config
from megajax.core.config.unused_rules import Unused
from megajax.core.config.validate import validate

CONFIG = 'config.yaml'  # file name in the folder of a run
RECIPES = 'recipes'  # name of the recipes' folder, inside the presets' folder
NULL = 'tag:yaml.org,2002:null'
FEW_FILES = 5  # number of YAML files up to which an error lists them


def presets() -> list[str]:
    """Return the names of the presets, in alphabetical order."""
    return sorted(path.stem for path in _folder().glob('*.yaml'))


def recipes() -> list[str]:
    """Return the names of the recipes, which train imported models, in alphabetical order."""
    return sorted(f'{RECIPES}/{path.stem}' for path in (_folder() / RECIPES).glob('*.yaml'))


def load(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    own: bool = True,
    chosen: Iterable[str] = (),
    is_recorded: bool = False,
) -> Config:
    """Read a preset, recipe or YAML file, apply `section.key=value` overrides and check the result.

    If two overrides set the same key, the last one wins. Without `own`, the config may be one that
    only other software runs. Keys that are still to be `chosen` may conflict. If a run has recorded
    the file (`is_recorded`, or a config.yaml in a folder that a run has written to), keys in it
    that have no effect are left out, and recorded defaults follow from their formulas. Raises
    ConfigError with every mistake in the file and the overrides and every conflict between keys,
    each with its line or override.
    """
    file = _find(source)
    problems: list[Problem] = []
    written = _read_file(file, problems)
    overridden = read_overrides(overrides, problems, written or {})
    checked = Checked(own=own, chosen=tuple(chosen))
    is_recorded |= file.name == CONFIG and is_written_by_run(file.parent)
    if written is not None and is_recorded:
        written = without_old_corpus(without_start(written, file.parent), overridden)
        written, overridden = with_new_defaults(written, overridden)
    return _resolve(written, overridden, str(file), problems, checked, is_recorded=is_recorded)


def reload(
    settings: Mapping[str, Mapping[str, Any]], overrides: Sequence[str] = (), *, place: str
) -> Config:
    """Return the Config of sections read from `place`, for example the record of a checkpoint.

    Keys in it that have no effect are left out, and its defaults follow from their formulas. Raises
    ConfigError as `load` does.
    """
    problems: list[Problem] = []
    written: dict[str, Setting] = {}
    for path, value in (
        (f'{section}.{key}', value)
        for section, group in settings.items()
        for key, value in group.items()
    ):
        path, value = current(path, value)
        if path in KEYS:
            written[path] = Setting(value, place)
        else:
            problems.append(Problem(path, unknown(path, problems), place=place))
    overridden = read_overrides(overrides, problems, written)
    written = without_old_corpus(written, overridden)
    written, overridden = with_new_defaults(written, overridden)
    return _resolve(written, overridden, place, problems, Checked(), is_recorded=True)


def runs_in(folder: Path) -> list[str]:
    """Return the sorted paths of the runs in a folder; no paths if it is not a folder."""
    return sorted(str(file.parent) for file in folder.glob(f'*/{CONFIG}'))


def run_like(folder: Path) -> str | None:
    """Return another run next to a folder, the one with the most similar name, or None."""
    runs = {Path(run).name: run for run in runs_in(folder.parent)}
    own = folder.absolute().name
    near = get_close_matches(own, runs.keys() - {own}, n=1)
    return runs[near[0]] if near else None


def _resolve(
    written: dict[str, Setting] | None,
    overridden: dict[str, Setting],
    file: str,
    problems: list[Problem],
    checked: Checked,
    *,
    is_recorded: bool,
) -> Config:
    """Return the config of these settings.

    Raises ConfigError with `problems` and every further mistake. If `written` is recorded, keys in
    it that have no effect, also because of `overridden` ones, are left out.
    """
    if written is None:
        raise ConfigError(*problems)
    # an override of a section, such as lora=null, removes all of it
    written = {path: x for path, x in written.items() if path.partition('.')[0] not in overridden}
    settings, before = written | overridden, [*problems]
    sections, unsettled = validate(settings, file, problems)
    found = incompatibilities(Config.model_construct(**sections), **checked._asdict())
    if is_recorded:
        kept, changes = _without_unused(written, overridden, found)
        if (kept, changes) != (written, overridden):
            return _resolve(kept, changes, file, before, checked, is_recorded=True)
    for problem in found:
        keys = [problem.path, *problem.others]
        keys += [source for key in keys if key not in settings for source in sources(key)]
        if unsettled.isdisjoint(keys):
            place = _place(keys, overridden) or _place(keys, written) or file
            problems.append(replace(problem, place=place))
    if problems:
        raise ConfigError(*problems)
    return Config.model_validate(sections, context=checked)


def _without_unused(
    written: dict[str, Setting], overridden: dict[str, Setting], problems: Sequence[Problem]
) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return both settings without written keys that have no effect, also in a section's value."""
    kept, changes = dict(written), dict(overridden)
    unused = {one.path: one for one in problems if isinstance(one, Unused)}
    for path in unused.keys() - overridden.keys():
        section, _, key = path.rpartition('.')
        if (same := unused[path].same) is not None:
            if overridden.keys().isdisjoint(unused[path].unless):
                kept[path] = Setting(same, '')
        elif path in kept:
            del kept[path]
        elif section in kept:
            # an override of another key in the section has set it too, at its place in the file
            for settings in (kept, changes):
                own = settings.get(section)
                if own is not None and own.place == kept[section].place:
                    value = {name: x for name, x in own.value.items() if name != key}
                    settings[section] = own._replace(value=value)
    return kept, changes


def _place(keys: Sequence[str], settings: Mapping[str, Setting]) -> str | None:
    """Return the place of the first of these keys or sections that is set, or None."""
    return next(
        (
            setting.place
            for key in keys
            for path, setting in settings.items()
            if f'{path}.'.startswith(f'{key}.')
        ),
        None,
    )


def overridden(overrides: Sequence[str], path: str) -> Any:
    """Return the value of the last override of a key; None if there is none or it is invalid."""
    setting = read_overrides(overrides, []).get(path)
    return values.valid(path, setting.value) if setting else None


def dump(config: Config) -> str:
    """Return every key as YAML, from which `load` reads an equal config."""
    return dump_sections(config.model_dump(mode='json'))


def dump_sections(sections: Mapping[str, Any]) -> str:
    """Return the keys of sections as YAML."""
    yaml: Any = Yaml(typ='safe', pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    stream = io.StringIO()
    yaml.dump(dict(sections), stream)
    return stream.getvalue()


def _folder() -> Path:
    package = Path(__file__).parents[2]
    installed = package / 'configs'  # in a wheel; in a clone, they are next to the package
    return installed if installed.is_dir() else package.parent / 'configs'


def _find(source: str | Path) -> Path:
    is_named = str(source) in (*presets(), *recipes())
    path = _folder() / f'{source}.yaml' if is_named else Path(source)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _read_file(file: Path, problems: list[Problem]) -> dict[str, Setting] | None:
    """Return the settings by path, or None if the file cannot be read."""
    try:
        return _read_settings(read_text(file), str(file), problems)
    except FileNotFoundError:
        problems.append(Problem(str(file), _no_such_file(file)))
    except IsADirectoryError:
        problems.append(Problem(str(file), _is_a_folder(file)))
    except OSError as error:
        problems.append(Problem(str(file), f'cannot be read: {error.strerror}'))
    except YAMLError as error:
        mark = getattr(error, 'problem_mark', None)
        problems.append(Problem(f'{file}:{mark.line + 1}' if mark else str(file), explain(error)))
    return None


def _no_such_file(file: Path) -> str:
    if is_override(str(file)):
        key, _, value = str(file).partition('=')
        of_run = Path(value) / CONFIG
        config = of_run if key == 'run.dir' and of_run.is_file() else 'tiny'
        return f'is an override; put a config before it, for example {config}'
    files = [path for end in ('*.yaml', '*.yml') for path in file.parent.glob(f'[!.]{end}')]
    here = {path.stem: str(path) for path in files}
    choices = here | {name: name for name in presets()}
    name = file.stem if file.suffix in ('.yaml', '.yml') else file.name
    if run := run_like(file):
        fix = f'did you mean {typed_override("run.dir", run)}? '
    elif near := get_close_matches(name, choices, n=1):
        fix = f'did you mean {choices[near[0]]}? '
    else:
        shown = sorted(here.values()) if len(here) <= FEW_FILES else ()
        fix = f'YAML files there: {", ".join(shown)}; ' if shown else ''
    return f'no such file or preset; {fix}presets: {", ".join(presets())}'


def _is_a_folder(folder: Path) -> str:
    """Return the message for a folder; commands that start no run need the path of its config."""
    if (folder / CONFIG).is_file():
        return f'is the folder of a run; {_fix_of_run(folder)}'
    run = folder.absolute().parent.parent
    if (run / CONFIG).is_file():
        start = typed_override('run.start_from', folder)
        config = f'its config is {run / CONFIG}'
        return f'is a checkpoint; {config}, and to start a run from its weights, use {start}'
    if runs := runs_in(folder):
        return f'is a folder of runs; for one of them, {_fix_of_run(Path(runs[0]))}'
    return 'is a folder; give a YAML file, or a preset (megajax config list)'


def _fix_of_run(run: Path) -> str:
    resume = typed_override('run.dir', run)
    return f'its config is {run / CONFIG}, and to resume it, use {resume}'


def _read_settings(text: str, file: str, problems: list[Problem]) -> dict[str, Setting]:
    """Return the settings by path; a section without keys is a setting by itself."""
    settings: dict[str, Setting] = {}
    for section, group, section_place in _items(compose(text), '', file, problems):
        if section not in SECTIONS:
            problems.append(Problem(section, unknown(section, problems), place=section_place))
            continue
        if _is_empty(group):
            settings[section] = Setting({}, section_place)
        for path, value, place in _items(group, section, file, problems):
            if path not in KEYS and path not in RENAMED:
                problems.append(Problem(path, unknown(path, problems), place=place))
            else:
                name, (path, plain) = path, current(path, construct(value), place)
                if path in settings:
                    line = settings[path].place.rpartition(':')[2]
                    message = f'is another name of the key on line {line}; delete one of the two'
                    problems.append(Problem(name, message, place=place))
                settings[path] = Setting(plain, place)
    return settings


def _is_empty(node: Node) -> bool:
    """Whether a section is written without keys, as `lora: {}` or `lora:` but not `lora: null`."""
    if isinstance(node, MappingNode):
        return not node.value
    return bool(node.tag == NULL and not node.value)


def _items(
    node: Node | None, prefix: str, file: str, problems: list[Problem]
) -> Iterator[tuple[str, Node, str]]:
    """Yield the path, value and place of each key of a mapping, each path once.

    An empty document or section yields nothing.
    """
    if node is None or node.tag == NULL:
        return
    if not isinstance(node, MappingNode):
        message = f'must be a group of keys; it has {members(prefix)}'
        problems.append(Problem(prefix, message, place=f'{file}:{node.start_mark.line + 1}'))
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        path, line = f'{prefix}.{key.value}' if prefix else key.value, key.start_mark.line + 1
        if path in lines:
            message = f'written twice, first on line {lines[path]}; delete one of the two'
            problems.append(Problem(path, message, place=f'{file}:{line}'))
        else:
            lines[path] = line
            yield path, value, f'{file}:{line}'
