"""Cross entropy on logits that are sharded over the vocabulary and never fully materialized.

No device has all columns, and the logits are computed in chunks of tokens, so that the logits of
all tokens are never in memory at once.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config import Config
from megajax.core.counts.chunks import chunk_sizes
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.grid import is_grid
from megajax.core.model.linear import add_bias
from megajax.core.model.platform import is_on_cpu
from megajax.core.model.product import product
from megajax.core.parallel.layout import UNSHARDED, Layout

LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a model, from its last hidden states.

    `label_smoothing` mixes the label with the uniform distribution over the unpadded vocabulary.
    `z_loss` is the factor of an added term, the squared log of the softmax's denominator (Chowdhery
    et al., 2022).
    """

    vocab_size: int
    layout: Layout
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    is_head_frozen: bool = False

    @classmethod
    def of(cls, config: Config, layout: Layout) -> 'Loss':
        """Return the loss of a run's config."""
        return cls(
            vocab_size=config.model.vocab_size,
            label_smoothing=config.loss.label_smoothing,
            z_loss=config.loss.z_loss,
            is_head_frozen=config.model.is_decoder_frozen,
            layout=layout,
        )

    def per_token(self, logits: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the objective to minimize and the negative log-likelihood in nats, both in fp32.

        `logits` [B, ..., V] are sharded over V; `label` is [B, ...]. There are three all-reduces of
        `label`'s size forward, and none backward.
        """
        token = self._token_ids(logits)
        nll, log_total = _nll(logits, label, token)
        objective = nll
        if self.label_smoothing:
            mean = jnp.where(token < self.vocab_size, logits, 0).sum(-1) / self.vocab_size
            objective = (1 - self.label_smoothing) * nll + self.label_smoothing * (log_total - mean)
        if self.z_loss:
            objective = objective + self.z_loss * jnp.square(log_total)
        return objective, nll

    def logits(
        self,
        x: jax.Array,
        head_dV: jax.Array | Slotted,
        bias_V: jax.Array | None = None,
        rows: str = 'BS',
    ) -> jax.Array:
        """Return logits [*rows, V] of x [*rows, d] in fp32, sharded over V, without communication.

        The logits of the vocabulary's padding are the lowest fp32 number.
        """
        logits = product(f'{rows}d,dV->{rows}V', x, head_dV, self.layout, jnp.float32)
        if bias_V is not None:
            logits = add_bias(logits, jnp.expand_dims(bias_V, tuple(range(logits.ndim - 1))))
        if self.vocab_size == logits.shape[-1]:
            return logits
        return jnp.where(self._token_ids(logits) < self.vocab_size, logits, LOWEST)

    def _token_ids(self, logits: jax.Array) -> jax.Array:
        token_V = jnp.arange(logits.shape[-1], out_sharding=self.layout('V'))
        return jnp.expand_dims(token_V, tuple(range(logits.ndim - 1)))

    def __call__(
        self,
        x_BTD: jax.Array,
        head_Vd: jax.Array,
        label_BS: jax.Array,
        weight_BS: jax.Array,
        bias_V: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Sum the objective and the negative log-likelihood over tokens, weighted by `weight_BS`.

        Memory holds the logits of one chunk of tokens at a time. If a gradient is needed, it is
        computed in the same pass, so nothing is computed twice.
        """
        return _sum_over_tokens(x_BTD, (head_Vd.T, bias_V), label_BS, weight_BS, self)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of each label in nats, in fp32.

    `logits` are [..., V] and `labels` [...]. This is
    `optax.softmax_cross_entropy_with_integer_labels` for logits that are sharded over V, as a
    model's logits are; optax raises a ShardingTypeError for sharded logits.
    """
    logits = logits.astype(jnp.float32)
    vocabulary = UNSHARDED.like(jax.typeof(logits).sharding.spec, '*V->V')
    token_V = jnp.arange(logits.shape[-1], out_sharding=vocabulary)
    return _nll(logits, labels, jnp.expand_dims(token_V, tuple(range(logits.ndim - 1))))[0]


def _nll(logits: jax.Array, label: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood, and the logarithm of the softmax's denominator.

    `token` has the ids of the logits. Each reduction over V is an all-reduce of `label`'s size.
    """
    top = lax.stop_gradient(logits.max(-1))
    log_total = jnp.log(jnp.exp(logits - top[..., None]).sum(-1)) + top
    return log_total - jnp.where(token == label[..., None], logits, 0).sum(-1), log_total


Sums = tuple[jax.Array, jax.Array]
Head = tuple[jax.Array, jax.Array | None]  # head_dV and bias_V
Chunk = tuple[jax.Array, ...]  # x, labels and weights of some tokens of every shard of T


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_over_tokens(
    x_BTD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, loss: Loss
) -> Sums:
    of_chunk = partial(_sum_over_chunk, cast_dV=head[0].astype(x_BTD.dtype), loss=loss)

    def add_chunk(sums: Sums, chunk: Chunk) -> tuple[Sums, None]:
        x, label, weight = chunk
        return jax.tree.map(jnp.add, sums, of_chunk(x, head, label, weight)), None

    chunks = _chunks(x_BTD, head, label_BS, weight_BS, loss.layout)
    sums, _ = lax.scan(add_chunk, _zero_sums(loss.layout), chunks)
    return sums


def _forward(
    x_BTD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, loss: Loss
) -> tuple[Sums, tuple[jax.Array, Head | None]]:
    wanted = (0,) if loss.is_head_frozen else (0, 1)
    of_chunk = partial(_sum_over_chunk, cast_dV=head[0].astype(x_BTD.dtype), loss=loss)
    chunk_with_gradient = jax.value_and_grad(of_chunk, argnums=wanted, has_aux=True)

    def add_chunk(
        carry: tuple[Sums, list[Head]], chunk: Chunk
    ) -> tuple[tuple[Sums, list[Head]], jax.Array]:
        (sums, dhead), (x, label, weight) = carry, chunk
        new_sums, (dx, *new_dhead) = chunk_with_gradient(x, head, label, weight)
        return jax.tree.map(jnp.add, (sums, dhead), (new_sums, new_dhead)), dx

    chunks = _chunks(x_BTD, head, label_BS, weight_BS, loss.layout)
    learned = [] if loss.is_head_frozen else [head]
    zeros = _zero_sums(loss.layout), jax.tree.map(jnp.zeros_like, learned)
    (sums, dhead), dx = lax.scan(add_chunk, zeros, chunks)
    return sums, (_join(dx, x_BTD, loss.layout), dhead[0] if dhead else None)


def _backward(
    loss: Loss, saved: tuple[jax.Array, Head | None], dsums: Sums
) -> tuple[jax.Array, Head | None, None, None]:
    dx_BTD, dhead = saved
    dobjective, _ = dsums
    dx_BTD = (dx_BTD * dobjective).astype(dx_BTD.dtype)
    return dx_BTD, dhead and jax.tree.map(lambda g: g * dobjective, dhead), None, None


_sum_over_tokens.defvjp(_forward, _backward)


def _sum_over_chunk(
    x: jax.Array,
    head: Head,
    label: jax.Array,
    weight: jax.Array,
    *,
    cast_dV: jax.Array,
    loss: Loss,
) -> Sums:
    """Return the two weighted sums over x [B, shards of T, tokens, D].

    `cast_dV` is the head's weight in the dtype of x, cast once for all chunks. The weight in `head`
    is not read; it only gets the gradient, in fp32. Every device has the labels and weights of all
    shards.
    """
    head_dV, bias_V = head
    with jax.named_scope('head'):
        # f: nothing forward, all-reduce backward (SP: all-gather forward, reduce-scatter backward)
        if not is_grid(loss.layout):  # with a grid, the matmul reduces over both axes
            x = jax.reshard(x, loss.layout('BS-d'))
        logits = loss.logits(x, Slotted(weight=cast_dV, slot=head_dV), bias_V, rows='BS-')
    objective, nll = loss.per_token(logits, label)
    return (objective * weight).sum(), (nll * weight).sum()


def _chunks(
    x_BTD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, layout: Layout
) -> Chunk:
    """Cut the tokens into equal chunks, along a new first dim; padding has weight 0.

    Each chunk has a part of every shard of the sequence, so that it stays sharded.
    """
    batch, length, _ = x_BTD.shape
    shards = layout.num_shards('T')
    logit_bytes = 4 * batch * length * head[0].shape[-1] // layout.num_shards('V')
    tokens = length // shards
    count, size = chunk_sizes(logit_bytes, tokens, on_gpu=not is_on_cpu(x_BTD))

    def split(x: jax.Array, rows: str, rest: str = '') -> jax.Array:
        if padding := count * size - tokens:
            shape = batch, shards, tokens, *x.shape[2:]
            x = x.reshape(shape, out_sharding=layout(f'{rows}-{rest}'))
            x = jnp.pad(x, [(0, padding) if dim == 2 else (0, 0) for dim in range(x.ndim)])
        shape = batch, shards, count, size, *x.shape[2 + bool(padding) :]
        return jnp.moveaxis(x.reshape(shape, out_sharding=layout(f'{rows}--{rest}')), 2, 0)

    return split(x_BTD, 'BT', 'D'), split(label_BS, 'BS'), split(weight_BS, 'BS')


def _join(chunks: jax.Array, x_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Join the chunks of `_chunks` into an array like x_BTD."""
    count, batch, shards, size, width = chunks.shape
    tokens = x_BTD.shape[1] // shards
    joined = jnp.moveaxis(chunks, 0, 2)
    if count * size > tokens:
        shape = batch, shards, count * size, width
        joined = joined.reshape(shape, out_sharding=layout('BT-D'))[:, :, :tokens]
    return joined.reshape(x_BTD.shape, out_sharding=layout('BTD'))


def _zero_sums(layout: Layout) -> Sums:
    zero = jnp.zeros((), out_sharding=layout(''))
    return zero, zero
