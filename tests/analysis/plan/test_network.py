"""Rings: the formula, and which links a group of a mesh axis crosses."""

import math
from collections import Counter

import pytest

from megajax.analysis.plan.network import Cluster, _parts
from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import hardware

H100 = hardware('h100')


def on(data: int, model: int, *, rows: int = 1, replicas: int = 1) -> Config:
    sizes = {
        'num_layers': 1,
        'hidden_size': 128,
        'num_heads': 64,
        'vocab_size': 1024,
        'max_seq_len': 64,
    }
    return Config(
        model=sizes,
        mesh={
            'data': data,
            'replicas': replicas,
            'model_rows': rows,
            'model': model,
            'sequence_parallel': rows > 1,
        },
        optim={'shard': 'none' if replicas == 1 else 'weights'},
        train={'batch_size': data * rows, 'seq_len': 64},
    )


@pytest.mark.parametrize('size', [2, 4, 8])
def test_an_all_reduce_inside_a_host_is_the_alpha_beta_ring(size):
    ring = Cluster.of(H100, 64).ring(on(64 // size, size), 'model')
    array = 10e6
    wire = 2 * (size - 1) / size * array
    bandwidth, latency = H100.inside_host.bandwidth, H100.inside_host.latency
    assert ring.seconds('all-reduce', wire) == pytest.approx(
        2 * (size - 1) / size * array / bandwidth + 2 * (size - 1) * latency
    )


def test_a_gather_and_a_scatter_cost_an_all_reduce():
    ring = Cluster.of(H100, 64).ring(on(8, 8), 'data')
    assert ring.seconds('all-gather', 5e6) + ring.seconds('reduce-scatter', 5e6) == pytest.approx(
        ring.seconds('all-reduce', 10e6)
    )


def test_an_all_to_all_over_hosts_has_one_network_card_per_gpu():
    inside, over_hosts = (
        Cluster.of(H100, 64).ring(on(*mesh), 'model') for mesh in ((8, 8), (1, 64))
    )
    wire = 1e9
    assert inside.seconds('all-to-all', wire) == inside.seconds('all-gather', wire)
    latency = over_hosts.seconds('all-to-all', 0)
    # Of the 63 other GPUs, 56 are in other hosts; rings use the cards of all eight GPUs of a host.
    assert over_hosts.seconds('all-to-all', wire) - latency == pytest.approx(
        56 / 63 * wire / H100.across_hosts.bandwidth
    )
    assert over_hosts.seconds('all-to-all', wire) > 6 * over_hosts.seconds('all-gather', wire)


@pytest.mark.parametrize(
    ('data', 'model', 'axis', 'hosts', 'cards'),
    [
        (8, 8, 'model', 1, None),
        (8, 8, 'data', 8, 1),
        (16, 4, 'data', 8, 2),
        (64, 1, 'data', 8, 8),
        (4, 16, 'model', 2, 8),
        (4, 16, 'data', 4, 1),
        (1, 64, 'model', 8, 8),
    ],
)
def test_a_group_has_the_network_cards_of_its_gpus(data, model, axis, hosts, cards):
    ring = Cluster.of(H100, 64).ring(on(data, model), axis)
    assert ring.hosts == hosts
    across = H100.across_hosts.bandwidth * (cards or 8)
    assert ring.bandwidth == (
        min(across, H100.inside_host.bandwidth) if cards else H100.inside_host.bandwidth
    )


@pytest.mark.parametrize(
    ('keys', 'axis', 'size', 'hosts'),
    [
        ({'data': 64, 'model': 1, 'replicas': 8}, 'data', 8, 1),
        ({'data': 64, 'model': 1, 'replicas': 8}, 'replica', 8, 8),
        ({'data': 64, 'model': 1, 'replicas': 16}, 'replica', 16, 8),
        ({'data': 64, 'model': 1, 'replicas': 4}, 'data', 16, 2),
        ({'data': 16, 'model': 4, 'replicas': 8}, 'data', 2, 1),
        ({'data': 16, 'model': 4, 'replicas': 8}, 'replica+data', 16, 8),
        ({'data': 16, 'model': 2, 'rows': 2}, 'row', 2, 1),
        ({'data': 4, 'model': 8, 'rows': 2}, 'row', 2, 2),
        ({'data': 2, 'model': 8, 'rows': 4}, 'row+model', 32, 4),
        ({'data': 2, 'model': 4, 'rows': 8}, 'row', 8, 4),
        ({'data': 2, 'model': 4, 'rows': 8}, 'data', 2, 2),
    ],
    ids=str,
)
def test_replicas_are_apart_and_rows_of_a_grid_are_near(keys, axis, size, hosts):
    cluster = Cluster.of(H100, 64)
    ring = cluster.ring(on(**keys), axis)
    assert (ring.size, ring.hosts) == (size, hosts)


@pytest.mark.parametrize(
    ('per_host', 'most', 'counts'),
    [
        (8, 64, [1, 2, 4, 8, 16, 32, 64]),
        (6, 48, [1, 2, 4, 6, 12, 24, 48]),
        (3, 7, [1, 2, 3, 6]),
        (1, 4, [1, 2, 4]),
    ],
)
def test_counts_are_powers_of_two_of_gpus_and_hosts(per_host, most, counts):
    assert Cluster.of(H100, 24, per_host).counts(most) == counts


def test_hosts_of_unequal_size_are_refused():
    with pytest.raises(
        ConfigError,
        match='12 GPUs do not fill hosts of 8: use 8 or 16, or set the number of GPUs per host',
    ):
        Cluster.of(H100, 12)
    assert Cluster.of(H100, 12, 4).num_hosts == 3


@pytest.mark.parametrize(
    ('gpus', 'domains'),
    [
        (64, (64,)),
        (72, (72,)),
        (76, (40, 36)),
        (80, (40, 40)),
        (128, (64, 64)),
        (148, (52, 48, 48)),
        (152, (56, 48, 48)),  # so that tensor-parallel groups of 8 stay in a domain
    ],
)
def test_nvlink_domains_are_few_and_as_equal_as_possible(gpus, domains):
    assert Cluster.of(hardware('gb200'), gpus).domains == domains


def test_a_group_over_unequal_domains_has_the_cards_of_its_smallest_part():
    cluster = Cluster.of(hardware('gb200'), 76)
    assert cluster.ring(on(19, 4), 'model').hosts == 1
    # Of the groups of 19, that of the GPUs 38 to 56 has two GPUs in the first domain.
    for config, members in ((on(19, 4), 9), (on(76, 1), 36), (on(76, 1, replicas=4), 2)):
        ring = cluster.ring(config, 'data')
        assert ring.hosts == 2
        assert ring.bandwidth == cluster.hardware.ring_bandwidth(members=members, hosts=2)


def test_groups_that_do_not_divide_a_host_cross_hosts():
    cluster, config = Cluster.of(H100, 24), on(24, 1, replicas=4)
    ring = cluster.ring(config, 'data')
    assert (ring.size, ring.hosts) == (6, 2)
    assert ring.bandwidth == H100.ring_bandwidth(members=2, hosts=2)


@pytest.mark.parametrize('each', [1, 4, 6, 8])
@pytest.mark.parametrize('blocks', [1, 2, 5])
@pytest.mark.parametrize('apart', [1, 2, 3, 6, 10])
@pytest.mark.parametrize('size', [2, 7, 24])
def test_the_parts_of_groups_in_equal_domains_are_those_that_counting_finds(
    size, apart, blocks, each
):
    counts = [
        Counter((block * size * apart + first + apart * step) // each for step in range(size))
        for block in range(blocks)
        for first in range(apart)
    ]
    fewest = min(min(domains.values()) for domains in counts)
    domains_of_a_group = max(map(len, counts))
    gpus = math.lcm(size * apart * blocks, each)  # which has at least as many full domains
    assert _parts(blocks, size, apart, gpus, each, each) == (fewest, domains_of_a_group)


@pytest.mark.parametrize(
    ('gpus', 'per_host', 'count', 'resized'),
    [
        (2, None, 16, (16, 8)),  # part of a host grows to full hosts
        (3, None, 6, (6, 6)),
        (3, None, 12, (12, 3)),  # which 12 GPUs do not fill
        (6, None, 6, (6, 6)),
        (8, None, 64, (64, 8)),
        (12, 6, 24, (24, 6)),  # hosts of another size remain
        (16, 16, 32, (32, 16)),
        (4, 4, 8, (8, 4)),
        (2, 4, 8, (8, 4)),
        (2, 4, 2, (2, 2)),
    ],
)
def test_a_part_of_a_host_grows_to_full_hosts(gpus, per_host, count, resized):
    cluster = Cluster.of(H100, gpus, per_host).resized(count)
    assert (cluster.num_devices, cluster.devices_per_host) == resized
