"""A layer of experts computes what every expert computes for every token, weighted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_close, make_config, on_mesh, slow

from megajax.core.config.experts import ExpertsConfig
from megajax.core.model import router
from megajax.core.model.activation import activate
from megajax.core.model.dispatch import Dropless, Peers, WithCapacity
from megajax.core.model.expert_passes import Settings
from megajax.core.model.experts import mix
from megajax.core.parallel.layout import Layout

ROWS, LENGTH, D, X, HIDDEN = 3, 8, 16, 6, 12
ALONE = Peers('expert', 1, is_abstract=False)


def config(**keys: Any) -> ExpertsConfig:
    return ExpertsConfig(**{'count': X, 'active': 2, 'ffn_size': HIDDEN, **keys})


def arrays(*, bias: bool, shared: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {'router': (D, X), 'up': (X, D, 2, HIDDEN), 'down': (X, HIDDEN, D)}
    if bias:
        shapes |= {'router_bias': (X,), 'up_bias': (X, 2, HIDDEN), 'down_bias': (X, D)}
        shapes |= {'selection_bias': (X,)}
    if shared:
        shapes |= {'shared_up': (D, 2, shared), 'shared_down': (shared, D)}
    return {
        name: jnp.asarray(random.normal(0, 0.5, shape), jnp.float32)
        for name, shape in shapes.items()
    }


DIMS = {
    **{'router': 'Dx', 'router_bias': 'x', 'selection_bias': 'x', 'up': 'XDUA', 'down': 'XAD'},
    **{'up_bias': 'XUA', 'down_bias': 'XD', 'shared_up': 'DUM', 'shared_down': 'MD'},
}


def on_every_token(
    x_BTD: jax.Array, given: dict[str, jax.Array], experts: ExpertsConfig, keep_TY: Any
) -> jax.Array:
    """Every expert on every token, by one-hot sums; `keep_TY` are not dropped."""
    x = x_BTD.reshape(-1, D)
    logit = x @ given['router'] + given.get('router_bias', jnp.zeros(X))[None]
    chosen = router.choose(logit, given.get('selection_bias'), experts)
    weight = router.weights(logit, chosen, experts) * keep_TY
    up = jnp.einsum('td,xdua->xtua', x, given['up'])
    up = up + given.get('up_bias', jnp.zeros((X, 2, HIDDEN)))[:, None]
    down = jnp.einsum('xta,xad->xtd', activate(up, 'swiglu'), given['down'])
    down = down + given.get('down_bias', jnp.zeros((X, D)))[:, None]
    of_expert = (jax.nn.one_hot(chosen, X) * weight[..., None]).sum(1)
    y = jnp.einsum('tx,xtd->td', of_expert, down)
    if experts.shared_ffn_size:
        up = jnp.einsum('td,dum->tum', x, given['shared_up'])
        y += activate(up[None], 'swiglu')[0] @ given['shared_down']
    return y.reshape(x_BTD.shape)


@pytest.mark.parametrize(
    ('bias', 'keys'),
    [
        slow(False, {}),
        (False, {'normalize': False, 'shared_ffn_size': 10}),
        (True, {'scores': 'sigmoid', 'scale': 2.5, 'groups': 3, 'active_groups': 2}),
        (True, {'scores': 'sigmoid', 'normalize': False, 'active': X}),
        (True, {'capacity': 0.75, 'capacity_group': 4}),
    ],
)
def test_result_and_gradients_are_those_of_every_expert_on_every_token(
    bias: bool, keys: dict[str, Any]
) -> None:
    experts, model = config(**keys), make_config('llama')
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, LENGTH, D)), jnp.float32)
    given = arrays(bias=bias, shared=experts.shared_ffn_size)
    keep = jnp.ones((ROWS * LENGTH, experts.active))
    if experts.capacity is not None:
        logit = x_BTD.reshape(-1, D) @ given['router'] + given['router_bias'][None]
        chosen = router.choose(logit, given['selection_bias'], experts)
        keep = jnp.asarray(1 - dropped(np.asarray(chosen), experts), jnp.float32)
        assert 0 < keep.sum() < keep.size

    def run(function: Any, x_BTD: jax.Array, given: Any) -> Any:
        def loss(x_BTD: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
            y_BTD = function(x_BTD, given)
            return jnp.sum(jnp.square(y_BTD)), y_BTD

        (_, y_BTD), (dx, rest) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
            x_BTD, given
        )
        rest.pop('selection_bias', None)
        return {'y': y_BTD, 'x': dx, **rest}

    expected = run(lambda x, given: on_every_token(x, given, experts, keep), x_BTD, given)
    with on_mesh(model):
        layout = Layout.of(model)
        how = Settings(experts, 'swiglu', layout, tuple((name, DIMS[name]) for name in given))
        placed = {name: jax.device_put(x, layout(DIMS[name])) for name, x in given.items()}
        x_BTD = jax.device_put(x_BTD, layout('BTD'))
        actual = run(lambda x, given: mix(x, given, {}, how), x_BTD, placed)
    assert_close(actual, expected, 1e-5)


def dropped(chosen: np.ndarray, experts: ExpertsConfig) -> np.ndarray:
    """The assignments that find their expert full, counted one after the other."""
    assert experts.capacity is not None
    assert experts.capacity_group is not None
    room = int(np.ceil(experts.capacity * experts.capacity_group * experts.active / X))
    is_dropped = np.zeros(chosen.shape)
    for start in range(0, len(chosen), experts.capacity_group):
        count = np.zeros(X, int)
        for token in range(start, start + experts.capacity_group):
            for place, expert in enumerate(chosen[token]):
                is_dropped[token, place] = count[expert] >= room
                count[expert] += 1
    return is_dropped


@pytest.mark.parametrize('has_padding', [False, True])
def test_capacity_drops_the_last_tokens_of_a_group(has_padding: bool) -> None:
    """Padding, which relevance leaves in images too, comes after the other tokens of its group."""
    random = np.random.default_rng(2)
    chosen = np.stack([random.permutation(X)[:2] for _ in range(24)])
    real = (random.random(24) > 0.5 * has_padding).astype(np.float32)
    order = np.lexsort((1 - real, np.arange(24) // 8))
    experts = config(capacity=0.6, capacity_group=8)
    is_dropped = jax.jit(lambda x, real: WithCapacity.of(x, experts, 8, ALONE, real).is_dropped_n)
    found = is_dropped(chosen, real if has_padding else None)
    expected = dropped(chosen[order], experts)
    np.testing.assert_array_equal(np.asarray(found).reshape(-1, 2)[order], expected)
    assert 0 < expected.sum() < expected.size


@pytest.mark.parametrize('capacity', [None, 8.0])
def test_tokens_come_back_from_their_experts(capacity: float | None) -> None:
    random = np.random.default_rng(3)
    chosen = random.integers(0, X, (16, 2)).astype(np.int32)
    experts = config(capacity=capacity)

    @jax.jit
    def there_and_back(chosen: jax.Array, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent = (
            Dropless.of(chosen, experts, ALONE)
            if capacity is None
            else WithCapacity.of(chosen, experts, 16, ALONE)
        )
        back = sent.back(sent.send_tokens(x_TD))
        return back, sent.back(sent.send(back))

    x_TD = random.normal(size=(16, D)).astype(np.float32)
    for back in there_and_back(chosen, x_TD):
        np.testing.assert_array_equal(back, np.repeat(x_TD, 2, 0))


def test_the_statistics_are_sums_over_the_tokens_that_are_no_padding() -> None:
    random = np.random.default_rng(4)
    logit = random.normal(size=(6, X)).astype(np.float32)
    chosen, real = np.argsort(-logit)[:, :2], np.array([1, 1, 0, 1, 1, 0], np.float32)
    is_dropped = np.arange(12).reshape(6, 2) % 3 == 0
    found = jax.jit(partial(router.statistics, experts=config()))(logit, chosen, is_dropped, real)
    score = np.exp(logit) / np.exp(logit).sum(-1, keepdims=True)
    of_expert = chosen[..., None] == np.arange(X)
    each = {
        router.CHOSEN: of_expert.sum(1),
        router.SCORES: score,
        router.ENTROPY: -score * np.log(score),
        router.DROPPED: (is_dropped[..., None] & of_expert).sum(1),
    }
    for row, of_token in each.items():
        np.testing.assert_allclose(found[row], real @ of_token, rtol=1e-5)


def test_equal_scores_choose_the_first_experts() -> None:
    logit = jnp.zeros((4, X))
    np.testing.assert_array_equal(router.choose(logit, None, config()), [[0, 1]] * 4)


def test_only_the_best_groups_are_chosen_from() -> None:
    logit = jnp.asarray([[5.0, -9.0, 3.0, 2.9, 1.0, 1.0]])
    experts = config(scores='sigmoid', groups=3, active_groups=1)
    np.testing.assert_array_equal(router.choose(logit, None, experts), [[2, 3]])
