"""Training steps in the manner of other projects, on 8 devices; none uses megajax.

B batch, S sequence, D model, F feed-forward, N heads, H head dim, Z stages, M microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

P = jax.P


class Case(NamedTuple):
    """A function, its arguments and, where one device cannot run it, what it should compute."""

    function: Any
    args: tuple[Any, ...]
    reference: Callable[..., Any] | None = None


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def array(mesh: Mesh | None, shape: tuple[int, ...], *spec: Any, seed: int = 0) -> jax.Array:
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.1
    x = np.asarray(scale * np.random.default_rng([seed, *shape]).normal(size=shape), np.float32)
    return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, P(*spec)))


def abstract(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def fsdp() -> Case:
    """Parameters lie sharded over `data`, are gathered in bf16, and Adam has their fp32 shards."""
    mesh = mesh_of(data=8)
    optimizer = optax.adam(1e-3, eps=1e-3)
    params = {
        'embedding': array(mesh, (256, 64), 'data'),
        'up': array(mesh, (2, 64, 128), None, 'data'),
        'down': array(mesh, (2, 128, 64), None, 'data'),
        'bias': array(mesh, (2, 64), None, 'data'),
    }
    tokens = np.random.default_rng(0).integers(256, size=(16, 33), dtype=np.int32)

    def loss(params: Any, tokens_BS: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        x_BSD = weights['embedding'][tokens_BS[:, :-1]]

        @jax.checkpoint
        def layer(x_BSD: jax.Array, w: Any) -> tuple[jax.Array, None]:
            h_BSF = jax.nn.silu((x_BSD @ w['up']).astype(jnp.float32)).astype(x_BSD.dtype)
            return x_BSD + h_BSF @ w['down'] + w['bias'][None, None], None

        stacked = {name: weights[name] for name in ('up', 'down', 'bias')}
        x_BSD, _ = lax.scan(layer, x_BSD, stacked)
        logits_BSV = (x_BSD @ weights['embedding'].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens_BS: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens_BS)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    batch = jax.device_put(tokens, NamedSharding(mesh, P('data')))
    return Case(step, (params, jax.jit(optimizer.init)(params), batch))


def tensor_parallel(mesh: Any = None) -> Case:
    """A block with its heads and its feed-forward dims over `model`, by constraints alone."""
    mesh = mesh or mesh_of(data=2, model=4)

    def constrain(x: jax.Array, *spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(w: Any, x_BSD: jax.Array) -> jax.Array:
        def project(x_BSD: jax.Array, w_DNH: jax.Array) -> jax.Array:
            return constrain(jnp.einsum('bsd,dnh->bsnh', x_BSD, w_DNH), 'data', None, 'model')

        h_BSD = x_BSD * lax.rsqrt((x_BSD**2).mean(-1, keepdims=True) + 1e-5)
        q, k, v = (project(h_BSD, w[name]) for name in 'qkv')
        a_BSNH = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + constrain(jnp.einsum('bsnh,nhd->bsd', a_BSNH, w['o']), 'data')
        h_BSF = constrain(jax.nn.gelu(x_BSD @ w['up']), 'data', None, 'model')
        return jnp.square(x_BSD + constrain(h_BSF @ w['down'], 'data')).mean()

    w = {name: abstract(mesh, (64, 4, 64), None, 'model') for name in 'qkv'}
    w |= {'o': abstract(mesh, (4, 64, 64), 'model'), 'up': abstract(mesh, (64, 128), None, 'model')}
    w |= {'down': abstract(mesh, (128, 64), 'model')}
    return Case(jax.jit(jax.value_and_grad(loss)), (w, abstract(mesh, (8, 32, 64), 'data')))


def gpipe() -> Case:
    """Four stages that hand microbatches on by permutes, in a scan of 4 + 4 - 1 ticks."""
    mesh, stages, microbatches = mesh_of(stage=4, data=2), 4, 4

    def stage(w_DD: jax.Array, x_BD: jax.Array) -> jax.Array:
        return x_BD + jnp.tanh(x_BD @ w_DD)

    def pipeline(w_1DD: jax.Array, x_MBD: jax.Array) -> jax.Array:
        index = lax.axis_index('stage')

        def tick(carry: Any, time: jax.Array) -> Any:
            held_BD, out_MBD = carry
            fed_BD = x_MBD[jnp.clip(time, 0, microbatches - 1)]
            y_BD = stage(w_1DD[0], jnp.where(index == 0, fed_BD, held_BD))
            place = jnp.clip(time - stages + 1, 0, microbatches - 1)
            out_MBD = out_MBD.at[place].set(jnp.where(index == stages - 1, y_BD, 0))
            pairs = [(i, i + 1) for i in range(stages - 1)]
            return (lax.ppermute(y_BD, 'stage', pairs), out_MBD), None

        start = (jnp.zeros_like(x_MBD[0]), jnp.zeros_like(x_MBD))
        (_, out_MBD), _ = lax.scan(tick, start, jnp.arange(stages + microbatches - 1))
        return lax.psum(out_MBD, 'stage')

    specs = {'in_specs': (P('stage'), P(None, 'data')), 'out_specs': P(None, 'data')}
    mapped = jax.shard_map(pipeline, mesh=mesh, check_vma=False, **specs)

    def loss(forward: Callable[..., Any], w_ZDD: jax.Array, x_MBD: jax.Array) -> jax.Array:
        return jnp.square(forward(w_ZDD, x_MBD)).mean()

    def in_turn(w_ZDD: jax.Array, x_MBD: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, w: stage(w, x), w_ZDD, x_MBD)

    args = array(mesh, (4, 64, 64), 'stage'), array(mesh, (4, 8, 64), None, 'data')
    step = jax.jit(jax.value_and_grad(functools.partial(loss, mapped), argnums=(0, 1)))
    right = jax.value_and_grad(functools.partial(loss, in_turn), argnums=(0, 1))
    return Case(step, args, right)


def ring_attention(missing: int | None = None) -> Case:
    """Keys and values go round the ring of `context`; parts are merged by their logsumexp.

    `missing` is the place of a device that hands on nothing.
    """
    mesh, size = mesh_of(data=2, context=4), 4
    pairs = [(i, (i + 1) % size) for i in range(size) if i != missing]

    def ring(q_BSNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
        def part(carry: Any, _: None) -> Any:
            k_BSNH, v_BSNH, top_BNS, total_BNS, o_BSNH = carry
            s_BNST = jnp.einsum('bsnh,btnh->bnst', q_BSNH, k_BSNH) * q_BSNH.shape[-1] ** -0.5
            new_BNS = jnp.maximum(top_BNS, s_BNST.max(-1))
            w_BNST, kept_BNS = jnp.exp(s_BNST - new_BNS[..., None]), jnp.exp(top_BNS - new_BNS)
            o_BSNH = o_BSNH * kept_BNS.transpose(0, 2, 1)[..., None]
            o_BSNH = o_BSNH + jnp.einsum('bnst,btnh->bsnh', w_BNST, v_BSNH)
            total_BNS = total_BNS * kept_BNS + w_BNST.sum(-1)
            k_BSNH, v_BSNH = (lax.ppermute(x, 'context', pairs) for x in (k_BSNH, v_BSNH))
            return (k_BSNH, v_BSNH, new_BNS, total_BNS, o_BSNH), None

        B, S, N, _ = q_BSNH.shape
        start = jnp.full((B, N, S), -1e30), jnp.zeros((B, N, S)), jnp.zeros_like(q_BSNH)
        (_, _, _, total_BNS, o_BSNH), _ = lax.scan(part, (k_BSNH, v_BSNH, *start), length=size)
        return o_BSNH / total_BNS.transpose(0, 2, 1)[..., None]

    spec = P('data', 'context')
    mapped = jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    args = tuple(array(mesh, (4, 32, 2, 16), *spec, seed=seed) for seed in range(3))

    def loss(attend: Callable[..., Any], *qkv: jax.Array) -> jax.Array:
        return jnp.square(attend(*qkv)).sum()

    step = jax.jit(jax.grad(functools.partial(loss, mapped), argnums=(0, 1, 2)))
    whole = functools.partial(loss, functools.partial(jax.nn.dot_product_attention))
    return Case(step, args, jax.grad(whole, argnums=(0, 1, 2)))


def equinox_mlp(eqx: Any) -> Case:
    """A module of equinox: its arrays are the arguments, the rest is bound."""
    mesh = mesh_of(data=8)
    arrays, rest = eqx.partition(eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0)), eqx.is_array)
    arrays = jax.device_put(arrays, NamedSharding(mesh, P()))

    @jax.jit
    def step(arrays: Any, x_BD: jax.Array, y_BD: jax.Array) -> Any:
        def loss(arrays: Any) -> jax.Array:
            return jnp.square(jax.vmap(eqx.combine(arrays, rest))(x_BD) - y_BD).mean()

        value, gradients = jax.value_and_grad(loss)(arrays)
        return jax.tree.map(lambda w, g: w - 0.1 * g, arrays, gradients), value

    return Case(step, (arrays, *(array(mesh, (32, 64), 'data', seed=i) for i in range(2))))


def equinox_step(eqx: Any) -> tuple[Any, Any, jax.Array]:
    """What `eqx.filter_jit` returns, and its arguments: a module and rows."""
    mesh = mesh_of(data=8)
    model = eqx.nn.MLP(64, 64, 1, 0, use_final_bias=False, key=jax.random.key(0))
    model = eqx.filter_shard(model, NamedSharding(mesh, P()))

    @eqx.filter_jit
    def step(model: Any, x_BD: jax.Array) -> Any:
        value, gradients = eqx.filter_value_and_grad(
            lambda model: jnp.square(jax.vmap(model)(x_BD)).mean()
        )(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    return step, model, array(mesh, (32, 64), 'data', seed=0)


def top_k_experts() -> Case:
    """Each token goes to two of eight experts, which lie over `expert`."""
    mesh = mesh_of(expert=8)

    def loss(w: Any, x_BD: jax.Array) -> jax.Array:
        gates_BK, chosen_BK = lax.top_k(jax.nn.softmax(x_BD @ w['router']), 2)
        weights_BE = (jax.nn.one_hot(chosen_BK, 8) * gates_BK[..., None]).sum(1)
        h_BEF = jax.nn.relu(jnp.einsum('bd,edf->bef', x_BD, w['up']))
        y_BD = jnp.einsum('bef,efd,be->bd', h_BEF, w['down'], weights_BE)
        order_B = jnp.argsort(chosen_BK[:, 0], stable=True)
        return jnp.square(y_BD[order_B] * jnp.arange(1.0, 1 + len(y_BD))[:, None]).mean()

    w = {'router': array(mesh, (64, 8)), 'up': array(mesh, (8, 64, 128), 'expert')}
    w |= {'down': array(mesh, (8, 128, 64), 'expert')}
    return Case(jax.jit(jax.value_and_grad(loss)), (w, array(mesh, (64, 64), 'expert')))


def shared_cotangent() -> tuple[Any, tuple[Any, ...], Mesh]:
    """Megatron's sequence parallelism over two data shards, with a gather that Shardy shares.

    The gathered cotangent of a layer's output is sliced for its residual: XLA of jax 0.10.2 makes
    of that slice a permute without pairs, which gives zeros.
    """
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    rows, full = P('data', 'model'), P('data')

    @jax.custom_vjp
    def project(h_BSF: jax.Array, w_FD: jax.Array) -> jax.Array:
        return jnp.einsum('bsf,fd->bsd', h_BSF, w_FD, out_sharding=rows)

    def forward(h_BSF: jax.Array, w_FD: jax.Array) -> Any:
        return project(h_BSF, w_FD), (h_BSF, w_FD)

    def backward(kept: Any, dy_BSD: jax.Array) -> Any:
        h_BSF, w_FD = kept
        dy_BSD = jax.reshard(dy_BSD, full)
        dh = jnp.einsum('bsd,fd->bsf', dy_BSD, w_FD, out_sharding=P('data', None, 'model'))
        dw = jnp.einsum('bsf,bsd->fd', h_BSF, dy_BSD, out_sharding=P('model'))
        return dh, dw

    project.defvjp(forward, backward)

    def layer(x_BSD: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h_BSD = jax.reshard(jnp.tanh(x_BSD), full)
        h_BSF = jnp.einsum('bsd,df->bsf', h_BSD, w['up'], out_sharding=P('data', None, 'model'))
        return x_BSD + project(jax.nn.relu(h_BSF), w['down']), None

    def loss(w: Any, x_BSD: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(layer, x_BSD, w)[0]).mean()

    w = {'up': array(mesh, (2, 64, 128), None, None, 'model')}
    w |= {'down': array(mesh, (2, 128, 64), None, 'model')}
    return jax.jit(jax.grad(loss)), (w, array(mesh, (4, 32, 64), 'data', 'model')), mesh
