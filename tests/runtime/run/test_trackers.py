"""TensorBoard's files are written without torch, which their package imports for its types."""

import subprocess
import sys
from pathlib import Path


def test_a_torch_that_cannot_be_imported_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch' / '__init__.py').write_text('raise RuntimeError("broken")\n')
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from megajax.runtime.run.log.trackers import TensorBoard
assert 'torch' not in sys.modules
try:
    import torch
except RuntimeError:
    print('a later import finds it')
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout == 'a later import finds it\n'
