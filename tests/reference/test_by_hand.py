"""megajax computes what Megatron does by hand: outputs, and the gradients of every weight and
input, on every mesh.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from reference import megatron_by_hand as by_hand
from support import (
    assert_close,
    exhaustive,
    graph_of,
    make_batch,
    make_config,
    on_mesh,
    relative_error,
    slow,
)

from megajax.core.config import Config
from megajax.core.model.attention import attention_core
from megajax.core.model.loss import Loss
from megajax.core.model.transformer import LanguageModel
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import Batch, place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state
from megajax.core.train.zero import between_steps
from megajax.interop.megatron.weights import from_megatron, to_megatron
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

LIMIT = 1e-5  # relative, see support.relative_error

Arrays = dict[str, np.ndarray]

on_each_mesh = pytest.mark.parametrize(
    ('model_size', 'sp'),
    [
        exhaustive(1, False),
        exhaustive(2, False),
        exhaustive(2, True),
        exhaustive(4, False),
        slow(4, True),  # `test_the_whole_model` shows it in `make test`
    ],
    ids=['1', '2', '2+sp', '4', '4+sp'],
)


def gpt(model_size: int, sp: bool, **sections: dict[str, Any]) -> Config:
    """GPT-2 with grouped queries, and a vocabulary that megajax pads and Megatron by hand does
    not.
    """
    model = {'vocab_size': 96, 'num_kv_heads': 4, 'activation': 'gelu_tanh', 'dropout': 0.0}
    return make_config(
        'gpt',
        2,
        model_size,
        sequence_parallel=sp,
        model=model | sections.pop('model', {}),
        loss={'label_smoothing': 0.0},
        **sections,
    )


@on_each_mesh
def test_the_embedding(model_size: int, sp: bool) -> None:
    def ours(model: LanguageModel, x_BSD: jax.Array, batch: Batch) -> jax.Array:
        return x_BSD + model.embedding(batch['tokens'], jnp.float32)

    def theirs(weights: by_hand.Weights, x_BRD: jax.Array, batch: Batch) -> jax.Array:
        return x_BRD + by_hand.vocab_parallel_embedding(
            weights['embedding.word_embeddings.weight'], batch['tokens'], sp
        )

    assert_same(gpt(model_size, sp), ours, theirs, residual(sp))


@on_each_mesh
def test_the_block(model_size: int, sp: bool) -> None:
    config = gpt(model_size, sp)

    def ours(model: LanguageModel, x_BSD: jax.Array, batch: Batch) -> jax.Array:
        block = jax.tree.map(lambda x: x[1], model.layers)
        return block(x_BSD, attention_core(config.model, Layout.of(config)))[0]

    def theirs(weights: by_hand.Weights, x_BRD: jax.Array, batch: Batch) -> jax.Array:
        return by_hand.transformer_layer(
            x_BRD, by_hand.under('decoder.layers.1', weights), config.model, sp
        )

    assert_same(config, ours, theirs, residual(sp))


@on_each_mesh
def test_the_loss(model_size: int, sp: bool) -> None:
    config = gpt(model_size, sp)

    def ours(model: LanguageModel, x_BSD: jax.Array, batch: Batch) -> jax.Array:
        weight_BS = batch['loss_mask'] / batch['loss_mask'].sum()
        loss = Loss.of(config, Layout.of(config))
        return loss(x_BSD, model.head_Vd, batch['labels'], weight_BS)[0]

    def theirs(weights: by_hand.Weights, x_BRD: jax.Array, batch: Batch) -> jax.Array:
        table_VD = weights['embedding.word_embeddings.weight']
        return by_hand.language_model_loss(x_BRD, table_VD, batch['labels'], batch['loss_mask'], sp)

    assert_same(config, ours, theirs, P())


@pytest.mark.slow
@pytest.mark.parametrize('sp', [exhaustive(False), True], ids=['4', '4+sp'])
def test_the_whole_model(sp: bool) -> None:
    config = gpt(4, sp)
    weights = random_weights()
    with on_mesh(config):
        batch = place_batch(make_batch(config))
        (loss, _), grads = jax.jit(make_loss_and_gradients(config))(
            from_megatron(config, weights), batch, jax.random.key(0)
        )
        gpt_loss = jax.shard_map(
            functools.partial(by_hand.gpt_loss, config=config.model, sp=sp),
            in_specs=(specs(weights), P('data'), P('data'), P('data')),
            out_specs=P(),
        )
        expected_loss, expected_grads = jax.jit(jax.value_and_grad(gpt_loss))(
            place(weights), batch['tokens'], batch['labels'], batch['loss_mask']
        )
        assert_close(to_megatron(config, grads), expected_grads, LIMIT)
    assert relative_error(loss, expected_loss) < LIMIT


RUNGS = {2: 'gradients', 3: 'weights'}


def run_both(
    rung: int, sp: bool, microbatches: int, **model: Any
) -> tuple[Config, list[jax.stages.Lowered], list[tuple[Any, ...]]]:
    """The gradients of the whole model on a rung of ZeRO, ours and by hand, and their arguments."""
    recompute = 'full' if rung == 3 else 'none'
    config = gpt(
        2,
        sp,
        train={'microbatches': microbatches, 'recompute': recompute},
        optim={'shard': RUNGS[rung]},
        model=model,
    )
    weights = random_weights(**model)
    by_hand_loss = jax.shard_map(
        functools.partial(
            by_hand.gpt_loss, config=config.model, sp=sp, rung=rung, microbatches=microbatches
        ),
        in_specs=(specs(weights, rung), P('data'), P('data'), P('data')),
        out_specs=P(),
    )
    batch = place_batch(make_batch(config))
    arguments = [
        (_at_rest(config, weights), batch, jax.random.key(0)),
        (place(weights, rung), batch['tokens'], batch['labels'], batch['loss_mask']),
    ]
    functions = make_loss_and_gradients(config), jax.value_and_grad(by_hand_loss)
    lowered = [jax.jit(f).lower(*x) for f, x in zip(functions, arguments, strict=True)]
    return config, lowered, arguments


def _at_rest(config: Config, weights: Arrays) -> nnx.State:
    return between_steps(from_megatron(config, weights), config)


def over_data(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The bytes that a program sends over `data`, by kind, without those of single numbers."""
    sent = collections.Counter[str]()
    for collective in collectives(Program(compiled.as_text()), jax.sharding.get_mesh().shape):
        if collective.axes == ('data',) and not collective.is_scalar:
            sent[collective.kind] += collective.times * collective.wire_bytes
    return dict(sent)


@pytest.mark.parametrize(
    ('rung', 'sp', 'microbatches'),
    [exhaustive(2, False, 2), exhaustive(3, False, 1), exhaustive(2, True, 1), slow(3, True, 2)],
)
def test_zero_has_the_gradients_of_megatron_by_hand(rung: int, sp: bool, microbatches: int) -> None:
    with on_mesh(gpt(2, sp)):
        config, lowered, arguments = run_both(rung, sp, microbatches)
        ours, theirs = (f.compile()(*x) for f, x in zip(lowered, arguments, strict=True))
        assert_close(to_megatron(config, ours[1]), theirs[1], LIMIT)
    assert relative_error(ours[0][0], theirs[0]) < LIMIT


@pytest.mark.parametrize(('rung', 'microbatches'), [exhaustive(2, 2), slow(3, 1)])
def test_zero_sends_the_bytes_of_megatron_by_hand(rung: int, microbatches: int) -> None:
    with on_mesh(gpt(2, sp=False)):
        # A vocabulary that megajax does not pad.
        _, lowered, _ = run_both(rung, False, microbatches, vocab_size=1024)
        ours, theirs = (over_data(each.compile()) for each in lowered)
    assert ours == theirs
    assert ours.keys() == {'all-gather', 'reduce-scatter', 'all-reduce'}


def gpipe(sp: bool, microbatches: int, **model: Any) -> Config:
    """Two rows of a data shard in each microbatch."""
    rows = {'batch_size': 4 * microbatches, 'microbatches': microbatches}
    train = rows | {'schedule': 'gpipe', 'recompute': 'full'}
    return gpt(
        2,
        sp,
        mesh={'stages': 2, 'data': 2, 'model': 2, 'sequence_parallel': sp},
        train=train,
        model=model,
    )


def run_stages(config: Config) -> tuple[list[jax.stages.Lowered], list[tuple[Any, ...]]]:
    """The gradients of a pipeline, ours and by hand, and their arguments."""
    sp, microbatches = config.mesh.sequence_parallel, config.train.microbatches
    weights = random_weights(vocab_size=config.model.vocab_size)
    outside = {name: x for name, x in weights.items() if not name.startswith('decoder.layers.')}
    stacked = stack(weights, config.model.num_layers)
    by_stage = {name: P('stage', *by_hand.spec(name)) for name in stacked}
    by_hand_loss = jax.shard_map(
        functools.partial(
            by_hand.gpipe_loss, config=config.model, sp=sp, microbatches=microbatches
        ),
        in_specs=(by_stage, specs(outside), P('data'), P('data'), P('data')),
        out_specs=P(),
    )
    batch = place_batch(make_batch(config))
    placed = {name: jax.device_put(x, by_stage[name]) for name, x in stacked.items()}
    rows = batch['tokens'], batch['labels'], batch['loss_mask']
    arguments = [
        (from_megatron(config, weights), batch, jax.random.key(0)),
        (placed, place(outside), *rows),
    ]
    gradients = jax.value_and_grad(by_hand_loss, argnums=(0, 1))
    functions = make_loss_and_gradients(config), gradients
    lowered = [jax.jit(f).lower(*x) for f, x in zip(functions, arguments, strict=True)]
    return lowered, arguments


def stack(weights: Arrays, num_layers: int) -> Arrays:
    """The weights of layers by their names in a layer, [layer, ...]."""
    layers = [by_hand.under(f'decoder.layers.{index}', weights) for index in range(num_layers)]
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


@pytest.mark.parametrize(('sp', 'microbatches'), [exhaustive(False, 2), slow(True, 3)])
def test_a_pipeline_is_gpipe_by_hand_in_gradients_and_to_the_byte(
    sp: bool, microbatches: int
) -> None:
    config = gpipe(sp, microbatches, vocab_size=1024)  # a vocabulary that megajax does not pad
    with on_mesh(config):
        lowered, arguments = run_stages(config)
        compiled = [each.compile() for each in lowered]
        ours, theirs = (each(*x) for each, x in zip(compiled, arguments, strict=True))
        sent, expected = (between_stages(each) for each in compiled)
        gradients = to_megatron(config, ours[1])
        layers, outside = theirs[1]
        assert_close(stack(gradients, config.model.num_layers), layers, LIMIT)
        assert_close({name: gradients[name] for name in outside}, outside, LIMIT)
    assert relative_error(ours[0][0], theirs[0]) < LIMIT
    assert sent == expected
    part = 4 * 2 * 32 * 64 // (2 if sp else 1)  # bytes of two rows on a device
    assert sent == {'stage': 2 * (microbatches + 1) * part}


def between_stages(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Bytes of the permutes of a program, by axis."""
    sent = collections.Counter[str]()
    for collective in collectives(Program(compiled.as_text()), jax.sharding.get_mesh().shape):
        if collective.kind == 'collective-permute':
            sent[collective.axis] += collective.times * collective.wire_bytes
    return dict(sent)


def assert_same(
    config: Config,
    ours: Callable[[LanguageModel, jax.Array, Batch], jax.Array],
    theirs: Callable[[by_hand.Weights, jax.Array, Batch], jax.Array],
    y_spec: P,
) -> None:
    """Both make the same y of the same weights, input and batch, and the same gradients of sum(y^2)
    / 2.
    """
    sp = config.mesh.sequence_parallel

    def run_ours(params: nnx.State, x_BSD: jax.Array, batch: Batch) -> jax.Array:
        return ours(nnx.merge(graph_of(config), params), x_BSD, batch)

    def run_theirs(weights: by_hand.Weights, x_BRD: jax.Array, batch: Batch) -> jax.Array:
        return theirs(by_hand.reduce_gradients(weights, sp), x_BRD, batch)

    weights = random_weights()
    with on_mesh(config):
        batch = place_batch(make_batch(config))
        shape = config.train.batch_size, config.train.seq_len, config.model.hidden_size
        x_BSD = jax.device_put(
            np.random.default_rng(1).normal(size=shape).astype(np.float32), residual(sp)
        )
        on_shards = jax.shard_map(
            run_theirs, in_specs=(specs(weights), residual(sp), P('data')), out_specs=y_spec
        )
        y, dparams, dx_BSD = output_and_gradients(
            run_ours, from_megatron(config, weights), x_BSD, batch
        )
        expected_y, expected_dweights, expected_dx_BSD = output_and_gradients(
            on_shards, place(weights), x_BSD, batch
        )
        assert_close(to_megatron(config, dparams), expected_dweights, LIMIT)
    assert_close({'y': y, 'dx': dx_BSD}, {'y': expected_y, 'dx': expected_dx_BSD}, LIMIT)


def output_and_gradients(
    function: Callable[..., jax.Array], weights: Any, x_BSD: jax.Array, batch: Batch
) -> tuple[jax.Array, Any, jax.Array]:
    def objective(weights: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = function(weights, x_BSD, batch)
        return (y * y).sum() / 2, y

    (_, y), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(
        weights, x_BSD
    )
    return y, *grads


def residual(sp: bool) -> P:
    return P('data', 'model' if sp else None, None)


def specs(weights: Arrays, rung: int = 0) -> dict[str, P]:
    return {name: by_hand.spec(name, rung) for name in weights}


def place(weights: Arrays, rung: int = 0) -> by_hand.Weights:
    return {name: jax.device_put(x, by_hand.spec(name, rung)) for name, x in weights.items()}


@functools.cache
def random_weights(**model: Any) -> Arrays:
    """By Megatron's names, the same for every mesh; of a size at which all of them matter, biases
    and norms too.
    """
    config, random = gpt(1, sp=False, model=model), np.random.default_rng(0)
    with on_mesh(config):
        shapes = {
            name: x.shape for name, x in to_megatron(config, init_state(config).params).items()
        }

    def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        return (random.normal(scale=scale, size=shape) + name.endswith('layernorm.weight')).astype(
            np.float32
        )

    return {name: weight(name, shape) for name, shape in shapes.items()}
