"""Training accepts every layout that a plan lists, on the hosts that it was planned for."""

import pytest

import megajax
from megajax.analysis.plan.accepted import accepted, rejection
from megajax.analysis.plan.layouts import Mesh, changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.planning import _train_error
from megajax.analysis.plan.programs import MEGAJAX
from megajax.analysis.plan.search import search, that_fits
from megajax.core.config import load
from megajax.core.hardware.records import hardware
from megajax.core.parallel.hosts import Hosts, check_hosts


def planned(name: str, rows: int, gpu: str, gpus: int):
    config = changed(load(name), train__batch_size=rows, train__seq_len=2048)
    cluster = Cluster.of(hardware(gpu), gpus)
    return cluster, search(config, cluster)


@pytest.mark.parametrize(
    ('name', 'rows', 'gpu', 'gpus'),
    [
        ('gemma3_27b', 16, 'h100', 64),  # tensor-parallel groups that fill a host, and replicas
        ('llama3_8b', 24, 'h100', 24),  # groups of 3 and 6 GPUs on hosts of 8
        ('llama3_8b', 8, 'gb200', 16),  # groups over hosts of 4 that NVLink joins
        ('llama3_8b', 64, 'gb200', 128),  # replicas of 64 GPUs that NVLink joins
    ],
)
def test_training_accepts_every_listed_layout(name, rows, gpu, gpus):
    cluster, found = planned(name, rows, gpu, gpus)
    names = [f'host{device // cluster.devices_per_host}' for device in range(gpus)]
    hosts = Hosts(names, cluster.hardware.devices_per_domain or 0)
    for choice in found.all:
        mesh = choice.config.mesh
        check_hosts(hosts, mesh.sizes, cross_hosts=mesh.allow_model_across_hosts)


def test_training_rejects_prompts_that_do_not_fit_a_gpu():
    prompts, mesh = 'train.sample_prompts=["The"]', ['mesh.data=64', 'mesh.model=1']
    config = load('llama3_70b', [*mesh, 'optim.shard=weights', 'train.microbatches=1', prompts])
    h100, b300 = (_train_error(config, Cluster.of(hardware(gpu), 64)) for gpu in ('h100', 'b300'))
    assert h100.startswith('train.sample_prompts: a GPU has ')
    assert 'at least 141' in h100
    assert b300 is None


def test_groups_over_hosts_need_no_permission_where_nvlink_joins_them():
    _, found = planned('llama3_8b', 8, 'gb200', 16)
    meshes = [choice.config.mesh for choice in found.all]
    assert any(mesh.model > 4 for mesh in meshes)
    assert not any(mesh.allow_model_across_hosts for mesh in meshes)


def test_a_grid_has_no_replicas_on_several_hosts():
    cluster = Cluster.of(hardware('h100'), 64)
    mesh = {'data': 16, 'model_rows': 2, 'model': 2}
    one, two = (
        changed(load('llama3_8b'), **{f'mesh__{key}': n for key, n in sizes.items()})
        for sizes in (mesh, mesh | {'replicas': 2})
    )
    assert accepted(one, cluster) is one
    assert accepted(two, cluster) is None


def test_groups_over_unequal_domains_need_the_permission_that_training_asks_for():
    cluster = Cluster.of(hardware('gb200'), 76)  # of which NVLink joins 40 and 36
    inside = changed(load('llama3_8b'), mesh__data=4, mesh__model=19)
    assert accepted(inside, cluster) is inside
    beyond = accepted(changed(inside, mesh__data=1, mesh__model=76), cluster)
    assert beyond.mesh.allow_model_across_hosts


def test_groups_up_to_the_smallest_of_unequal_domains_are_compared():
    _, found = planned('llama3_8b', 19, 'gb200', 76)
    compared = {*found.impossible, *(choice.mesh for choice in found.all)}
    assert Mesh(1, 1, 19, stages=4) in compared  # 19 of the 36 GPUs in the second domain


def test_a_layout_for_more_gpus_than_part_of_a_host_is_judged_on_full_hosts():
    config = changed(load('llama3_8b'), train__batch_size=2, train__seq_len=2048)
    larger = that_fits(config, 16, Cluster.of(hardware('h100'), 2), MEGAJAX)
    assert larger.mesh.model == 8
    assert not larger.mesh.allow_model_across_hosts


ACROSS = 'mesh.data=1', 'mesh.model=16'
FLAT = 'mesh.model=1', 'optim.shard=weights'
GRID = 'mesh.model_rows=2', 'mesh.model=2', 'mesh.sequence_parallel=true', 'optim.shard=weights'


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (ACROSS, 'or mesh.allow_model_across_hosts=true'),
        ((*ACROSS, 'mesh.allow_model_across_hosts=true'), None),
        (('mesh.data=24', 'mesh.replicas=3', *FLAT), None),
        (('mesh.data=24', 'mesh.replicas=2', *FLAT), 'set mesh.replicas=3'),
        (('mesh.data=4', 'mesh.replicas=2', *GRID), 'set mesh.replicas=1, or mesh.model_rows=1'),
    ],
)
def test_a_layout_has_the_error_that_training_raises(overrides, message):
    config = load('gpt2_345m', ['train.batch_size=24', 'train.microbatches=1', *overrides])
    error = rejection(config, Cluster.of(hardware('h100'), config.mesh.num_devices))
    assert message in error if message else not error


def test_a_plan_prints_the_error_that_training_raises():
    overrides = 'model.num_layers=23', 'train.batch_size=24', 'train.microbatches=1', *ACROSS
    plan = megajax.plan(load('gpt2_345m', overrides), gpu='h100')
    assert 'or mesh.allow_model_across_hosts=true' in plan.train_error
    assert f'train rejects this layout: {plan.train_error}'[:100] in str(plan)
