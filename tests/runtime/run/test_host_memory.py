"""Simulated devices that a host has no memory for are refused; what fits is not."""

import math
import resource

import jax
import pytest
from steps import compiled_step
from support import make_config, slow

from megajax.core.config import Config, ConfigError, load
from megajax.core.parallel.mesh import mesh_for
from megajax.runtime.run import host_memory, run
from megajax.runtime.run.host_memory import check_host_memory, state_bytes

GB = 10**9


def test_too_many_devices_for_a_host_are_refused_with_the_bytes_and_a_way_out(monkeypatch):
    config = load('gpt2_124m', ['mesh.data=2', 'mesh.model=4', 'train.dtype=bfloat16'])
    monkeypatch.setattr(host_memory, 'host_memory', lambda: 3 * GB)
    monkeypatch.setattr(run, 'read_corpus', lambda *_: pytest.fail('the run has begun'))
    with pytest.raises(ConfigError) as refusal:
        run.run(config, name='large')
    assert str(refusal.value) == (
        'training on 8 simulated devices needs at least 4.1 GB for parameters, gradients and '
        'moments, and this host has 3.0 GB: set mesh.data=1 (at least 2.0 GB), or train a '
        'smaller model'
    )
    assert refusal.value.exit_code == 2
    monkeypatch.setattr(host_memory, 'host_memory', lambda: GB)
    with pytest.raises(ConfigError, match='train a smaller model here, or this one on GPUs'):
        check_host_memory(config, mesh_for(config))


def test_the_way_out_of_a_mixture_of_experts_has_all_experts_on_a_device(monkeypatch):
    sizes = ['mesh.data=4', 'mesh.experts=4', 'mesh.model=1', 'optim.shard=weights']
    config = load('tiny_moe', sizes)
    alone = load('tiny_moe', [*sizes, 'mesh.data=1', 'mesh.experts=1'])
    needed, less = (x.mesh.num_devices * state_bytes(x) for x in (config, alone))
    assert less < needed
    monkeypatch.setattr(host_memory, 'host_memory', lambda: less)
    with pytest.raises(ConfigError, match=r'set mesh.data=1 mesh.experts=1 \(at least '):
        check_host_memory(config, mesh_for(config))


def test_a_limit_of_address_space_is_named_before_xla_ends_the_process(monkeypatch):
    monkeypatch.setattr(host_memory, 'ADDRESSES', 10**15)
    monkeypatch.setattr(host_memory, 'host_memory', lambda: None)
    config = make_config('gpt', 1, 1)
    check_host_memory(config, mesh_for(config))
    before = resource.getrlimit(resource.RLIMIT_AS)
    enough = host_memory.ADDRESSES + mesh_for(config).size * state_bytes(config)
    resource.setrlimit(resource.RLIMIT_AS, (enough, before[1]))
    try:
        check_host_memory(config, mesh_for(config))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    resource.setrlimit(resource.RLIMIT_AS, (999_000 * GB, before[1]))
    try:
        with pytest.raises(
            ConfigError, match=r'\(ulimit -v\) is 999000.0 GB, .* 1000000.0 GB: run'
        ):
            check_host_memory(config, mesh_for(config))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize('have', [4.2 * GB, None])
def test_what_fits_or_may_fit_is_not_refused(monkeypatch, have):
    config = load('gpt2_124m', ['mesh.data=2', 'mesh.model=4'])
    monkeypatch.setattr(host_memory, 'host_memory', lambda: have)
    check_host_memory(config, mesh_for(config))


@pytest.mark.parametrize(
    'optim', [{}, slow({'optim': {'shard': 'weights'}})], ids=['none', 'weights']
)
def test_the_bound_is_not_above_what_a_step_holds(optim):
    config: Config = make_config('llama', 2, 2, **optim)
    step, state = compiled_step(config)
    memory = step.memory_analysis()
    held = sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state)
        if x.ndim > 0
    )
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert held < state_bytes(config) <= needed


def test_a_step_that_is_repeated_needs_its_parameters_and_moments_twice():
    once = load('gpt2_124m', [])
    twice = load('gpt2_124m', ['train.replay_every=10', 'train.deterministic=true'])
    assert state_bytes(twice) / state_bytes(once) == (12 + 4 + 12) / (12 + 4)
