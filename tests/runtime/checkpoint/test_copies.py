"""A model opens with as many copies of its weights as the machine has devices and memory for."""

import jax
import pytest

from megajax.core.config import Config, ConfigError, load
from megajax.core.counts.parameters import num_parameters
from megajax.core.parallel.mesh import mesh_for
from megajax.runtime.checkpoint import copies
from megajax.runtime.checkpoint.copies import check_copies, with_copies_that_fit


def on(data: int, model: int, experts: int = 1) -> Config:
    sizes = [f'mesh.data={data}', f'mesh.model={model}', 'train.batch_size=96']
    return load('tiny_moe', [*sizes, f'mesh.experts={experts}'])


@pytest.mark.parametrize(
    ('mesh', 'data'),
    [
        ((4, 2), 4),
        ((32, 1), 8),
        ((32, 2), 4),
        ((12, 1), 6),
        ((16, 1, 4), 8),
        ((8, 2, 8), 8),  # no number of data shards fits: the error of the mesh has the sizes
        ((2, 8), 1),
    ],
)
def test_data_shards_are_left_out_until_the_devices_suffice(
    mesh: tuple[int, ...], data: int
) -> None:
    assert jax.device_count() == 8
    config = on(*mesh)
    found = with_copies_that_fit(config)
    assert found.mesh.data == data
    assert found.model_copy(update={'mesh': config.mesh}) == config


def test_simulated_devices_have_the_copies_that_the_host_has_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = on(8, 1)
    copy = 4 * num_parameters(config.model, padded=True)
    for memory, data in ((None, 8), (8 * copy, 8), (8 * copy - 1, 4), (2 * copy, 2), (1, 1)):
        monkeypatch.setattr(copies, 'host_memory', lambda memory=memory: memory)
        found = with_copies_that_fit(config)
        assert found.mesh.data == data
        if memory != 1:
            check_copies(found, [*mesh_for(found).devices.flat])


@pytest.mark.parametrize(
    ('data', 'where', 'fix'), [(8, '8 simulated devices', 'set mesh.data=1, or '), (1, 'a CPU', '')]
)
def test_too_little_memory_is_named_before_the_weights_are_read(
    data: int, where: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, 'host_memory', lambda: 10**6)
    config = on(data, 1)
    needed = 4 * data * num_parameters(config.model, padded=True) / 1e9
    with pytest.raises(ConfigError) as refusal:
        check_copies(config, [*mesh_for(config).devices.flat])
    assert str(refusal.value) == (
        f'the weights need at least {needed:.1f} GB on {where}, and this host has 0.0 GB: '
        f'{fix}use a host with more memory, or GPUs'
    )
