"""The same seed makes the same mutants of files, and a reader with a hole is found."""

import shutil
import sys
from pathlib import Path
from random import Random

import pytest
from mutants import data_files, formats, mutate_files
from mutants import mutations as by
from support import exhaustive, slow

from megajax.core.config import ConfigError

QUICK = [name for name in formats.ALL if name not in ('run', 'checkpoint', 'profile')]


@pytest.mark.parametrize('name', QUICK)
def test_the_seeds_of_a_format_are_read_and_its_mutants_are_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    seeds = tmp_path / 'seeds'
    seeds.mkdir()
    formats.ALL[name].write(seeds)
    folder = shutil.copytree(seeds, tmp_path / 'folder')
    assert mutate_files.targets(name, folder)
    for path in mutate_files.targets(name, folder):
        assert mutate_files.judge(name, path) == 'read', path
    for number in range(3):
        with mutate_files.changed(folder, seeds, name, '0', number) as path:
            assert mutate_files.judge(name, path) in ('read', 'refused'), number


@pytest.mark.parametrize('structure', [by.in_json, by.in_json_lines, by.in_lines, by.in_bytes])
def test_a_seed_makes_the_same_mutant_and_another_seed_another(structure: by.Structure) -> None:
    content = b'{"a": [1, "x", null],\n "b": {"c": 2.5, "d": true}}\n' * 3

    def mutants(seed: int) -> list[bytes]:
        return [by.mutate(content, (structure,), Random(f'{seed} {n}')) for n in range(50)]

    assert mutants(0) == mutants(0)
    assert content not in mutants(0)
    assert len({*mutants(0), *mutants(1)}) > 80


@pytest.mark.parametrize(
    ('hole', 'result'),
    [
        ('ConfigError("expected")', 'refused'),
        ('ConfigError("x" * 1000 + "\\n")', 'refused'),
        ('KeyError("x")', 'KeyError in '),
        ('SystemExit(0)', 'SystemExit in '),
        ('MemoryError()', 'MemoryError in '),
    ],
)
def test_only_an_expected_error_is_no_hole(
    hole: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> None:
        raise eval(hole, {'ConfigError': ConfigError})

    monkeypatch.setitem(formats.ALL, 'planted', formats.Format(lambda _: None, {}, read))
    assert mutate_files.judge('planted', tmp_path).startswith(result)


PLANTED = """
import os, sys, time
from mutants import data_files, formats, mutate_files
def read(path):
    content = path.read_bytes()
    if b'milliseconds: 60' not in content:
        {hole}
formats.ALL['planted'] = formats.Format(data_files.write_budget, {{'*': ()}}, read)
mutate_files.SECONDS = 3
mutate_files.__file__ = __file__
mutate_files.main()
"""


@pytest.mark.parametrize(
    ('hole', 'told'),
    [
        ('bytearray(1 << 33)', 'MemoryError in '),
        slow('raise KeyError(1)', 'KeyError in '),
        exhaustive('os.abort()', 'ends the process with signal 6'),
        exhaustive('time.sleep(1000)', 'takes more than 3 s'),
    ],
)
def test_a_planted_hole_is_told_with_its_mutant_and_its_file_is_kept(
    hole: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / 'planted.py'
    program.write_text(PLANTED.format(hole=hole))
    options = '--keep', f'{tmp_path}/kept', '--out', f'{tmp_path}/out.json'
    monkeypatch.setattr(
        sys, 'argv', [str(program), '--formats', 'planted', '--mutants', '3', *options]
    )
    tests = Path(__file__).parents[1]
    monkeypatch.setenv('PYTHONPATH', f'{tests}:{tests.parent}')  # of the process that reads
    monkeypatch.setenv('XDG_CACHE_HOME', f'{tmp_path}/cache')  # which it sets
    planted = formats.Format(data_files.write_budget, {'*': ()}, lambda _: None)
    monkeypatch.setitem(formats.ALL, 'planted', planted)
    monkeypatch.setattr(mutate_files, '__file__', str(program))
    monkeypatch.setattr(mutate_files, 'SECONDS', 3)
    with pytest.raises(SystemExit) as end:
        mutate_files.main()
    assert end.value.code == 1
    assert told in capsys.readouterr().out
    kept = sorted((tmp_path / 'kept').iterdir())
    assert kept
    assert all(b'milliseconds: 60' not in path.read_bytes() for path in kept)
    assert told in (tmp_path / 'out.json').read_text()
