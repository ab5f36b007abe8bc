"""A step with a fault of its experts is caught: by a rule if it sends them or their gradients
wrongly, by its execution if it drops tokens or chooses experts wrongly.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import get_abstract_mesh
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_step
from megajax.analysis.inspect.reference import GRADIENT, LOAD, reference
from megajax.analysis.inspect.step_run import run
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler
from megajax.core.model import dispatch, expert_passes, router, zero_sharding
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train import routing


def config(shard: str = 'optimizer', **mesh: int) -> Config:
    sections = {'mesh': {'data': 4, 'experts': 2, **mesh}, 'optim': {'shard': shard}}
    # With two layers, the counts of the routers would have as many elements as a norm.
    return make_config('experts', model={'num_layers': 3}, **sections)


def rules(config: Config) -> set[str]:
    """The rules of the errors that are found."""
    compiled = compile_step(config, mesh_for(config), config.mesh.num_devices)
    return {one.rule for one in audit(config, compiled, 'cpu').findings if one.level == 'error'}


def own_of(gradient: jax.Array, dims: str, shards: Any, layout: Layout) -> jax.Array:
    """The gradients [*shards, *dims] without their sum: each device has its own."""

    def own(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[len(shards) :])

    spec = jax.typeof(gradient).sharding.spec
    return jax.shard_map(own, in_specs=spec, out_specs=layout(dims), check_vma=False)(gradient)


def router_gradients_not_summed(patch: Any) -> None:
    usual = zero_sharding.sum_of_vector

    def all_but_the_router(gradient: jax.Array, dims: str, *rest: Any) -> jax.Array:
        total = own_of if dims.endswith(('Dx', 'DAx')) else usual
        return total(gradient, dims, *rest)

    patch(zero_sharding, 'sum_of_vector', all_but_the_router)


def load_of_own_tokens(patch: Any) -> None:
    """The shares of the balance loss, and the counts that move the selection biases."""
    patch(routing, 'sum_of_vector', own_of)


def experts_summed_over_expert(patch: Any) -> None:
    usual = zero_sharding.sum_of_own_experts

    def summed_again(*arguments: Any, **options: Any) -> jax.Array:
        total = usual(*arguments, **options)
        spec = jax.typeof(total).sharding.spec
        add = lambda x: lax.psum(x, 'expert')  # noqa: E731
        return jax.shard_map(add, in_specs=spec, out_specs=spec, check_vma=False)(total)

    patch(zero_sharding, 'sum_of_own_experts', summed_again)


def experts_gathered(patch: Any) -> None:
    usual = expert_passes._Local.up.fget

    def gathered(self: Any) -> jax.Array:
        w = usual(self)
        if self.how.is_abstract:
            return w
        whole = lax.all_gather(w, 'expert', axis=0, tiled=True)
        own = lax.dynamic_slice_in_dim(whole, lax.axis_index('expert') * len(w), len(w))
        return own + 0 * whole.max()

    patch(expert_passes._Local, 'up', property(gathered))


@pytest.mark.parametrize(
    ('break_it', 'config', 'expected'),
    [
        slow(router_gradients_not_summed, config(), {'sum left out'}),
        exhaustive(load_of_own_tokens, config(model=2), {'sum left out'}),
        slow(experts_summed_over_expert, config('none'), {'experts summed over expert'}),
        exhaustive(experts_gathered, config('weights'), {'gathered experts'}),
    ],
)
def test_a_step_with_a_fault_of_its_experts_is_caught(
    break_it: Any, config: Config, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch.setattr)
    assert rules(config) == expected


def capacity_of_a_shard(patch: Any) -> None:
    """Drop the last tokens of a device, instead of those of a sequence."""
    usual = dispatch.WithCapacity.of.__func__

    def of(cls: type, expert_TY: jax.Array, experts: Any, group: int, *others: Any) -> Any:
        return usual(cls, expert_TY, experts, len(expert_TY), *others)

    patch(dispatch.WithCapacity, 'of', classmethod(of))


def ties_broken_by_the_mesh(patch: Any) -> None:
    """Of experts with equal scores, choose the last one if experts are on several devices."""
    usual = router.choose

    def choose(logit_Tx: jax.Array, bias_x: jax.Array | None, experts: Any) -> jax.Array:
        logit_Tx = jnp.round(logit_Tx)  # so that there are equal ones
        if get_abstract_mesh().shape.get('expert', 1) == 1:
            return usual(logit_Tx, bias_x, experts)
        return experts.count - 1 - usual(logit_Tx[:, ::-1], bias_x, experts)

    patch(router, 'choose', choose)


def loads_of_other_experts(patch: Any) -> None:
    """On a mesh, the balance loss has the loads in another order."""
    usual = routing.attached

    def attached(weights: Any, primals: Any, load: routing.Load, *rest: Any) -> Any:
        if get_abstract_mesh().size > 1:
            load = load._replace(share_Lx=load.share_Lx[:, ::-1])
        return usual(weights, primals, load, *rest)

    patch(routing, 'attached', attached)


def nothing(patch: Any) -> None:
    pass


ROUTER = f'{GRADIENT}layers.experts.router.weight'


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")
@pytest.mark.parametrize(
    ('break_it', 'capacity', 'wrong'),
    [
        (capacity_of_a_shard, 1.0, 'loss'),
        exhaustive(nothing, 1.0, ''),
        exhaustive(ties_broken_by_the_mesh, None, 'loss'),
        exhaustive(router_gradients_not_summed, None, ROUTER),
        (loads_of_other_experts, None, ROUTER),
        exhaustive(load_of_own_tokens, None, LOAD),
    ],
)
def test_a_fault_of_the_numbers_is_caught_by_running_the_step(
    break_it: Any, capacity: float | None, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.cache_clear()
    break_it(monkeypatch.setattr)
    experts = {'count': 8, 'active': 2, 'ffn_size': 32, 'capacity': capacity, 'balance_loss': 0.1}
    model = {'num_layers': 1, 'experts': experts}
    step = make_config('llama', model=model, mesh={'data': 4, 'experts': 2})
    [result] = run(step, 'h100', bisect=False, minimize=False, say=lambda line: None)
    reference.cache_clear()
    assert result.ok == (not wrong)
    assert not wrong or wrong in [each.name for each in result.results if not each.ok]
