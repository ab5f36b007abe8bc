"""From another project's checkpoint to a trained one and back, by the commands."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from interop.stored import DATA, assert_same_tensors
from runs import finish, losses, read_until, steps
from support import by_name, exhaustive, on_mesh, write_run
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.train.step import init_state
from megajax.interop.huggingface.directories import import_huggingface
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import open_model


def megajax(*arguments: object) -> str:
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_import_comes_back_and_goes_to_megatron_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')  # which export sets
    run, out, ranks, again = (tmp_path / name for name in ('run', 'out', 'ranks', 'again'))
    assert (
        megajax('import', 'hf', DATA / 'qwen3', run, 'mesh.model=2')
        == f'run        {run}\ncheckpoint {run}/checkpoints/0\n'
    )
    assert '0' in megajax('checkpoint', 'ls', run).splitlines()[1].split()
    assert megajax('export', 'hf', run, out) == f'{out}: qwen3 in float32\n'
    assert_same_tensors(out, DATA / 'qwen3')
    megajax('export', 'hf', run, tmp_path / 'cut', '--shard-gb', '2e-5')
    sizes = [path.stat().st_size for path in (tmp_path / 'cut').glob('*.safetensors')]
    assert max(sizes) < 22_000  # with its header
    assert len(sizes) == 2
    for number, limit in enumerate(('inf', '1e300')):
        whole = tmp_path / f'whole{number}'
        megajax('export', 'hf', run, whole, '--shard-gb', limit)
        assert len([*whole.glob('*.safetensors')]) == 1
    assert (
        megajax('export', 'megatron', run, ranks, '--tensor-parallel', 2)
        == f'{ranks}: 2 ranks in float32\nload with  --transformer-impl transformer_engine '
        '--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1\n'
    )
    megajax('import', 'megatron', ranks, again)
    megajax('export', 'hf', again / 'checkpoints' / '0', tmp_path / 'last')
    assert_same_tensors(tmp_path / 'last', DATA / 'qwen3')


@pytest.mark.parametrize('shard', [exhaustive('false'), 'true'])
def test_a_run_that_begins_with_an_import_has_a_fresh_optimizer(shard: str, tmp_path: Path) -> None:
    config = import_huggingface(DATA / 'llama2', tmp_path, ['mesh.data=2', f'optim.shard={shard}'])
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        assert checkpoints.newest_verified() == 0
        state, fresh = checkpoints.restore(0), init_state(config)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    assert all(
        a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True)
    )
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            *(jax.tree.leaves(x._replace(params=None)) for x in (state, fresh)), strict=True
        )
    )
    expected = by_name(open_model(tmp_path).params)
    assert all(np.array_equal(x, expected[name]) for name, x in by_name(state.params).items())


@pytest.mark.faults
def test_two_runs_begin_with_one_import_which_stays_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, '')
    megajax(
        'import',
        'hf',
        DATA / 'gpt2',
        tmp_path / 'import',
        'train.seq_len=16',
        'train.dtype=float32',
    )
    shutil.copytree(tmp_path / 'import', tmp_path / 'in_place')
    before = {
        path: path.read_bytes()
        for path in (tmp_path / 'import/checkpoints').rglob('*')
        if path.is_file()
    }
    settings = [
        'data.corpus=corpus',
        'data.split="6,2,0"',
        'train.steps=3',
        'train.batch_size=4',
        'mesh.data=2',
        'checkpoint.keep=1',
    ]

    def train(*arguments: str, processes: int = 1) -> subprocess.Popen[str]:
        launch = [] if processes == 1 else ['launch', '--processes', str(processes), '--']
        command = [sys.executable, '-m', 'megajax', *launch, 'train', *arguments, *settings]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    code, said = finish(train('run.dir=in_place'))
    assert code == 0, said
    killed = train('run.dir=new', 'run.start_from=import')
    read_until(killed, 'step 0  validation')
    killed.kill()
    assert finish(killed)[0] == -signal.SIGKILL
    code, said = finish(train('run.dir=new', processes=2))  # its config.yaml knows where it begins
    assert (code, f'start      {tmp_path}/import/checkpoints/0' in said) == (0, True), said
    assert losses(tmp_path / 'new') == losses(tmp_path / 'in_place')
    assert steps(tmp_path / 'in_place') == [0, 3]
    assert {
        path: path.read_bytes()
        for path in (tmp_path / 'import/checkpoints').rglob('*')
        if path.is_file()
    } == before
    code, said = finish(train('run.dir=imprt'))
    assert (code, 'did you mean run.dir=import?' in said) == (2, True), said


@pytest.mark.slow
def test_training_goes_on_from_an_import_and_is_exported(tmp_path: Path) -> None:
    write_run(tmp_path, '')
    megajax(
        'import', 'hf', DATA / 'gpt2', tmp_path / 'run', 'train.seq_len=16', 'train.dtype=float32'
    )
    train = (
        'train',
        'run.dir=run',
        'data.corpus=corpus',
        'data.split="1,0,0"',
        'train.steps=2',
        'train.batch_size=4',
        'mesh.model=2',
    )
    command = [sys.executable, '-m', 'megajax', *train]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 'resume' in result.stdout
    megajax('export', 'hf', tmp_path / 'run', tmp_path / 'out')
    with pytest.raises(AssertionError):
        assert_same_tensors(tmp_path / 'out', DATA / 'gpt2')
