"""Where each array lies: every PartitionSpec of the project.

B batch, S sequence, D model, N query heads, K key/value heads, C = G + 2 columns of a head group (G queries, one key, one value),
H head dim, F feed-forward, V vocabulary. On the mesh, `data` shards the batch and `model` what the specs below say.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
from jax import P

from megajax.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Megatron's placement of weights and activations.

    Column-parallel weights shard what they make, row-parallel ones what they contract. With `sequence_parallel`, what lies
    between the products is sharded over the sequence. An activation's batch dim stays where the array that it follows has it.
    """

    model_size: int = 1
    sequence_parallel: bool = False
    shard_kv_heads: bool = True

    @classmethod
    def of(cls, config: Config) -> 'Layout':
        """The layout that `config.mesh` asks for; with fewer key/value heads than `model`, these are replicated as needed."""
        mesh = config.mesh
        return cls(
            model_size=mesh.model,
            sequence_parallel=mesh.sequence_parallel and mesh.model > 1,
            shard_kv_heads=config.model.num_kv_heads % mesh.model == 0,
        )

    vocab_VD = P('model', None)
    mlp_up_DF = P(None, 'model')
    mlp_gated_up_DCF = P(None, None, 'model')
    mlp_down_FD = P('model', None)
    attention_out_NHD = P('model', None, None)
    vector_D = P(None)
    vocab_V = P('model')
    position_SD = P(None, None)
    whole_DE = P(None, None)  # of BERT's heads
    copies_TD = P('model', None)  # a copy of a vector on each shard, see `model/vector.py`
    copies_TSD = P('model', None, None)

    @property
    def qkv_DKCH(self) -> P:
        """Whole head groups per shard, or a slice of every head where there are fewer groups than shards."""
        return P(None, 'model', None, None) if self.shard_kv_heads else P(None, None, None, 'model')

    def bias(self, weight: P) -> P:
        """The bias of a column-parallel weight lies where its columns lie."""
        return P(*weight[1:])

    def columns(self, like: jax.Array, weight: P) -> P:
        """What a column-parallel product makes."""
        return P(batch_axis(like), None, *weight[1:])

    def residual_BSD(self, like: jax.Array) -> P:
        """Between the products: replicated over `model`, or sharded over the sequence."""
        return P(batch_axis(like), *self.residual_SD)

    @property
    def residual_SD(self) -> P:
        """The residual stream of one sequence."""
        return P('model' if self.sequence_parallel else None, None)

    def full_BSD(self, like: jax.Array) -> P:
        """What a column-parallel product reads: the whole sequence, replicated over `model`."""
        return P(batch_axis(like), *(None,) * (max(like.ndim, 3) - 1))

    def logit_BSV(self, like: jax.Array) -> P:
        """Logits stay sharded over the vocabulary."""
        return P(batch_axis(like), *(None,) * (like.ndim - 2), 'model')

    def heads_BSNH(self, like: jax.Array) -> P:
        """Attention has whole heads, sharded over `model`."""
        return P(batch_axis(like), None, 'model', None)

    def split_BSNH(self, like: jax.Array) -> P:
        """Query heads as the QKV product makes them: whole heads, or with few key/value heads a slice of each."""
        return self.heads_BSNH(like) if self.shard_kv_heads else P(batch_axis(like), None, None, 'model')

    def whole_BSKH(self, like: jax.Array) -> P:
        """Key/value heads on every shard."""
        return P(batch_axis(like), None, None, None)

    def by_shard_BTSD(self, like: jax.Array) -> P:
        """The residual stream as [batch, sequence shard, its tokens, D]."""
        return P(batch_axis(like), *self.residual_SD, None)

    def chunked_BTNCD(self, like: jax.Array) -> P:
        """The residual stream as [batch, sequence shard, chunk, token, D], see `loss.py`."""
        return P(batch_axis(like), *self.residual_SD, None, None)

    def chunked_token_BTNC(self, like: jax.Array) -> P:
        """The labels that belong to it, on every shard."""
        return P(batch_axis(like), None, None, None)


SCALAR = P()
BATCH = P('data', None)
DATA_SHARDS = P('data')


def of_axes(axes: Iterable[str | Sequence[str] | None]) -> P:
    """The placement with these mesh axes, one entry for each dim, which may be sharded over several."""
    return P(*(axis if axis is None or isinstance(axis, str) else tuple(axis) for axis in axes))


def replicated(x: jax.Array) -> P:
    """The whole array on every device."""
    return P(*(None,) * x.ndim)


def whole_rows(x: jax.Array) -> P:
    """Each row whole, where its data shard is."""
    return P(batch_axis(x), *(None,) * (x.ndim - 1))


def transposed_logits_VB(x: jax.Array) -> P:
    """Logits of one position, sharded over the vocabulary, which comes first."""
    return P('model', batch_axis(x))


def per_data_shard(x: jax.Array) -> P:
    """One array like x for each data shard, stacked: [data, *x.shape]."""
    return P('data', *jax.typeof(x).sharding.spec)


def sharded_over_data(x: jax.Array, num_data: int) -> P:
    """The placement of x with its largest free dim sharded over `data` too (ZeRO-1)."""
    spec = jax.typeof(x).sharding.spec
    free = [dim for dim, axis in enumerate(spec) if axis is None and x.shape[dim] % num_data == 0]
    largest = max(free, key=lambda dim: x.shape[dim])
    return P(*spec[:largest], 'data', *spec[largest + 1 :])


def whole_over_data(x: jax.Array) -> P:
    """The placement of x without `data`."""
    return P(*(None if axis == 'data' else axis for axis in jax.typeof(x).sharding.spec))


def microbatches(x: jax.Array) -> P:
    """A global batch [batch, ...] as [data shard, microbatch, row, ...]."""
    return P('data', *(None,) * (x.ndim + 1))


def batch_axis(x: jax.Array) -> str | None:
    """The mesh axis that the first dim of x lies on; None inside the train step, where each data shard is on its own."""
    return jax.typeof(x).sharding.spec[0]


def model_dim(x: jax.Array) -> int:
    """The dim of x that is sharded over `model`."""
    return tuple(jax.typeof(x).sharding.spec).index('model')


def copies(x: jax.Array) -> P:
    """Vectors [..., D] with a copy on each shard of `model`: [..., T, D]."""
    *rest, last = jax.typeof(x).sharding.spec
    return P(*rest, 'model', last)


def without_first(x: jax.Array) -> P:
    """The placement of x without its first dim."""
    return P(*jax.typeof(x).sharding.spec[1:])


def merged_rows(x: jax.Array) -> P:
    """[data shard, row, ...] as [rows of all, ...]."""
    shards, _, *rest = jax.typeof(x).sharding.spec
    return P(shards, *rest)


def split_rows(x: jax.Array) -> P:
    """[rows of all, ...] as [data shard, row, ...]."""
    shards, *rest = jax.typeof(x).sharding.spec
    return P(shards, None, *rest)


def by_group(x_BSNH: jax.Array) -> P:
    """Query heads cut into [key/value head, query of its group]: the former lie where the heads lay."""
    *rest, head_dim = jax.typeof(x_BSNH).sharding.spec
    return P(*rest, None, head_dim)


def with_rows_of(x: jax.Array, y: jax.Array, num_dims: int) -> P:
    """The placement of y with its first dims as those of x."""
    return P(*jax.typeof(x).sharding.spec[:num_dims], *jax.typeof(y).sharding.spec[num_dims:])
