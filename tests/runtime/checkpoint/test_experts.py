"""The load of experts, which the balance loss reads, is part of a checkpoint."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import make_config, on_mesh, random_state

from megajax.core.config import Config, ConfigError
from megajax.core.train.step import init_state
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import restore_params

MESH = {'data': 4, 'experts': 2, 'model': 2}


def experts(count: int = 8, **mesh: Any) -> Config:
    keys = {'count': count, 'active': 2, 'ffn_size': 32, 'balance_loss': 0.1}
    return make_config('llama', model={'experts': keys}, mesh=mesh)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint in which the first expert of each layer has all tokens."""
    folder, config = tmp_path_factory.mktemp('experts'), experts()
    with on_mesh(config), Checkpoints(folder, config) as checkpoints:
        state = random_state(config)
        assert state.load is not None
        checkpoints.save(state._replace(load=jax.nn.one_hot(np.zeros(2, int), 8)), 1)
    return folder


def test_the_load_is_restored_on_another_mesh_and_begins_anew_from_weights(folder: Path) -> None:
    config = experts(**MESH)
    with on_mesh(config), Checkpoints(folder, config) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(1).load, np.eye(8)[[0, 0]])
        started = init_state(config, restore_params(folder / '1', config))
        np.testing.assert_array_equal(started.load, np.full((2, 8), 1 / 8))


def test_another_number_of_experts_is_rejected_with_the_key(folder: Path) -> None:
    config = experts(4)
    with (
        on_mesh(config),
        Checkpoints(folder, config) as checkpoints,
        pytest.raises(ConfigError, match=r'model\.experts\.count 8 there'),
    ):
        checkpoints.restore(1)
