"""Megatron-LM by hand: what one device computes, with every collective where the papers put it.

Read it beside `megajax/core/model`, where XLA finds these collectives from the places of the
weights; `test_by_hand.py` shows that outputs and gradients are the same. Tensor parallelism is that
of Shoeybi et al. (2019); `sp` turns on the sequence parallelism of Korthikanti et al. (2022). Every
function runs inside `jax.shard_map` and sees the shards of its device. Weights have megatron-core's
names and layout: a linear weight is [out, in].

The backward pass needs no code. In `shard_map` the type of a value tells over which mesh axes it
varies, and a collective's transpose is the one that Megatron pairs it with: of
`pcast(to='varying')`, which does nothing, `psum`; of `psum`, `pcast`; of `all_gather`,
`psum_scatter`, and the reverse.

`rung` turns on ZeRO (Rajbhandari et al., 2020), of which the numbers are the parts that data shards
keep: 2 of gradients, 3 of weights too. Then a device has a part of each matrix's D besides.

B batch, S sequence, R this device's part of the sequence in the residual stream (S; with SP S / t),
D model; and this device's share of F feed-forward, K key/value heads, V vocabulary; C = G + 2 (G
queries, one key, one value), H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import P, lax

from megajax.core.config import ModelConfig

Weights = dict[str, jax.Array]

SHARDED = {
    'word_embeddings.weight': P('model', None),
    'linear_qkv.weight': P(
        'model', None
    ),  # column-parallel: the rows of [out, in], whole head groups
    'linear_qkv.bias': P('model'),
    'linear_proj.weight': P(None, 'model'),  # row-parallel: the columns of [out, in]
    'linear_fc1.weight': P('model', None),
    'linear_fc1.bias': P('model'),
    'linear_fc2.weight': P(None, 'model'),
}


# The dim of D in [out, in], or [vocabulary, D], which ZeRO cuts over `data`.
ZERO_DIM = {
    'word_embeddings.weight': 1,
    'linear_qkv.weight': 1,
    'linear_proj.weight': 0,
    'linear_fc1.weight': 1,
    'linear_fc2.weight': 0,
}


def spec(name: str, rung: int = 0) -> P:
    """How a weight is cut; norms, row-parallel biases and positions are not: every device has a
    copy.
    """
    over_model = SHARDED.get(kind(name), P())
    if not rung or kind(name) not in ZERO_DIM:
        return over_model
    return P(
        *('data' if dim == ZERO_DIM[kind(name)] else axis for dim, axis in enumerate(over_model))
    )


def kind(name: str) -> str:
    """The last two parts of a name, which say what a weight is."""
    return '.'.join(name.split('.')[-2:])


def f(x_BRD: jax.Array, sp: bool) -> jax.Array:
    """Enter a column-parallel matmul: identity forward, all-reduce backward.

    With SP, all-gather forward and reduce-scatter backward.
    """
    if sp:
        return lax.all_gather(x_BRD, 'model', axis=1, tiled=True)
    return lax.pcast(x_BRD, 'model', to='varying')


def g(partial_BSD: jax.Array, sp: bool) -> jax.Array:
    """Leave a row-parallel matmul: all-reduce forward, identity backward.

    With SP, reduce-scatter forward and all-gather backward.
    """
    if sp:
        return lax.psum_scatter(partial_BSD, 'model', scatter_dimension=1, tiled=True)
    return lax.psum(partial_BSD, 'model')


def gather(weights: Weights) -> Weights:
    """Join the parts that data shards have. Forward all-gather, backward reduce-scatter."""
    return {
        name: lax.all_gather(weight, 'data', axis=ZERO_DIM[kind(name)], tiled=True)
        if kind(name) in ZERO_DIM
        else weight
        for name, weight in weights.items()
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def use_joined(weight: jax.Array, part: jax.Array, dim: int) -> jax.Array:
    """A weight that was joined before.

    Forward nothing, backward reduce-scatter: each use sums its gradient into the part.
    """
    return weight


use_joined.defvjp(
    lambda weight, part, dim: (weight, None),
    lambda dim, _, gradient: (
        jnp.zeros_like(gradient),
        lax.psum_scatter(gradient, 'data', scatter_dimension=dim, tiled=True),
    ),
)


def reduce_gradients(weights: Weights, sp: bool, rung: int = 0) -> Weights:
    """Once per step. Forward nothing, backward all-reduce what devices with a copy of a weight
    found from different tokens.

    Over `data` these are all weights. With SP over `model` too, those that meet the residual
    stream: each device saw its part of the sequence alone. Megatron does this one in
    `finalize_model_grads`, and it is the one that is easily forgotten.
    """
    axes = {name: ('data', 'model') if sp and spec(name) == P() else ('data',) for name in weights}
    return {
        name: weight
        if rung and kind(name) in ZERO_DIM
        else lax.pcast(weight, axes[name], to='varying')
        for name, weight in weights.items()
    }


def column_parallel_linear(x_BSD: jax.Array, weight_FD: jax.Array, bias_F: jax.Array) -> jax.Array:
    """Multiply all columns of X to this device's columns of Y: Y = [X A_1, X A_2]."""
    return jnp.einsum('bsd,fd->bsf', x_BSD, weight_FD) + bias_F[None, None]


def row_parallel_linear(
    x_BSF: jax.Array, weight_DF: jax.Array, bias_D: jax.Array, sp: bool
) -> jax.Array:
    """Multiply this device's columns of X, and sum over devices: Y = X_1 A_1 + X_2 A_2.

    The bias is added once, after the sum.
    """
    return g(jnp.einsum('bsf,df->bsd', x_BSF, weight_DF), sp) + bias_D[None, None]


def layer_norm(x_BRD: jax.Array, weights: Weights, name: str, eps: float) -> jax.Array:
    """The same on every device; with SP each has other tokens."""
    mean, variance = x_BRD.mean(-1, keepdims=True), x_BRD.var(-1, keepdims=True)
    weight_D, bias_D = weights[f'{name}.weight'], weights[f'{name}.bias']
    return (x_BRD - mean) / jnp.sqrt(variance + eps) * weight_D[None, None] + bias_D[None, None]


def self_attention(x_BSD: jax.Array, weights: Weights, config: ModelConfig, sp: bool) -> jax.Array:
    """Return attention's output; between the two matmuls, each device computes its own heads."""
    batch, length, _ = x_BSD.shape
    qkv_BSF = column_parallel_linear(
        x_BSD, weights['linear_qkv.weight'], weights['linear_qkv.bias']
    )
    qkv_BSKCH = qkv_BSF.reshape(batch, length, -1, config.queries_per_kv + 2, config.head_dim)
    q_BSKGH, k_BSKH, v_BSKH = (
        qkv_BSKCH[:, :, :, :-2],
        qkv_BSKCH[:, :, :, -2],
        qkv_BSKCH[:, :, :, -1],
    )
    score_BKGST = jnp.einsum('bskgh,btkh->bkgst', q_BSKGH, k_BSKH) / config.head_dim**0.5
    causal_ST = jnp.tril(jnp.ones((length, length), bool))
    weight_BKGST = jax.nn.softmax(
        jnp.where(causal_ST[None, None, None], score_BKGST, -jnp.inf), axis=-1
    )
    o_BSF = jnp.einsum('bkgst,btkh->bskgh', weight_BKGST, v_BSKH).reshape(batch, length, -1)
    return row_parallel_linear(
        o_BSF, weights['linear_proj.weight'], weights['linear_proj.bias'], sp
    )


def mlp(x_BSD: jax.Array, weights: Weights, sp: bool) -> jax.Array:
    """Return g(GELU(f(X) A) B); GELU gets complete sums, because A is split by columns."""
    h_BSF = column_parallel_linear(x_BSD, weights['linear_fc1.weight'], weights['linear_fc1.bias'])
    return row_parallel_linear(
        jax.nn.gelu(h_BSF), weights['linear_fc2.weight'], weights['linear_fc2.bias'], sp
    )


def transformer_layer(
    x_BRD: jax.Array, weights: Weights, config: ModelConfig, sp: bool
) -> jax.Array:
    """Two branches between f and g.

    Over `model`: two all-reduces forward and two backward (SP: as many pairs of gather and
    scatter).
    """
    h_BRD = layer_norm(x_BRD, weights, 'input_layernorm', config.norm_eps)
    x_BRD = x_BRD + self_attention(f(h_BRD, sp), under('self_attention', weights), config, sp)
    h_BRD = layer_norm(x_BRD, weights, 'pre_mlp_layernorm', config.norm_eps)
    return x_BRD + mlp(f(h_BRD, sp), under('mlp', weights), sp)


def own_rows(id_BS: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The row of each id in this device's share of the vocabulary, and whether it is there; where
    not, the row is 0.
    """
    row_BS = id_BS - lax.axis_index('model') * num_rows
    mine_BS = (row_BS >= 0) & (row_BS < num_rows)
    return jnp.where(mine_BS, row_BS, 0), mine_BS


def vocab_parallel_embedding(table_VD: jax.Array, token_BS: jax.Array, sp: bool) -> jax.Array:
    """Each device looks up the tokens that it has, zero for the others, and g adds: all-reduce (SP:
    reduce-scatter).
    """
    row_BS, mine_BS = own_rows(token_BS, table_VD.shape[0])
    return g(jnp.where(mine_BS[..., None], table_VD[row_BS], 0), sp)


def position_embedding(table_SD: jax.Array, x_BRD: jax.Array, sp: bool) -> jax.Array:
    """The positions of this device's part of the sequence; no communication."""
    first = lax.axis_index('model') * x_BRD.shape[1] if sp else 0
    return x_BRD + lax.dynamic_slice_in_dim(table_SD, first, x_BRD.shape[1])[None]


def vocab_parallel_cross_entropy(logit_BSV: jax.Array, label_BS: jax.Array) -> jax.Array:
    """The loss of each token.

    Three all-reduces of [B, S] forward, none backward; logits are never gathered.
    """
    row_BS, mine_BS = own_rows(label_BS, logit_BSV.shape[-1])
    logit_BSV = logit_BSV - lax.pmax(lax.stop_gradient(logit_BSV).max(-1), 'model')[..., None]
    target_BS = jnp.take_along_axis(logit_BSV, row_BS[..., None], axis=-1)[..., 0]
    target_BS = lax.psum(jnp.where(mine_BS, target_BS, 0), 'model')
    return jnp.log(lax.psum(jnp.exp(logit_BSV).sum(-1), 'model')) - target_BS


def language_model_loss(
    x_BRD: jax.Array, table_VD: jax.Array, label_BS: jax.Array, mask_BS: jax.Array, sp: bool
) -> jax.Array:
    """The mean loss of the tokens that count, from the last hidden states.

    The head is column-parallel: f before it, no g.
    """
    logit_BSV = jnp.einsum('bsd,vd->bsv', f(x_BRD, sp), table_VD)
    loss_BS = vocab_parallel_cross_entropy(logit_BSV, label_BS)
    return lax.psum((loss_BS * mask_BS).sum(), 'data') / lax.psum(mask_BS.sum(), 'data')


def gpt_loss(
    weights: Weights,
    token_BS: jax.Array,
    label_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    config: ModelConfig,
    sp: bool,
    rung: int = 0,
    microbatches: int = 1,
) -> jax.Array:
    """GPT-2 from tokens to the mean loss of the global batch."""
    parts = reduce_gradients(weights, sp, rung)
    joined = gather(lax.stop_gradient(parts)) if rung == 2 else parts  # ZeRO-2: once a step
    count = lax.psum(mask_BS.sum(), 'data')

    def add_microbatch(loss: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        used = joined
        if rung == 2:  # a reduce-scatter in each microbatch
            used = {
                name: use_joined(joined[name], part, ZERO_DIM[kind(name)])
                if kind(name) in ZERO_DIM
                else part
                for name, part in parts.items()
            }
        own = language_model(used, *rows, config=config, sp=sp, rung=rung)
        return loss + own * lax.psum(rows[2].sum(), 'data') / count, None

    rows = token_BS, label_BS, mask_BS
    rows = tuple(x.reshape(microbatches, -1, x.shape[-1]) for x in rows)
    return lax.scan(add_microbatch, jnp.zeros(()), rows)[0]


def language_model(
    weights: Weights,
    token_BS: jax.Array,
    label_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    config: ModelConfig,
    sp: bool,
    rung: int = 0,
) -> jax.Array:
    """GPT-2 from tokens to the mean loss of a microbatch.

    ZeRO-3 joins a layer's weights before its forward pass and, because no layer keeps them, before
    its backward pass; the table once.
    """
    outside = {name: x for name, x in weights.items() if not name.startswith('decoder.layers.')}
    outside = gather(outside) if rung == 3 else outside

    def layer(x_BRD: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
        weights = gather(weights) if rung == 3 else weights
        return transformer_layer(x_BRD, weights, config, sp), None

    layer = jax.checkpoint(layer, prevent_cse=False) if rung == 3 else layer
    layers = (under(f'decoder.layers.{index}', weights) for index in range(config.num_layers))
    table_VD = outside['embedding.word_embeddings.weight']
    x_BRD = vocab_parallel_embedding(table_VD, token_BS, sp)
    x_BRD = position_embedding(outside['embedding.position_embeddings.weight'], x_BRD, sp)
    x_BRD, _ = lax.scan(layer, x_BRD, jax.tree.map(lambda *x: jnp.stack(x), *layers))
    x_BRD = layer_norm(x_BRD, outside, 'decoder.final_layernorm', config.norm_eps)
    return language_model_loss(x_BRD, table_VD, label_BS, mask_BS, sp)


def under(prefix: str, weights: Weights) -> Weights:
    """The weights of one module, by their names in it."""
    return {
        name.removeprefix(f'{prefix}.'): weight
        for name, weight in weights.items()
        if name.startswith(f'{prefix}.')
    }


def gpipe_loss(
    layers: Weights,
    outside: Weights,
    token_BS: jax.Array,
    label_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    config: ModelConfig,
    sp: bool,
    microbatches: int,
) -> jax.Array:
    """GPT-2 on the stages of a pipeline (Huang et al., 2019), each with its part of stacked layers.

    In each tick a stage sends what it has made to the next; the gradients of these come back in as
    many ticks. All stages have what is outside the layers, which one all-reduce a step adds.
    """
    layers, outside = reduce_gradients(layers, sp), reduce_gradients(outside, sp)
    outside = {name: lax.pcast(x, 'stage', to='varying') for name, x in outside.items()}
    stage, stages = lax.axis_index('stage'), lax.axis_size('stage')
    ring = [(i, (i + 1) % stages) for i in range(stages)]
    table_VD = outside['embedding.word_embeddings.weight']
    rows = token_BS, label_BS, mask_BS
    token_MBS, *targets = (x.reshape(microbatches, -1, x.shape[-1]) for x in rows)

    def layer(x_BRD: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
        return transformer_layer(x_BRD, weights, config, sp), None

    def tick(x_BRD: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_BS = token_MBS[jnp.minimum(index, microbatches - 1)]
        first_BRD = vocab_parallel_embedding(table_VD, token_BS, sp)
        first_BRD = position_embedding(
            outside['embedding.position_embeddings.weight'], first_BRD, sp
        )
        y_BRD, _ = lax.scan(layer, jnp.where(stage == 0, first_BRD, x_BRD), layers)
        return lax.ppermute(y_BRD, 'stage', ring), y_BRD

    def add_head(loss: jax.Array, last: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_BRD, label_BS, mask_BS = last
        x_BRD = layer_norm(x_BRD, outside, 'decoder.final_layernorm', config.norm_eps)
        mean = language_model_loss(x_BRD, table_VD, label_BS, mask_BS, sp)
        return loss + mean * lax.psum(mask_BS.sum(), 'data'), None

    batch, length = token_MBS.shape[1:]
    shape = batch, length // (lax.axis_size('model') if sp else 1), config.hidden_size
    zeros = lax.pcast(jnp.zeros(shape), ('stage', 'data', *(('model',) * sp)), to='varying')
    _, y_TBRD = lax.scan(tick, zeros, jnp.arange(microbatches + stages - 1))
    start = lax.pcast(jnp.zeros(()), 'stage', to='varying')
    total, _ = lax.scan(add_head, start, (y_TBRD[stages - 1 :], *targets))
    return lax.psum(jnp.where(stage == stages - 1, total, 0), 'stage') / lax.psum(
        mask_BS.sum(), 'data'
    )
