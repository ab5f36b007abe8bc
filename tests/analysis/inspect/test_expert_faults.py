"""A step that sends experts or their gradients wrongly is caught by the rule that is for it."""

from typing import Any

import jax
import pytest
from jax import lax
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_step
from megajax.core.config import Config
from megajax.core.model import expert_passes, zero_sharding
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
        total = own_of if dims.endswith('Dx') else usual
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
        slow(experts_gathered, config('weights'), {'gathered experts'}),
    ],
)
def test_a_step_with_a_fault_of_its_experts_is_caught(
    break_it: Any, config: Config, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch.setattr)
    assert rules(config) == expected
