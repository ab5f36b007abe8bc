"""The load of each expert, which a step's routers use, and the routers' reports of it.

The balance loss multiplies a token's scores by each expert's share of the assignments in the whole
batch. No device knows these shares in its forward pass, so a step uses the shares of the step
before. The gradients are therefore equal on every mesh and with any number of microbatches, and no
layer waits for a collective. The reports are sums over tokens for each expert
(`router.statistics`). They leave the backward pass as the gradient of a slot, like the counts of
fp8 (`scaling.py`). Neither the losses nor the reports count padding (`microbatches.py`).
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import Config, TrainConfig
from megajax.core.counts.layers import num_with_experts
from megajax.core.model import router
from megajax.core.model.zero_sharding import sum_of_vector
from megajax.core.parallel.layer_order import small_in_model_order, small_on_stages
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import Batch
from megajax.core.train.loss_scale import LossScale


class Load(NamedTuple):
    """The load of a step's experts."""

    share_Lx: jax.Array  # each expert's share of the assignments in the step before
    weight: jax.Array  # a token's weight in a mean, in units of 1 / (batch_size * seq_len)

    @classmethod
    def of(cls, share_Lx: jax.Array, batch: Batch, train: TrainConfig) -> Self:
        """Return the load for a batch with the places of its padding."""
        count = (batch['real'] > 0).sum(dtype=jnp.int32)
        return cls(share_Lx, train.batch_size * train.seq_len / jnp.maximum(count, 1))


def init_load(config: Config) -> jax.Array | None:
    """Return equal shares [layer, expert] of the assignments, or None without experts."""
    experts = config.model.experts
    if experts is None:
        return None
    return jnp.full((num_with_experts(config.model), experts.count), 1 / experts.count)


def attached(
    weights: Any,
    primals: Any,
    load: Load,
    loss_scale: LossScale | None,
    config: Config,
    layout: Layout,
) -> tuple[Any, Any]:
    """Return the weights with each router's load values, and the primals with report slots."""
    experts, train = config.model.experts, config.train
    assert experts is not None
    token = (1 if loss_scale is None else loss_scale.value) / (train.batch_size * train.seq_len)
    is_over_batch = experts.balance_over == 'batch'
    pressure = experts.balance_loss * experts.count * token * is_over_batch * load.share_Lx
    zeros = jnp.zeros_like(pressure)
    rows = {router.PRESSURE: load.weight * pressure, router.TOKEN: zeros + load.weight * token}
    values = jnp.stack([rows.get(row, zeros) for row in router.STATISTICS], 1)
    values = small_on_stages(values, layout)

    def attach(params: Any, x: jax.Array) -> Any:
        param = nnx.Param(x, declared=router.LOAD)
        slots = {'layers': {'experts': {'router': {'load': param}}}}
        return nnx.merge_state(params, nnx.State(slots))

    return attach(weights, values), attach(primals, jnp.zeros_like(values))


def detached(gradients: Any, layout: Layout) -> tuple[Any, jax.Array | None]:
    """Return the gradients and, separately, the sums [layer, statistic, expert] of all tokens."""
    found, rest = nnx.split_state(gradients, lambda _, x: x.declared is router.LOAD, ...)
    if not found:
        return gradients, None
    (load,) = jax.tree.leaves(found)
    sums = sum_of_vector(load, 'L--', layout.mapped, layout)  # all-reduce over data
    return rest, small_in_model_order(sums, layout)


def shares(sums_L4x: jax.Array) -> jax.Array:
    """Return each expert's share [layer, expert] of the assignments; zeros if there are none."""
    chosen_Lx = sums_L4x[:, router.CHOSEN]
    return chosen_Lx / jnp.maximum(chosen_Lx.sum(-1, keepdims=True), 1)


def after_step(
    params: Any, load_Lx: Any, sums_L4x: jax.Array, taken: jax.Array, config: Config
) -> tuple[Any, Any]:
    """Return the parameters and the shares for the next step, unchanged if the update is skipped.

    Selection biases are moved in favor of experts with too few tokens, unless the decoder is
    frozen.
    """
    experts, layout = config.model.experts, Layout.of(config)
    share_Lx = shares(sums_L4x)
    load_Lx = jnp.where(taken & (share_Lx.max() > 0), share_Lx, load_Lx)
    if experts is None or not experts.selection_bias or config.model.is_decoder_frozen:
        return params, load_Lx
    chosen_Lx = sums_L4x[:, router.CHOSEN]
    change = experts.bias_rate * jnp.sign(chosen_Lx.mean(-1, keepdims=True) - chosen_Lx) * taken
    bias = params['layers']['experts']['router']['selection_bias']
    moved = bias.replace(bias.get_value() + small_on_stages(change, layout))
    new = {'router': {'selection_bias': moved}}
    return nnx.merge_state(params, nnx.State({'layers': {'experts': new}})), load_Lx


def metrics(sums_L4x: jax.Array, config: Config) -> dict[str, jax.Array]:
    """Return the metrics of a step's routing for the log, over all layers.

    `expert_load` is the largest load of an expert divided by the mean load, `router_entropy` the
    mean entropy of a token's scores in nats, and `idle_experts` the number of experts that received
    no token. Padding does not count. With `balance_loss` over the batch, the result also has that
    loss; with `capacity`, it has the share of dropped assignments.
    """
    experts = config.model.experts
    assert experts is not None
    chosen_Lx, scores_Lx, entropy_Lx, dropped_Lx = jnp.moveaxis(sums_L4x, 1, 0)
    all_L = jnp.maximum(chosen_Lx.sum(-1), 1)
    tokens_L = all_L / experts.active
    found = {
        'expert_load': (chosen_Lx.max(-1) / (all_L / experts.count)).max(),
        'router_entropy': (entropy_Lx.sum(-1) / tokens_L).mean(),
        'idle_experts': (chosen_Lx == 0).sum(),
    }
    if experts.balance_loss and experts.balance_over == 'batch':
        balance_L = experts.count * (shares(sums_L4x) * scores_Lx).sum(-1) / tokens_L
        found['balance_loss'] = experts.balance_loss * balance_L.sum()
    if experts.capacity is not None:
        found['dropped'] = dropped_Lx.sum() / all_L.sum()
    return found
