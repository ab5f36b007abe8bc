"""A model opens with as many copies of its weights as the machine has devices and memory for."""

import jax
import pytest

from megajax.core.config import Config, ConfigError, load
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.parameters import num_parameters
from megajax.core.parallel.mesh import mesh_for
from megajax.runtime.checkpoint import copies
from megajax.runtime.checkpoint.copies import check_copies, with_copies_that_fit


def on(data: int, model: int, experts: int = 1) -> Config:
    sizes = [f'mesh.data={data}', f'mesh.model={model}', 'train.batch_size=96']
    return load('tiny_moe', [*sizes, f'mesh.experts={experts}', 'train.dtype=bfloat16'])


@pytest.mark.parametrize(
    ('mesh', 'data', 'experts'),
    [
        ((4, 2), 4, 1),
        ((32, 1), 8, 1),
        ((32, 2), 4, 1),
        ((12, 1), 6, 1),
        ((16, 1, 4), 8, 4),
        ((8, 2, 8), 4, 4),
        ((12, 2, 4), 4, 4),
        ((12, 1, 4), 6, 2),
        ((2, 8), 1, 1),
    ],
)
def test_data_shards_are_left_out_until_the_devices_suffice(
    mesh: tuple[int, ...], data: int, experts: int
) -> None:
    assert jax.device_count() == 8
    config = on(*mesh)
    found = with_copies_that_fit(config, cast=True)
    assert (found.mesh.data, found.mesh.experts) == (data, experts)
    assert not incompatibilities(found)
    assert mesh_for(found).size == found.mesh.num_devices
    assert found.model_copy(update={'mesh': config.mesh}) == config


@pytest.mark.parametrize('experts', [1, 8])
def test_simulated_devices_have_the_copies_that_the_host_has_memory_for(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on(8, 1, experts)
    copy = 4 * num_parameters(config.model, padded=True)
    for memory, data in ((None, 8), (8 * copy, 8), (copy, 1), (1, 1)):
        monkeypatch.setattr(copies, 'host_memory', lambda memory=memory: memory)
        found = with_copies_that_fit(config, cast=False)
        assert found.mesh.data == data
        if memory != 1:
            check_copies(found, [*mesh_for(found).devices.flat], cast=False)


def test_generation_has_memory_for_two_copies_in_the_compute_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = on(8, 1)
    model = config.model
    low, high = (2 * 8 * size * num_parameters(model, padded=True) for size in (2, 4))
    for memory, data in ((high, 8), (low, 4), (low // 2, 2)):  # vectors and routers are in fp32
        monkeypatch.setattr(copies, 'host_memory', lambda memory=memory: memory)
        assert with_copies_that_fit(config, cast=True).mesh.data == data


@pytest.mark.parametrize(
    ('data', 'experts', 'where', 'fix'),
    [
        (8, 1, '8 simulated devices', 'set mesh.data=1, or '),
        (8, 8, '8 simulated devices', 'set mesh.data=1 mesh.experts=1, or '),
        (1, 1, 'a CPU', ''),
    ],
)
def test_too_little_memory_is_named_before_the_weights_are_read(
    data: int, experts: int, where: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, 'host_memory', lambda: 10**4)
    config = on(data, 1, experts)
    with pytest.raises(ConfigError) as refusal:
        check_copies(config, [*mesh_for(config).devices.flat], cast=False)
    message = str(refusal.value)
    assert message.startswith('loading the weights needs at least 0.')
    end = f' GB on {where}, and this host has 0.0 GB: {fix}use a host with more memory, or GPUs'
    assert message.endswith(end)
    as_run = [f'mesh.data={data}', f'mesh.experts={experts}', 'train.batch_size=96']
    load('tiny_moe', [*as_run, *(word.strip(',') for word in fix.split() if '=' in word)])
