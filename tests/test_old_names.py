"""Modules by the names that they had before the package had groups."""

import importlib
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import megajax
from megajax.old_names import GROUPS, PUBLIC, RENAMED, today

NAMES = [f'megajax.{room}' for rooms in GROUPS.values() for room in rooms]


@pytest.mark.parametrize(
    'name', [*NAMES, *RENAMED, 'megajax.train.optimizer', 'megajax.data.tokens.indexed']
)
def test_an_old_name_is_the_module_of_today(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        module = import_module(name)
    assert module is import_module(today(name))
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == today(name)


def test_a_warning_tells_the_name_of_today_but_for_public_names() -> None:
    program = (
        'import megajax.compare, megajax.inspect, megajax.plan, megajax.train\n'
        'from megajax.config import load\n'
        'from megajax.config.model import ModelConfig\n'
    )
    done = subprocess.run(
        [sys.executable, '-W', 'default', '-c', program], capture_output=True, text=True, check=True
    )
    told = [line for line in done.stderr.splitlines() if 'DeprecationWarning: megajax' in line]
    assert all(line.startswith('<string>:') for line in told)  # the line that imports it
    assert [line.partition('Warning: ')[2] for line in told] == [
        'megajax.config has moved to megajax.core.config',
        'megajax.config.model has moved to megajax.core.config.model',
    ]


def test_every_room_of_the_time_before_groups_has_an_old_name() -> None:
    later = {('analysis', 'fuzz'), ('xla', 'reduce')}
    package = Path(megajax.__file__).parent
    assert {(group, room) for group, rooms in GROUPS.items() for room in rooms} == {
        (path.parts[-3], path.parts[-2])
        for group in GROUPS
        for path in (package / group).glob('*/__init__.py')
    } - later
    assert all(importlib.import_module(today(name)) for name in PUBLIC)
