"""Replicas that share the read of an array get the bits that each would have read alone."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoints import LAYOUTS, STAGED, equal, laid_out, make_state, staged, tiny
from runs import in_two_processes
from support import abstract_state, exhaustive, more, on_mesh

from megajax.core.config import Config
from megajax.runtime.checkpoint import shared_reads
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import restore_params

MESHES = {
    'data=4 x model=2': tiny(4, 2),
    'replicas=2 data=4 x model=1': tiny(1, 1, mesh={'data': 4, 'replicas': 2}),
    **{layout: laid_out(layout) for layout in LAYOUTS},
    **{layout: staged(layout) for layout in STAGED},
}

RESTORED = (
    'data=6 replicas=2 x model=1, weights',
    'stages=2 virtual_stages=2 x data=1 x context=2 x model=2, optimizer',
)
GRID = 'data=2 x model_rows=2 model=2, optimizer'


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as processes with one device each do; replicas share arrays of any size."""
    monkeypatch.setattr(shared_reads, 'one_device_each', lambda: True)
    monkeypatch.setattr(shared_reads, 'SMALLEST_SLICE', 1)


def num_readers(x: jax.ShapeDtypeStruct) -> int:
    """The number of devices that read the same elements."""
    indices = x.sharding.devices_indices_map(x.shape).values()
    return len(indices) // len({str(index) for index in indices})


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.usefixtures('shared')
def test_every_array_is_read_once_if_its_replicas_divide_a_dim(mesh: str) -> None:
    config: Config = MESHES[mesh]
    with on_mesh(config):
        stored = jax.tree.leaves(abstract_state(config))
        for x, wanted in zip(jax.tree.leaves(shared_reads.to_read(stored)), stored, strict=True):
            parts = wanted.sharding.shard_shape(wanted.shape)
            divides = any(size % num_readers(wanted) == 0 for size in parts)
            assert num_readers(x) == (1 if divides else num_readers(wanted)), x


@pytest.mark.usefixtures('shared')
@pytest.mark.parametrize(
    'mesh',
    [
        *RESTORED,
        more(GRID),
        *map(exhaustive, sorted(MESHES.keys() - {*RESTORED, GRID})),
    ],
)
def test_what_the_replicas_read_together_is_the_state_in_its_places(
    mesh: str, tmp_path: Path
) -> None:
    config: Config = MESHES[mesh]
    with on_mesh(config), Checkpoints(tmp_path, config) as checkpoints:
        state = make_state(config, 5)
        checkpoints.save(state, 5)
        restored = checkpoints.restore(5)
        assert equal(restored, config, 5)
        assert shardings(restored) == shardings(state)
        params = restore_params(tmp_path / '5', config)
        assert shardings(params) == shardings(state.params)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, state.params))


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


PROGRAM = """
import sys
from pathlib import Path
import jax, numpy as np, tensorstore
from checkpoints import tiny
from megajax.core.parallel.mesh import concrete, make_mesh
from megajax.core.train.step import init_state
from megajax.runtime.checkpoint import orbax_manager, shared_reads
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.processes.distributed import processes

orbax_manager.SMALLEST_SLICE = shared_reads.SMALLEST_SLICE = 2**16
config = tiny(2, 1, model={'hidden_size': 128, 'vocab_size': 4096})

def make_state():
    random = np.random.default_rng(0)
    def place(x):
        value = random.normal(0, 9, x.shape).astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])
    return jax.tree.map(place, concrete(jax.eval_shape(lambda: init_state(config))))

def bytes_read():
    name = '/tensorstore/kvstore/file/bytes_read'
    metrics = tensorstore.experimental_collect_matching_metrics(name)  # none before the first read
    return sum(each['value'] for metric in metrics for each in metric['values'])

def restore(checkpoints):
    before = bytes_read()
    restored = checkpoints.restore(1)
    for x, wanted in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
        np.testing.assert_array_equal(x.addressable_data(0), wanted.addressable_data(0))
    return bytes_read() - before

with processes(), jax.set_mesh(make_mesh(2, 1)):
    state = make_state()
    with Checkpoints(Path(sys.argv[1]), config) as checkpoints:
        checkpoints.save(state, 1)
        assert checkpoints.wait()
        together = restore(checkpoints)
        shared_reads.one_device_each = lambda: False
        print('share', together / restore(checkpoints))
"""


@pytest.mark.faults
def test_two_processes_read_half_of_the_arrays_each(tmp_path: Path) -> None:
    outputs = in_two_processes(PROGRAM, str(tmp_path))
    for output in outputs:
        (share,) = re.findall(r'^share (.*)$', output, re.MULTILINE) or [output]
        assert 0.4 < float(share) < 0.6
