"""Models of torch_dist checkpoints that megatron-core wrote train as megatron-core trains them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interop.oracles import Arrays, batch_of, steps_of, under
from support import assert_close, exhaustive, relative_error, slow

from megajax.core.train.gradients import make_loss_and_gradients
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.weights import to_megatron
from megajax.runtime.checkpoint.open import Opened, open_model

STORED = Path(__file__).parent / 'torch_dist'  # see make_torch_dist.py and make_dist_steps.py
MODELS = 'gpt2', 'llama', 'experts'
EXPERTS = (
    '{count: 4, active: 2, ffn_size: 8, scores: sigmoid, scale: 2.5, selection_bias: true, '
    'bias_rate: 0.02, balance_loss: 0.1, balance_over: sequence, z_loss: 0.01}'
)
LOSS_LIMIT, LIMIT = 1e-6, 2e-6  # relative, see support.relative_error

for_each_model = pytest.mark.parametrize('name', MODELS)
on_each_mesh = pytest.mark.parametrize(
    'mesh',
    [exhaustive({'data': 1, 'model': 1}), {'data': 2, 'model': 2, 'sequence_parallel': 'true'}],
    ids=['1', '2x2+sp'],
)


def read_steps(folder: Path, name: str) -> Arrays:
    with np.load(folder / f'{name}_steps.npz') as file:
        return dict(file)


def imported(name: str, oracle: Arrays, mesh: dict[str, Any], folder: Path) -> Opened:
    """The model of megatron-core's checkpoint, to be trained as the oracle was."""
    shutil.unpack_archive(STORED / f'{name}.tar.xz', folder / name, filter='data')
    rows, length = oracle['tokens'].shape
    settings = {
        'train.dtype': 'float32',
        'train.batch_size': rows,
        'train.seq_len': length,
        'optim.schedule': 'constant',
        'optim.lr': oracle['lr'],
        'optim.weight_decay': oracle['weight_decay'],
        'optim.beta1': oracle['adam_beta1'],
        'optim.beta2': oracle['adam_beta2'],
        'optim.eps': oracle['adam_eps'],
        'optim.grad_clip': oracle['clip_grad'],
    } | {f'mesh.{key}': value for key, value in mesh.items()}
    if name == 'experts':
        settings |= {'model.experts': EXPERTS, 'mesh.experts': mesh['data']}
    run = folder / 'run'
    import_megatron(folder / name, run, [f'{key}={value}' for key, value in settings.items()])
    return open_model(run)


@pytest.mark.slow  # the weights after the steps depend on every gradient and its size
@for_each_model
@on_each_mesh
def test_the_loss_and_every_gradient(name: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    oracle = read_steps(STORED, name)
    opened = imported(name, oracle, mesh, tmp_path)
    with jax.set_mesh(opened.mesh):
        (loss, _), gradients = jax.jit(make_loss_and_gradients(opened.config))(
            opened.params, batch_of(oracle, opened.config), jax.random.key(0)
        )
        assert relative_error(loss, oracle['train_losses'][0]) < LOSS_LIMIT
        assert_close(to_megatron(opened.config, gradients), under('g', oracle), LIMIT)


@pytest.mark.parametrize('name', [slow('gpt2'), 'llama', exhaustive('experts')])
@on_each_mesh
def test_steps_of_adamw(name: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    oracle = read_steps(STORED, name)
    opened = imported(name, oracle, mesh, tmp_path)
    with jax.set_mesh(opened.mesh):
        losses, norms, weights = steps_of(opened.config, opened.params, oracle)
    assert relative_error(losses, oracle['train_losses']) < LOSS_LIMIT
    assert relative_error(norms, oracle['train_gnorms']) < LOSS_LIMIT
    assert_close(weights, under('pf', oracle), LIMIT)


@pytest.mark.slow
def test_the_stored_steps_are_those_of_the_installed_megatron_core(tmp_path: Path) -> None:
    pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
    pytest.importorskip('megatron.core', reason='megatron-core is not installed')
    program = Path(__file__).with_name('make_dist_steps.py')
    subprocess.run([sys.executable, '-W', 'ignore', program, tmp_path], check=True, timeout=300)
    for name in MODELS:
        assert_close(read_steps(tmp_path, name), read_steps(STORED, name), LIMIT)
