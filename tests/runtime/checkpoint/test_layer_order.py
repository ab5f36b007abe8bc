"""A checkpoint has a model's layers in their order, however the stages of a pipeline hold them."""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import STAGED, equal, make_state, staged
from support import exhaustive, gather, on_mesh, slow

from megajax.core.parallel.layer_order import in_model_order, on_stages, tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.core.train.moments import round_to_bf16
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import parameter_differences
from megajax.runtime.checkpoint.open import open_model, restore_params
from megajax.runtime.checkpoint.record import read_record

ONE, *MANY = STAGED


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all checkpoints."""
    return tmp_path_factory.mktemp('staged')


def write(folder: Path, *layouts: str) -> Path:
    """Write the same state, with moments in bf16, in these layouts, if it is not there yet."""
    for layout in layouts:
        if (folder / layout).exists():
            continue
        config = staged(layout, moments_dtype='bfloat16')
        with on_mesh(config), Checkpoints(folder / layout / 'checkpoints', config) as checkpoints:
            checkpoints.save(make_state(config, 1), 1)
    return folder


@pytest.mark.parametrize('there', [slow(x) if 'context' not in x else x for x in MANY])
def test_stages_write_the_checkpoint_of_one_device_and_restore_it_to_the_bit(
    folder: Path, there: str
) -> None:
    written = write(folder, ONE, there)
    step, config = written / there / 'checkpoints/1', staged(there, moments_dtype='bfloat16')
    assert read_record(step).mesh == there
    differences = dict(parameter_differences(step, written / ONE / 'checkpoints/1'))
    assert differences == dict.fromkeys(differences, 0.0)
    with on_mesh(config), Checkpoints(written / ONE / 'checkpoints', config) as checkpoints:
        assert equal(checkpoints.restore(1), config, 1)
    one = staged(ONE, moments_dtype='bfloat16')
    with on_mesh(one), Checkpoints(written / there / 'checkpoints', one) as checkpoints:
        assert equal(checkpoints.restore(1), one, 1)


def test_stages_start_from_the_parameters_of_one_device_and_open_as_a_model(folder: Path) -> None:
    layout = 'stages=2 virtual_stages=2 x data=1 x context=2 x model=2, optimizer'
    written = write(folder, ONE, layout)
    config = staged(layout)
    with on_mesh(config):
        found = gather(restore_params(written / ONE / 'checkpoints/1', config))
        for name, x in gather(make_state(config, 1).params).items():
            np.testing.assert_array_equal(found[name], x, err_msg=name)
    opened = open_model(written / layout)
    assert dict(opened.mesh.shape) == {'data': 4, 'model': 2}
    with on_mesh(staged(ONE)):
        expected = gather(make_state(staged(ONE), 1).params)
    for name, x in gather(opened.params).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_a_save_puts_what_it_moves_into_host_memory(tmp_path: Path) -> None:
    config = staged('stages=4 virtual_stages=2 x data=1 x model=2')
    with on_mesh(config), Checkpoints(tmp_path, config) as checkpoints:
        state = make_state(config, 1)
        held = sharded_in('device')
        checkpoints.save(state, 1)
        assert sharded_in('device') == held
        assert sharded_in('pinned_host') > 0
        assert checkpoints.wait()
        assert equal(state, config, 1)


def sharded_in(memory: str) -> int:
    """The number of arrays over several devices that are in one kind of memory."""
    gc.collect()
    shardings = [x.sharding for x in jax.live_arrays()]
    return sum(x.memory_kind == memory and x.num_devices > 1 for x in shardings)


@pytest.mark.parametrize(
    ('stages', 'chunks'), [(2, 3), (3, 2), exhaustive(4, 2), exhaustive(2, 4), (4, 4)]
)
def test_each_stage_sends_and_receives_a_chunk_in_each_round(stages: int, chunks: int) -> None:
    layout = Layout(
        axes=(('L', ('stage',)),), sizes=(('stage', stages), ('data', 1)), chunks=chunks
    )
    mesh = jax.make_mesh(
        (stages, 1), ('stage', 'data'), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    num_layers = 2 * stages * chunks
    with jax.set_mesh(mesh):
        order = np.array(layout.layer_order(num_layers), np.int32)
        x = jax.device_put(order, jax.NamedSharding(mesh, layout('L')))
        np.testing.assert_array_equal(in_model_order(x, layout), np.arange(num_layers))
        in_order = jax.device_put(np.arange(num_layers), x.sharding)
        np.testing.assert_array_equal(on_stages(in_order, layout), order)
        text = jax.jit(lambda x: in_model_order(x, layout)).lower(x).compile().as_text()
    assert text is not None
    assert text.count(' collective-permute(') + text.count(' collective-permute-start(') == chunks
    assert not any(name in text for name in ('all-gather', 'all-to-all', 'all-reduce'))


def test_a_state_of_any_number_of_arrays_is_brought_onto_stages() -> None:
    """XLA's simulated devices do not end more than 32 such programs that have begun."""
    config = staged('stages=4 virtual_stages=2 x data=1 x model=2')
    with on_mesh(config):
        params = make_state(config, 1).params
        many = [jax.tree.map(jnp.copy, params) for _ in range(12)]
        assert len(jax.tree.leaves(many)) > 100
        layout = Layout.of(config)
        expected = gather(tree_on_stages(params, layout))
        for moved in tree_on_stages(many, layout):
            jax.tree.map(np.testing.assert_array_equal, gather(moved), expected)


def test_a_moment_is_rounded_alike_wherever_its_layer_lies() -> None:
    layout = Layout(axes=(('L', ('stage',)),), sizes=(('stage', 2),), chunks=2)
    order = np.array(layout.layer_order(8))
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    seed = jnp.uint32(7)
    with jax.set_mesh(jax.make_mesh((1,), ('data',))):
        expected = np.asarray(round_to_bf16(jnp.array(x), seed))
        rounded = np.asarray(round_to_bf16(jnp.array(x[order]), seed, layout))
    np.testing.assert_array_equal(rounded, expected[order])
