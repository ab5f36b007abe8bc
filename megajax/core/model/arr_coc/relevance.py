"""The relevance of an image's regions to a question: ARR-COC's scorers, balance and noise.

Three scorers look at the texture of each region (`core/model/arr_coc/texture.py`). Each starts as
one of Vervaeke's ways of knowing: propositional is how much information a region has, perspectival
is how salient it is, and participatory is how it couples with the question. To each, a network adds
a learned correction. The three networks have the same shape, so they are stored in one array whose
slots are sharded over `model`: one slot per scorer, or `shards` slots with equal parts of a
scorer's hidden units. The scores are all-gathered, and everything else is replicated. Arrays hold
the sequences of one data shard, in fp32, because budgets are discrete choices.

The gradient reaches scorers, coupling and balance through `Relevance.gate`, because budgets have no
gradient. The networks' inputs get no gradient either, because it would have to be reduced over
`model`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.config import ModelConfig
from megajax.core.counts.vision_parameters import SCORER_FEATURES, SUMMARIES, declare_scorers
from megajax.core.model.arr_coc.levels import einsum
from megajax.core.model.arr_coc.texture import SALIENCY
from megajax.core.model.dropout import fold_in
from megajax.core.model.fp32_gradients import Slotted, value
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import UNSHARDED, Layout

SCORES = 'propositional', 'perspectival', 'participatory'
NUM_FEATURES, NUM_SUMMARIES = SCORER_FEATURES, SUMMARIES
# scores are in [0, 1] at first, and a softmax hardly distinguishes such close values
SHARPNESS = 3.0
# With standard Gumbel noise, half of the chosen regions would have nothing to read.
NOISE = 0.3
# The tokens that a region asks for are proportional to this power of its probability. At 90% of the
# highest probability, a region asks for a quarter of the tokens, because text that needs full
# detail is illegible at half of the detail.
DECISION = 4 / NOISE
_EPSILON = 1e-8
_NOISE = 0x67756D62  # differs from every layer index, by which dropout's keys are derived


class Coupling(NamedTuple):
    """The network that projects the texture of a region into the space of the question."""

    texture: jax.Array  # [13, hidden]
    out: jax.Array  # [hidden, D]


class Scorers(NamedTuple):
    """The networks of all scorers: `num_slots` arrays of each kind, sharded over `model`."""

    features: jax.Array  # [slots, NUM_FEATURES, hidden / shards]
    query: jax.Array  # [slots, D, hidden / shards]
    bias: jax.Array  # [slots, hidden / shards]
    out: jax.Array  # [slots, hidden / shards], small at first


class Balance(NamedTuple):
    """The network that weighs the three scores against each other."""

    summary: jax.Array  # [NUM_SUMMARIES, hidden]
    query: jax.Array  # [D, hidden]
    out: jax.Array  # [hidden, 3]


class RelevanceParameters(NamedTuple):
    """The parameters that compute the relevance of regions."""

    coupling: Coupling
    scorers: Scorers
    balance: Balance


class Relevance(NamedTuple):
    """The relevance of the regions of each image."""

    relevance: jax.Array  # [B, regions], in [0, 1], with noise in training: for `budget`
    gate: jax.Array  # [B, regions], 1 on average, without noise: the factor of the detail
    scores: jax.Array  # [3, B, regions]
    weights: jax.Array  # [B, 3], which add up to 1


class RelevanceNetworks(nnx.Module):
    """The coupling, the scorers and the balance of a model.

    A step gives each device a copy of all scorers (`shard_copies.py`), and the device uses only its
    own slots. Checkpoints therefore do not depend on the mesh.
    """

    def __init__(self, model: ModelConfig, parameters: Parameters, *, key: jax.Array):
        assert model.vision is not None
        assert model.vision.relevance is not None
        self.config = model.vision.relevance
        coupling_key, scorers_key, balance_key = jax.random.split(key, 3)
        self.coupling = _Networks(parameters['coupling'], key=coupling_key)
        scorers = Parameters.of_encoder(model, declare_scorers(model, self.config))
        self.scorers = _Networks(scorers, key=scorers_key)
        self.balance = _Networks(parameters['balance'], key=balance_key)

    def __call__(
        self,
        texture: jax.Array,
        query_BD: jax.Array,
        layout: Layout,
        key_B: jax.Array | None = None,
    ) -> Relevance:
        """Assess the relevance of regions to the question of each sequence."""
        parameters = RelevanceParameters(
            Coupling(**self.coupling.arrays()),
            Scorers(**{name: _slots(x, layout) for name, x in self.scorers.arrays().items()}),
            Balance(**self.balance.arrays()),
        )
        return assess(texture, query_BD, parameters, shards=self.config.scorer_shards, key_B=key_B)


class _Networks(nnx.Module):
    """The parameters, by the names in their declarations."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        for index, name in enumerate(parameters.declared):
            setattr(self, name, parameters.make(name, jax.random.fold_in(key, index)))

    def arrays(self) -> dict[str, jax.Array]:
        """Return each parameter in fp32; its gradient goes to its accumulator, if it has one."""
        params = {name: x for name, x in vars(self).items() if isinstance(x, nnx.Param)}
        return {name: _in_fp32(x.get_value()) for name, x in params.items()}


def _in_fp32(x: Any) -> jax.Array:
    return value(x.weight, x.slot) if isinstance(x, Slotted) else x.astype(jnp.float32)


def _slots(copies: jax.Array, layout: Layout) -> jax.Array:
    """Return each device's own slots, given a copy of all slots [Ⓘ, slots, ...] on each device.

    Devices beyond the number of slots get slots of zeros.
    """
    shards, used, rest = len(copies), copies.shape[1], copies.shape[2:]
    own = jnp.arange(-(-used // shards) * shards).reshape(shards, -1)

    def of_device(copy: jax.Array, own: jax.Array) -> jax.Array:
        none = UNSHARDED('-' * copy.ndim)
        return copy.at[own].get(mode='fill', fill_value=0, out_sharding=none)

    slots = jax.vmap(of_device)(copies, jax.reshard(own, layout('Ⓘ-')))
    return slots.reshape(-1, *rest, out_sharding=layout('Ⓘ' + '-' * len(rest)))


def question(loss_mask_BS: jax.Array, image_index_BS: jax.Array) -> jax.Array:
    """Return the tokens of the question [B, S]: the text before the answer.

    A loss mask marks the tokens that predict a counted token, so the first marked token ends the
    question. If no token counts in the loss, all text is the question; the caller must exclude
    padding.
    """
    counts_BS = (loss_mask_BS > 0).astype(jnp.int32)
    return (jnp.cumsum(counts_BS, 1) == counts_BS) & (image_index_BS < 0)


def query(x_BTD: jax.Array, is_question_BT: jax.Array) -> jax.Array:
    """Return the sum [B, D] of the question's embeddings in fp32, scaled to an RMS of 1.

    The result has no gradient. It is 0 for a sequence without a question. If T is sharded, the sums
    of the shards are all-reduced.
    """
    weight = jnp.expand_dims(is_question_BT, 2)
    total = jnp.where(weight, lax.stop_gradient(x_BTD).astype(jnp.float32), 0).sum(1)
    square = (total * total).mean(1, keepdims=True)
    return total * lax.rsqrt(jnp.maximum(square, _EPSILON**2))


def assess(
    texture: jax.Array,
    query_BD: jax.Array,
    parameters: RelevanceParameters,
    *,
    shards: int,
    key_B: jax.Array | None = None,
) -> Relevance:
    """Assess the relevance of regions to a question from their texture [B, regions, 13].

    With `key_B`, a key for each row (`core/model/dropout.py`), relevance has Gumbel noise, the same
    on every mesh: without noise, a region that once got no detail would never get any again.
    """
    with jax.named_scope('relevance'):
        query_BD = lax.stop_gradient(query_BD)
        start = definitions(texture, query_BD, parameters.coupling)
        scores = start + _learned(texture, start, query_BD, parameters.scorers, shards)
        weights = _weigh(scores, query_BD, parameters.balance)
        weight = jnp.expand_dims(weights.swapaxes(0, 1), 2)  # [3, B, 1]
        logits = SHARPNESS * (weight * scores).sum(0)
        gate = jax.nn.softmax(logits, 1) * logits.shape[1]
        noisy = lax.stop_gradient(logits + NOISE * _gumbel(logits, key_B))
        power = jnp.exp(DECISION * (noisy - noisy.max(1, keepdims=True)))
        return Relevance(_from_zero_to_one(power), gate, scores, weights)


def definitions(texture: jax.Array, query_BD: jax.Array, coupling: Coupling) -> jax.Array:
    """Return the scores [3, B, regions] before anything is learned, each in [0, 1].

    They are the entropy of a softmax over channels, the length of the gradient, and the cosine
    between the question and a small network's output for the texture. Each is scaled by its minimum
    and maximum over one image.
    """
    log_p = jax.nn.log_softmax(texture, 2)
    propositional = _from_zero_to_one(-(jnp.exp(log_p) * log_p).sum(2))
    hidden = jax.nn.relu(einsum('brc,ch->brh', texture, coupling.texture))
    vector, asked = einsum('brh,hd->brd', hidden, coupling.out), jnp.expand_dims(query_BD, 1)
    square = (vector * vector).sum(2) * (asked * asked).sum(2)
    cosine = (vector * asked).sum(2) * lax.rsqrt(square + _EPSILON)
    return jnp.stack([propositional, texture[:, :, SALIENCY], (cosine + 1) / 2])


def _learned(
    texture: jax.Array, start: jax.Array, query_BD: jax.Array, scorers: Scorers, shards: int
) -> jax.Array:
    """Return the correction that the networks add to each score, [3, B, regions].

    The networks' features are the channels, each channel's difference from its mean over the image
    in standard deviations, and all three definitions.
    """
    difference = texture - texture.mean(1, keepdims=True)
    deviation = jnp.sqrt((difference * difference).mean(1, keepdims=True) + _EPSILON)
    known = [start[i] for i in range(len(SCORES))]
    features = jnp.concatenate([texture, difference / deviation, jnp.stack(known, 2)], 2)
    features = lax.stop_gradient(features)
    hidden = einsum('brc,scf->sbrf', features, scorers.features)
    asked = einsum('bd,sdf->sbf', query_BD, scorers.query)
    asked = asked + jnp.expand_dims(scorers.bias, 1)
    hidden = jnp.tanh(hidden + jnp.expand_dims(asked, 2))
    partial = einsum('sbrf,sf->sbr', hidden, scorers.out)
    # all-gather over model forward, nothing backward
    partial = jax.reshard(partial, UNSHARDED('---'))
    used = partial[: len(SCORES) * shards]
    shape = len(SCORES), shards, *used.shape[1:]
    return used.reshape(shape, out_sharding=UNSHARDED('----')).sum(1)


def _weigh(scores: jax.Array, query_BD: jax.Array, balance: Balance) -> jax.Array:
    """Return the weight [B, 3] of each score in the relevance of a sequence."""
    mean = scores.mean(2)
    difference = scores - jnp.expand_dims(mean, 2)
    deviation = jnp.sqrt((difference * difference).mean(2) + _EPSILON)
    rows = [x[i] for x in (mean, scores.max(2), deviation) for i in range(len(SCORES))]
    summary = jnp.stack(rows, 1)
    hidden = einsum('bi,ih->bh', summary, balance.summary)
    hidden = jax.nn.relu(hidden + einsum('bd,dh->bh', query_BD, balance.query))
    return jax.nn.softmax(einsum('bh,hi->bi', hidden, balance.out), 1)


def _gumbel(like: jax.Array, key_B: jax.Array | None) -> jax.Array | float:
    """Draw Gumbel noise [B, regions] from each sequence's key, or return 0 without keys."""
    keys = fold_in(key_B, _NOISE)
    if keys is None:
        return 0.0
    return jax.vmap(lambda key: jax.random.gumbel(key, like.shape[1:]))(keys)


def _from_zero_to_one(x: jax.Array) -> jax.Array:
    """Scale each row to [0, 1] by its minimum and maximum; if they are equal, return 0."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    return (x - low) / (high - low + _EPSILON)
