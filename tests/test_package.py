"""The package as it is installed: typed, with a version, and quick to import."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
import pytest

import megajax
from megajax.analysis.report.page import _footer

ROOT = Path(__file__).parents[1]


def test_it_is_typed_and_has_the_version_of_its_distribution() -> None:
    assert (Path(megajax.__file__).parent / 'py.typed').is_file()
    assert megajax.__version__ == version('megajax')


def test_a_name_that_it_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match='module megajax has no attribute'):
        _ = megajax.nothing


def test_a_clone_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr('importlib.metadata.version', missing)
    assert megajax.__version__ == 'unknown'
    assert 'Written by megajax unknown at' in _footer()


def test_importing_it_imports_no_jax() -> None:
    program = 'import sys, megajax; megajax.__version__; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0


@pytest.fixture(scope='module')
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel installs it: without the clone around it."""
    site = tmp_path_factory.mktemp('site-packages')
    ignore = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / 'megajax', site / 'megajax', ignore=ignore)
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    wheel = project['tool']['hatch']['build']['targets']['wheel']
    for source, target in wheel['force-include'].items():
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, site / target)
    return site


def test_what_notebooks_import_and_read_needs_no_clone(installed: Path, tmp_path: Path) -> None:
    imports, *others = code_of('02_what_xla_inserted.ipynb')
    assert not any('import ' in source for source in others)
    lines = [
        imports,
        'import csv, megajax',
        'from pathlib import Path',
        'from megajax.analysis.inspect.report import si',
        'from rich.table import Table',
    ]
    for notebook in ('04_where_weights_live.ipynb', '05_stages.ipynb'):
        reads = [source for source in code_of(notebook) if 'results' in source]
        lines += [*reads, f'assert results.is_relative_to({str(installed)!r}), results']
    lines.append('print(megajax.__file__, three_ways.__file__)')
    files = run('\n'.join(lines), installed, tmp_path).splitlines()[-1].split()
    assert [file.startswith(str(installed)) for file in files] == [True, True]


def code_of(notebook: str) -> list[str]:
    """The sources of its code cells."""
    cells = nbformat.read(ROOT / 'notebooks' / notebook, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == 'code']


def run(program: str, installed: Path, folder: Path) -> str:
    """What a program prints with the installed package, in an empty folder."""
    done = subprocess.run(
        [sys.executable, '-c', program],
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(installed), 'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
