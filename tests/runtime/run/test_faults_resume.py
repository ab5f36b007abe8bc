"""A run that goes on: the same bits on the same mesh, the same tokens and state on any, and never
other data without a word.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import CONFIG, HASH_STATES, end_here, hashes, losses, train, train_here
from support import by_name, megajax, write_run

from megajax.core.config import load
from megajax.core.parallel.mesh import make_mesh
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.old_names import old
from megajax.runtime.data import Batches
from megajax.runtime.run.run import run

pytestmark = pytest.mark.faults

CONSTANT = 'optim.schedule=constant'
MESHES = {
    'data=2 x model=2': (2, 2),
    'data=1 x model=4': (1, 4),
    'data=4 x model=1': (4, 1),
    'one device': (1, 1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG)


@pytest.mark.parametrize('microbatches', [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_stopped_inside_an_epoch_and_resumed_a_run_ends_in_the_same_bits(
    folder: Path, microbatches: int
) -> None:
    settings = [CONSTANT, f'train.microbatches={microbatches}']
    train(folder, *settings, 'train.steps=20', fault=HASH_STATES, name='straight')
    train(folder, *settings, 'train.steps=10', fault=HASH_STATES)
    train(folder, *settings, 'train.steps=20', 'run.resume=must', fault=HASH_STATES)
    assert losses(folder / 'run') == losses(folder / 'straight')
    found = hashes(folder)
    assert found.keys() == {'saved 10', 'restored 10', 'saved 20'}
    assert found['restored 10'] == found['saved 10']
    assert all(len(digests) == 1 for digests in found.values())


@pytest.fixture(scope='module')
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ten steps on two by two devices, and ten more from there on each mesh, here: states, losses
    and tokens.
    """
    folder = write_run(tmp_path_factory.mktemp('meshes'), CONFIG)
    read: list[bytes] = []
    whole = Batches.rows

    def rows(batches: Batches, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        batch = whole(batches, step, start, stop)
        read.append(batch['tokens'].tobytes())
        return batch

    def go_on(name: str, data: int, model: int, steps: int) -> None:
        # Without the biases of keys, whose gradients are nothing but rounding, which Adam makes as
        # large as any.
        settings = [
            'model.num_heads=4',
            'model.bias=false',
            'optim.lr=1e-3',
            CONSTANT,
            'train.eval_every=100',
            f'train.steps={steps}',
        ]
        config = load(
            folder / 'small.yaml',
            [*settings, f'run.dir={folder}/{name}', f'mesh.data={data}', f'mesh.model={model}'],
        )
        run(config, name='small')

    go_on('first', 2, 2, 10)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, 'rows', rows)
        for name, (data, model) in MESHES.items():
            shutil.copytree(folder / 'first', folder / name)
            read.clear()
            go_on(name, data, model, 20)
            found[name] = _state(folder / name, 20), losses(folder / name), list(read)
    return found


def _state(run: Path, step: int) -> dict[str, np.ndarray]:
    config = load(run / 'config.yaml')
    with (
        jax.set_mesh(make_mesh(config.mesh.data, config.mesh.model)),
        Checkpoints(run / 'checkpoints', config) as checkpoints,
    ):
        return {
            name: np.asarray(x) for name, x in by_name(checkpoints.restore(step).params).items()
        }


@pytest.mark.parametrize('name', [name for name in MESHES if name != 'data=2 x model=2'])
def test_on_another_mesh_the_same_tokens_follow_and_the_numbers_stay_close(
    resumed: dict[str, Any], name: str
) -> None:
    expected, actual = resumed['data=2 x model=2'], resumed[name]
    assert sorted(actual[2]) == sorted(expected[2])
    assert list(actual[1]) == list(range(1, 21))
    for step, loss in expected[1].items():
        assert actual[1][step] == pytest.approx(loss, abs=1e-5 if step > 10 else 0)
    for parameter, x in expected[0].items():
        np.testing.assert_allclose(actual[0][parameter], x, rtol=0, atol=1e-6, err_msg=parameter)


def test_a_corpus_that_was_replaced_is_not_trained_on_without_a_word(folder: Path) -> None:
    train_here(folder, CONSTANT, 'train.steps=2')
    file = folder / 'corpus/3.txt'
    file.write_text(file.read_text().replace('x + 3', 'x - 3'))  # as long as before
    code, said = end_here(folder, CONSTANT, 'train.steps=3')
    assert (code, 'compiling' in said) == (2, False), said
    assert 'checkpoints/2 was trained on different data of the same name' in said
    assert 'restore it, choose another run.dir, or set run.allow_changed_data=true' in said
    assert '-> ' in train_here(folder, CONSTANT, 'train.steps=3', 'run.allow_changed_data=true')
    assert sorted(losses(folder / 'run')) == [1, 2, 3]


def test_changed_data_are_allowed_for_one_start(folder: Path) -> None:
    train_here(folder, CONSTANT, 'train.steps=2')
    file = folder / 'corpus/3.txt'
    file.write_text(file.read_text().replace('x + 3', 'x - 3'))
    train_here(folder, CONSTANT, 'train.steps=3', 'run.allow_changed_data=true')
    file.write_text(file.read_text().replace('x - 3', 'x * 3'))
    resumed = megajax('train', 'run.dir=run', folder=folder)  # with the run's own config
    assert resumed.returncode == 2, resumed.stdout
    assert 'checkpoints/3 was trained on different data of the same name' in resumed.stderr


def test_a_start_that_is_rejected_leaves_the_config_of_the_run(folder: Path) -> None:
    train_here(folder, CONSTANT, 'train.steps=2')
    kept = (folder / 'run/config.yaml').read_bytes()
    code, said = end_here(folder, 'train.steps=3', f'train.sample_prompts=["{"word " * 60}"]')
    assert (code, 'train.sample_prompts' in said) == (2, True), said
    assert (folder / 'run/config.yaml').read_bytes() == kept


GOLDEN = Path(__file__).parent / 'data/first_release'  # made by make_golden.py


def test_the_checkpoint_of_the_first_release_still_restores_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    expected = json.loads((tmp_path / 'expected.json').read_text())
    monkeypatch.chdir(tmp_path)  # the config names its corpus so
    settings = ['run.resume=must', f'train.steps={expected["step"] + 1}']
    config = load(tmp_path / 'golden.yaml', settings)
    with (
        jax.set_mesh(make_mesh(config.mesh.data, config.mesh.model)),
        Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints,
    ):
        assert checkpoints.newest_verified() == expected['step']
        params = by_name(checkpoints.restore(expected['step']).params)
    assert {
        old(name): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for name, x in params.items()
    } == expected['params']
    run(config, name='golden')
    assert losses(tmp_path / 'run') == pytest.approx(
        {expected['step'] + 1: expected['next_loss']}, rel=1e-4
    )
