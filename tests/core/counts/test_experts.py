"""The FLOPs and collectives of a mixture of experts, by hand."""

from collections.abc import Callable, Iterable

import pytest
from support import make_config

from megajax.core.config import Config
from megajax.core.counts.collective import REDUCE, Expected
from megajax.core.counts.experts import of_megatron, over_experts
from megajax.core.counts.flops import step_flops
from megajax.core.counts.megatron import expected
from megajax.core.counts.parameters import count, num_parameters

TOKENS, D, LAYERS, X, ACTIVE, HIDDEN = 8 * 32, 64, 2, 8, 2, 32


def config(capacity: float | None = None, **mesh: int) -> Config:
    experts = {'count': X, 'active': ACTIVE, 'ffn_size': HIDDEN, 'capacity': capacity}
    train = {'microbatches': mesh.get('stages', 1)}
    return make_config('experts', model={'experts': experts}, mesh=mesh, train=train)


def test_flops_are_of_the_experts_that_a_token_uses() -> None:
    dense = make_config('llama', model={'ffn_size': ACTIVE * HIDDEN})
    router = 2 * TOKENS * LAYERS * D * X
    assert step_flops(config()).layers == step_flops(dense).layers + router
    half = config(capacity=0.5)
    mlp = 2 * TOKENS * LAYERS * 3 * D * ACTIVE * HIDDEN
    assert step_flops(half).layers == step_flops(config()).layers - mlp // 2
    # Slots beyond an equal share are executed, but they are not work of the model.
    twice = step_flops(config(capacity=2.0))
    assert twice.model == step_flops(config()).model
    assert twice.recomputed == step_flops(config()).recomputed + 3 * mlp


@pytest.mark.parametrize('mesh', [{'data': 4, 'experts': 2}, {'data': 4, 'experts': 4, 'model': 2}])
def test_the_devices_of_a_mesh_share_the_work(mesh: dict[str, int]) -> None:
    one, all_devices = step_flops(config()), step_flops(config(**mesh))
    assert all_devices.model == one.model
    # Each device of a tensor-parallel group runs the router.
    router = 3 * 2 * TOKENS * LAYERS * D * X
    assert all_devices.recomputed - one.recomputed == (mesh.get('model', 1) - 1) * router


@pytest.mark.parametrize(
    ('capacity', 'counted', 'slots'),
    [
        (None, of_megatron, 64 * ACTIVE),
        (None, over_experts, 1.25 * 64 * ACTIVE),
        (1.0, over_experts, 64 * ACTIVE),
    ],
)
def test_each_pass_of_a_layer_has_two_all_to_alls(
    capacity: float | None, counted: Callable[..., Iterable[Expected]], slots: int
) -> None:
    sent = [
        (row.site.phase, row.times, row.array.dims)
        for row in counted(config(capacity, data=4, experts=2), LAYERS)
        if row.kind == 'all-to-all'
    ]
    assert sent == [(phase, 2 * LAYERS, (slots, D)) for phase in ('forward', 'backward')]


def test_each_half_of_a_batch_has_its_own_all_to_alls() -> None:
    whole = config(data=4, experts=2)
    train = whole.train.model_copy(update={'overlap': 'batch_split'})
    in_halves = whole.model_copy(update={'train': train})
    one, two = (
        [(row.times, row.array.dims) for row in over_experts(each, LAYERS) if row.kind != REDUCE]
        for each in (whole, in_halves)
    )
    assert [times for times, _ in two] == [2 * times for times, _ in one]
    assert {dims for _, dims in two} == {(1.25 * 64 * ACTIVE / 2, D), (2, X)}


def test_experts_are_reduced_over_the_shards_that_hold_the_same_ones() -> None:
    sharded = config(data=4, experts=2)
    reduced = {
        row.site.axis: row.array.dims[0]
        for row in expected(sharded)
        if row.site.name == 'gradients' and len(row.array.dims) == 1
    }
    of_experts = count(sharded.model, (('X', 2),), of_experts=True).all
    others = num_parameters(sharded.model, padded=True) - 2 * of_experts
    assert reduced == {'data': of_experts, 'data+expert': others}


def test_a_stage_reduces_the_experts_of_its_layers() -> None:
    staged = config(data=4, experts=2, stages=2)
    (of_experts,) = (
        row.array.dims[0]
        for row in expected(staged)
        if row.site.name == 'gradients' and row.site.axis == 'data'
    )
    assert of_experts == LAYERS // 2 * X // 2 * 3 * D * HIDDEN
