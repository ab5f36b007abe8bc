"""Rings: the formula, and which links a group of a mesh axis crosses."""

import pytest

from megajax.config import Config, ConfigError
from megajax.hardware.records import hardware
from megajax.plan.network import Cluster

H100 = hardware('h100')


def on(data: int, model: int) -> Config:
    sizes = {
        'num_layers': 1,
        'hidden_size': 128,
        'num_heads': 64,
        'vocab_size': 1024,
        'max_seq_len': 64,
    }
    return Config(
        model=sizes, mesh={'data': data, 'model': model}, train={'batch_size': data, 'seq_len': 64}
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


def test_hosts_of_unequal_size_are_refused():
    with pytest.raises(
        ConfigError, match='12 GPUs do not fill hosts of 8: use 8 or 16, or set the GPUs of a host'
    ):
        Cluster.of(H100, 12)
    assert Cluster.of(H100, 12, 4).num_hosts == 3
