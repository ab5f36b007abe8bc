"""Random configs of everything that the rules allow train as one device does.

`test_random_meshes.py` draws layouts of two models; these also draw the models, and which features
run together, as `megajax inspect fuzz` does.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import (
    exhaustive,
    gather,
    in_layer_order,
    on_mesh,
    random_params,
    random_state,
    relative_error,
    slow,
)

from megajax.analysis.fuzz.draw import described, draw
from megajax.analysis.inspect.random_batch import make_batch
from megajax.core.config import Config, MeshConfig
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import make_train_step
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.xla.emulate.compare import nudged

SEED, COUNT = 20261128, 50
LIMIT = 1e-5
# As a share of the largest gradient. The exact gradient of some arrays is zero, such as of a bias
# that is added to all keys, or of a router that chooses one expert: only rounding is computed.
NOISE = 1e-6
LAST_BITS = 2**-23  # of numbers in fp32, as a share of their values: one or two ulps
IN_FP32 = 'train.dtype=float32', 'optim.reduce_dtype=float32'


def on_one_device(config: Config) -> Config:
    """The config of the same model and batch on one device, in one pass."""
    train = {'microbatches': 1, 'recompute': 'none', 'schedule': '1f1b'}
    changed = {
        'mesh': MeshConfig().model_dump(),
        'train': train | {'overlap': 'none', 'unroll': False},
        'optim': {'shard': 'none'},
    }
    written = config.model_dump(exclude_unset=True)
    return Config.model_validate(
        {key: written.get(key, {}) | changed.get(key, {}) for key in {*written, *changed}}
    )


def loss_and_gradients(config: Config, nudge: float = 0) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of a step, from the same parameters on every mesh.

    The parameters differ from these by up to a share `nudge` of their values.
    """

    def moved(x: jax.Array) -> jax.Array:
        return jax.device_put(nudged(np.asarray(x), nudge), x.sharding)

    with on_mesh(config):
        params = random_params(config, std=0.05)
        params = jax.tree.map(moved, params) if nudge else params
        function = jax.jit(make_loss_and_gradients(config))
        (loss, _), gradients = function(params, place_batch(make_batch(config)), jax.random.key(0))
        return float(loss), in_layer_order(gather(gradients), config)


@pytest.mark.parametrize('number', [slow(0), *map(exhaustive, range(1, COUNT))])
def test_a_random_config_has_the_loss_and_gradients_of_one_device(number: int) -> None:
    config = draw(SEED, number, IN_FP32)
    print(described(config))
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (on_one_device(config), config)
    )
    assert relative_error(loss, expected_loss) <= LIMIT
    noise = NOISE * max(np.abs(x).max() for x in expected.values())
    assert gradients.keys() == expected.keys()
    wrong = {
        name: error
        for name, x in gradients.items()
        if not (error := relative_error(x, expected[name])) <= LIMIT
        and not max(np.abs(x).max(), np.abs(expected[name]).max()) <= noise
    }
    if wrong:  # unless the last bits of the parameters change as much on one device
        _, others = loss_and_gradients(on_one_device(config), LAST_BITS)
        rounded = {name: relative_error(others[name], expected[name]) for name in wrong}
        assert {name: error for name, error in wrong.items() if error > 2 * rounded[name]} == {}


@pytest.mark.parametrize('number', [*map(exhaustive, range(0, COUNT, 10))])
def test_a_random_config_resumes_bit_for_bit(number: int, tmp_path: Path) -> None:
    config = draw(SEED, number, IN_FP32)
    print(described(config))
    with on_mesh(config), Checkpoints(tmp_path, config) as checkpoints:
        step, batch = make_train_step(config), place_batch(make_batch(config))
        state, _ = step(random_state(config), batch)
        checkpoints.save(state, 1)
        checkpoints.wait()
        expected = bits(step(state, batch))
        assert bits(step(checkpoints.restore(1), batch)) == expected


def bits(results: Any) -> list[bytes]:
    """The bits of every array of a step's results."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]
