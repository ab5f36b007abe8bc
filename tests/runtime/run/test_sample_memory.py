"""Prompts whose samples no GPU has the memory for are refused before a run begins."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from support import make_config, on_mesh, random_params

from megajax.core.config import Config, ConfigError, load
from megajax.core.counts.run_memory import sample_bytes
from megajax.core.parallel.mesh import mesh_for
from megajax.runtime.generate.weights import make_one_dimensional, make_weights
from megajax.runtime.run import run
from megajax.runtime.run.sample_memory import check_sample_memory

GB = 10**9
ZERO_1 = 'optim.shard=optimizer'
PROMPTS = 'train.sample_prompts=["The"]'


def mesh_of_gpus(limit: int | None) -> Any:
    gpu = SimpleNamespace(memory_stats=lambda: {'bytes_limit': limit} if limit else None)
    return SimpleNamespace(local_devices=[gpu])


def size(arrays: Any) -> int:
    """The bytes of arrays on the first device."""
    first = jax.sharding.get_mesh().devices.flat[0]
    shards = [shard for x in jax.tree.leaves(arrays) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


@pytest.mark.parametrize(
    ('preset', 'overrides', 'least'),
    [
        ('gpt3_175b', [], 87),
        (
            'gpt3_175b',
            ['mesh.data=8', 'mesh.stages=8', 'mesh.model=8', 'train.microbatches=8', ZERO_1],
            87,
        ),
        ('qwen3_235b_a22b', [], 72),
    ],
)
def test_matrices_that_only_tensor_and_expert_parallelism_shard_are_refused(
    preset: str, overrides: list[str], least: int
) -> None:
    config = load(preset, [*overrides, PROMPTS])
    assert least < sample_bytes(config) / GB < 1.05 * least
    for limit in (1000 * GB, None):
        check_sample_memory(config, mesh_of_gpus(limit))
    with pytest.raises(
        ConfigError, match=rf'least {sample_bytes(config) / GB:.1f} GB .* use train.sample_prompts='
    ):
        check_sample_memory(config, mesh_of_gpus(72 * GB))
    check_sample_memory(load(preset, overrides), mesh_of_gpus(72 * GB))


@pytest.mark.parametrize(
    'config',
    [
        make_config('llama', 2, 2, optim={'shard': 'weights'}, train={'dtype': 'bfloat16'}),
        make_config('llama', 2, 2, mesh={'stages': 2}, train={'microbatches': 2}),
    ],
)
def test_no_fewer_bytes_are_counted_than_the_samples_have(config: Config) -> None:
    with on_mesh(config):
        params, copy = random_params(config, std=0.3), None
        if config.mesh.is_one_dimensional:
            held = size(make_weights(config, params))
        else:
            plain, mesh, copy = make_one_dimensional(config, params)
            with jax.set_mesh(mesh):
                weights = make_weights(plain, copy)
                arrays = {id(x): x for x in jax.tree.leaves((copy, weights))}
                held = size([*arrays.values()])
    assert 0.95 * held < sample_bytes(config) <= held


def test_a_run_is_refused_before_it_reads_its_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load('tiny', ['mesh.data=1', 'mesh.model=1', PROMPTS])
    gpu = mesh_of_gpus(GB // 1000).local_devices[0]
    monkeypatch.setattr(type(jax.devices()[0]), 'memory_stats', lambda _: gpu.memory_stats())
    monkeypatch.setattr(run, 'read_corpus', lambda *_: pytest.fail('the run has begun'))
    assert mesh_for(config)
    with pytest.raises(ConfigError, match=r'^train.sample_prompts: a GPU has 0.0 GB'):
        run.run(config, name='small')
