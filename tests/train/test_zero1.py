"""ZeRO-1: what lies where between steps, what a step sends, and that nothing else is different."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import (
    AS_SHIPPED,
    assert_close,
    gather,
    make_batch,
    make_config,
    on_mesh,
    pack,
    random_params,
    relative_error,
    slow,
)

from megajax.checkpoint.checkpoints import Checkpoints
from megajax.config import Config
from megajax.inspect.audit import audit
from megajax.inspect.compile import compile_for
from megajax.parallel.mesh import concrete
from megajax.parallel.placements import parameter_name
from megajax.train.feed import place_batch
from megajax.train.step import init_state, make_eval_step, make_loss_and_gradients, make_train_step

MESHES = [(4, 1), (2, 2), (4, 2)]


def config(name: str, *mesh: int, shard: bool, dtype: str = 'float32', **train: Any) -> Config:
    return make_config(
        name,
        *mesh,
        sequence_parallel=mesh[1] > 1,
        train={'dtype': dtype, **train},
        optim={'shard': shard, 'lr': 3e-3, 'eps': 1e-3},
    )


def is_parameter(x: object) -> bool:
    return isinstance(x, nnx.Variable)


@pytest.mark.parametrize('mesh', MESHES)
def test_every_matrix_and_its_moments_are_shared_out_over_data_and_vectors_are_not(mesh):
    sharded, whole = (config('llama', *mesh, shard=shard) for shard in (True, False))
    with on_mesh(sharded):
        states = [
            concrete(jax.eval_shape(functools.partial(init_state, each)))
            for each in (sharded, whole)
        ]
    trees = [(state.params, state.opt_state) for state in states]
    leaves = [jax.tree.leaves_with_path(tree, is_leaf=is_parameter) for tree in trees]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        size, whole_size = (math.prod(z.sharding.shard_shape(z.shape)) for z in (x, y))
        shards = mesh[0] if is_parameter(x) and x.declared.is_matrix else 1
        assert size * shards == whole_size, parameter_name(path)


def test_initial_parameters_are_bit_identical():
    states = []
    for shard in (False, True):
        with on_mesh(config('gpt', 4, 2, shard=shard)):
            make = jax.jit(lambda shard=shard: init_state(config('gpt', 4, 2, shard=shard)).params)
            states.append(gather(make.lower().compile(AS_SHIPPED)()))
    for name, x in states[0].items():
        np.testing.assert_array_equal(states[1][name], x)


@functools.cache
def loss_and_gradients(
    name: str, dtype: str, *, shard: bool
) -> tuple[float, dict[str, np.ndarray]]:
    each = config(name, 2, 2, shard=shard, dtype=dtype, microbatches=2, recompute='full')
    with on_mesh(each):
        params = random_params(each, std=0.05)
        batch = place_batch(
            pack(make_batch(each), [10, 22]) if name == 'llama' else make_batch(each)
        )
        function = jax.jit(
            lambda params: make_loss_and_gradients(each)(params, batch, jax.random.key(0))
        )
        (loss, _), gradients = function(params)
        assert all(g.dtype == np.float32 for g in jax.tree.leaves(gradients))
        return float(loss), gather(gradients)


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('gpt', 'bfloat16'),
        ('llama', 'float32'),
        *(
            slow(*case)
            for case in (('gpt', 'float32'), ('llama', 'bfloat16'), ('bert', 'bfloat16'))
        ),
    ],
)
def test_loss_and_gradients_are_those_of_whole_weights(name, dtype):
    (expected, expected_gradients), (actual, gradients) = (
        loss_and_gradients(name, dtype, shard=shard) for shard in (False, True)
    )
    # the same roundings to bf16 in both, if gradients of weights were made in it they would differ
    # by 1e-3
    assert relative_error(actual, expected) <= 1e-6
    assert_close(gradients, expected_gradients, 1e-6 if dtype == 'float32' else 1e-4)


def train(each: Config, steps: int = 3) -> tuple[Any, list[float]]:
    state, step, losses = init_state(each), make_train_step(each), []
    for seed in range(steps):
        state, metrics = step(state, place_batch(make_batch(each, seed=seed)))
        losses.append(float(metrics['loss']))
    return state, losses


def test_steps_and_evaluation_are_those_of_one_device():
    ends = []
    for each in (config('llama', 1, 1, shard=False), config('llama', 4, 2, shard=True)):
        with on_mesh(each):
            state, losses = train(each)
            nll = float(
                make_eval_step(each)(state.params, place_batch(make_batch(each, seed=9)))['nll']
            )
            ends.append((losses, nll, gather(state.params)))
    (losses, nll, params), (sharded_losses, sharded_nll, sharded_params) = ends
    assert relative_error(sharded_losses, losses) <= 1e-5
    assert relative_error(sharded_nll, nll) <= 1e-5
    assert_close(sharded_params, params, 1e-5)


@pytest.mark.parametrize('name', ['gpt', slow('llama'), slow('bert')])
def test_a_step_sends_what_megatrons_distributed_optimizer_sends(name):
    each = config(name, 2, 2, shard=True, microbatches=2)
    inspection = audit(each, compile_for(each, 'cpu', 1), 'cpu')
    over_data = {row.site: row for row in inspection.rows if row.axis == 'data'}
    assert inspection.ok, str(inspection)
    assert over_data.keys() == {'parameters', 'gradients', 'metrics'}
    assert [t.kind for t in over_data['parameters'].placed] == ['all-gather'] * len(
        over_data['parameters'].placed
    )
    assert {t.kind for t in over_data['gradients'].megatron} == {'reduce-scatter', 'all-reduce'}


@pytest.mark.slow
def test_weights_are_gathered_in_the_dtype_of_the_computation_and_no_loop_holds_them_in_fp32():
    sizes = {'num_layers': 16, 'hidden_size': 256, 'vocab_size': 1000}
    train = {'dtype': 'bfloat16', 'recompute': 'full'}
    steps = [
        compile_for(
            make_config('gpt', 4, 1, model=sizes, train=train, optim={'shard': shard}), 'cpu', 1
        )
        for shard in (False, True)
    ]
    matrices = (
        sum(p.bytes_per_device for p in steps[0].parameters if p.bytes_per_device > 2**20) // 4
    )  # numbers
    whole, sharded = (step.arguments + step.temporaries for step in steps)
    saved = (
        12 * (1 - 1 / 4) - 2
    )  # bytes per number: three of the four arrays in fp32 are shared out, one in bf16 is new
    assert whole - sharded >= 0.95 * saved * matrices


@pytest.mark.parametrize('shard', [False, slow(True)])
def test_a_checkpoint_restores_to_the_bit_with_the_other_setting(tmp_path: Path, shard: bool):
    one, other = config('llama', 4, 2, shard=shard), config('llama', 2, 2, shard=not shard)
    with on_mesh(one), Checkpoints(tmp_path, one) as checkpoints:
        state, _ = train(one, steps=1)
        before = [np.asarray(x) for x in jax.tree.leaves(state)]
        checkpoints.save(state, 1)
    with on_mesh(other), Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore(checkpoints.newest_verified())
        assert {x.sharding for x in jax.tree.leaves(restored.params)} == {
            x.sharding for x in jax.tree.leaves(init_state(other).params)
        }
        for x, y in zip(before, jax.tree.leaves(restored), strict=True):
            np.testing.assert_array_equal(y, x)
