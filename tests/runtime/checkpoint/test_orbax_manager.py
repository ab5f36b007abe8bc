"""What a save costs before training goes on."""

from pathlib import Path

import jax
import pytest
from checkpoints import make_state, tiny
from support import on_mesh

from megajax.runtime.checkpoint.checkpoints import Checkpoints


def test_no_replica_compiles_a_slice_of_a_small_array(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(2, 2, model={'ffn_size': 88})  # shapes that no other test saves
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        state = make_state(config, 1)
        with jax.log_compiles():
            checkpoints.save(state, 1)
        assert checkpoints.wait()
    assert not [line for line in caplog.messages if 'slice' in line]
