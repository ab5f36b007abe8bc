"""A step on stages and context shards sends the expected bytes, and a wrong build is caught."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from inspect_collectives import reduced
from jax import P, lax
from support import AS_SHIPPED, exhaustive, make_config, slow

from megajax.analysis.inspect import inspect_with_text
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import CompiledStep, compile_step
from megajax.analysis.inspect.pipeline_lint import (
    gathered_at_edges,
    kept_gradients,
    undeclared_permutes,
)
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection, Row
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler
from megajax.core.model import zero_sharding
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train import pipeline
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Array, Program

LAYERS, MICROBATCHES = 4, 4


def config(
    name: str = 'llama',
    *,
    train: dict | None = None,
    shard: str = 'none',
    model: int = 1,
    layers: list[dict] | None = None,
    documents: bool = False,
    **mesh,
) -> Config:
    return make_config(
        name,
        mesh={'data': 1, 'model': model} | mesh,
        model={'num_layers': LAYERS, 'dropout': 0.0, 'layers': layers or []},
        train={'microbatches': MICROBATCHES} | (train or {}),
        optim={'shard': shard},
        data={'document_mask': documents},
    )


def compiled_here(config: Config) -> CompiledStep:
    return compile_step(config, mesh_for(config), config.mesh.num_devices, AS_SHIPPED)


def inspect_here(config: Config) -> Inspection:
    return audit(config, compiled_here(config), 'cpu')


@functools.cache
def as_built(config: Config) -> Inspection:
    return inspect_here(config)


def caught(found: Inspection) -> set[str]:
    """Rows with MORE, and rules of lint errors."""
    more = {f'{row.site} {row.phase} {row.axis}' for row in found.rows if row.verdict == 'MORE'}
    return more | {one.rule for one in found.findings if one.level == 'error'}


def row_of(found: Inspection, site: str, phase: str, axis: str) -> Row:
    (row,) = (row for row in found.rows if (row.site, row.phase, row.axis) == (site, phase, axis))
    return row


FULL = {'recompute': 'full'}
HALF = {'recompute': 'selective', 'dtype': 'bfloat16'}
SP = {'model': 2, 'sequence_parallel': True}
WINDOWS = [{'window': 4}, {}]
SMALL = config(stages=2, context=2, train={'microbatches': 2})


@pytest.mark.parametrize(
    'config',
    [
        slow(SMALL),
        exhaustive(config(stages=2, context=2, **SP, shard='optimizer')),
        exhaustive(config('gpt', stages=2, data=2, model=2)),
        exhaustive(config(stages=2, virtual_stages=2, data=2, **SP, train=FULL)),
        exhaustive(config('gpt', stages=4, data=2, train={'schedule': 'gpipe'} | FULL)),
        exhaustive(config(stages=2, data=2, **SP, train=HALF, shard='optimizer')),
        exhaustive(config(stages=2, data=2, replicas=2, model=2, shard='optimizer')),
        exhaustive(config('bert', stages=4, **SP, train=FULL)),
        exhaustive(config('bert', stages=2, model=2, train={'batch_size': 24})),
        exhaustive(config(context=2, data=2, model=2)),
        exhaustive(config(context=4, **SP, train=HALF, shard='optimizer')),
        exhaustive(config(context=4, model=2, context_exchange='ring', train=FULL)),
        exhaustive(config('gpt', context=2, data=2, context_exchange='ring', shard='weights')),
        exhaustive(config(context=2, context_exchange='ring', **SP, train=FULL, layers=WINDOWS)),
        exhaustive(
            config(
                context=2,
                context_exchange='ring',
                **SP,
                documents=True,
                layers=WINDOWS,
                shard='weights',
            )
        ),
        exhaustive(config(context=4, data=2, layers=WINDOWS, shard='weights')),
        exhaustive(config(stages=2, context=2, data=2, context_exchange='ring', train=FULL)),
        exhaustive(config(context=2, data=2, documents=True, layers=WINDOWS, shard='weights')),
        exhaustive(config(context=4, **SP, documents=True, context_exchange='ring', train=FULL)),
        exhaustive(config(stages=2, context=2, data=2, documents=True)),
    ],
)
def test_a_step_sends_no_more_than_is_expected_and_computes_what_the_config_says(config):
    found = as_built(config)
    assert not caught(found)
    assert found.ok
    assert found.products.ratio == pytest.approx(1, abs=1e-6)
    assert not any(row.site.startswith('other') for row in found.rows)


@pytest.mark.slow
def test_rows_have_megatrons_runs_and_those_of_the_bubbles_ticks():
    found = as_built(SMALL)
    for phase in ('forward', 'backward'):
        row = row_of(found, 'stage', phase, 'stage')
        for transfers, times in ((row.placed, 3), (row.megatron, 2), (row.expected, 3)):
            assert {one.kind: one.times for one in transfers} == {'collective-permute': times}
        assert row.verdict == 'expected'
        (head,) = row_of(found, 'head', phase, 'stage').placed
        assert head.times == 2
    assert row_of(found, 'attention', 'forward', 'context').placed[0].times == 2 * 3 * LAYERS / 2
    assert row_of(found, 'gradients', 'step', 'context').verdict == 'equal'
    pipeline = found.pipeline
    assert (pipeline.ticks, pipeline.idle_ticks, pipeline.bubble) == (3, 1, 0.5)
    text = ' '.join(to_text(found, width=200).split())
    assert 'each stage is busy in 2 of 3 ticks per direction; bubble 50.0%' in text
    assert 'expected head forward over stage' in text


def sent_the_other_way(patch):
    send = pipeline.send
    patch(pipeline, 'send', lambda x, pairs: send(x, [(to, source) for source, to in pairs]))


def sent_past_a_stage(patch):
    send = pipeline.send

    def send_further(x: jax.Array, pairs: list) -> jax.Array:
        return send(x, [(source, (to + 1) % len(pairs)) for source, to in pairs])

    patch(pipeline, 'send', send_further)


def never_sent_home(patch):
    """A chain, where the last stage's outputs go nowhere: with virtual stages they must."""
    send = pipeline.send
    patch(pipeline, 'send', lambda x, pairs: send(x, pairs[:-1]))


def sent_in_fp32(patch):
    send = pipeline.send

    def send_wide(x: jax.Array, pairs: list) -> jax.Array:
        return send(x.astype(jnp.float32) + 1e-9, pairs).astype(x.dtype)

    patch(pipeline, 'send', send_wide)


def context_shards_left_out(patch):
    """Gradients are reduced over `data`, and each context shard keeps its own."""

    def sum_of_data(gradient: jax.Array, dims: str, shards: tuple, layout) -> jax.Array:
        count = len(shards)

        def own(x: jax.Array) -> jax.Array:
            return lax.psum(x.reshape(x.shape[count:]), 'data')

        spec = jax.typeof(gradient).sharding.spec
        return jax.shard_map(own, in_specs=spec, out_specs=layout(dims), check_vma=False)(gradient)

    patch(zero_sharding, 'sum_of_vector', sum_of_data)


FOUR = config(stages=4)
CHUNKS = config(stages=2, virtual_stages=2)
UNDECLARED = 'permute with undeclared pairs'


@pytest.mark.parametrize(
    ('worsen', 'config', 'expected'),
    [
        exhaustive(sent_the_other_way, FOUR, {UNDECLARED}),
        exhaustive(sent_past_a_stage, FOUR, {UNDECLARED}),
        slow(never_sent_home, CHUNKS, {UNDECLARED, 'permute without a source'}),
        exhaustive(
            sent_in_fp32,
            config(stages=2, model=2, train=HALF),
            {'stage forward stage', 'stage backward stage', 'fp32 communication'},
        ),
        exhaustive(context_shards_left_out, config(context=2, data=2), {'gradients step data'}),
    ],
)
def test_a_step_that_moves_something_else_is_caught(worsen, config, expected, monkeypatch):
    worsen(monkeypatch.setattr)
    found = inspect_here(config)
    assert expected <= caught(found)
    assert not found.ok


@pytest.mark.parametrize('is_summed', [True, False])
def test_a_loop_that_keeps_the_gradients_of_a_table_is_found(is_summed: bool) -> None:
    one = config()
    rows, width = one.model.padded_vocab_size, one.model.hidden_size

    def gradient(table_VD: jax.Array, x_BD: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jax.nn.logsumexp(x_BD @ table.T, -1).sum())(table_VD)

    def total(table_VD: jax.Array, x_MBD: jax.Array) -> jax.Array:
        if is_summed:
            add = lambda so_far, x: (so_far + gradient(table_VD, x), None)  # noqa: E731
            return lax.scan(add, jnp.zeros_like(table_VD), x_MBD)[0]
        return lax.scan(lambda _, x: (None, gradient(table_VD, x)), None, x_MBD)[1].sum(0)

    shapes = (rows, width), (MICROBATCHES, 8, width)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program = Program(jax.jit(total).lower(*arrays).compile().as_text())
    rules = {finding.rule for finding in kept_gradients(one, program)}
    assert rules == (set() if is_summed else {'table gradients stacked'})


RINGS = {'context': 2, 'context_exchange': 'ring'}


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.parametrize(
    ('config', 'times'),
    [
        (
            config(
                stages=2,
                virtual_stages=2,
                **RINGS,
                train={'recompute': 'selective', 'dtype': 'bfloat16'},
            ),
            (18, 54),
        ),
        (config(stages=4, **RINGS, train={'microbatches': 8, 'dtype': 'bfloat16'}), (22, 66)),
    ],
)
def test_a_backward_tick_on_gpus_runs_the_ring_of_the_backward_pass_alone(config, times):
    """Keys and values in the forward pass, and their gradients too in the backward pass."""
    found, _ = inspect_with_text(config, target='h100', hosts=None)
    assert not caught(found)
    assert times == tuple(
        row_of(found, 'attention', phase, 'context').placed[0].times
        for phase in ('forward', 'backward')
    )


RING = ((0, 1), (1, 2), (2, 3), (3, 0))
BACK = ((0, 3), (3, 2), (2, 1), (1, 0))
FORWARD, BACKWARD = (
    f'jit(train_step)/while/body/{name}/ppermute'
    for name in (pipeline.TO_NEXT, pipeline.TO_PREVIOUS)
)


@pytest.mark.parametrize(
    ('axes', 'op_name', 'pairs', 'is_right'),
    [
        (('stage',), FORWARD, RING, True),
        (('stage',), FORWARD, BACK, False),
        (('stage',), BACKWARD, BACK, True),
        (('stage',), BACKWARD, RING, False),
        (('stage',), FORWARD, RING[:-1], False),
        (('stage',), 'jit(train_step)/while/body/ppermute', RING, False),
        (('context',), FORWARD, RING, True),
        (('context',), FORWARD, BACK, True),
        (('context',), FORWARD, RING[:-1], False),
        (('stage', 'context'), FORWARD, RING, False),
        (('model',), FORWARD, BACK, True),
    ],
)
def test_stages_and_context_shards_send_to_their_neighbors(axes, op_name, pairs, is_right):
    one = reduced(op_name, Array('f32', (1, 32, 64)))
    one = dataclasses.replace(one, kind='collective-permute', axes=axes, groups=pairs)
    mesh = dict.fromkeys(('stage', 'context', 'model'), 1) | dict.fromkeys(axes[:1], 4)
    assert [finding.rule for finding in undeclared_permutes(mesh, [one])] == (
        [] if is_right else [UNDECLARED]
    )


@pytest.mark.parametrize('is_partial', [True, False])
def test_an_array_that_is_gathered_to_enter_a_region_is_found(is_partial: bool) -> None:
    spec = P('stage', 'data', 'model')
    within = P('stage', None, None) if is_partial else spec
    axes = {'axis_names': {'stage'}} if is_partial else {}
    options = {'in_specs': within, 'out_specs': within, 'check_vma': False} | axes

    def doubled(x: jax.Array) -> jax.Array:
        gather = lambda x: lax.all_gather(x, 'stage', axis=0, tiled=True)  # noqa: E731
        return 2 * jax.shard_map(gather, **options)(x)

    explicit = (jax.sharding.AxisType.Explicit,) * 3
    mesh = jax.make_mesh((2, 2, 2), ('stage', 'data', 'model'), axis_types=explicit)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 8, 16), 'float32', sharding=jax.NamedSharding(mesh, spec))
        text = jax.jit(doubled).lower(x).compile().as_text()
    found = [*gathered_at_edges(collectives(Program(text), dict(mesh.shape)))]
    assert bool(found) == is_partial
    assert {finding.rule for finding in found} <= {'gathered at a shard_map boundary'}
