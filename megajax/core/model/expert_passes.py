"""The forward and backward pass of a layer of experts, on one device.

T is all tokens of the device, after sequence parallelism has gathered them. Until the last
reduction of each pass, results are partial sums over the shards of the experts' hidden dim A.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from megajax.core.config.experts import ExpertsConfig
from megajax.core.model import router
from megajax.core.model.activation import activate
from megajax.core.model.dispatch import Dispatch, Peers, dispatch
from megajax.core.model.platform import accumulation_dtype
from megajax.core.parallel.layout import CONTEXT, EXPERT, Layout

Arrays = dict[str, Any]


class Settings(NamedTuple):
    """The settings of a layer of experts, and the kind of its weights."""

    experts: ExpertsConfig
    activation: str
    layout: Layout
    dims: tuple[tuple[str, str], ...]  # name and dims of each parameter
    at_rest: bool = False  # whether the matrices have to be gathered over `data`
    is_frozen: bool = False  # whether the matrices are frozen
    is_abstract: bool = False  # whether a mapped function is only traced (`per_device.py`)

    @property
    def is_mapped(self) -> bool:
        """Whether the data shards are a mapped dim, as in a training step."""
        return not self.layout.mesh_axes('B')

    @property
    def num_own(self) -> int:
        """The number of experts on a device."""
        return self.experts.count // self.layout.num_shards('X')

    @property
    def peers(self) -> Peers:
        """The devices that hold the layer's experts."""
        return Peers(EXPERT, self.layout.num_shards('X'), self.is_abstract)

    def over_context(self, x: jax.Array) -> jax.Array:
        """Return the sum of x over the context shards."""
        if dict(self.layout.sizes).get(CONTEXT, 1) == 1 or self.is_abstract:
            return x
        return lax.psum(x, CONTEXT)  # all-reduce over context


class Saved(NamedTuple):
    """The values that the backward pass reads, in addition to its arguments."""

    logit_Tx: jax.Array
    expert_TY: jax.Array
    up: jax.Array  # result of the first round's first matmul, with its bias
    y_nD: jax.Array
    rows: jax.Array | None = None  # rows of the first round; None if they come from this device
    shared_up: jax.Array | None = None  # the result of the shared expert's first matmul


def forward(x_BTD: jax.Array, arrays: Arrays, how: Settings) -> tuple[jax.Array, Saved]:
    """Return the sum of the experts' results for each token, sharded like x."""
    x_BSD = _gathered(x_BTD, how.layout)
    x_TD, local = x_BSD.reshape(-1, x_BSD.shape[-1]), _Local(arrays, how)
    logit_Tx = router.logits(x_TD, local.router_Dx, local.vector('router_bias'))
    expert_TY = router.choose(logit_Tx, local.vector('selection_bias'), how.experts)
    sent = local.dispatch(expert_TY, x_BSD.shape[1])
    rows = sent.send_tokens(x_TD)
    up = local.before_activation(rows, sent)

    def run_later(sent: Dispatch, y_nD: jax.Array) -> jax.Array:
        up = local.before_activation(sent.send_tokens(x_TD), sent)
        return sent.back_into(y_nD, local.after_activation(up, sent))

    y_nD = sent.in_later_rounds(run_later, sent.back(local.after_activation(up, sent)))
    weight_TY1 = router.weights(logit_Tx, expert_TY, how.experts)[..., None]
    y_TYD = y_nD.reshape(*expert_TY.shape, -1).astype(jnp.float32)
    y_TD, shared_up = (weight_TY1 * y_TYD).sum(1), None
    if 'shared_up' in arrays:
        shared_up = multiply(x_TD, local.shared_up)
        y_TD += multiply(local.activated(shared_up), local.shared_down).astype(jnp.float32)
    y_BSD = y_TD.astype(x_BTD.dtype).reshape(x_BSD.shape)
    rows_from_others = rows if sent.peers.size > 1 else None
    saved = Saved(logit_Tx, expert_TY, up, y_nD, rows_from_others, shared_up)
    return _reduced(y_BSD, how.layout), saved


def backward(
    dy_BTD: jax.Array, x_BTD: jax.Array, arrays: Arrays, saved: Saved, how: Settings
) -> tuple[jax.Array, Arrays]:
    """Return the gradients of x and of the arrays; the one of `load` is `router.statistics`."""
    x_BSD, dy_BSD = (_gathered(x, how.layout) for x in (x_BTD, dy_BTD))
    x_TD, dy_TD = (x.reshape(-1, x.shape[-1]) for x in (x_BSD, dy_BSD))
    logit_Tx, expert_TY, local = saved.logit_Tx, saved.expert_TY, _Local(arrays, how)
    sent = local.dispatch(expert_TY, x_BSD.shape[1])
    weight_TY, of_weights = jax.vjp(
        lambda logit: router.weights(logit, expert_TY, how.experts), logit_Tx
    )
    y_TYD = saved.y_nD.reshape(*expert_TY.shape, -1).astype(jnp.float32)
    dy_T1D = dy_TD[:, None].astype(jnp.float32)
    (dlogit_Tx,) = of_weights((dy_T1D * y_TYD).sum(-1))
    dy_nD = (weight_TY[..., None] * dy_T1D).astype(x_BTD.dtype).reshape(-1, x_TD.shape[-1])
    dx_nD, gradients = _of_rounds(dy_nD, x_TD, saved, sent, local)
    if 'load' in arrays:
        is_dropped_TY, real_T = sent.is_dropped_n.reshape(expert_TY.shape), local.real_T
        gradients['load'] = router.statistics(
            logit_Tx, expert_TY, is_dropped_TY, real_T, how.experts
        )
        dlogit_Tx += local.once(local.auxiliary(logit_Tx, expert_TY, x_BSD.shape[1]))
    of_router, router_Dx = x_TD.astype(jnp.float32), local.router_Dx
    highest = lax.Precision.HIGHEST
    gradients['router'] = jnp.matmul(of_router.T, dlogit_Tx, precision=highest)
    gradients['router_bias'] = dlogit_Tx.sum(0)
    dx_TYD = dx_nD.reshape(*expert_TY.shape, -1).astype(jnp.float32)
    dx_TD = dx_TYD.sum(1) + jnp.matmul(dlogit_Tx, router_Dx.T, precision=highest)
    if saved.shared_up is not None:
        dx_shared_TD, of_shared = _of_shared(dy_TD, x_TD, saved.shared_up, local)
        dx_TD, gradients = dx_TD + dx_shared_TD, gradients | of_shared
    dx_BSD = dx_TD.astype(x_BTD.dtype).reshape(x_BSD.shape)
    return _reduced(dx_BSD, how.layout), local.summed(gradients)


def _of_rounds(
    dy_nD: jax.Array, x_TD: jax.Array, saved: Saved, sent: Dispatch, local: '_Local'
) -> tuple[jax.Array, Arrays]:
    """Return the gradients of assignments [n, D], and of the experts' parameters.

    Only the first round has saved values. Later rounds, which are rare, recompute theirs.
    """
    rows = sent.send_tokens(x_TD) if saved.rows is None else saved.rows
    drows, gradients = _of_matmuls(sent.send(dy_nD), rows, saved.up, sent, local)

    def run_later(sent: Dispatch, found: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        rows, (dx_nD, gradients) = sent.send_tokens(x_TD), found
        up = local.before_activation(rows, sent)
        drows, more = _of_matmuls(sent.send(dy_nD), rows, up, sent, local)
        return sent.back_into(dx_nD, drows), jax.tree.map(jnp.add, gradients, more)

    return sent.in_later_rounds(run_later, (sent.back(drows), gradients))


def _of_matmuls(
    dy: jax.Array, rows: jax.Array, up: jax.Array, sent: Dispatch, local: '_Local'
) -> tuple[jax.Array, Arrays]:
    """Return the gradients of the rows that experts receive, and of the experts' parameters."""
    hidden, of_activation = jax.vjp(local.activated, up)
    (dup,) = of_activation(sent.input_gradient(dy, local.down))
    gradients: Arrays = {}
    if not local.how.is_frozen:
        gradients['up'] = sent.weight_gradient(rows, dup)
        gradients['down'] = sent.weight_gradient(hidden, dy)
        gradients['up_bias'] = sent.bias_gradient(dup)
        gradients['down_bias'] = local.once(sent.bias_gradient(dy))
    return sent.input_gradient(dup, local.up), gradients


def _of_shared(
    dy_TD: jax.Array, x_TD: jax.Array, up: jax.Array, local: '_Local'
) -> tuple[jax.Array, Arrays]:
    """Return the gradients of tokens, and of the weights of the shared expert."""
    hidden, of_activation = jax.vjp(local.activated, up)
    (dup,) = of_activation(multiply(dy_TD, local.shared_down.T))
    gradients: Arrays = {}
    if not local.how.is_frozen:
        gradients['shared_up'] = multiply(x_TD.T, dup, jnp.float32)
        gradients['shared_down'] = multiply(hidden.T, dy_TD, jnp.float32)
    return multiply(dup, local.shared_up.T).astype(jnp.float32), gradients


def multiply(x: jax.Array, w: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the matmul of two matrices, by default in the dtype of x."""
    of = accumulation_dtype(x, dtype or x.dtype)
    return jnp.matmul(x, w, preferred_element_type=of).astype(dtype or x.dtype)


class _Local(NamedTuple):
    """A device's part of the arrays."""

    arrays: Arrays
    how: Settings

    @property
    def router_Dx(self) -> jax.Array:
        """The router's weight, without its dim of copies."""
        return self.arrays['router'].reshape(-1, self.how.experts.count)

    def vector(self, name: str) -> jax.Array | None:
        """Return a vector [x] of the router, or None if the router does not have it."""
        return self.arrays[name].reshape(-1) if name in self.arrays else None

    @property
    def real_T(self) -> jax.Array:
        """1 for tokens that count, 0 for padding."""
        real_T: jax.Array = self.arrays['real'].reshape(-1)
        return real_T

    @property
    def up(self) -> jax.Array:
        """The weights [x, D, hidden] of the first matmul."""
        w = self.arrays['up']
        return w.reshape(*w.shape[:2], -1)

    @property
    def down(self) -> jax.Array:
        """The weights [x, A, D] of the second matmul."""
        w: jax.Array = self.arrays['down']
        return w

    @property
    def shared_up(self) -> jax.Array:
        """The weight [D, hidden] of the shared expert's first matmul."""
        w = self.arrays['shared_up']
        return w.reshape(len(w), -1)

    @property
    def shared_down(self) -> jax.Array:
        """The weight [hidden, D] of the shared expert's second matmul."""
        w: jax.Array = self.arrays['shared_down']
        return w

    def dispatch(self, expert_TY: jax.Array, length: int) -> Dispatch:
        """Return where the tokens are sent."""
        real_T = self.real_T if 'real' in self.arrays else None
        return dispatch(expert_TY, self.how.experts, length, self.how.peers, real_T)

    def before_activation(self, rows: jax.Array, sent: Dispatch) -> jax.Array:
        """Return the result of the first matmul of rows, with its bias."""
        return self.biased(sent.matmul(rows, self.up), 'up_bias', sent)

    def after_activation(self, up: jax.Array, sent: Dispatch) -> jax.Array:
        """Return the experts' results, given the result of the first matmul."""
        return self.biased(sent.matmul(self.activated(up), self.down), 'down_bias', sent)

    def biased(self, y: jax.Array, name: str, sent: Dispatch) -> jax.Array:
        """Add the experts' biases, if any, to rows; to partial sums, on only one shard."""
        if name not in self.arrays:
            return y
        bias = self.arrays[name].reshape(len(self.up), -1)
        bias = self.once(bias) if name == 'down_bias' else bias
        return (y.astype(jnp.float32) + sent.of_rows(bias)).astype(y.dtype)

    def activated(self, up: jax.Array) -> jax.Array:
        """Return the hidden layer, given the result of the first matmul."""
        gates = self.arrays['up'].shape[2:-1]  # (2,) for gate and up, otherwise ()
        width = up.shape[-1] // math.prod(gates)
        hidden = activate(up.reshape(1, -1, *gates, width), self.how.activation)
        return hidden.reshape(*up.shape[:-1], -1)

    def once(self, x: jax.Array) -> jax.Array:
        """Return x on the first shard of the hidden dim, and zeros on the others."""
        layout = self.how.layout
        if layout.num_shards('A') == 1:
            return x
        return jnp.where(lax.axis_index(layout.mesh_axes('A')) == 0, x, jnp.zeros_like(x))

    def auxiliary(self, logit_Tx: jax.Array, expert_TY: jax.Array, length: int) -> jax.Array:
        """Return the gradients of the balance loss and the z-loss with respect to the logits."""
        experts, load, real_T = self.how.experts, self.arrays['load'], self.real_T
        token = load[router.TOKEN, 0]
        pressure = load[router.PRESSURE][None]
        if experts.balance_over == 'sequence':
            # DeepSeek-V3 and Megatron count these, too
            best_TY = router.best(logit_Tx, expert_TY, experts)
            best_BSY, real_BS1 = (
                x.reshape(-1, length, x.shape[-1]) for x in (best_TY, real_T[:, None])
            )
            count = jax.vmap(lambda best, real: router.counts(best, real, experts.count))
            chosen_Bx = self.how.over_context(count(best_BSY, real_BS1))
            share_Bx = chosen_Bx / jnp.maximum(chosen_Bx.sum(-1, keepdims=True), 1)
            pressure_Bx = experts.balance_loss * experts.count * token * share_Bx
            pressure = jnp.repeat(pressure_Bx, length, 0)
        return router.auxiliary_gradient(logit_Tx, pressure, token, real_T, experts)

    def summed(self, gradients: Arrays) -> Arrays:
        """Return the gradients of `arrays`, summed over devices unless the step does so later.

        A training step maps its data shards, and gives each shard of A its own copies; it adds both
        once per step. Anywhere else the devices' gradients are added here.
        """
        layout = self.how.layout
        tokens = (*layout.mesh_axes('B'), *layout.mesh_axes('S'))
        done: Arrays = {}
        for name, dims in self.how.dims:
            if name not in gradients or name not in self.arrays:
                continue
            gradient, copies = gradients[name], self.arrays[name].ndim > len(dims)
            axes = [axis for axis in tokens if axis != EXPERT or 'X' not in dims]
            if not {'A', 'M'} & {*dims} and not copies and layout.num_shards('A') > 1:
                axes += layout.mesh_axes('A')
            # Outside a training step: all-reduce over data, and over model if A is not a dim of the
            # array.
            gradient = lax.psum(gradient, tuple(axes)) if axes else gradient
            done[name] = gradient.reshape(self.arrays[name].shape)
        if 'load' in gradients:
            done['load'] = gradients['load']
        return done


def _gathered(x_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Return x_BSD, with all tokens of the sequences."""
    axes = layout.mesh_axes('T')
    # SP: all-gather over model
    return lax.all_gather(x_BTD, axes, axis=1, tiled=True) if axes else x_BTD


def _reduced(y_BSD: jax.Array, layout: Layout) -> jax.Array:
    """Return the sum y_BTD of the partial sums of all shards of A."""
    if axes := layout.mesh_axes('T'):
        # SP: reduce-scatter over model
        return lax.psum_scatter(y_BSD, axes, scatter_dimension=1, tiled=True)
    if layout.num_shards('A') == 1:
        return y_BSD
    return lax.psum(y_BSD, layout.mesh_axes('A'))  # all-reduce over model
