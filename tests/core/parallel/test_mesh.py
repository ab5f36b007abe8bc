"""The mesh has two Explicit axes, and the devices of a tensor-parallel group are neighbours."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

import megajax
from megajax.core.config import ConfigError
from megajax.core.config.one_dimensional import one_dimensional
from megajax.core.hardware.cpu_flags import LIMIT
from megajax.core.parallel.mesh import (
    SETTINGS,
    _simulate_cpu_devices,
    axis_sizes,
    check_current_mesh,
    concrete,
    is_simulated,
    left_idle,
    make_mesh,
    mesh_for,
)


@pytest.mark.parametrize(
    ('data', 'model'), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (1, 8), (8, 1)]
)
def test_a_mesh_has_the_axes_data_and_model_both_explicit_with_neighbours_along_model(data, model):
    mesh = make_mesh(data, model)
    assert mesh.axis_names == ('data', 'model')
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    assert dict(mesh.shape) == {'data': data, 'model': model}
    assert [[device.id for device in group] for group in mesh.devices] == [
        [d * model + m for m in range(model)] for d in range(data)
    ]
    assert is_simulated(mesh) == (data * model > 1)


def test_further_axes_come_in_their_order_and_one_of_a_single_device_is_left_out():
    assert axis_sizes(2, 4) == {'data': 2, 'model': 4}
    sizes = axis_sizes(4, 2, row=2, context=1, replica=3, stage=2, spare=5)
    assert [*sizes.items()] == [
        ('replica', 3),
        ('stage', 2),
        ('data', 4),
        ('spare', 5),
        ('row', 2),
        ('model', 2),
    ]
    assert make_mesh(2, 2, stage=2).axis_names == ('stage', 'data', 'model')


@pytest.mark.parametrize(
    ('sizes', 'words', 'fits'),
    [
        (
            {'data': 4, 'model': 2, 'row': 2},
            'mesh.data=4 x mesh.model_rows=2 x mesh.model=2 needs 16 devices',
            'choose data x model among 4x1, 2x2, 1x4',
        ),
        (
            {'data': 4, 'model': 2, 'replica': 2},
            'mesh.data=8 x mesh.model=2 (mesh.replicas=2) needs 16 devices',
            'choose data x model among 8x1, 4x2, 2x4',
        ),
        (
            {'data': 1, 'model': 1, 'replica': 3, 'row': 16},
            'mesh.data=3 x mesh.model_rows=16 x mesh.model=1 (mesh.replicas=3) needs 48 devices',
            'choose data x model among 8x1, 4x2, 2x4, 1x8 with mesh.model_rows=1, mesh.replicas=1',
        ),
        (
            {'data': 2, 'model': 2, 'stage': 4, 'context': 2},
            'mesh.stages=4 x mesh.data=2 x mesh.context=2 x mesh.model=2 needs 32 devices',
            'choose data x model among 1x1',
        ),
        (
            {'data': 1, 'model': 2, 'stage': 8, 'context': 2},
            'mesh.stages=8 x mesh.data=1 x mesh.context=2 x mesh.model=2 needs 32 devices',
            'choose data x model among 8x1, 4x2, 2x4, 1x8 with mesh.stages=1, mesh.context=1',
        ),
    ],
)
def test_too_few_devices_are_told_by_the_keys_of_the_config(sizes, words, fits):
    jax.devices()
    with pytest.raises(megajax.ConfigError) as refusal:
        make_mesh(**sizes)
    message = str(refusal.value)
    assert message.startswith(f'{words}, but jax has 8 (CPU)')
    assert message.endswith(fits)


@pytest.mark.parametrize(
    ('sizes', 'words', 'fix'),
    [
        ({'data': 1, 'model': 8}, 'mesh.data=1 x mesh.model=8 leaves 16', 'set mesh.data=3'),
        (
            {'data': 1, 'model': 4, 'replica': 4},
            'mesh.data=4 x mesh.model=4 (mesh.replicas=4) leaves 8',
            'set mesh.data=6 mesh.replicas=2',
        ),
        (
            {'data': 1, 'model': 4, 'expert': 2},
            'mesh.data=2 x mesh.experts=2 x mesh.model=4 leaves 16',
            'set mesh.data=6',
        ),
        (
            {'data': 1, 'model': 8, 'expert': 2},
            'mesh.data=2 x mesh.experts=2 x mesh.model=8 leaves 8',
            'choose data x model among 24x1, 12x2, 8x3, 6x4, 4x6, 2x12',
        ),
        (
            {'data': 1, 'model': 8, 'stage': 2},
            'mesh.stages=2 x mesh.data=1 x mesh.model=8 leaves 8',
            'choose data x model among 12x1, 6x2, 4x3, 3x4, 2x6, 1x12',
        ),
        (
            {'data': 1, 'model': 2, 'stage': 5},
            'mesh.stages=5 x mesh.data=1 x mesh.model=2 leaves 14',
            'choose data x model among 24x1, 12x2, 8x3, 6x4, 4x6, 3x8, 2x12, 1x24 with '
            'mesh.stages=1',
        ),
    ],
)
def test_a_mesh_that_leaves_processes_idle_is_told_one_of_all_devices(sizes, words, fix):
    message = left_idle(axis_sizes(**sizes), 24, 3)
    assert message.startswith(f'{words} of 24 devices idle, and with 3 processes each')
    assert message.endswith(f': {fix}')


def on(mesh, shard='none', schedule='1f1b', **model):
    small = {
        'num_layers': mesh.get('stages', 1),
        'hidden_size': 32,
        'num_heads': 4,
        'vocab_size': 300,
    }
    return megajax.Config(
        model=small | {'max_seq_len': 16} | model,
        train={
            **{'seq_len': 16, 'batch_size': 8, 'schedule': schedule},
            'microbatches': mesh.get('stages', 1),
        },
        mesh=mesh,
        optim={'shard': shard},
    )


def grid(rows, model):
    return {'data': 2, 'model_rows': rows, 'model': model, 'sequence_parallel': True}


@pytest.mark.parametrize(
    ('config', 'data', 'model'),
    [
        (on(grid(2, 2)), 2, 4),
        (on(grid(4, 1)), 2, 4),
        (on(grid(4, 2)), 8, 2),  # four heads are not for eight columns
        (on(grid(2, 2), num_kv_heads=2, head_dim=7), 4, 2),
        (on({'data': 4, 'replicas': 2, 'model': 2}, 'weights'), 4, 2),
        (on({'context': 2, 'model': 2}, 'optimizer'), 2, 2),
        (on({'stages': 2, 'model': 2}, schedule='gpipe'), 2, 2),
    ],
)
def test_a_config_in_one_dimension_has_as_many_devices_and_is_right(config, data, model):
    plain = one_dimensional(config)
    assert plain.mesh.sizes == {'data': data, 'model': model}
    assert plain.mesh.num_devices == config.mesh.num_devices
    assert plain.optim.shard == 'none'
    megajax.Config.model_validate(plain.model_dump())


@pytest.mark.parametrize(('data', 'model'), [(4, 4), (3, 3), (9, 1), (1, 16)])
def test_too_few_devices_are_refused_with_the_numbers_and_meshes_that_fit(data, model):
    jax.devices()  # from their first use on there are eight
    with pytest.raises(megajax.ConfigError) as refusal:
        make_mesh(data, model)
    message = str(refusal.value)
    assert (
        f'mesh.data={data} x mesh.model={model} needs {data * model} devices, but jax has 8'
        in message
    )
    for fits in ('8x1', '4x2', '2x4', '1x8'):
        assert fits in message


def test_an_abstract_state_made_concrete_lies_on_the_current_mesh_as_the_state_would():
    config = megajax.Config(
        model={
            'num_layers': 1,
            'hidden_size': 16,
            'num_heads': 4,
            'vocab_size': 10,
            'max_seq_len': 8,
        },
        train={'seq_len': 8},
        mesh={'data': 2, 'model': 4},
    )
    with jax.set_mesh(make_mesh(2, 4)):
        real = megajax.init_state(config)
        abstract = concrete(jax.eval_shape(lambda: megajax.init_state(config)))
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for x, like in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.parametrize('has_gpu', [True, False])
def test_the_libraries_of_gpus_are_checked_only_where_there_are_gpus(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        'megajax.core.parallel.mesh.NVIDIA', [tmp_path / ('.' if has_gpu else 'no')]
    )
    monkeypatch.setattr(os, 'environ', dict(os.environ))
    os.environ.pop('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', None)
    make_mesh(1, 1)
    assert ('JAX_SKIP_CUDA_CONSTRAINTS_CHECK' in os.environ) == (not has_gpu)


def test_devices_that_xla_flags_ask_for_are_simulated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    monkeypatch.setattr(jax.config, 'update', lambda key, count: counts.append(count))
    for flags, count in (('', 9), ('--xla_force_host_platform_device_count=12 --xla_a=1', 12)):
        monkeypatch.setenv('XLA_FLAGS', flags)
        _simulate_cpu_devices(9)
        assert counts.pop() == count


STEPS_OF_WHICH_NONE_IS_READ = """
import jax
import jax.numpy as jnp
import megajax

jax.set_mesh(megajax.make_mesh(8, 1))
step = jax.jit(lambda x: x + jax.reshard(x.sum(0), jax.P()))
x = jax.device_put(jnp.zeros((64, 256)), jax.P('data'))
for _ in range(200):
    x = step(x)
print(x.sum())
"""


@pytest.mark.slow
def test_simulated_devices_take_any_number_of_steps_of_which_none_is_read() -> None:
    """In jax 0.10, devices with a thread each wait for each other for ever."""
    environ = os.environ | {'XLA_FLAGS': f'{LIMIT}=20'}
    command = [sys.executable, '-c', STEPS_OF_WHICH_NONE_IS_READ]
    assert subprocess.run(command, env=environ, capture_output=True).stdout == b'0.0\n'


def test_the_data_shards_in_a_message_count_those_that_share_experts() -> None:
    with pytest.raises(megajax.ConfigError, match=r'mesh\.data=4096 x mesh\.experts=2 x ') as error:
        make_mesh(2048, 1, expert=2)
    assert '1x8' not in str(error.value)


@pytest.mark.parametrize(
    ('setting', 'said'),
    [
        (jax.enable_x64(True), 'jax_enable_x64=True is not supported: .*; unset JAX_ENABLE_X64,'),
        (
            jax.threefry_partitionable(False),
            'jax_threefry_partitionable=False is not .*; unset JAX_THREEFRY_PARTITIONABLE,',
        ),
    ],
    ids=['x64', 'partitionable'],
)
def test_a_setting_of_jax_that_no_step_supports_is_named(
    setting: AbstractContextManager[None], said: str
) -> None:
    config = megajax.load('tiny', ['mesh.data=1', 'mesh.model=1'])
    mesh = jax.make_mesh((1, 1), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        check_current_mesh(config)
        with setting, pytest.raises(ConfigError, match=said):
            check_current_mesh(config)
    with setting, pytest.raises(ConfigError, match=said):
        mesh_for(config)
    with setting:
        make_mesh()  # which may be for another program


def test_a_setting_that_this_jax_does_not_have_is_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = *SETTINGS, ('jax_removed', True, 'a later jax has no such setting')
    monkeypatch.setattr('megajax.core.parallel.mesh.SETTINGS', settings)
    mesh_for(megajax.load('tiny', ['mesh.data=1', 'mesh.model=1']))


@pytest.mark.parametrize(
    ('axes', 'is_accepted'),
    [
        ({'data': 2, 'model': 1}, True),
        ({'data': 2, 'model': 1, 'stage': 1, 'spare': 2}, True),
        ({'data': 2, 'model': 1, 'stage': 2}, False),
        ({'data': 2}, False),  # a step shards over `model` on every mesh
    ],
    ids=str,
)
def test_a_mesh_may_have_further_axes_of_size_1(axes: dict[str, int], is_accepted: bool) -> None:
    config = megajax.load('tiny', ['mesh.data=2', 'mesh.model=1'])
    rejects = pytest.raises(ConfigError, match=r'mesh\.model=1, and the current mesh is')
    types = (AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types)
    with jax.set_mesh(mesh), nullcontext() if is_accepted else rejects:
        check_current_mesh(config)
