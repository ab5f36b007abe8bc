"""The package as it is installed: typed, with a version, and quick to import."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import megajax


def test_it_is_typed_and_has_the_version_of_its_distribution() -> None:
    assert (Path(megajax.__file__).parent / 'py.typed').is_file()
    assert megajax.__version__ == version('megajax')


def test_importing_it_imports_no_jax() -> None:
    program = 'import sys, megajax; megajax.__version__; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0
