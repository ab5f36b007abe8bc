"""What the README promises to a reader who tries it."""

import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from megajax.config import load

ROOT = Path(__file__).parents[1]


def run_python(code: str, timeout: float = 120) -> str:
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=True).stdout


@pytest.mark.slow
def test_the_example_runs_as_it_stands() -> None:
    (example,) = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), flags=re.DOTALL)
    output = run_python(example)
    assert 'layers.attention.qkv.weight' in output
    vocab_size = load('tiny').model.vocab_size
    assert float(output.splitlines()[-1]) == pytest.approx(math.log(vocab_size), abs=0.5)  # nothing is learned yet


def test_the_import_is_light() -> None:
    seconds, imported = run_python(
        'import sys, time; start = time.perf_counter(); import megajax; '
        'print(time.perf_counter() - start); print("jax" in sys.modules or "pydantic" in sys.modules)'
    ).split()
    assert float(seconds) < 0.3
    assert imported == 'False'


@pytest.mark.slow
@pytest.mark.parametrize('notebook', sorted((ROOT / 'notebooks').glob('*.ipynb')), ids=lambda path: path.stem)
def test_the_notebook_runs_from_top_to_bottom(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # as conftest.py does: the kernel is a process of its own
    cells = nbformat.read(notebook, as_version=4)
    NotebookClient(cells, timeout=300, resources={'metadata': {'path': str(ROOT)}}).execute()
