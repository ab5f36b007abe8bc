"""Parameters in the form that pipeline stages use."""

import jax
import pytest
from support import abstract_state, make_config, on_mesh

from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout
from megajax.core.train.stage_arrays import of_own_experts, split_layers


@pytest.mark.parametrize(('experts', 'own'), [(2, True), (1, False)])
def test_a_data_shard_of_its_own_experts_is_a_dim(experts: int, own: bool) -> None:
    mesh = {'stages': 2, 'experts': experts}
    config = make_config('experts', 2, 1, mesh=mesh, train={'microbatches': 2})
    layout, added = Layout.of(config), set[tuple[bool, bool, int]]()

    def count(params: object) -> None:
        before, _ = split_layers(params, layout)
        after, has_shards = of_own_experts(before, layout)
        map_parameters(
            lambda declared, x, y, has: added.add((declared.is_of_experts, has, y.ndim - x.ndim)),
            before,
            after,
            has_shards,
        )

    with on_mesh(config):
        jax.eval_shape(count, abstract_state(config).params)
    assert added == {(False, False, 0), (True, own, len(layout.mapped) if own else 0)}
