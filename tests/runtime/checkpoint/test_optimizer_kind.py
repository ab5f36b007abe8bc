"""Checkpoints with each optimizer: Muon's restore on another mesh, AdamW's not with Muon."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from checkpoints import LAYOUTS, equal, laid_out, make_state, staged, tiny
from support import exhaustive, on_mesh, random_params, slow

from megajax.core.config import Config, ConfigError
from megajax.core.parallel.layout import Layout
from megajax.core.train.step import TrainState, init_state
from megajax.core.train.whole_matrices import on_whole_matrices
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.unpadded import unpadded

PADDED = 'data=3 x model=2, weights'
SLOW = 'data=6 replicas=2 x model=1, weights', 'data=2 x model_rows=2 model=2, optimizer'
MUON: dict[str, Any] = {'optim': {'kind': 'muon'}}


def assert_restores(folder: Path, saved: Config, restored: Config) -> None:
    with on_mesh(saved), Checkpoints(folder, saved) as checkpoints:
        checkpoints.save(make_state(saved, 3), 1)
    with on_mesh(restored), Checkpoints(folder, restored) as checkpoints:
        assert equal(checkpoints.restore(1), restored, 3)


@pytest.mark.parametrize(
    'layout',
    [x if x == PADDED else slow(x) if x in SLOW else exhaustive(x) for x in LAYOUTS],
)
def test_a_state_restores_on_another_mesh_bit_for_bit(tmp_path: Path, layout: str) -> None:
    assert_restores(tmp_path, laid_out(layout, **MUON), laid_out('one device', **MUON))


def test_a_state_of_pipeline_stages_restores_on_one_device(tmp_path: Path) -> None:
    staged_saved, one = (
        staged(layout, kind='muon')
        for layout in ('stages=4 x data=1 x model=2, optimizer', 'data=1 x model=1')
    )
    assert_restores(tmp_path, staged_saved, one)


@pytest.mark.parametrize('kinds', [('adamw', 'muon'), ('muon', 'adamw')])
def test_a_run_keeps_its_optimizer(tmp_path: Path, kinds: tuple[str, str]) -> None:
    saved, resumed = (tiny(1, 1, optim={'kind': kind}) for kind in kinds)
    with on_mesh(saved):
        with Checkpoints(tmp_path, saved) as checkpoints:
            checkpoints.save(make_state(saved, 0), 1)
        with (
            Checkpoints(tmp_path, resumed) as checkpoints,
            pytest.raises(
                ConfigError,
                match=rf'different optimizer \(optim.kind {kinds[0]} there, {kinds[1]} here\): '
                r'change it back, or begin a new run with run.start_from=',
            ),
        ):
            checkpoints.restore(1)


def test_a_run_with_muon_starts_from_imported_parameters(tmp_path: Path) -> None:
    imported, run = tiny(1, 1), tiny(1, 1, **MUON)
    with on_mesh(run):
        with Checkpoints(tmp_path, imported) as checkpoints:
            checkpoints.save({'params': make_state(imported, 0).params}, 0)
        with Checkpoints(tmp_path, run) as checkpoints:
            assert checkpoints.restore(0).step == 0


def test_an_optimizer_given_by_hand_is_restored_and_no_other(tmp_path: Path) -> None:
    config, other = tiny(2, 2, optim={'shard': 'weights'}), tiny(2, 1)
    lion = optax.lion(1e-3)
    with on_mesh(config), Checkpoints(tmp_path, config, optimizer=lion) as checkpoints:
        state = init_state(config, random_params(config, std=0.05), optimizer=lion)
        moments = jax.jit(lambda moments: jax.tree.map(lambda x: x + 1, moments))(state.opt_state)
        checkpoints.save(state._replace(opt_state=moments), 1)
    with on_mesh(other):
        with Checkpoints(tmp_path, other, optimizer=lion) as checkpoints:
            restored = checkpoints.restore(1).opt_state
            assert {float(np.max(x)) for x in jax.tree.leaves(restored)} == {1.0}
        with (
            Checkpoints(tmp_path, other) as checkpoints,
            pytest.raises(ConfigError, match=r'different arrays .* use the config, the optimizer'),
        ):
            checkpoints.restore(1)


def test_the_state_of_whole_matrices_restores_on_its_mesh_only(tmp_path: Path) -> None:
    def optimizer(config: Config) -> optax.GradientTransformation:
        return on_whole_matrices(config, optax.scale_by_adam(), others=optax.scale_by_lion())

    config, other = tiny(2, 2, optim={'shard': 'weights'}), tiny(1, 4)
    with on_mesh(config), Checkpoints(tmp_path, config, optimizer=optimizer(config)) as checkpoints:
        state = init_state(config, random_params(config, std=0.05), optimizer=optimizer(config))
        checkpoints.save(state, 1)
        before = [(x.shape, x.sharding) for x in jax.tree.leaves(state.opt_state)]
        restored = checkpoints.restore(1).opt_state
        assert before == [(x.shape, x.sharding) for x in jax.tree.leaves(restored)]
    with (
        on_mesh(other),
        Checkpoints(tmp_path, other, optimizer=optimizer(other)) as checkpoints,
        pytest.raises(ConfigError, match=r'different arrays .*the optimizer'),
    ):
        checkpoints.restore(1)


def numbered(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    """The first state, with other numbers in each array of the optimizer; zeros are its padding."""
    state, layout, random = (
        init_state(config, random_params(config, std=0.05), optimizer=optimizer),
        Layout.of(config),
        np.random.default_rng(0),
    )

    def draw(x: jax.Array, own: jax.ShapeDtypeStruct) -> jax.Array:
        value = np.zeros(x.shape, x.dtype)
        value[tuple(map(slice, own.shape))] = random.integers(1, 99, own.shape)
        return jax.device_put(value, x.sharding)

    moments = jax.tree.map(draw, state.opt_state, unpadded(state.opt_state, layout))
    return state._replace(opt_state=moments)


FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=8)
PER_PARAMETER = optax.novograd(1e-3)


def assert_state_is_restored(
    folder: Path, optimizer: optax.GradientTransformation, saved: Config, restored: Config
) -> None:
    with on_mesh(saved), Checkpoints(folder, saved, optimizer=optimizer) as checkpoints:
        checkpoints.save(numbered(saved, optimizer), 1)
        assert checkpoints.wait()
    with on_mesh(restored), Checkpoints(folder, restored, optimizer=optimizer) as checkpoints:
        found, expected = checkpoints.restore(1), numbered(restored, optimizer)
        for a, b in zip(
            jax.tree.leaves(found.opt_state), jax.tree.leaves(expected.opt_state), strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ('optimizer', 'there', 'here'),
    [
        (FACTORED, tiny(2, 2, optim={'shard': 'weights'}), tiny(1, 1)),
        slow(optax.sm3(1e-3), tiny(2, 2, optim={'shard': 'weights'}), tiny(1, 1)),
        (PER_PARAMETER, laid_out('data=3 x model=2, weights'), tiny(1, 1)),
    ],
)
def test_a_state_that_is_not_shaped_like_its_parameter_restores_on_another_mesh(
    tmp_path: Path, optimizer: optax.GradientTransformation, there: Config, here: Config
) -> None:
    assert_state_is_restored(tmp_path, optimizer, there, here)


def test_a_factored_state_with_padding_restores_where_it_has_the_same(tmp_path: Path) -> None:
    config = laid_out('data=3 x model=2, weights')
    assert_state_is_restored(tmp_path, FACTORED, config, config)
    with (
        on_mesh(tiny(1, 1)),
        Checkpoints(tmp_path, tiny(1, 1), optimizer=FACTORED) as checkpoints,
        pytest.raises(ConfigError, match=r'different arrays .*\[33\] there, float32\[32\] here'),
    ):
        checkpoints.restore(1)


def test_layers_of_a_factored_state_are_not_restored_in_another_order(tmp_path: Path) -> None:
    there = staged('stages=4 virtual_stages=2 x data=1 x model=2')
    one = staged('data=1 x model=1')
    assert_state_is_restored(tmp_path, FACTORED, there, there)
    with (
        on_mesh(one),
        Checkpoints(tmp_path, one, optimizer=FACTORED) as checkpoints,
        pytest.raises(
            ConfigError,
            match=r'not shaped like its parameters .* of mesh.stages=4 mesh.virtual_stages=2, '
            r'not of mesh.stages=1 mesh.virtual_stages=1; restore it with these stages',
        ),
    ):
        checkpoints.restore(1)
