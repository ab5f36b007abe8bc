"""Steps that several tests compare, each compiled once: a setting, and its numbers."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.stages import Compiled
from support import (
    abstract_state,
    gather,
    in_layer_order,
    make_batch,
    make_config,
    on_mesh,
    pack,
    pack_at_random,
    random_params,
    random_state,
)

import megajax
from megajax.core.config import Config
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import abstract_batch, place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.loss_scale import init_loss_scale
from megajax.core.train.optimizer import make_optimizer
from megajax.core.train.step import TrainState, make_train_step

STEPS = 5
MESH = (
    *('data', 'replicas', 'experts', 'stages', 'virtual_stages', 'context', 'context_exchange'),
    *('model_rows', 'model', 'sequence_parallel'),
)
TRAIN = ('dtype', 'fp8_scaling', 'microbatches', 'schedule', 'recompute', 'overlap', 'unroll')


class Setting(NamedTuple):
    """A step whose numbers are compared."""

    name: str
    data: int
    model: int
    shard: str = 'none'
    replicas: int = 1
    model_rows: int = 1
    stages: int = 1
    virtual_stages: int = 1
    schedule: str = '1f1b'
    experts: int = 1
    context: int = 1
    context_exchange: str = 'gather'
    sequence_parallel: bool = False
    dtype: str = 'float32'
    fp8_scaling: str = 'delayed'
    microbatches: int = 1
    recompute: str = 'none'
    reduce_dtype: str = 'float32'
    moments_dtype: str = 'float32'
    overlap: str = 'none'
    unroll: bool = False
    num_layers: int = 2
    hidden_size: int = 64
    num_kv_heads: int | None = None  # those of the model
    seq_len: int = 16
    rows: int | None = None  # of the batch; as many as data shards and microbatches divide
    plain: bool = False  # without dropout and document masks
    dropout: float | None = None  # that of the model
    cut: bool = False  # into documents, anywhere

    @property
    def config(self) -> Config:
        """The config of the step."""
        sizes = {'head_dim': 8, 'ffn_size': 128} | self._section('num_layers', 'hidden_size')
        heads = {} if self.num_kv_heads is None else {'num_kv_heads': self.num_kv_heads}
        sizes['max_seq_len'] = max(32, self.seq_len)
        if self.plain or self.dropout is not None:
            sizes['dropout'] = self.dropout or 0.0
        # An eps above rounding error: Adam would turn the sign of such an error into a step.
        optim = {'lr': 3e-3, 'eps': 1e-3}
        return make_config(
            self.name,
            model=sizes | heads,
            mesh=self._section(*MESH),
            train={'batch_size': self.batch_size} | self._section('seq_len', *TRAIN),
            optim=optim | self._section('shard', 'reduce_dtype', 'moments_dtype'),
        )

    @property
    def batch_size(self) -> int:
        """The rows of the batch."""
        return self.rows or math.lcm(24, self.data * self.microbatches)

    def _section(self, *keys: str) -> dict[str, Any]:
        return {key: getattr(self, key) for key in keys}

    @property
    def unsharded(self) -> 'Setting':
        """The same step on the same mesh without ZeRO."""
        return self._replace(shard='none', replicas=1, reduce_dtype='float32')

    @property
    def in_one_part(self) -> 'Setting':
        """The same step without stages and context shards."""
        return self._replace(stages=1, virtual_stages=1, schedule='1f1b', context=1)

    @property
    def in_one_row(self) -> 'Setting':
        """The same step on as many devices, with one-dimensional tensor parallelism."""
        return self._replace(model_rows=1, model=self.model_rows * self.model)

    @property
    def on_one_device(self) -> 'Setting':
        """The same step on one device."""
        one = self.unsharded.in_one_part._replace(rows=self.batch_size)
        return one._replace(data=1, experts=1, model=1, model_rows=1, sequence_parallel=False)

    def __str__(self) -> str:
        defaults = Setting('', 0, 0)._asdict()
        said = {
            field: value if isinstance(value, str) else f'{field}={value}'
            for field, value in self._asdict().items()
            if value != defaults[field]
        }
        return '-'.join(said.values())


def batch_of(setting: Setting, seed: int = 0) -> dict[str, jax.Array]:
    """A batch on the current mesh; those of `llama` have document masks, unless it is plain."""
    batch = make_batch(setting.config, seed=seed)
    if setting.cut:
        return place_batch(pack_at_random(batch, seed))
    is_packed = setting.name == 'llama' and not setting.plain
    return place_batch(pack(batch, [5, 11]) if is_packed else batch)


@functools.cache
def loss_and_gradients(setting: Setting) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of a step, from the same parameters on every mesh."""
    config = setting.config
    with on_mesh(config):
        function = jax.jit(make_loss_and_gradients(config))
        params, batch = random_params(config, std=0.05), batch_of(setting)
        scale = init_loss_scale(config)  # without it fp16 would have no gradients this small
        (loss, _), gradients = function(params, batch, jax.random.key(0), scale)
        assert {gradient.dtype for gradient in jax.tree.leaves(gradients)} == {np.dtype('float32')}
        return float(loss), in_layer_order(gather(gradients), config)


# Without dropout, with a warm-up, and with clipping to less than the norm of its first gradients.
CLIPPED = make_config(
    *('gpt', 2, 2),
    model={'dropout': 0.0},
    train={'microbatches': 2},
    optim={'shard': 'weights', 'warmup_steps': 4, 'grad_clip': 0.05},
)


@functools.cache
def step_of(config: Config) -> Any:
    """The training step of a config, compiled once for all tests of a process."""
    with on_mesh(config):
        return make_train_step(config)


@functools.cache
def own_step_of(config: Config) -> Any:
    """The loss, the gradients and the updated parameters of a training loop of one's own."""
    with on_mesh(config):
        optimizer = make_optimizer(config)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(megajax.loss)(params, batch, config)
        updates, _ = optimizer.update(gradients, opt_state, params)
        return loss, gradients, optax.apply_updates(params, updates)

    return step


class Training(NamedTuple):
    """The numbers of a few steps, from the same start on every mesh."""

    losses: list[float]
    first_moments: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    evaluated: dict[str, float]


@functools.cache
def train(setting: Setting) -> Training:
    """Train for a few steps, and evaluate what comes of it."""
    config, losses = setting.config, []
    with on_mesh(config):
        step, state = make_train_step(config), random_state(config)
        for seed in range(STEPS):
            state, metrics = step(state, batch_of(setting, seed))
            losses.append(float(metrics['loss']))
        moments = optax.tree_utils.tree_get(state.opt_state, 'mu')
        sums = make_eval_step(config)(state.params, batch_of(setting, STEPS))
        evaluated = {name: float(value) for name, value in sums.items()}
        first_moments, params = (in_layer_order(gather(x), config) for x in (moments, state.params))
        return Training(losses, first_moments, params, evaluated)


@functools.cache
def compiled_step(config: Config) -> tuple[Compiled, TrainState]:
    """A step that nobody takes, and the shapes and places of its state."""
    with on_mesh(config):
        state = abstract_state(config)
        return make_train_step(config).lower(state, abstract_batch(config)).compile(), state


@functools.cache
def evaluate(setting: Setting) -> dict[str, float]:
    """The sums of evaluation, with random parameters."""
    config = setting.config
    with on_mesh(config):
        sums = make_eval_step(config)(random_params(config, std=0.05), batch_of(setting))
        return {name: float(value) for name, value in sums.items()}
