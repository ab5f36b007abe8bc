"""A step that is computed twice has the same bits, and one flipped bit in it ends the run."""

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import losses, steps
from support import exhaustive, make_batch, make_config, on_mesh, random_state, write_run

from megajax.core.config import Config, CorruptionError, load
from megajax.core.parallel.mesh import concrete
from megajax.core.train.feed import abstract_batch, place_batch
from megajax.core.train.step import TrainState, init_state, make_train_step
from megajax.runtime.run import trainer
from megajax.runtime.run.clock import Clock
from megajax.runtime.run.compile_step import compile_step
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.replay import Replay
from megajax.runtime.run.run import run
from megajax.runtime.run.watchdog import Watchdog

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 300, max_seq_len: 16,
        dropout: 0.1}
mesh: {data: 2, model: 2}
train: {steps: 6, batch_size: 4, seq_len: 16, dtype: float32, log_every: 1, eval_every: 100,
        deterministic: true}
checkpoint: {every: 3}
optim: {lr: 1e-2, shard: optimizer}
"""
REPEATED = r'^step (\d+)  replayed bit for bit in [\d.]+ s \(the step took [\d.]+ s\)$'
WEIGHT = 'params.layers.mlp.down.weight'


class Corrupting:
    """A compiled step that flips a bit of a result on one device, the `at`th time that it runs."""

    def __init__(self, compiled: Any, corrupt: Callable[[Any], Any], *, at: int):
        self._compiled, self._corrupt, self._at = compiled, corrupt, at
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, state: TrainState, batch: Any) -> Any:
        self._count += 1
        results = self._compiled(state, batch)
        return self._corrupt(results) if self._count == self._at else results


def flip(x: jax.Array, device: int) -> jax.Array:
    """The array with the lowest bit of its last element flipped on one device."""
    shards = []
    for shard in x.addressable_shards:
        value = np.array(shard.data)
        if shard.device.id == device:
            value.reshape(-1).view(np.uint8)[-value.itemsize] ^= 1
        shards.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flip_weight(results: Any, device: int) -> Any:
    state, metrics = results
    weight = state.params['layers']['mlp']['down']['weight']
    weight.set_value(flip(weight.get_value(), device))
    return state, metrics


def flip_loss(results: Any, device: int) -> Any:
    state, metrics = results
    return state, metrics | {'loss': flip(metrics['loss'], device)}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config and the data of the runs."""
    return write_run(tmp_path_factory.mktemp('replay'), CONFIG, split='1,0,0')


@pytest.fixture(scope='module')
def straight(folder: Path) -> dict[int, float]:
    """The losses of a run without repetitions."""
    start(folder, 'straight')
    return losses(folder / 'straight')


def start(folder: Path, name: str, *overrides: str) -> None:
    run(load(folder / 'small.yaml', [f'run.dir={folder / name}', *overrides]), name='small')


@pytest.mark.slow
def test_a_run_says_which_steps_it_has_repeated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(folder, 'repeated', 'train.replay_every=2', 'model.dropout=0')
    said = capsys.readouterr().out
    assert re.findall(REPEATED, said, flags=re.MULTILINE) == ['2', '4', '6']
    assert 'replay     every 2 steps, on the next device of the same process; compiled in ' in said
    assert sorted(losses(folder / 'repeated')) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_bit_that_is_wrong_on_one_device_ends_the_run_and_is_not_saved(
    folder: Path, straight: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupted(*arguments: Any) -> Any:
        return Corrupting(compile_step(*arguments), partial(flip_weight, device=2), at=4)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, 'compile_step', corrupted)
        with pytest.raises(CorruptionError) as error:
            start(folder, 'corrupted', 'train.replay_every=2', 'checkpoint.every=1')
    assert error.value.exit_code == 5
    said = str(error.value)
    assert said.startswith('silent data corruption at step 4: ')
    assert f'{WEIGHT} on device 2 (process 0, host ' in said
    assert 'does not match its replay on device 3 (1 of 256 elements; ' in said
    assert '1 of 4 devices differ, in process 0)' in said
    assert steps(folder / 'corrupted')[-1] == 3
    start(folder, 'corrupted', 'train.replay_every=2', 'run.resume=must')
    assert losses(folder / 'corrupted') == straight


@functools.cache
def compiled_step(config: Config) -> Any:
    """The step of a config, on the current mesh."""
    state = jax.eval_shape(lambda: init_state(config))
    return make_train_step(config).lower(concrete(state), abstract_batch(config)).compile()


def repeat(
    config: Config,
    folder: Path,
    corrupt: Callable[[Any], Any] = lambda results: results,
    *,
    steps: int = 2,
) -> TrainState:
    """Take some steps from random weights, each of them repeated.

    In the second, `corrupt` changes the results; in the third, a token of the batch is no number.
    """
    with on_mesh(config):
        state, compiled = random_state(config), compiled_step(config)
        replay = Replay(
            config,
            Corrupting(compiled, corrupt, at=2),
            state,
            report=Report(),
            clock=Clock(),
            watchdog=Watchdog(folder, None),
        )
        for step in range(1, steps + 1):
            batch = make_batch(config, seed=step)
            batch['loss_mask'][0, 0] = np.nan if step == 3 else 1.0
            state, _ = replay.of_step(step)(state, place_batch(batch))
    return state


EXPERTS = {'count': 4, 'active': 2, 'ffn_size': 16, 'selection_bias': True, 'first_dense': 1}
EXPERTS |= {'shared_ffn_size': 16, 'balance_loss': 0.1}


def replayed(data: int = 1, model: int = 1, /, **sections: dict[str, Any]) -> Config:
    train = {'deterministic': True, 'replay_every': 1} | sections.pop('train', {})
    sizes = {'num_layers': 1, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 300}
    sections['model'] = sizes | sections.get('model', {})
    return make_config('llama', data, model, train=train, **sections)


@pytest.mark.parametrize(
    'config',
    [
        replayed(),
        exhaustive(replayed(2, 2, optim={'shard': 'weights'}, train={'microbatches': 2})),
        exhaustive(replayed(2, 2, optim={'shard': 'gradients', 'moments_dtype': 'bfloat16'})),
        exhaustive(
            replayed(
                2,
                1,
                model={'num_layers': 2},
                mesh={'stages': 2, 'context': 2},
                train={'microbatches': 2},
            )
        ),
        exhaustive(
            replayed(
                2,
                2,
                mesh={'model_rows': 2, 'sequence_parallel': True},
                optim={'shard': 'optimizer'},
            )
        ),
        exhaustive(replayed(2, 2, mesh={'sequence_parallel': True}, train={'dtype': 'fp8'})),
        exhaustive(replayed(2, 2, train={'dtype': 'float16'})),
        exhaustive(replayed(2, 2, lora={'rank': 2})),
        exhaustive(replayed(4, 2, mesh={'replicas': 2}, optim={'shard': 'weights'})),
        exhaustive(
            replayed(
                *(4, 1),
                mesh={'experts': 2, 'replicas': 2},
                optim={'shard': 'weights'},
                model={'num_layers': 3, 'experts': EXPERTS, 'layers': [{}, {'experts': None}]},
            )
        ),
    ],
    ids=lambda config: f'{config.mesh.num_devices} {config.optim.shard} {config.train.dtype}',
)
def test_every_layout_repeats_its_steps_to_the_bit_and_one_that_is_skipped_too(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_alone = config.mesh.num_devices == 1
    state = repeat(config, tmp_path, steps=3 if is_alone else 2)
    assert int(state.step) == 2 + is_alone
    assert int(state.guard.taken) == 2 or not is_alone
    said = capsys.readouterr().out
    assert re.findall(REPEATED, said, flags=re.MULTILINE) == ['1', '2', '3'][: 2 + is_alone]
    where = 'the same device' if is_alone else 'the next device of the same process'
    assert f'replay     every 1 steps, on {where}; compiled in ' in said


def test_a_device_that_repeats_its_own_step_is_named_with_the_metric_that_differs(
    tmp_path: Path,
) -> None:
    with pytest.raises(CorruptionError) as error:
        repeat(replayed(), tmp_path, lambda results: flip_loss(flip_weight(results, 0), 0))
    said = str(error.value)
    assert 'silent data corruption at step 2: ' in said
    assert ': loss on device 0 (process 0, host ' in said
    assert 'does not match its replay on the same device (1 of 1 elements; ' in said
    assert '1 of 1 devices differ' in said
