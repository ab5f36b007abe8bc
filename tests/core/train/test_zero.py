"""ZeRO: what lies where between steps, what a step sends, and that nothing else is different.

Errors are relative to the largest element, see `support.relative_error`.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import Setting, batch_of, evaluate, loss_and_gradients, train
from support import (
    AS_SHIPPED,
    abstract_state,
    assert_close,
    exhaustive,
    gather,
    make_config,
    on_mesh,
    relative_error,
    slow,
)

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import CompiledStep, compile_for
from megajax.core.counts.declaration import Parameter
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete
from megajax.core.parallel.placements import parameter_name
from megajax.core.train.feed import abstract_batch
from megajax.core.train.gradients import make_gradients
from megajax.core.train.loss_scale import HYSTERESIS, LossScale
from megajax.core.train.step import init_state, make_train_step
from megajax.core.train.zero import gather_once
from megajax.runtime.checkpoint.checkpoints import Checkpoints

RUNGS = ['optimizer', 'gradients', 'weights']
HIGHEST_FIRST = ['weights', slow('gradients'), slow('optimizer')]
SP: dict[str, Any] = {'sequence_parallel': True}


def assert_as_unsharded(setting: Setting) -> None:
    """The loss is that of the same mesh without ZeRO, and the gradients up to the order of sums.

    Several groups of replicas sum the loss in another order than one group does: in half of all
    draws of parameters it differs in the last bit.
    """
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.unsharded, setting)
    )
    one_group = setting.replicas in (1, setting.data)
    limit = 0 if one_group else np.spacing(np.float32(expected_loss))
    assert abs(loss - expected_loss) <= limit
    assert_close(gradients, expected, 1e-6)


@pytest.mark.parametrize('shard', HIGHEST_FIRST)
@pytest.mark.parametrize(
    'setting',
    [
        # Each product gathers its weight; 3 divides no dim, so every matrix is padded.
        exhaustive(Setting('bert', 3, 2, **SP, recompute='selective')),
        # Each layer gathers its weights; fewer key/value heads than `model`.
        Setting('llama', 2, 4, **SP, microbatches=4, recompute='full'),
        exhaustive(Setting('gpt', 2, 2, **SP, dtype='bfloat16', recompute='full')),
        exhaustive(Setting('gpt', 4, 1, dtype='bfloat16', microbatches=4)),
        exhaustive(Setting('bert', 4, 2, **SP, dtype='float16', recompute='full')),
        # Shards 5, 6 and 7 of 16 in 3s: 1, 0 and 0.
        exhaustive(Setting('gpt', 7, 1, hidden_size=16)),
        exhaustive(Setting('gpt', 7, 1, hidden_size=16, recompute='full')),
        slow(Setting('llama', 6, 1, recompute='full')),
        exhaustive(Setting('llama', 2, 2, **SP, recompute='full', overlap='batch_split')),
        exhaustive(Setting('gpt', 2, 2, **SP, dtype='bfloat16', overlap='batch_split')),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_unsharded_weights(setting: Setting, shard: str) -> None:
    assert_as_unsharded(setting._replace(shard=shard))


def every_pair() -> Iterator[Setting]:
    """Every pair of a rung, model, mesh, recomputation, dtype and number of microbatches."""
    meshes = [(2, 1), (4, 1), (8, 1), (3, 2), (2, 2), (4, 2), (2, 4)]
    places = [(*mesh, sp) for mesh in meshes for sp in (False, True) if mesh[1] > 1 or not sp]
    for (i, (data, model, sp)), (j, name) in itertools.product(
        enumerate(places), enumerate(['gpt', 'llama', 'bert'])
    ):
        yield Setting(
            name,
            data,
            model,
            RUNGS[(i + j) % 3],
            sequence_parallel=sp,
            recompute=['none', 'selective', 'full'][(i // 3 + j) % 3],
            dtype=['float32', 'bfloat16', 'float16'][(i // 3 + 2 * j) % 3],
            microbatches=[1, 4][(i + j) % 2],
        )


@pytest.mark.parametrize(
    'setting',
    [exhaustive(one) for one in every_pair()],
    ids=str,
)
def test_every_rung_has_the_numbers_of_unsharded_weights(setting: Setting) -> None:
    assert_as_unsharded(setting)


@pytest.mark.parametrize(
    ('setting', 'replicas'),
    [
        exhaustive(Setting('gpt', 4, 2, 'weights', **SP, recompute='full'), 2),
        exhaustive(Setting('gpt', 4, 2, 'weights', **SP, recompute='full'), 4),
        exhaustive(Setting('gpt', 8, 1, 'gradients'), 4),
        slow(Setting('llama', 4, 1, 'none', microbatches=4), 2),
        exhaustive(Setting('gpt', 4, 2, 'none', **SP, microbatches=2), 2),
        exhaustive(Setting('llama', 4, 1, 'none', stages=2, microbatches=4), 2),
        exhaustive(Setting('experts', 8, 1, 'none', experts=2, microbatches=2), 2),
        *(exhaustive(Setting('gpt', 8, 1, shard), 2 * 2**i) for i, shard in enumerate(RUNGS)),
        *(exhaustive(Setting('gpt', 8, 1, shard), 8 // 2**i) for i, shard in enumerate(RUNGS)),
        exhaustive(Setting('bert', 4, 2, 'weights', **SP, microbatches=4), 2),
        exhaustive(Setting('bert', 4, 2, 'gradients', **SP, microbatches=4), 2),
        # Padded to 66.
        exhaustive(Setting('llama', 6, 1, 'gradients', microbatches=4, dtype='bfloat16'), 2),
        *(exhaustive(Setting('llama', 6, 1, shard, recompute='full'), 3) for shard in RUNGS),
    ],
    ids=str,
)
def test_replicas_change_nothing(setting: Setting, replicas: int) -> None:
    assert_as_unsharded(setting._replace(replicas=replicas))


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('gpt', 4, 2, 'weights', replicas=2, **SP, recompute='full')),
        Setting('llama', 4, 1, 'none', microbatches=4),
        *(exhaustive(Setting('llama', 4, 1, shard, microbatches=4)) for shard in RUNGS),
    ],
    ids=str,
)
def test_gradients_summed_in_bf16_are_near_those_in_fp32_and_not_the_same(setting: Setting) -> None:
    setting = setting._replace(reduce_dtype='bfloat16')
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.unsharded, setting)
    )
    assert loss == expected_loss
    assert_close(gradients, expected, 1e-2)
    errors = {name: relative_error(gradients[name], x) for name, x in expected.items()}
    assert errors['layers.mlp.up.weight'] > 1e-4
    assert errors['norm.weight'] < 1e-6  # vectors are summed in fp32


EXPERT = 'model.experts={count: 2, active: 1, ffn_size: 48}'


@pytest.mark.parametrize(
    ('preset', 'keys', 'dim', 'is_rounded'),
    [
        exhaustive('tiny', ['mesh.model=2'], '', False),
        ('tiny', ['mesh.model=2', 'optim.shard=weights'], '', False),
        slow('tiny_vlm', ['mesh.model=1'], '', False),
        # Each data shard has an expert of its own; all other matrices are summed over both.
        ('tiny', ['mesh.model=1', 'mesh.data=2', 'mesh.experts=2', EXPERT], '48', False),
        ('tiny', ['mesh.model=1', 'mesh.data=2', EXPERT], '48', True),
    ],
)
def test_only_a_gradient_that_several_data_shards_have_is_rounded_to_reduce_dtype(
    preset: str, keys: list[str], dim: str, is_rounded: bool
) -> None:
    fp32 = 'train.dtype=float32', 'optim.reduce_dtype=bfloat16'
    config = megajax.load(preset, ['mesh.data=1', *fp32, *keys])
    with on_mesh(config):
        given = abstract_state(config).params, abstract_batch(config), jax.random.key(0)
        program = str(jax.make_jaxpr(make_gradients(config))(*given))
    assert bool(re.search(rf'bf16\[[^\]]*\b{dim}[^\]]*\]', program)) == is_rounded


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('llama', 3, 2, 'weights', **SP, recompute='full')),
        exhaustive(Setting('gpt', 8, 1, 'gradients', replicas=4)),
        *(exhaustive(Setting('bert', 4, 2, shard, replicas=2, **SP)) for shard in RUNGS),
        *(exhaustive(Setting('gpt', 3, 2, shard, **SP)) for shard in RUNGS),
        *(exhaustive(Setting('llama', 2, 4, shard, **SP)) for shard in RUNGS),
    ],
    ids=str,
)
def test_five_steps_end_as_those_of_one_device(setting: Setting) -> None:
    expected, actual = train(setting.on_one_device), train(setting)
    assert relative_error(actual.losses, expected.losses) <= 1e-5
    assert_close(actual.first_moments, expected.first_moments, 1e-5)  # gather: padding stays zero
    assert_close(actual.params, expected.params, 1e-5)
    assert actual.evaluated == pytest.approx(expected.evaluated, rel=1e-5)


@pytest.mark.parametrize('shard', HIGHEST_FIRST)
@pytest.mark.parametrize(
    'setting',
    [
        Setting('llama', 3, 2, **SP, dtype='bfloat16'),
        exhaustive(Setting('gpt', 4, 2, replicas=2, **SP, recompute='full')),
        exhaustive(Setting('bert', 3, 2, dtype='bfloat16', recompute='full')),
    ],
    ids=str,
)
def test_evaluation_is_that_of_unsharded_weights(setting: Setting, shard: str) -> None:
    assert evaluate(setting._replace(shard=shard)) == evaluate(setting.unsharded)


@functools.cache
def train_in_fp16(shard: str) -> list[dict[str, float]]:
    """The metrics of steps of which the first ones overflow."""
    setting = Setting('llama', 2, 1, shard, dtype='float16', recompute='full')
    config, steps = setting.config, []
    with on_mesh(config):
        step = make_train_step(config)
        scale = LossScale(jnp.float32(2.0**23), jnp.int32(0), jnp.int32(HYSTERESIS))
        state = init_state(config)._replace(loss_scale=scale)
        for seed in range(8):
            state, metrics = step(state, batch_of(setting, seed))
            steps.append({name: float(value) for name, value in metrics.items()})
    return steps


@pytest.mark.slow
@pytest.mark.parametrize('shard', [*map(exhaustive, RUNGS)])
def test_in_fp16_the_same_steps_overflow(shard: str) -> None:
    expected, actual = train_in_fp16('none'), train_in_fp16(shard)
    for name in ('loss_scale', 'overflow', 'taken'):
        assert [step[name] for step in actual] == [step[name] for step in expected]
    assert {step['taken'] for step in actual} == {0, 1}
    losses = [[step['loss'] for step in steps] for steps in (actual, expected)]
    assert relative_error(*losses) <= 1e-5


def is_parameter(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def placed(setting: Setting) -> dict[str, Any]:
    """The parameters and the state of the optimizer by name, as shapes with placements."""
    config = setting.config
    with on_mesh(config):
        state = concrete(jax.eval_shape(functools.partial(init_state, config)))
    leaves = jax.tree.leaves_with_path((state.params, state.opt_state), is_leaf=is_parameter)
    return {parameter_name(path): leaf for path, leaf in leaves}


def local_shape(x: Any) -> tuple[int, ...]:
    return tuple(x.sharding.shard_shape(x.shape))


def on_every_rung(setting: Setting) -> list[Any]:
    """ZeRO-3 in `make test`; another setting shows there what lies where on lower rungs."""
    *lower, highest = (setting._replace(shard=shard) for shard in RUNGS)
    return [*map(exhaustive, lower), highest]


@pytest.mark.parametrize(
    'setting',
    [
        *(Setting('llama', 4, 2, shard) for shard in RUNGS),
        *on_every_rung(Setting('gpt', 2, 2, **SP)),
        *on_every_rung(Setting('gpt', 3, 2)),
        *on_every_rung(Setting('bert', 7, 1, hidden_size=16)),
        *on_every_rung(Setting('gpt', 8, 1, replicas=2)),
        # Replicas and padding.
        *(Setting('llama', 6, 1, shard, replicas=2) for shard in RUNGS),
    ],
    ids=str,
)
def test_every_matrix_and_its_moments_lie_in_shards_over_data_and_vectors_do_not(setting):
    shards = setting.data // setting.replicas
    sharded, unsharded = placed(setting), placed(setting.unsharded)
    assert sharded.keys() == unsharded.keys()
    matrices = 0
    for name, x in sharded.items():
        expected = list(local_shape(unsharded[name]))
        if is_parameter(x) and x.declared.is_matrix:
            matrices += 1
            dim = x.declared.dims.lower().index('d')
            expected[dim] = math.ceil(expected[dim] / shards)
        assert local_shape(x) == tuple(expected), name
    assert matrices >= 3 * 5  # parameters and their two moments


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting', [exhaustive(Setting('gpt', 4, 2)), Setting('llama', 3, 2)], ids=str
)
def test_initial_parameters_are_bit_identical(setting: Setting) -> None:
    params = []
    for shard in ('none', 'weights'):
        config = setting._replace(shard=shard).config
        with on_mesh(config):
            make = jax.jit(lambda config=config: init_state(config).params)
            params.append(gather(make.lower().compile(AS_SHIPPED)()))
    for name, x in params[0].items():
        np.testing.assert_array_equal(params[1][name], x)


@pytest.mark.parametrize('name', [slow('gpt'), exhaustive('llama'), exhaustive('bert')])
def test_a_step_sends_what_megatrons_distributed_optimizer_sends(name: str) -> None:
    config = Setting(name, 2, 2, 'optimizer', **SP, microbatches=2).config
    inspection = audit(config, compile_for(config, 'cpu', 1), 'cpu')
    over_data = {row.site: row for row in inspection.rows if row.axis == 'data'}
    assert inspection.ok, str(inspection)
    assert over_data.keys() == {'parameters', 'gradients', 'metrics'}
    assert {t.kind for t in over_data['parameters'].placed} == {'all-gather'}
    assert {t.kind for t in over_data['gradients'].megatron} == {'reduce-scatter', 'all-reduce'}


@pytest.mark.slow
@pytest.mark.parametrize('recompute', [exhaustive('none'), 'full'])
def test_each_rung_holds_less_than_the_one_below(recompute: str) -> None:
    sizes = {'num_layers': 16, 'hidden_size': 256, 'vocab_size': 1000, 'dropout': 0.0}
    train = {'dtype': 'bfloat16', 'recompute': recompute}

    def compiled(shard: str) -> CompiledStep:
        config = make_config('gpt', 4, 1, model=sizes, train=train, optim={'shard': shard})
        return compile_for(config, 'cpu', 1)

    steps = {shard: compiled(shard) for shard in ('none', *RUNGS)}
    held = {shard: step.arguments + step.temporaries for shard, step in steps.items()}
    large = (x.bytes_per_device for x in steps['none'].parameters if x.bytes_per_device > 2**20)
    matrices = sum(large) // 4  # numbers
    # Of the four arrays in fp32 a device has a quarter: weights, moments and gradients. The step
    # has its weights in bf16 too: all of them in two rungs, those of a layer in the last.
    assert held['none'] - held['optimizer'] >= 0.95 * (12 * (1 - 1 / 4) - 2) * matrices
    assert held['optimizer'] - held['gradients'] >= 0.95 * 4 * (1 - 1 / 4) * matrices
    assert held['gradients'] - held['weights'] >= 0.95 * 2 * matrices


@pytest.mark.slow
@pytest.mark.parametrize('shard', [exhaustive('weights'), 'none'])
def test_a_checkpoint_restores_to_the_bit_with_another_rung(tmp_path: Path, shard: str) -> None:
    saved = Setting('llama', 4, 2, shard)
    restored = Setting('llama', 2, 2, 'none' if shard == 'weights' else 'gradients')
    with on_mesh(saved.config), Checkpoints(tmp_path, saved.config) as checkpoints:
        state, _ = make_train_step(saved.config)(init_state(saved.config), batch_of(saved))
        before = [np.asarray(x) for x in jax.tree.leaves(state)]
        checkpoints.save(state, 1)
    with on_mesh(restored.config), Checkpoints(tmp_path, restored.config) as checkpoints:
        state = checkpoints.restore(checkpoints.newest_verified())
        placements = {x.sharding for x in jax.tree.leaves(init_state(restored.config).params)}
        assert {x.sharding for x in jax.tree.leaves(state.params)} == placements
        for x, y in zip(before, jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize('name', ['gpt', 'llama'])  # a tied head, and one of its own
def test_layers_on_their_own_have_every_matrix_cast_before_the_first_microbatch(name: str) -> None:
    config = make_config(name, 1, 2, train={'dtype': 'bfloat16', 'unroll': True, 'microbatches': 2})
    dtypes: dict[str, set[Any]] = {}

    def look(declared: Parameter, weight: Any) -> Any:
        if declared.is_matrix:
            dtypes[declared.dims] = {x.dtype for x in jax.tree.leaves(weight)}
        return weight

    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config)).params
        jax.eval_shape(
            lambda params: map_parameters(look, gather_once(params, config, Layout.of(config))),
            params,
        )
    assert len(dtypes) > 4
    assert set().union(*dtypes.values()) == {jnp.dtype('bfloat16')}
