"""Copies of sections: a value that was computed from old keys does not reach a copy."""

import pickle
import subprocess
import sys

from megajax.core.config import load
from megajax.core.config.mesh import MeshConfig

PICKLED = 'import pickle, sys; print(hash(pickle.load(sys.stdin.buffer).model))'


def test_a_copy_has_the_values_that_follow_from_its_own_keys() -> None:
    mesh, config = MeshConfig(data=2), load('tiny', ['train.unroll=false'])
    assert mesh.sizes['data'] == 2
    assert mesh.model_copy(update={'data': 4}).sizes['data'] == 4
    assert mesh.changed(data=4) == MeshConfig(data=4)
    assert hash(mesh.changed(data=4)) == hash(MeshConfig(data=4)) != hash(mesh)
    assert not config.overlap.unroll
    unrolled = config.model_copy(update={'train': config.train.changed(unroll=True)})
    assert unrolled.overlap.unroll
    assert unrolled == load('tiny', ['train.unroll=true'])


def test_equal_changes_share_a_copy() -> None:
    mesh = MeshConfig(data=2)
    assert mesh.changed(data=4, model=2) is mesh.changed(data=4, model=2)
    assert mesh.changed(data=2) is mesh


def test_a_pickled_section_has_the_hash_of_its_process() -> None:
    config = load('tiny')
    hash(config.model)
    text = pickle.dumps(config)
    assert pickle.loads(text) == config
    hashes = {
        subprocess.run(
            [sys.executable, '-c', PICKLED],
            input=text,
            env={'PYTHONPATH': ':'.join(sys.path), 'PYTHONHASHSEED': seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in '12'
    }
    assert len(hashes) == 2
