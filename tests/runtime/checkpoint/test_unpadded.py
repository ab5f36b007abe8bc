"""A checkpoint knows no rung, no padding and no mesh: what one layout wrote, any other restores."""

import gc
import logging
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import LAYOUTS, equal, laid_out, leaves, make_state
from support import ROOT, by_name, exhaustive, gather, on_mesh, slow

from megajax.core.config import Config, ConfigError, load
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.train.step import TrainState, init_state
from megajax.runtime.checkpoint import checkpoints as module
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import parameter_differences, parameter_shapes
from megajax.runtime.checkpoint.open import open_model, restore_params
from megajax.runtime.checkpoint.orbax_manager import restore_gb
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.checkpoint.unpadded import strip_padding

# Padding, replicas and a grid.
WRITTEN = [exhaustive(x) if 'gradients' in x else x for x in LAYOUTS]


def save(folder: Path, config: Config) -> None:
    with on_mesh(config), Checkpoints(folder / 'checkpoints', config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)


@pytest.fixture(scope='module')
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('layouts')


@pytest.fixture
def written(folder_of_all: Path, request: pytest.FixtureRequest) -> Path:
    """The same state, written on one device and in the layout that the test reads."""
    arguments = request.node.callspec.params if hasattr(request.node, 'callspec') else {}
    for layout in {'one device', arguments.get('there', 'one device')}:
        if not (folder_of_all / layout).exists():
            save(folder_of_all / layout, laid_out(layout))
    return folder_of_all


def bytes_on_devices() -> int:
    """Of all arrays that are alive, each shard counted."""
    gc.collect()
    return sum(nbytes(x) for x in jax.live_arrays())


def placements(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, state)


def nbytes(x: jax.Array) -> int:
    """Of all shards; their data would be further arrays that are alive."""
    shard = math.prod(x.sharding.shard_shape(x.shape))
    return x.dtype.itemsize * shard * len(x.sharding.addressable_devices)


@pytest.mark.parametrize('there', WRITTEN)
def test_a_checkpoint_holds_the_arrays_of_one_device(written: Path, there: str) -> None:
    step, model = written / there / 'checkpoints/1', laid_out(there).model
    sizes = dim_sizes(model)
    assert parameter_shapes(step) == {
        name: shape_of(parameter.dims, sizes) for name, parameter in parameters(model)
    }
    differences = dict(parameter_differences(step, written / 'one device/checkpoints/1'))
    assert differences == dict.fromkeys(differences, 0.0)


def test_a_step_that_is_written_anew_is_listed_anew(tmp_path: Path) -> None:
    for layers in (1, 2):
        shutil.rmtree(tmp_path / 'checkpoints', ignore_errors=True)
        save(tmp_path, laid_out('one device', model={'num_layers': layers}))
        shapes = parameter_shapes(tmp_path / 'checkpoints/1')
        assert shapes['layers.mlp.up.weight'][0] == layers


@pytest.mark.parametrize('there', WRITTEN)
def test_a_record_names_the_layout(written: Path, there: str) -> None:
    record = read_record(written / there / 'checkpoints/1')
    assert record.mesh == there.replace('one device', 'data=1 x model=1')


NEXT = dict(zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True))
IN_CI = 'data=4 replicas=2 x model=2, gradients', 'data=2 x model_rows=2 model=2, optimizer'


@pytest.mark.parametrize(
    ('there', 'here'),
    [
        (there, here)
        if there == 'one device' and NEXT[there] == here
        else (slow if NEXT[there] == here and there in IN_CI else exhaustive)(there, here)
        for there in LAYOUTS
        for here in LAYOUTS
    ],
)
def test_any_layout_restores_what_another_wrote_to_the_bit_and_holds_nothing_else(
    written: Path, there: str, here: str
) -> None:
    config = laid_out(here)
    with on_mesh(config), Checkpoints(written / there / 'checkpoints', config) as checkpoints:
        before = bytes_on_devices()
        state = checkpoints.restore(1)
        assert bytes_on_devices() - before == sum(map(nbytes, jax.tree.leaves(state)))
        assert placements(state) == placements(make_state(config, 1))
        assert equal(state, config, 1)


def test_a_process_reads_no_more_than_the_largest_parameter_at_a_time() -> None:
    model = load(ROOT / 'configs/gpt3_175b.yaml').model
    up = 4 * model.num_layers * model.hidden_size * model.ffn_size
    assert 96e9 < up < 1e9 * restore_gb(model) < 1.2 * up  # Orbax's own limit would refuse it


@pytest.mark.parametrize(('there', 'here'), [('bfloat16', 'float32'), ('float32', 'bfloat16')])
def test_moments_of_another_dtype_are_cast_and_named(
    tmp_path: Path, there: str, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout = 'data=3 x model=2, weights'
    save(tmp_path, laid_out(layout, optim={'moments_dtype': there}))
    config = laid_out(layout, optim={'moments_dtype': here})
    with (
        on_mesh(config),
        caplog.at_level(logging.INFO),
        Checkpoints(tmp_path / 'checkpoints', config) as checkpoints,
    ):
        state, written = checkpoints.restore(1), make_state(config, 1)
        assert f'optim.moments_dtype: {there} -> {here}' in caplog.text
        for x, like in zip(leaves(state), leaves(written), strict=True):
            assert x.dtype == like.dtype
        for x, like in zip(leaves(state.opt_state), leaves(written.opt_state), strict=True):
            if x.dtype in (jnp.bfloat16, np.float32):  # not the counts
                like = like.astype(jnp.bfloat16)
            np.testing.assert_array_equal(x.astype(np.float32), like.astype(np.float32))


@pytest.mark.parametrize(
    'here', ['data=3 x model=2, weights', slow('data=2 x model_rows=2 model=2, optimizer')]
)
def test_a_run_that_starts_from_a_checkpoint_never_holds_more_than_its_state(
    written: Path, here: str
) -> None:
    config = laid_out(here)
    with on_mesh(config):
        before = bytes_on_devices()
        params = restore_params(written / 'one device/checkpoints/1', config)
        assert bytes_on_devices() - before == sum(map(nbytes, jax.tree.leaves(params)))
        expected = gather(make_state(config, 1).params)
        state = init_state(config, params)
        found, kept = by_name(state.params), by_name(params)
        for name, x in gather(state.params).items():
            np.testing.assert_array_equal(x, expected[name], err_msg=name)
            assert all(
                a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
                for a, b in zip(
                    found[name].addressable_shards, kept[name].addressable_shards, strict=True
                )
            ), f'{name} was copied'
        assert placements(state) == placements(make_state(config, 1))


@pytest.mark.parametrize(
    ('there', 'sizes'),
    [
        ('data=3 x model=2, weights', {'data': 3, 'model': 2}),
        exhaustive('data=4 replicas=2 x model=2, gradients', {'data': 4, 'model': 2}),
        exhaustive('data=6 replicas=2 x model=1, weights', {'data': 6, 'model': 1}),
        ('data=2 x model_rows=2 model=2, optimizer', {'data': 2, 'model': 4}),
    ],
)
def test_a_checkpoint_of_any_layout_opens_as_a_model_without_further_words(
    written: Path, there: str, sizes: dict[str, int]
) -> None:
    opened = open_model(written / there)
    assert dict(opened.mesh.shape) == sizes
    assert opened.config.optim.shard == 'none'
    with on_mesh(laid_out('one device')):
        expected = gather(make_state(laid_out('one device'), 1).params)
    found = gather(opened.params)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_stripping_the_padding_writes_one_file_and_copies_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def watch(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        before = {path for path in folder.rglob('*') if path.is_file()}
        strip_padding(folder, shapes)
        after = {path for path in folder.rglob('*') if path.is_file()}
        assert len(shapes) == 3 * 5  # the matrices and their moments
        written.extend(path.stat().st_size for path in after - before)

    monkeypatch.setattr(module, 'strip_padding', watch)
    save(tmp_path, laid_out('data=3 x model=2, weights', model={'num_layers': 8}))
    arrays = sum(
        path.stat().st_size for path in (tmp_path / 'checkpoints/1/state').rglob('ocdbt*/d/*')
    )
    assert len(written) == 1
    assert written[0] < arrays / 50


def test_padding_that_cannot_be_stripped_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(module, 'strip_padding', fail)
    config = laid_out('data=3 x model=2, weights')
    with on_mesh(config), Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
        assert not checkpoints.wait()
        assert 'checkpoint 1 could not be written ([Errno 28] No space' in caplog.text
        assert checkpoints.newest_verified() is None
        monkeypatch.undo()
        checkpoints.save(make_state(config, 1), 1)
        assert checkpoints.newest_verified() == 1


def test_an_array_of_another_size_is_neither_cut_nor_padded(written: Path) -> None:
    config = laid_out('data=3 x model=2, weights', model={'hidden_size': 36, 'head_dim': 8})
    with (
        on_mesh(config),
        Checkpoints(written / 'one device/checkpoints', config) as checkpoints,
        pytest.raises(ConfigError, match=r'model\.hidden_size 32 there, 36 here'),
    ):
        checkpoints.restore(1)
    with on_mesh(config), pytest.raises(ConfigError, match='contains different arrays'):
        restore_params(written / 'one device/checkpoints/1', config)
