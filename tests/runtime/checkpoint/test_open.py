"""A checkpoint opens as a model: the same parameters on every mesh, and nothing that does not hold
what was written.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import make_state
from support import by_name, make_config, on_mesh

from megajax.core.config import CheckpointError, Config, ConfigError
from megajax.core.counts.parameters import num_parameters
from megajax.runtime.checkpoint import copies
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.checkpoint.open import Opened, abstract_params, open_model
from megajax.runtime.checkpoint.orbax_manager import gb_to_read
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.generate.weights import make_weights

TINY = {'num_layers': 1, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 300}


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 and 2, the second of another seed, on a mesh of 2x2."""
    folder = tmp_path_factory.mktemp('run')
    for step in (1, 2):
        config = seeded(step)
        with (
            on_mesh(config),
            Checkpoints(folder / 'checkpoints', config, tokenizer=byte_tokenizer()) as checkpoints,
        ):
            checkpoints.save(make_state(config, step), step)
    return folder


def seeded(step: int) -> Config:
    return make_config('llama', 2, 2, model=TINY, train={'seed': step})


@functools.cache
def expected(step: int) -> dict[str, np.ndarray]:
    config = seeded(step)
    with on_mesh(config):
        return {name: np.asarray(x) for name, x in by_name(make_state(config, step).params).items()}


def assert_holds(opened: Opened, step: int) -> None:
    assert opened.step == step
    found = by_name(opened.params)
    assert found.keys() == expected(step).keys()
    for name, x in expected(step).items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize(('data', 'model'), [(1, 1), (2, 2), (1, 4)])
def test_a_run_opens_at_its_newest_checkpoint_on_any_mesh(run: Path, data: int, model: int) -> None:
    opened = open_model(run, [f'mesh.data={data}', f'mesh.model={model}', 'train.dtype=bfloat16'])
    assert_holds(opened, 2)
    assert opened.config.train.dtype == 'bfloat16'
    assert opened.tokenizer is not None
    assert opened.tokenizer.fingerprint == byte_tokenizer().fingerprint
    assert dict(opened.mesh.shape) == {'data': data, 'model': model}
    with jax.set_mesh(opened.mesh):
        placed = by_name(abstract_params(opened.config))
    assert all(x.sharding == placed[name].sharding for name, x in by_name(opened.params).items())


def test_a_run_opens_with_as_many_copies_as_fit_unless_their_number_is_given(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 6 * num_parameters(seeded(2).model, padded=True)  # one and a half copies
    monkeypatch.setattr(copies, 'host_memory', lambda: memory)
    opened = open_model(run)
    assert_holds(opened, 2)
    assert dict(opened.mesh.shape) == {'data': 1, 'model': 2}
    with pytest.raises(ConfigError, match=r'on 4 simulated devices, .*: set mesh\.data=1, or'):
        open_model(run, ['mesh.data=2'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_matrices_that_are_cast_while_they_are_read_give_the_same_weights(
    run: Path, dtype: str
) -> None:
    overrides = ['mesh.data=1', 'mesh.model=2', f'train.dtype={dtype}']
    plain, cast = (open_model(run, overrides, cast=cast) for cast in (False, True))
    assert {str(x.dtype) for x in by_name(cast.params).values() if x.ndim > 2} == {dtype}
    with jax.set_mesh(cast.mesh):
        weights = [make_weights(each.config, each.params) for each in (plain, cast)]
    for one, other in zip(*map(jax.tree.leaves, weights), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_so_does_each_of_its_checkpoints(run: Path) -> None:
    assert_holds(open_model(run / 'checkpoints' / '1'), 1)
    assert_holds(open_model(run / '2'), 2)


def test_what_does_not_hold_what_was_written_is_passed_over(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = max(
        (run / 'checkpoints' / '2' / 'state').rglob('d/*'), key=lambda path: path.stat().st_size
    )
    content = victim.read_bytes()
    try:
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert_holds(open_model(run), 1)
        assert 'checkpoints/2 is rejected' in caplog.text
        with pytest.raises(
            CheckpointError, match='2 cannot be used: run megajax checkpoint verify'
        ):
            open_model(run / '2')
    finally:
        victim.write_bytes(content)


def test_what_is_not_there_or_does_not_fit_is_told(run: Path) -> None:
    assert find_steps(run / 'checkpoints') == [1, 2]
    with pytest.raises(
        ConfigError, match='3: no finished checkpoint there; choose one of steps 1, 2'
    ):
        open_model(run / '3')
    with pytest.raises(
        ConfigError, match=r'override mesh.model=3: model.num_heads: 4 is not a multiple'
    ):
        open_model(run, ['mesh.model=3'])
    with pytest.raises(
        ConfigError, match=r'contains different arrays \(params/layers/mlp/down/weight/value'
    ):
        open_model(run, ['model.ffn_size=64'])


def test_a_run_that_has_saved_nothing_yet_is_not_another_one(tmp_path: Path) -> None:
    (tmp_path / 'mine/checkpoints/6.orbax-checkpoint-tmp').mkdir(parents=True)
    (tmp_path / 'mine/config.yaml').touch()
    with pytest.raises(ConfigError, match=r'its run has finished no save yet; resume it: megajax'):
        open_model(tmp_path / 'mine')


@pytest.mark.parametrize('elements', [1, 2**20, 50304 * 12288, 2**35])
def test_a_read_may_hold_the_largest_array_with_its_padding(elements: int) -> None:
    assert 1e9 * gb_to_read(elements) > 1.1 * 4 * elements
