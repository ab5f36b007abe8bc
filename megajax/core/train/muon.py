"""Muon (Jordan et al., 2024), `optim.kind=muon`: momentum whose matrices are orthogonalized.

Muon updates the matrices of the decoder's layers. The queries, keys and values of a fused QKV are
orthogonalized separately, and so are gate and up. AdamW updates the rest: embedding and head,
BERT's heads, the vision encoder, biases, norms and tables. The updates of a matrix [m, n] are
multiplied by 0.2 sqrt(max(m, n)), which makes them as large as AdamW's (Moonlight, Liu et al.,
2025), so both use the same learning rate and weight decay.

The momentum is stored like AdamW's first moment. Newton-Schulz iterations compute in bf16, or in
fp32 with train.dtype=float32, and each runs on one device only (`whole_matrices.py`).
"""

from itertools import chain, cycle, islice, repeat
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from megajax.core.config import Config, OptimConfig
from megajax.core.train.whole_matrices import Pools, WholeMatrices, matrices_of, others_of

RMS = 0.2  # RMS of the elements of an update, as is usual for AdamW's
QUINTIC = 3.4445, -4.7750, 2.0315
# Coefficients of five iterations, which repeat; called `dion` in optax, `quintic` in NVIDIA's
# Emerging-Optimizers.
DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Coefficients of the first iterations; LAST is for all others (Amsel et al., 2025, algorithm 1).
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
LAST = 1.875, -1.25, 0.375
SAFETY = 1.01  # rounding may raise singular values above 1 by this factor


def with_muon(
    adam: optax.GradientTransformation, config: Config, rounded_to: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Return Muon's updates of the matrices of layers, and `adam`'s updates of the others.

    The state is `adam`'s, but has no second moments for Muon's matrices. optax rounds the
    coefficients to the dtype of the iterations; `rounded_to` rounds them to another one before.
    """
    optim, whole = config.optim, WholeMatrices(config)
    dtype = jnp.float32 if config.train.dtype == 'float32' else jnp.bfloat16

    def init(params: Any) -> Any:
        state = adam.init(params)
        return state._replace(nu=others_of(state.nu))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        of_matrices, momentum = matrices_of(gradients), matrices_of(state.mu)
        updates, state = adam.update(others_of(gradients), state._replace(mu=others_of(state.mu)))
        momentum = optax.tree.update_moment(of_matrices, momentum, optim.momentum, 1)
        ahead = _direction(momentum, of_matrices, state.count, optim)
        pools = whole.gather(ahead, dtype)
        moved = whole.scatter(orthogonalized(pools, optim, rounded_to), like=ahead)
        moved = jax.tree.map(lambda x: x.astype(jnp.float32), moved)
        state = state._replace(mu=nnx.merge_state(state.mu, momentum))
        return nnx.merge_state(updates, moved), state

    return optax.GradientTransformation(init, update)


def orthogonalized(pools: Pools, optim: OptimConfig, rounded_to: DTypeLike | None = None) -> Pools:
    """Return the orthogonalized matrices of each pool, multiplied by 0.2 sqrt(max(m, n))."""
    # With beta=0, this only orthogonalizes.
    muon = scale_by_muon(
        jnp.asarray(coefficients(optim), rounded_to),
        optim.ns_steps,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
    )

    def update(pool: jax.Array, rms: float) -> jax.Array:
        matrices, _ = muon.update(pool, muon.init(pool))
        # bf16 would round the factor by up to 0.4%.
        return (rms * matrices.astype(jnp.float32)).astype(pool.dtype)

    return {form: update(pool, RMS * max(form.shape) ** 0.5) for form, pool in pools.items()}


def coefficients(optim: OptimConfig) -> Any:
    """Return the coefficients of x, x^3 and x^5: one triple for all iterations, or one for each."""
    if optim.ns_coefficients == 'quintic':
        return QUINTIC
    if optim.ns_coefficients == 'dion':
        return tuple(islice(cycle(DION), optim.ns_steps))
    safe = (
        tuple(c / SAFETY**power for c, power in zip(row, (1, 3, 5), strict=True))
        for row in POLAR_EXPRESS
    )
    return tuple(islice(chain(safe, repeat(LAST)), optim.ns_steps))


def _direction(momentum: Any, gradients: Any, count: jax.Array, optim: OptimConfig) -> Any:
    """Return the momentum or, with `nesterov`, its look-ahead, corrected for its start at zero."""
    correct, beta = optax.tree.bias_correction, optim.momentum
    if not optim.nesterov:
        return correct(momentum, beta, count)
    return jax.tree.map(
        lambda m, g: beta * m + (1 - beta) * g,
        correct(momentum, beta, count + 1),
        correct(gradients, beta, count),
    )
