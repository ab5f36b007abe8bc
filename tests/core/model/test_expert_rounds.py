"""Dropless experts compute the same however unevenly the tokens are distributed among devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from support import assert_close, exhaustive, make_config, on_mesh, slow

from megajax.core.counts.expert_rows import rows_to_each
from megajax.core.model.expert_passes import Settings
from megajax.core.model.experts import mix
from megajax.core.parallel.layout import Layout

ROWS, LENGTH, D, X, HIDDEN = 8, 8, 16, 8, 12
TOKENS = np.arange(ROWS * LENGTH)
DIMS = {'router': 'Dx', 'up': 'XDUA', 'up_bias': 'XUA', 'down': 'XAD', 'down_bias': 'XD'}
SIZES = {'D': D, 'x': X, 'X': X, 'U': 2, 'A': HIDDEN}
# Two experts of each token: the best, and the next. In the last case, devices that have the same
# experts as others send them a different number of rounds.
DISTRIBUTIONS: dict[str, Callable[[], tuple[Any, Any]]] = {
    'balanced': lambda: (TOKENS % X, (TOKENS + 3) % X),
    'one expert': lambda: (np.full_like(TOKENS, 5), TOKENS % 4),
    'the experts of one device': lambda: (np.full_like(TOKENS, 7), np.full_like(TOKENS, 6)),
    'uneven among devices': lambda: (
        np.where(TOKENS < 40, 0, TOKENS % X),
        np.where(TOKENS < 40, 1, (TOKENS + 3) % X),
    ),
}


def arrays(distribution: str) -> dict[str, np.ndarray]:
    """x and a cotangent, and parameters of experts whose router makes this distribution."""
    random = np.random.default_rng(0)
    given = {name: random.normal(0, 0.5, [SIZES[dim] for dim in DIMS[name]]) for name in DIMS}
    given['router'] = np.concatenate([np.eye(X), random.normal(0, 0.1, (D - X, X))])
    x_TD, dy_TD = random.normal(0, 0.3, (2, len(TOKENS), D))
    best_T, next_T = DISTRIBUTIONS[distribution]()
    x_TD[TOKENS, best_T] += 4
    x_TD[TOKENS, next_T] += 3
    given |= {name: x.reshape(ROWS, LENGTH, D) for name, x in (('x', x_TD), ('dy', dy_TD))}
    return {name: x.astype(np.float32) for name, x in given.items()}


def run(mesh: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Return the result and all gradients for each distribution."""
    experts = {'count': X, 'active': 2, 'ffn_size': HIDDEN}
    config = make_config(
        model={'hidden_size': D, 'num_heads': 2, 'activation': 'swiglu', 'experts': experts},
        mesh=dict(mesh),
        train={'batch_size': ROWS, 'seq_len': LENGTH, 'dtype': 'float32'},
    )
    assert config.model.experts is not None
    with on_mesh(config):
        layout = Layout.of(config)
        how = Settings(config.model.experts, 'swiglu', layout, tuple(DIMS.items()))

        @jax.jit
        def results(x: jax.Array, dy: jax.Array, given: Any) -> Any:
            y, backward = jax.vjp(lambda x, given: mix(x, given, {}, how), x, given)
            dx, gradients = backward(dy)
            return {'y': y, 'dx': dx, **gradients}

        found = {}
        for distribution in DISTRIBUTIONS:
            placed = {
                name: jax.device_put(x, layout(DIMS.get(name, 'BTD')))
                for name, x in arrays(distribution).items()
            }
            x, dy = placed.pop('x'), placed.pop('dy')
            found[distribution] = jax.device_get(results(x, dy, placed))
        return found


@pytest.mark.parametrize(
    'mesh',
    [
        {'data': 4, 'experts': 2, 'model': 2, 'sequence_parallel': True},
        slow({'data': 4, 'experts': 4}),
        exhaustive({'data': 8, 'experts': 8}),
    ],
)
def test_results_and_gradients_are_those_of_one_device(mesh: dict[str, Any]) -> None:
    expected, actual = run({}), run(mesh)
    for distribution in DISTRIBUTIONS:
        assert_close(actual[distribution], expected[distribution], 1e-5)


@pytest.mark.parametrize('devices', [1, 2, 4, 8])
@pytest.mark.parametrize('assignments', [1, 6, 4096])
def test_a_balanced_load_needs_one_round(assignments: int, devices: int) -> None:
    first, later = rows_to_each(assignments, devices)
    assert assignments / devices <= first <= assignments
    assert 0 < later <= first
