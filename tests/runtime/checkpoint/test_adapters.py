"""A checkpoint's adapters are read with its model, added to its weights, or begin beside them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from checkpoints import make_state, tiny
from support import (
    assert_close,
    by_name,
    exhaustive,
    gather,
    in_layer_order,
    make_batch,
    on_mesh,
    random_state,
    relative_error,
    slow,
)

from megajax.core.config import Config, ConfigError, LoraConfig, dump
from megajax.core.train.feed import place_batch
from megajax.core.train.step import make_train_step
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import open_model, restore_params
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.generate.weights import make_weights
from megajax.runtime.run.start import start_checkpoint

LORA = {'rank': 4, 'alpha': 6.0}
SCALE = 1.5
NEW = 'begin a new run with run.start_from=[^ ]*'
IN_BF16 = {'train': {'dtype': 'bfloat16'}}
LINEARS = (
    'layers.attention.qkv',
    'layers.attention.out',
    'layers.mlp.up',
    'layers.mlp.down',
)


def adapted(data: int = 2, model: int = 2, /, **sections: Any) -> Config:
    return tiny(data, model, **{'lora': LORA, **IN_BF16, **sections})


def save(run: Path, config: Config, step: int) -> Path:
    with (
        on_mesh(config),
        Checkpoints(run / 'checkpoints', config, tokenizer=byte_tokenizer()) as checkpoints,
    ):
        checkpoints.save(make_state(config, step), step)
    byte_tokenizer().save(run / 'tokenizer.json')
    (run / 'config.yaml').write_text(dump(config))
    return run / 'checkpoints' / str(step)


@pytest.fixture(scope='module')
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp('runs') / 'base', tiny(), 3)


@pytest.fixture(scope='module')
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp('runs') / 'tuned', adapted(), 3)


def read(checkpoint: Path, config: Config) -> dict[str, np.ndarray]:
    with on_mesh(config):
        return gather(restore_params(checkpoint, config))


def merged(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    weights = {name: x.astype(np.float32) for name, x in arrays.items() if '.adapter.' not in name}
    for linear in LINEARS:
        a, b = (arrays[f'{linear}.adapter.{which}'].astype(np.float64) for which in 'AB')
        layers, rank = len(a), a.shape[-1]
        added = SCALE * a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        weights[f'{linear}.weight'] += added.reshape(weights[f'{linear}.weight'].shape)
    return weights


@pytest.mark.parametrize(('data', 'model', 'shard'), [exhaustive(1, 4, 'none'), (4, 2, 'weights')])
def test_they_are_the_same_bits_on_any_mesh(tuned: Path, data: int, model: int, shard: str) -> None:
    expected = read(tuned, adapted())
    actual = read(tuned, adapted(data, model, optim={'shard': shard}))
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
    assert {str(x.dtype) for name, x in actual.items() if 'norm' in name} == {'float32'}
    assert actual['layers.mlp.up.weight'].dtype == 'bfloat16'
    assert actual['layers.mlp.up.adapter.A'].dtype == 'float32'


@pytest.mark.slow
def test_stages_and_context_shards_store_them_in_the_order_of_the_model(tmp_path: Path) -> None:
    model = {'num_layers': 4}
    mesh = {'stages': 2, 'virtual_stages': 2, 'context': 2}
    train = {**IN_BF16['train'], 'microbatches': 2}
    staged = adapted(1, 2, model=model, mesh=mesh, train=train)
    tuned = save(tmp_path / 'tuned', staged, 3)
    expected = in_layer_order(read(tuned, staged), staged)
    for name, x in read(tuned, adapted(1, 1, model=model)).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    assert_close(read(tuned, tiny(1, 1, model=model)), merged(expected), 1e-6)
    opened = open_model(tuned, ['train.dtype=float32'])
    with jax.set_mesh(opened.mesh):
        assert_close(gather(opened.params), merged(expected), 1e-6)


@pytest.mark.parametrize('model', [slow(1), 4])
def test_new_ones_begin_beside_the_weights_of_a_model_and_add_nothing(
    base: Path, model: int
) -> None:
    weights, begun = read(base, tiny(1, 1)), read(base, adapted(1, model))
    first = read(base, adapted())
    for name, x in begun.items():
        if '.adapter.' in name:
            assert np.any(x) == name.endswith('A')
            np.testing.assert_array_equal(x, first[name], err_msg=name)
        else:
            np.testing.assert_array_equal(x, weights[name].astype(x.dtype), err_msg=name)


@pytest.mark.parametrize('shard', [exhaustive('none'), 'weights'])
def test_a_model_without_adapters_has_them_added_to_its_weights(tuned: Path, shard: str) -> None:
    expected = merged(read(tuned, adapted()))
    actual = read(tuned, tiny(2, 2, optim={'shard': shard}))
    assert {x.dtype for x in actual.values()} == {np.dtype(np.float32)}
    assert_close(actual, expected, 1e-6)


def test_the_dtype_of_a_new_run_does_not_round_the_saved_weights(tmp_path: Path) -> None:
    saved = adapted(train={'dtype': 'float32'})
    tuned = save(tmp_path / 'tuned', saved, 3)
    begun = read(tuned, tiny(**IN_BF16))
    assert_close(begun, merged(read(tuned, saved)), 1e-6)
    for name, x in read(tuned, tiny()).items():
        np.testing.assert_array_equal(begun[name], x, err_msg=name)


def test_a_model_that_is_opened_or_generates_has_them_added(tuned: Path) -> None:
    expected = merged(read(tuned, adapted()))
    opened = open_model(tuned, ['train.dtype=float32'])
    assert opened.config.lora is None
    with jax.set_mesh(opened.mesh):
        assert_close(gather(opened.params), expected, 1e-6)
        of_opened = make_weights(opened.config, opened.params)
    plain, cast = (
        by_name(open_model(tuned, ['train.dtype=bfloat16'], cast=cast).params)
        for cast in (False, True)
    )
    for name, x in cast.items():
        np.testing.assert_array_equal(x, plain[name].astype(x.dtype), err_msg=name)
    assert cast['layers.mlp.up.weight'].dtype == 'bfloat16'
    live = adapted(train={'dtype': 'float32'})
    with on_mesh(live):
        of_live = make_weights(live, restore_params(tuned, live))
        for one, other in zip(
            jax.tree.leaves(of_opened.layers), jax.tree.leaves(of_live.layers), strict=True
        ):
            assert relative_error(one, other) <= 1e-6


def test_an_import_resumes_with_new_adapters(tmp_path: Path) -> None:
    config = tiny(**IN_BF16)
    with on_mesh(config), Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save({'params': make_state(config, 0).params}, 0)
    with on_mesh(adapted()), Checkpoints(tmp_path, adapted()) as checkpoints:
        state = checkpoints.restore(0)
    assert set(LINEARS) == {
        name.removesuffix('.adapter.B') for name in by_name(state.params) if '.adapter.B' in name
    }


def test_a_run_cannot_change_them_and_another_run_only_have_them_added(
    base: Path, tuned: Path, tmp_path: Path
) -> None:
    def begin(config: Config, start: Path) -> None:
        run = config.run.model_copy(update={'start_from': str(start)})
        with start_checkpoint(config.model_copy(update={'run': run}), tmp_path):
            pass

    with on_mesh(tiny()):
        for config, start in ((adapted(), base), (adapted(), tuned), (tiny(), tuned)):
            begin(config, start)
        with pytest.raises(ConfigError, match=r'lora.rank: 8, but 4 in .*set lora.rank=4'):
            begin(adapted().model_copy(update={'lora': LoraConfig(rank=8, alpha=6.0)}), tuned)
        with (
            Checkpoints(tuned.parent, tiny(**IN_BF16)) as checkpoints,
            pytest.raises(ConfigError, match=rf'lora.rank 4 .*: change these back, or {NEW}$'),
        ):
            checkpoints.restore(3)
        with (
            Checkpoints(base.parent, adapted(train={'dtype': 'float32'})) as checkpoints,
            pytest.raises(ConfigError, match=rf'lora.rank None .*: change these back, or {NEW}$'),
        ):
            checkpoints.restore(3)


@pytest.mark.parametrize(
    'changes', [{'rank': 8}, {'alpha': 8.0}, {'targets': ['up']}, {'rank': 8, 'targets': ['up']}]
)
def test_a_run_that_would_change_them_is_told_to_merge_them_first(
    tuned: Path, changes: dict[str, Any]
) -> None:
    config = adapted(lora=LORA | changes)
    with (
        on_mesh(config),
        Checkpoints(tuned.parent, config) as checkpoints,
        pytest.raises(ConfigError) as error,
    ):
        checkpoints.restore(3)
    fix = str(error.value).rpartition(' back, or ')[2]
    merge = f'megajax export hf {tuned.parent.parent} MERGED, megajax import hf MERGED BASE'
    assert fix.startswith(f'merge its adapters and begin a new run with others: {merge}, ')


def test_a_step_changes_them_alone_and_keeps_moments_of_them_alone() -> None:
    config = adapted(1, 1)
    with on_mesh(config):
        state = random_state(config)
        before = gather(state.params)
        moments = by_name(optax.tree_utils.tree_get(state.opt_state, 'mu'))
        state, metrics = make_train_step(config)(state, place_batch(make_batch(config)))
        after = gather(state.params)
    changed = {name for name, x in before.items() if not np.array_equal(after[name], x)}
    assert changed == moments.keys() == {name for name in before if '.adapter.' in name}
    assert float(metrics['grad_norm']) > 0
