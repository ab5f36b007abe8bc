"""The router of a mixture of experts: which experts a token is sent to, and with which weights.

Everything is in fp32. The functions handle the tokens of one device, and none communicates. Here, T
is all of these tokens, and Y is the experts that each token is sent to.
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config.experts import ExpertsConfig
from megajax.core.counts.declaration import Parameter, Role

# The statistics of a layer's routing in a step [STATISTICS, x]: sums over tokens for each expert.
# They leave the backward pass as the gradient of a slot (`core/train/routing.py`).
STATISTICS = CHOSEN, SCORES, ENTROPY, DROPPED = range(4)
# The rows of that slot's value: for each expert, the gradient of the balance loss with respect to a
# token's score; and the share of one token among all tokens.
PRESSURE, TOKEN = range(2)
LOAD = Parameter('L-x', Role.SCALES)


def logits(x_TD: jax.Array, weight_Dx: jax.Array, bias_x: jax.Array | None) -> jax.Array:
    """Return the router's logits [T, x]."""
    # no TF32, because a rounding error can change which experts are chosen
    highest = lax.Precision.HIGHEST
    y_Tx = jnp.matmul(x_TD.astype(jnp.float32), weight_Dx, precision=highest)
    return y_Tx if bias_x is None else y_Tx + bias_x[None]


def choose(logit_Tx: jax.Array, bias_x: jax.Array | None, experts: ExpertsConfig) -> jax.Array:
    """Return the experts [T, Y] of each token, the best first.

    If scores are equal, the first expert counts as better. `bias_x` is added to the scores only for
    this choice.
    """
    score_Tx = _scores(logit_Tx, experts)
    if bias_x is not None:
        score_Tx = score_Tx + bias_x[None]
    if experts.groups > 1:
        by_group = score_Tx.reshape(len(score_Tx), experts.groups, -1)
        best, _ = lax.top_k(by_group, min(2, by_group.shape[-1]))
        _, group_TG = lax.top_k(best.sum(-1), experts.active_groups)
        is_in = jax.nn.one_hot(group_TG, experts.groups).sum(1)[..., None] > 0
        score_Tx = jnp.where(is_in, by_group, -jnp.inf).reshape(score_Tx.shape)
    _, expert_TY = lax.top_k(score_Tx, experts.active)
    return expert_TY


def best(logit_Tx: jax.Array, expert_TY: jax.Array, experts: ExpertsConfig) -> jax.Array:
    """Return the experts [T, Y] with the best scores, without regard to biases and groups."""
    if not experts.selection_bias and experts.groups == 1:
        return expert_TY
    return lax.top_k(_scores(logit_Tx, experts), experts.active)[1]


def weights(logit_Tx: jax.Array, expert_TY: jax.Array, experts: ExpertsConfig) -> jax.Array:
    """Return the weights [T, Y] of each token's experts."""
    if experts.scores == 'softmax' and experts.normalize:
        return experts.scale * jax.nn.softmax(jnp.take_along_axis(logit_Tx, expert_TY, 1))
    score_TY = jnp.take_along_axis(_scores(logit_Tx, experts), expert_TY, 1)
    if experts.normalize:
        score_TY = score_TY / (score_TY.sum(-1, keepdims=True) + 1e-20)
    return experts.scale * score_TY


def probabilities(logit_Tx: jax.Array, experts: ExpertsConfig) -> jax.Array:
    """Return the scores of each token, divided by their sum over the experts."""
    score_Tx = _scores(logit_Tx, experts)
    if experts.scores == 'softmax':
        return score_Tx
    return score_Tx / (score_Tx.sum(-1, keepdims=True) + 1e-20)


def auxiliary_gradient(
    logit_Tx: jax.Array,
    pressure_Tx: jax.Array,
    token: jax.Array,
    real_T: jax.Array,
    experts: ExpertsConfig,
) -> jax.Array:
    """Return the gradient of the balance loss and of the z-loss with respect to the logits.

    `pressure_Tx` is the gradient of the balance loss with respect to `probabilities`, `token` is
    the share of one token among all tokens, and `real_T` is 0 for padding, which has no loss.
    """

    def loss(logit_Tx: jax.Array) -> jax.Array:
        total = (pressure_Tx * probabilities(logit_Tx, experts)).sum()
        if experts.z_loss:
            total += experts.z_loss * token * jnp.square(jax.nn.logsumexp(logit_Tx, -1)).sum()
        return total

    return real_T[:, None] * jax.grad(loss)(logit_Tx)


def counts(expert_TY: jax.Array, weight_TY: jax.Array, num_experts: int) -> jax.Array:
    """Return the sum of the weights with which each expert is chosen."""
    weight_TY = jnp.broadcast_to(weight_TY, expert_TY.shape)
    return jnp.zeros(num_experts).at[expert_TY.reshape(-1)].add(weight_TY.reshape(-1))


def statistics(
    logit_Tx: jax.Array,
    expert_TY: jax.Array,
    is_dropped_TY: jax.Array,
    real_T: jax.Array,
    experts: ExpertsConfig,
) -> jax.Array:
    """Return the statistics [STATISTICS, x] of these tokens, without padding (`real_T` is 0)."""
    real_T1 = real_T[:, None]
    chosen_x = counts(expert_TY, real_T1, experts.count)
    dropped_x = counts(expert_TY, real_T1 * is_dropped_TY, experts.count)
    score_Tx = probabilities(logit_Tx, experts)
    entropy_Tx = -jnp.where(score_Tx > 0, score_Tx * jnp.log(score_Tx), 0)
    score_x, entropy_x = (real_T1 * score_Tx).sum(0), (real_T1 * entropy_Tx).sum(0)
    return jnp.stack([chosen_x, score_x, entropy_x, dropped_x])


def _scores(logit_Tx: jax.Array, experts: ExpertsConfig) -> jax.Array:
    return jax.nn.softmax(logit_Tx) if experts.scores == 'softmax' else jax.nn.sigmoid(logit_Tx)
