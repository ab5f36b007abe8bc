"""A run whose step computes nothing but the number of tokens that count."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import random_params

from megajax.core.config import Config
from megajax.core.train.guard import judge
from megajax.core.train.step import TrainState, init_state

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 300, max_seq_len: 16}
mesh: {data: 1, model: 1}
train: {steps: 8, batch_size: 2, seq_len: 16, dtype: float32, log_every: 1,
        nonfinite: rollback, sample_prompts: []}
checkpoint: {every: 1, keep: 2}
optim: {schedule: constant, warmup_steps: 0}
"""


def make_counting_step(config: Config, optimizer: Any = None) -> Any:
    """A step whose loss is the sum of the batch's mask; parameters stay as they are."""

    def step(
        state: TrainState, batch: dict[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss = batch['loss_mask'].sum()
        verdict, guard = judge(
            state.guard, loss, loss, jnp.float32(1), overflow=jnp.array(False), spikes=False
        )
        metrics = {
            'loss': loss,
            'nll': loss,
            'grad_norm': jnp.float32(1),
            'lr': jnp.float32(0),
            **verdict._asdict(),
        }
        return state._replace(step=state.step + 1, batches=state.batches + 1, guard=guard), metrics

    return jax.jit(step, donate_argnums=0)


def count_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runs of a test take this step, from parameters that are drawn without compiling."""

    def first_state(config: Config, params: Any = None, *, optimizer: Any = None) -> TrainState:
        return init_state(config, params or random_params(config, std=0.05), optimizer=optimizer)

    monkeypatch.setattr('megajax.runtime.run.compile_step.make_train_step', make_counting_step)
    monkeypatch.setattr('megajax.runtime.run.run.init_state', first_state)
