"""Choose the next token of each sequence from logits that are sharded over the vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config import ConfigError
from megajax.core.model.platform import with_fast_rows
from megajax.core.parallel.layout import Layout

# A lower temperature is 0: logits divided by it overflow, and only the most probable token is left.
_COLDEST = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule by which a token is chosen: the most probable one at temperature 0, else at random.

    `top_k` keeps the k most probable tokens; of these, `top_p` keeps the smallest set whose
    probabilities add up to p (Holtzman et al., 2020). Raises ConfigError for values that leave no
    token to choose.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float('inf'):
            problems.append(
                f'temperature {self.temperature} is negative or not finite: '
                'use 0 for the most probable token, or 0.8'
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(f'top-k {self.top_k} leaves no token: use at least 1')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f'top-p {self.top_p} must be above 0 and at most 1')
        if problems:
            raise ConfigError(*problems)


def head_logits(x_BD: jax.Array, head_Vd: jax.Array, layout: Layout) -> jax.Array:
    """Return logits [B, V] in fp32, sharded over the vocabulary, without communication.

    They equal the result of `Loss.logits`, but include the vocabulary's padding. The head is the
    left operand and is not transposed: on a CPU, this matmul took between 25% and 100% of the time
    of x times the transposed head.
    """
    x_BSD = jnp.expand_dims(x_BD, 1)
    with_zeros = with_fast_rows(x_BSD, 1, x_BD.shape[0] // layout.num_shards('B'))
    if with_zeros is not x_BSD:
        return _logits(head_Vd, with_zeros, 'VBS', layout)[..., 0].T
    return _logits(head_Vd, x_BD, 'VB', layout).T


def _logits(head_Vd: jax.Array, x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    return lax.dot_general(
        head_Vd,
        x,
        (((1,), (x.ndim - 1,)), ((), ())),
        preferred_element_type=jnp.float32,
        out_sharding=layout(dims),
    )


def choose(
    logits_BV: jax.Array, key_B: jax.Array, sampling: Sampling, vocab_size: int, layout: Layout
) -> jax.Array:
    """Choose a token [B] below `vocab_size` for each sequence.

    The token is the same on every mesh and in every batch, because each sequence has its own key.
    """
    if sampling.temperature < _COLDEST:
        return most_probable(logits_BV, vocab_size, layout)
    # all-gather over model, of one position
    logits_BV = jax.reshard(logits_BV, layout('Bv'))[:, :vocab_size] / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < vocab_size:
        lowest_B1 = lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits_BV = _keep_top_p(logits_BV, sampling.top_p)
    return jax.vmap(jax.random.categorical)(key_B, logits_BV).astype(jnp.int32)


def most_probable(logits: jax.Array, vocab_size: int, layout: Layout) -> jax.Array:
    """Return the token [B, ...] with the highest of the logits [B, ..., V], the first if several.

    This takes two all-reduces of [B, ...] over `model`.
    """
    token_V = jnp.arange(logits.shape[-1], dtype=jnp.int32, out_sharding=layout('V'))
    token = jnp.expand_dims(token_V, tuple(range(logits.ndim - 1)))
    logits = jnp.where(token < vocab_size, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == top, token, vocab_size - 1), axis=-1)


def row_keys(key: jax.Array, row_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """Return a key for each sequence, which depends on the sequence and on the token's position."""
    return jax.vmap(
        lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position)
    )(row_B, position_B)


def _keep_top_p(logits_BV: jax.Array, top_p: float) -> jax.Array:
    falling_BV = -jnp.sort(-logits_BV, axis=-1)
    probability_BV = jax.nn.softmax(falling_BV, axis=-1)
    # The total probability of all tokens that are more probable.
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
    lowest_B1 = jnp.min(jnp.where(before_BV < top_p, falling_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
