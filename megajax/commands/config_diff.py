"""`megajax config diff`: parse, call, render."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megajax.core.config import load
from megajax.core.config.differences import differences
from megajax.core.config.load import CONFIG

Source = Annotated[str, typer.Argument(help='A preset, a YAML file or the folder of a run.')]


def config_diff(before: Source, after: Source) -> None:
    """Show the keys in which two configs differ.

    Keys that are not in a file have their defaults.
    """
    for key, (old, new) in differences(_sections(before), _sections(after)).items():
        print(f'{key}: {old} -> {new}')


def _sections(source: str) -> dict[str, dict[str, Any]]:
    config = Path(source) / CONFIG
    is_run = config.is_file()
    sections = load(config if is_run else source, is_recorded=is_run).model_dump(mode='json')
    # A config without a section, such as vision, has no keys of that section.
    return {name: keys for name, keys in sections.items() if keys is not None}
