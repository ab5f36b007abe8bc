"""The mesh has two Explicit axes, and the devices of a tensor-parallel group are neighbours."""

import jax
import pytest
from jax.sharding import AxisType

import megajax
from megajax.parallel.mesh import axis_sizes, concrete, is_simulated, make_mesh


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


def test_too_few_devices_for_further_axes_name_them_too():
    jax.devices()
    with pytest.raises(megajax.ConfigError) as refusal:
        make_mesh(4, 2, row=2)
    assert 'mesh.data=4 x mesh.row=2 x mesh.model=2 needs 16 devices and jax has 8' in str(
        refusal.value
    )


@pytest.mark.parametrize(('data', 'model'), [(4, 4), (3, 3), (9, 1), (1, 16)])
def test_too_few_devices_are_refused_with_the_numbers_and_meshes_that_fit(data, model):
    jax.devices()  # from their first use on there are eight
    with pytest.raises(megajax.ConfigError) as refusal:
        make_mesh(data, model)
    message = str(refusal.value)
    assert (
        f'mesh.data={data} x mesh.model={model} needs {data * model} devices and jax has 8'
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
