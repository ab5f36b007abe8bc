"""A miscompiled program is reduced to a folder that reproduces the fault without megajax."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support import exhaustive

from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices, has_compiler
from megajax.xla.emulate.bisect import dump_options
from megajax.xla.hlo.dump import without_cache
from megajax.xla.miscompiles.empty_permute import EMPTY_PERMUTE, PASS
from megajax.xla.miscompiles.entry import Miscompile
from megajax.xla.miscompiles.misplaced_bias import MISPLACED_BIAS
from megajax.xla.miscompiles.probe import ask
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES
from megajax.xla.reduce.__main__ import main
from megajax.xla.reduce.execute import LIMIT, Compiler
from megajax.xla.reduce.folder import reduce_dumps

MOST = 20  # instructions


@pytest.mark.parametrize(
    ('dumps', 'folder', 'message'),
    [
        ('gone', 'out', 'gone: No such file or directory'),
        ('file', 'out', 'file: Not a directory'),
        ('empty', 'out', 'no pass dumps in empty: compile with dump_options, without a cache'),
        ('empty', 'file', 'file: File exists'),
    ],
)
def test_a_mistake_ends_with_one_line_before_the_search(
    dumps, folder, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'file').touch()
    monkeypatch.setattr(sys, 'argv', ['reduce', dumps, folder])
    with pytest.raises(SystemExit, match='2'):
        main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'error: {message}')


def test_a_target_that_there_is_not_is_named_before_the_folder_is_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, 'argv', ['reduce', 'dumps', f'{tmp_path}/out', '--target', 'h1000'])
    with pytest.raises(SystemExit, match='2'):
        main()
    assert 'target h1000: choose among a100, b200' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('entry', 'culprit'),
    [
        (EMPTY_PERMUTE, PASS),
        exhaustive(SPLIT_CYCLES, 'collective-permute-cycle-decomposer'),
        exhaustive(SCALED_BIAS, 'cublas-gemm-rewriter'),
        exhaustive(MISPLACED_BIAS, 'cublas-gemm-rewriter'),
    ],
)
def test_a_known_miscompile_is_reduced_and_reproduced(entry: Miscompile, culprit, tmp_path):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    if not ask(entry, 'h100').is_faulty:
        pytest.skip('this XLA does not have the bug')
    devices = gpu_devices('h100', hosts=1, per_host=entry.repro.num_devices)
    dumps, folder = tmp_path / 'dumps', tmp_path / 'hlo'
    with without_cache():
        options = {**WITHOUT_GPU, **dump_options(dumps), **entry.repro.options}
        entry.repro.lower(devices).compile(options)
    compiler = Compiler('h100', entry.repro.num_devices, entry.repro.options)
    summary = reduce_dumps(dumps, folder, compiler)
    assert summary is not None
    assert summary == json.loads((folder / 'reduced.json').read_text())
    assert summary['instructions'] <= min(MOST, summary['original_instructions'])
    assert summary['error'] > LIMIT
    assert summary['pass'].startswith(culprit)
    values = np.load(folder / 'values.npz')
    assert 'expected0_device0' in values
    assert (folder / 'before_pass.hlo').read_text() != (folder / 'after_pass.hlo').read_text()
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run(
        [sys.executable, folder / 'compile.py'], env=env, capture_output=True, text=True, check=True
    )
    assert 'ENTRY' in done.stdout
    assert any(culprit in path.name for path in (folder / 'dumps').iterdir())
