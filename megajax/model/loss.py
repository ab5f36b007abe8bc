"""Cross entropy on logits that are sharded over the vocabulary and never whole: not on a device, not in time.

B batch, S sequence, D model, V vocabulary (padded), T sequence shards, C tokens of a chunk.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import P, lax

from megajax.config import Config
from megajax.config.chunks import num_chunks
from megajax.model.linear import add_bias
from megajax.model.product import product
from megajax.parallel import layout
from megajax.parallel.layout import Layout

LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a model, from its last hidden states.

    `label_smoothing` mixes the label with the uniform distribution over the real vocabulary; `z_loss` adds its multiple of the
    squared log of the softmax's denominator (Chowdhery et al., 2022).
    """

    vocab_size: int
    label_smoothing: float
    z_loss: float
    layout: Layout

    @classmethod
    def of(cls, config: Config) -> 'Loss':
        return cls(
            vocab_size=config.model.vocab_size,
            label_smoothing=config.loss.label_smoothing,
            z_loss=config.loss.z_loss,
            layout=Layout.of(config),
        )

    def per_token(self, logits: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is minimised, and the plain negative log-likelihood in nats, both in fp32.

        logits [B, ..., V] sharded over V, label [B, ...]: three all-reduces of the size of `label` forward, none backward.
        """
        token = self._token_ids(logits)
        top = lax.stop_gradient(logits.max(-1))  # all-reduce of [B, ...]
        log_total = jnp.log(jnp.exp(logits - top[..., None]).sum(-1)) + top  # all-reduce of [B, ...]
        nll = log_total - jnp.where(token == label[..., None], logits, 0).sum(-1)  # all-reduce of [B, ...]
        objective = nll
        if self.label_smoothing:
            mean = jnp.where(token < self.vocab_size, logits, 0).sum(-1) / self.vocab_size  # all-reduce of [B, ...]
            objective = (1 - self.label_smoothing) * nll + self.label_smoothing * (log_total - mean)
        if self.z_loss:
            objective = objective + self.z_loss * jnp.square(log_total)
        return objective, nll

    def logits(self, x: jax.Array, head_DV: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
        """Logits [B, ..., V] of x [B, ..., D] in fp32, sharded over V: no communication. Those of padding are the lowest number."""
        logits = product(x, head_DV, 1, self.layout.logit_BSV(x), jnp.float32)
        if bias_V is not None:
            logits = add_bias(logits, jnp.expand_dims(bias_V, tuple(range(logits.ndim - 1))))
        if self.vocab_size == head_DV.shape[-1]:
            return logits
        return jnp.where(self._token_ids(logits) < self.vocab_size, logits, LOWEST)

    def _token_ids(self, logits: jax.Array) -> jax.Array:
        token_V = jnp.arange(logits.shape[-1], out_sharding=self.layout.vocab_V)
        return jnp.expand_dims(token_V, tuple(range(logits.ndim - 1)))

    def __call__(
        self, x_BSD: jax.Array, head_VD: jax.Array, label_BS: jax.Array, weight_BS: jax.Array, bias_V: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Sums over tokens, weighted by `weight_BS`: of what is minimised, and of the negative log-likelihood.

        x_BSD is in the residual placement. Memory holds the logits of one chunk of tokens at a time: where a gradient is
        wanted it is computed in the same pass, so nothing is computed twice.
        """
        return _sum_over_tokens(x_BSD, (head_VD.T, bias_V), label_BS, weight_BS, self)


Sums = tuple[jax.Array, jax.Array]
Head = tuple[jax.Array, jax.Array | None]  # head_DV and bias_V


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_over_tokens(x_BSD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, loss: Loss) -> Sums:
    def add_chunk(sums: Sums, chunk: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        x, label, weight = chunk
        return _add(sums, _sum_over_chunk(x, head, label, weight, loss)), None

    sums, _ = lax.scan(add_chunk, _zero_sums(), _chunks(x_BSD, head, label_BS, weight_BS, loss.layout))
    return sums


def _forward(x_BSD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, loss: Loss) -> tuple[Sums, tuple[jax.Array, Head]]:
    chunk_with_gradient = jax.value_and_grad(_sum_over_chunk, argnums=(0, 1), has_aux=True)

    def add_chunk(carry: tuple[Sums, Head], chunk: tuple[jax.Array, ...]) -> tuple[tuple[Sums, Head], jax.Array]:
        (sums, dhead), (x, label, weight) = carry, chunk
        new_sums, (dx, new_dhead) = chunk_with_gradient(x, head, label, weight, loss)
        return (_add(sums, new_sums), jax.tree.map(jnp.add, dhead, new_dhead)), dx

    chunks = _chunks(x_BSD, head, label_BS, weight_BS, loss.layout)
    (sums, dhead), dx_NBTCD = lax.scan(add_chunk, (_zero_sums(), jax.tree.map(jnp.zeros_like, head)), chunks)
    dx_BSD = jnp.moveaxis(dx_NBTCD, 0, 2).reshape(x_BSD.shape, out_sharding=jax.typeof(x_BSD).sharding.spec)
    return sums, (dx_BSD, dhead)


def _backward(loss: Loss, saved: tuple[jax.Array, Head], dsums: Sums) -> tuple[jax.Array, Head, None, None]:
    dx_BSD, dhead = saved
    dobjective, _ = dsums
    return (dx_BSD * dobjective).astype(dx_BSD.dtype), jax.tree.map(lambda g: g * dobjective, dhead), None, None


_sum_over_tokens.defvjp(_forward, _backward)


def _sum_over_chunk(x_BTCD: jax.Array, head: Head, label_BTC: jax.Array, weight_BTC: jax.Array, loss: Loss) -> Sums:
    with jax.named_scope('head'):
        # f: nothing forward, all-reduce backward (SP: all-gather forward, reduce-scatter backward)
        x_BTCD = jax.reshard(x_BTCD, loss.layout.full_BSD(x_BTCD))
        logits_BTCV = loss.logits(x_BTCD, *head)
    objective_BTC, nll_BTC = loss.per_token(logits_BTCV, label_BTC)
    return (objective_BTC * weight_BTC).sum(), (nll_BTC * weight_BTC).sum()


def _chunks(x_BSD: jax.Array, head: Head, label_BS: jax.Array, weight_BS: jax.Array, layout: Layout) -> tuple[jax.Array, ...]:
    """Equal chunks of tokens, first dim the chunk; each takes its share of every sequence shard, so that it stays sharded."""
    batch, length, _ = x_BSD.shape
    shards = layout.model_size if layout.sequence_parallel else 1
    logit_bytes = 4 * batch * length * head[0].shape[-1] // layout.model_size
    tokens = length // shards
    parts = num_chunks(logit_bytes, tokens)

    def split(x: jax.Array, spec: P) -> jax.Array:
        x = x.reshape(batch, shards, parts, tokens // parts, *x.shape[2:], out_sharding=spec)
        return jnp.moveaxis(x, 2, 0)

    token_spec = layout.chunked_token_BTNC(label_BS)
    return split(x_BSD, layout.chunked_BTNCD(x_BSD)), split(label_BS, token_spec), split(weight_BS, token_spec)


def _zero_sums() -> Sums:
    zero = jnp.zeros((), out_sharding=layout.SCALAR)
    return zero, zero


def _add(a: Sums, b: Sums) -> Sums:
    return a[0] + b[0], a[1] + b[1]
