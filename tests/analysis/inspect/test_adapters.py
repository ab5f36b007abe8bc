"""Beside frozen weights, adapters send no activation more, and their gradients once a step."""

from typing import Any

import jax
import numpy as np
import pytest
from support import exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.reference import first_state
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection
from megajax.core.config import Config
from megajax.core.config.lora import without_adapters
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dim_sizes, elements, parameters

SP = {'sequence_parallel': True}
TWICE = {'train': {'microbatches': 2}}


def case(*mesh: Any, **sections: Any) -> Config:
    return make_config(*mesh, **{'lora': {'rank': 4}, 'model': {'dropout': 0.0}, **sections})


def inspect_here(config: Config) -> Inspection:
    return audit(config, compile_for(config, 'cpu', 1), 'cpu')


def of_activations(found: Inspection) -> dict[tuple[str, str], list[tuple[str, int, float]]]:
    """What each site sends over `model`, but for gradients."""
    return {
        (row.site, row.phase): sorted((x.kind, x.times, x.wire_bytes) for x in row.placed)
        for row in found.rows
        if row.axis == 'model' and row.site not in ('gradients', 'metrics')
    }


def gradient_bytes(config: Config, axis: str) -> float:
    """The ring all-reduce of a stage's adapters over its shards, or of their replicated halves."""
    sizes, mesh = dim_sizes(config.model), config.mesh
    count = mesh.model if axis == 'model' else mesh.data * mesh.context

    def sent(x: Parameter) -> int:
        shared = axis == 'model' or x.summed
        return elements(x.dims, sizes, {'L': mesh.stages}) // (1 if shared else mesh.model)

    adapters = [x for _, x in parameters(config.model) if not x.is_frozen]
    summed = [x for x in adapters if axis != 'model' or x.summed]
    return 2 * (count - 1) / count * 4 * sum(map(sent, summed))


def axes_of(config: Config) -> list[str]:
    """The axes over which gradients are summed; stages have different adapters."""
    shards = [name for name in ('data', 'context') if getattr(config.mesh, name) > 1]
    return ['+'.join(shards), 'model']


@pytest.mark.parametrize(
    'config',
    [
        exhaustive(case('gpt', 2, 2, **SP, **TWICE)),
        exhaustive(case('llama', 1, 4)),
        slow(case('llama', 2, 2, **SP, optim={'shard': 'weights'}, train={'recompute': 'full'})),
        exhaustive(case('gpt', 2, 4, optim={'shard': 'gradients'}, **TWICE)),
        exhaustive(case('gpt', 4, 2, mesh={'replicas': 2}, optim={'shard': 'optimizer'})),
        exhaustive(case('llama', 2, 2, **SP, mesh={'stages': 2}, train={'microbatches': 4})),
        exhaustive(case('llama', 2, 2, **SP, mesh={'context': 2})),
    ],
)
def test_activations_send_what_they_send_without_and_the_gradients_are_summed_once(
    config: Config,
) -> None:
    found, plain = inspect_here(config), inspect_here(without_adapters(config))
    assert found.ok, to_text(found)
    # Without a gradient of the embedding, and of other weights, some of these are not there.
    sent, allowed = of_activations(found), of_activations(plain)
    if config.mesh.stages == 1:
        assert sent == {site: allowed[site] for site in sent}
    for site, collectives in sent.items():  # nothing reads the last gradient of a stage's input
        for (kind, times, _), (same, most, _) in zip(collectives, allowed[site], strict=True):
            assert kind == same
            assert times in (most, most - 1)
    assert {site for site, _ in sent} >= {'attention', 'mlp'}
    assert found.products is not None
    assert found.products.ratio == pytest.approx(1, abs=0.01)
    if config.optim.shard != 'none':  # sums in each microbatch, or to shards, are rows of their own
        return
    sent = {row.axis: row.wire_bytes for row in found.rows if row.site == 'gradients'}
    summed = {axis: gradient_bytes(config, axis) for axis in axes_of(config)}
    assert sent == {axis: pytest.approx(size) for axis, size in summed.items() if size}


@pytest.mark.parametrize('dtype', [exhaustive('bfloat16'), 'float16'])
def test_frozen_weights_before_an_emulated_step_are_the_same_in_each_dtype(dtype):
    """A weight that is rounded to fp16 and then to bf16 can differ by a unit in the last place."""
    found, wanted = (
        jax.tree.leaves(first_state(case('llama', 1, 1, train={'dtype': each})).params)
        for each in (dtype, 'float32')
    )
    assert any(x.dtype == dtype for x in found)
    for x, precise in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.float32(x), precise, rtol=0, atol=1e-7)
