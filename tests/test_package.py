"""The package as it is installed: typed, with a version, and quick to import."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest

import megajax

ROOT = Path(__file__).parents[1]


def test_it_is_typed_and_has_the_version_of_its_distribution() -> None:
    assert (Path(megajax.__file__).parent / 'py.typed').is_file()
    assert megajax.__version__ == version('megajax')


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


def test_the_notebook_of_the_three_ways_needs_no_clone(installed: Path, tmp_path: Path) -> None:
    cells = nbformat.read(ROOT / 'notebooks/02_what_xla_inserted.ipynb', as_version=4).cells
    imports, *others = [cell.source for cell in cells if cell.cell_type == 'code']
    assert not any('import ' in source for source in others)
    done = subprocess.run(
        [sys.executable, '-c', f'{imports}\nprint(megajax.__file__, three_ways.__file__)'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(installed), 'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()[-1].split()
    assert [file.startswith(str(installed)) for file in files] == [True, True]
