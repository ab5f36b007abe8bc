"""A layer of experts computes what megatron-core's MoELayer does, gradients included.

See tests/runtime/data/oracles/README.md.
"""

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from interop.oracles import ORACLES, Arrays
from jax import lax
from support import assert_close, exhaustive, make_config, on_mesh, relative_error, slow

from megajax.core.config import Config
from megajax.core.model import expert_passes, router
from megajax.core.model.dispatch import Dropless, WithCapacity
from megajax.core.model.expert_passes import Settings
from megajax.core.model.experts import mix
from megajax.core.parallel.layout import Layout
from megajax.core.train.routing import Load, after_step, attached

LIMIT = 2e-5  # relative, see support.relative_error
DIMS = {
    'router': 'Dx',
    'router_bias': 'x',
    'selection_bias': 'x',
    'up': 'XDUA',
    'up_bias': 'XUA',
    'down': 'XAD',
    'down_bias': 'XD',
    'shared_up': 'DUM',
    'shared_down': 'MD',
}
SIGMOID = {'scores': 'sigmoid', 'scale': 2.5, 'selection_bias': True}
GROUPS = SIGMOID | {'groups': 2, 'active_groups': 1}
CASES: dict[str, dict[str, Any]] = {
    'softmax': {'normalize': False},
    'chosen': {},
    'sigmoid': SIGMOID,
    'groups': GROUPS,
    'groups_sequence': GROUPS | {'balance_loss': 0.1, 'balance_over': 'sequence'},
    'sequence': {
        'normalize': False,
        'balance_loss': 0.1,
        'balance_over': 'sequence',
        'z_loss': 0.02,
    },
    'global': {'balance_loss': 0.05},
    'biases': {'router_bias': True},
    'shared': {'shared_ffn_size': 20},
}
MESHES = {
    '1': {},
    'tp2 x ep2': {'model': 2, 'data': 2, 'experts': 2, 'sequence_parallel': True},
}
# Together they have each setting of the others.
FAST = {('groups_sequence', 'tp2 x ep2'), *((case, '1') for case in ('global', 'shared', 'biases'))}
SLOW = {(case, 'tp2 x ep2') for case in ('global', 'shared')}


@functools.cache
def oracle() -> Arrays:
    with np.load(ORACLES / 'experts_tp2_ep2.npz') as file:
        return dict(file)


def config_of(keys: Mapping[str, Any], mesh: Mapping[str, Any], *, bias: bool = False) -> Config:
    count, hidden = oracle()['router'].shape
    batch, length, _ = oracle()['x'].shape
    experts = {'count': count, 'active': 2, 'ffn_size': oracle()['fc2'].shape[2], **keys}
    model = {'hidden_size': hidden, 'activation': 'swiglu', 'bias': bias, 'experts': experts}
    return make_config(
        model={'num_layers': 1, 'num_heads': 2, **model},
        mesh=dict(mesh),
        train={'batch_size': batch, 'seq_len': length, 'dtype': 'float32'},
    )


def ours(given: Mapping[str, np.ndarray], prefix: str = '') -> Arrays:
    """Megatron's weights, or their gradients, with the names and dims of megajax."""
    fc1, fc2 = given[f'{prefix}fc1'], given[f'{prefix}fc2']
    gates = fc1.reshape(len(fc1), 2, -1, fc1.shape[-1])
    arrays = {
        'router': given[f'{prefix}router'].T,
        'up': gates.transpose(0, 3, 1, 2),
        'down': fc2.transpose(0, 2, 1),
    }
    if f'{prefix}shared_fc1' in given:
        shared = given[f'{prefix}shared_fc1']
        arrays['shared_up'] = shared.reshape(2, -1, shared.shape[-1]).transpose(2, 0, 1)
        arrays['shared_down'] = given[f'{prefix}shared_fc2'].T
    if f'{prefix}router_bias' in given:
        arrays['router_bias'] = given[f'{prefix}router_bias']
        arrays['up_bias'] = given[f'{prefix}fc1_bias'].reshape(gates.shape[:-1])
        arrays['down_bias'] = given[f'{prefix}fc2_bias']
    return arrays


def run(config: Config, shares_x: np.ndarray) -> tuple[Arrays, Arrays]:
    """Return the output and, by name, the gradients of sum(output * cotangent) and of the
    auxiliary losses; that of `load` is the statistics of the routing.
    """
    experts, whole = config.model.experts, oracle()
    assert experts is not None
    weights = ours(whole)
    left_out = {'bias': config.model.bias, 'shared': bool(experts.shared_ffn_size)}
    for part, is_kept in left_out.items():
        if not is_kept:
            weights = {name: x for name, x in weights.items() if part not in name}
    if experts.selection_bias:
        weights['selection_bias'] = whole['expert_bias']
    with on_mesh(config):
        layout = Layout.of(config)
        arrays = {name: jax.device_put(x, layout(DIMS[name])) for name, x in weights.items()}
        load = Load(jnp.asarray(shares_x[None]), jnp.float32(1))
        slots, _ = attached(nnx.State({}), nnx.State({}), load, None, config, layout)
        arrays['load'] = slots['layers']['experts']['router']['load'].get_value()[0]
        arrays['real'] = jax.device_put(np.ones(whole['x'].shape[:2], np.float32), layout('BS'))
        dims = tuple((name, DIMS[name]) for name in weights)
        how = Settings(experts, config.model.activation, layout, dims)
        x_BTD, dy_BTD = (jax.device_put(whole[key], layout('BTD')) for key in ('x', 'cotangent'))

        @jax.jit
        def outputs(x_BTD: jax.Array, arrays: Any, dy_BTD: jax.Array) -> Any:
            y_BTD, backward = jax.vjp(lambda x, arrays: mix(x, arrays, {}, how), x_BTD, arrays)
            return y_BTD, *backward(dy_BTD)

        y_BTD, dx_BTD, gradients = jax.device_get(outputs(x_BTD, arrays, dy_BTD))
    return {'output': y_BTD, 'dx': dx_BTD}, gradients


def share_of(case: str) -> np.ndarray:
    routed: np.ndarray = oracle()[f'{case}/routed'].sum((0, 1))
    return routed / routed.sum()


@pytest.mark.parametrize(
    ('case', 'mesh'),
    [
        (case, mesh)
        if (case, mesh) in FAST
        else slow(case, mesh)
        if (case, mesh) in SLOW or (mesh == '1' and (case, 'tp2 x ep2') not in FAST)
        else exhaustive(case, mesh)
        for case in CASES
        for mesh in MESHES
    ],
)
def test_output_and_all_gradients_are_those_of_megatron_core(case: str, mesh: str) -> None:
    config = config_of(CASES[case], MESHES[mesh], bias=case == 'biases')
    results, gradients = run(config, share_of(case))
    for key, x in results.items():
        assert relative_error(x, oracle()[f'{case}/{key}']) < LIMIT, key
    expected = ours(oracle(), f'{case}/g/')
    if case == 'biases':  # Megatron adds the gradients of different experts; see the README
        each = gradients['down_bias'].reshape(2, -1, *gradients['down_bias'].shape[1:])
        gradients['down_bias'] = np.concatenate([each.sum(0)] * 2)
    assert_close({name: gradients[name] for name in expected}, expected, LIMIT)


@pytest.mark.parametrize('case', CASES)
def test_experts_and_their_weights_are_those_of_megatron_core(case: str) -> None:
    experts, whole = config_of(CASES[case], {}).model.experts, oracle()
    assert experts is not None
    bias = whole['router_bias'] if experts.router_bias else None
    rows_TD = jnp.asarray(whole['x'].reshape(-1, whole['x'].shape[-1]))
    logit_Tx = router.logits(rows_TD, jnp.asarray(whole['router'].T), bias)
    selection = whole['expert_bias'] if experts.selection_bias else None
    expert_TY = router.choose(logit_Tx, selection, experts)
    weight_TY = router.weights(logit_Tx, expert_TY, experts)
    weight_Tx = np.zeros(logit_Tx.shape, np.float32)
    np.put_along_axis(weight_Tx, np.asarray(expert_TY), np.asarray(weight_TY), 1)
    expected = whole[f'{case}/probs'].reshape(weight_Tx.shape)
    np.testing.assert_array_equal(weight_Tx > 0, expected > 0)
    np.testing.assert_allclose(weight_Tx, expected, rtol=LIMIT)


def test_each_expert_drops_as_many_tokens_of_a_group_as_megatron_core() -> None:
    """Which ones differs: Megatron keeps the largest weights, megajax the first tokens."""
    _, gradients = run(config_of({'capacity': 1.0, 'capacity_group': 8}, {}), share_of('chosen'))
    chosen, kept = oracle()['chosen/routed'], oracle()['capacity/routed']
    assert (chosen & ~kept).sum() > 10
    statistics = gradients['load']
    np.testing.assert_array_equal(statistics[router.CHOSEN], chosen.sum((0, 1)))
    np.testing.assert_array_equal(statistics[router.DROPPED], (chosen & ~kept).sum((0, 1)))


def sent_to_the_next_slot(patch: Any) -> None:
    back = Dropless.back
    patch(Dropless, 'back', lambda self, rows: jnp.roll(back(self, rows), 1, 0))


def weighted_twice(patch: Any) -> None:
    weights = router.weights
    patch_router(patch, weights=lambda *arguments: jnp.square(weights(*arguments)))


def not_normalized(patch: Any) -> None:
    weights = router.weights
    update = {'normalize': False}
    patch_router(
        patch,
        weights=lambda logit, chosen, experts: weights(
            logit, chosen, experts.model_copy(update=update)
        ),
    )


def patch_router(patch: Any, **functions: Any) -> None:
    """Replace functions of the router in the passes alone."""
    patch(expert_passes, 'router', SimpleNamespace(**{**vars(router), **functions}))


def expert_gradients_doubled(patch: Any) -> None:
    gradient = Dropless.weight_gradient
    patch(Dropless, 'weight_gradient', lambda self, *arrays: 2 * gradient(self, *arrays))


def router_gradient_of_own_tokens(patch: Any) -> None:
    summed = expert_passes._Local.summed

    def all_but_one(self: Any, gradients: Any) -> Any:
        own = gradients['router']
        return summed(self, gradients) | {'router': own.reshape(self.arrays['router'].shape)}

    patch(expert_passes._Local, 'summed', all_but_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('break_it', 'names'),
    [
        (sent_to_the_next_slot, {'output', 'dx', 'router'}),
        exhaustive(weighted_twice, {'output', 'dx', 'router', 'up', 'down'}),
        exhaustive(not_normalized, {'output', 'dx', 'router', 'up', 'down'}),
        (expert_gradients_doubled, {'up', 'down'}),
        (router_gradient_of_own_tokens, {'router'}),
    ],
)
def test_a_fault_of_the_layer_changes_its_output_or_gradients(
    break_it: Any, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch.setattr)
    results, gradients = run(config_of({}, MESHES['tp2 x ep2']), share_of('chosen'))
    expected = {name: oracle()[f'chosen/{name}'] for name in results}
    expected |= {name: x for name, x in ours(oracle(), 'chosen/g/').items() if name in gradients}
    found = results | gradients
    assert {
        name for name, x in expected.items() if relative_error(found[name], x) >= LIMIT
    } == names


@pytest.mark.slow
@pytest.mark.parametrize('is_broken', [False, True])
def test_a_capacity_that_is_counted_per_shard_drops_other_tokens(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, keys = WithCapacity.of, {'capacity': 1.0, 'capacity_group': 8}

    def per_shard(chosen: jax.Array, experts: Any, group: int, *others: Any) -> WithCapacity:
        return of(chosen, experts, len(chosen), *others)

    alone, _ = run(config_of(keys, {}), share_of('chosen'))
    monkeypatch.setattr(WithCapacity, 'of', per_shard if is_broken else of)
    sharded, _ = run(config_of(keys, MESHES['tp2 x ep2']), share_of('chosen'))
    assert (relative_error(sharded['output'], alone['output']) < LIMIT) != is_broken


@pytest.mark.slow
@pytest.mark.parametrize('is_broken', [False, exhaustive(True)])
def test_tokens_with_equal_scores_are_sent_to_the_same_experts_on_every_mesh(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = router.choose

    def last_of_equals_on_some(logit_Tx: jax.Array, *others: Any) -> jax.Array:
        last_TY = logit_Tx.shape[1] - 1 - choose(logit_Tx[:, ::-1], *others)
        return jnp.where(lax.axis_index('expert') == 1, last_TY, choose(logit_Tx, *others))

    monkeypatch.setitem(oracle(), 'router', np.zeros_like(oracle()['router']))
    mesh = {'data': 2, 'experts': 2}
    alone, _ = run(config_of({}, {}), share_of('chosen'))
    if is_broken:
        patch_router(monkeypatch.setattr, choose=last_of_equals_on_some)
    sharded, _ = run(config_of({}, mesh), share_of('chosen'))
    assert (relative_error(sharded['output'], alone['output']) < LIMIT) != is_broken


@pytest.mark.parametrize('case', ['sigmoid', 'groups'])
def test_the_selection_bias_changes_as_in_megatron_core(case: str) -> None:
    config, whole = config_of(CASES[case], {}), oracle()
    sums = np.zeros((1, len(router.STATISTICS), len(whole['expert_bias'])), np.float32)
    sums[0, router.CHOSEN] = whole[f'{case}/routed'].sum((0, 1))
    with on_mesh(config):
        bias = nnx.State({'selection_bias': nnx.Param(jnp.asarray(whole['expert_bias'])[None])})
        params = nnx.State({'layers': {'experts': {'router': bias}}})
        after, load_Lx = after_step(params, sums[:, 0], jnp.asarray(sums), jnp.array(True), config)
    np.testing.assert_allclose(load_Lx[0], share_of(case))
    changed = after['layers']['experts']['router']['selection_bias'].get_value()[0]
    np.testing.assert_allclose(changed, whole[f'{case}/expert_bias_after'], rtol=0, atol=1e-8)
