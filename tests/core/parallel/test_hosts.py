"""Which groups of devices may span hosts, and how those that may not are refused."""

import contextlib

import pytest

import megajax
from megajax.core.parallel.hosts import Hosts, check_hosts, nvlink_domain


def hosts(*counts: int, domain: int = 0) -> Hosts:
    names = [f'host{number}' for number, count in enumerate(counts) for _ in range(count)]
    return Hosts(names, domain)


@pytest.mark.parametrize(
    ('places', 'sizes', 'cross_hosts', 'message'),
    [
        (
            hosts(8, 8, 8, 8),
            {'replica': 2, 'data': 16, 'model': 1},
            False,
            'mesh.replicas=2 makes groups of 16 devices, which reach across hosts (host0, host1), '
            'and each layer would wait for their network: set mesh.replicas=4, whose groups of 8 '
            'devices stay in one host',
        ),
        (
            hosts(6, 6),
            {'replica': 3, 'data': 4, 'model': 1},
            False,
            'mesh.replicas=3 makes groups of 4 devices, which reach across hosts (host0, host1), '
            'and each layer would wait for their network: set mesh.replicas=2, whose groups of 6 '
            'devices stay in one host',
        ),
        (
            hosts(4, 4, 4),
            {'data': 1, 'expert': 2, 'model': 6},
            False,
            'mesh.model=6 reaches across hosts (host0, host1), and each layer would wait for '
            'their network: set mesh.model to 4 or a divisor of it, or '
            'mesh.allow_model_across_hosts=true',
        ),
        (
            hosts(4, 4, 4, 4),
            {'stage': 2, 'data': 1, 'model': 8},
            False,
            'mesh.model=8 reaches across hosts (host0, host1), and each layer would wait for '
            'their network: set mesh.model to 4 or a divisor of it, for example mesh.data=2 '
            'mesh.model=4, or mesh.allow_model_across_hosts=true',
        ),
        (
            hosts(8, 8),
            {'data': 2, 'row': 2, 'model': 8},
            False,
            'mesh.model_rows=2 x mesh.model=8 reaches across hosts (host0, host1), and each layer '
            'would wait for their network: set their product to 8 or a divisor of it, or '
            'mesh.allow_model_across_hosts=true',
        ),
        (
            hosts(8, 8),
            {'replica': 2, 'data': 2, 'row': 2, 'model': 2},
            True,
            'mesh.replicas=2 with mesh.model_rows=2 on several hosts: a grid whose gradients are '
            'also summed between hosts is not supported yet; set mesh.replicas=1, or '
            'mesh.model_rows=1',
        ),
    ],
)
def test_groups_that_need_not_cross_hosts_are_refused_with_those_that_stay(
    places, sizes, cross_hosts, message
):
    with pytest.raises(megajax.ConfigError) as refusal:
        check_hosts(places, sizes, cross_hosts=cross_hosts)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ('places', 'sizes', 'cross_hosts'),
    [
        (hosts(8, 8), {'data': 16, 'model': 1}, False),  # ZeRO over all hosts, for its memory
        (hosts(8, 8), {'replica': 2, 'data': 4, 'model': 2}, False),
        (hosts(8, 8), {'replica': 4, 'data': 2, 'model': 2}, False),
        (hosts(8, 8), {'replica': 2, 'data': 1, 'model': 8}, False),
        # Smaller groups would not have all experts.
        (hosts(8, 8, 8, 8), {'replica': 2, 'data': 1, 'expert': 4, 'model': 4}, False),
        (hosts(8, 8), {'stage': 2, 'data': 2, 'context': 2, 'model': 2}, False),
        # A group of replicas has data shards in each stage, and each of these stays in a host.
        (hosts(4, 4, 4, 4), {'replica': 2, 'stage': 2, 'data': 2, 'model': 2}, False),
        # No number of replicas keeps a group inside a host.
        (hosts(4, 4, 4, 4), {'replica': 2, 'data': 1, 'model': 8}, True),
        # Replicas of one data shard each would have no shards to keep in a host.
        (hosts(8, 8, 8, 8), {'replica': 2, 'data': 2, 'model': 8}, False),
        (hosts(8), {'replica': 2, 'data': 1, 'row': 2, 'model': 2}, False),
        (hosts(8, 8), {'data': 1, 'row': 2, 'model': 8}, True),
    ],
)
def test_groups_inside_hosts_and_those_that_cannot_be_are_allowed(places, sizes, cross_hosts):
    check_hosts(places, sizes, cross_hosts=cross_hosts)


@pytest.mark.parametrize(
    ('sizes', 'domain', 'refused'),
    [
        ({'data': 1, 'model': 16}, 16, False),
        ({'data': 1, 'model': 16}, 8, True),
        ({'data': 1, 'row': 2, 'model': 8}, 72, False),
        ({'replica': 2, 'data': 8, 'model': 1}, 8, False),
        ({'replica': 2, 'data': 8, 'model': 1}, 4, True),
    ],
)
def test_groups_that_nvlink_joins_may_span_hosts(sizes, domain, refused):
    with pytest.raises(megajax.ConfigError) if refused else contextlib.nullcontext():
        check_hosts(hosts(4, 4, 4, 4, domain=domain), sizes, cross_hosts=False)


@pytest.mark.parametrize(
    ('sizes', 'fix', 'follows'),
    [
        (
            {'replica': 2, 'data': 144, 'model': 1},
            'set mesh.replicas=4, whose groups of 72 devices NVLink joins',
            {'replica': 4, 'data': 72, 'model': 1},
        ),
        (
            {'data': 2, 'model': 144},
            'set mesh.model to 72 or a divisor of it, for example mesh.data=4 mesh.model=72, or',
            {'data': 4, 'model': 72},
        ),
        (
            {'data': 1, 'row': 2, 'model': 144},
            'set their product to 72 or a divisor of it, or',
            {'data': 4, 'row': 2, 'model': 36},
        ),
    ],
)
def test_the_largest_groups_that_nvlink_joins_are_named(sizes, fix, follows):
    places = hosts(*[4] * 72, domain=72)
    with pytest.raises(megajax.ConfigError) as refusal:
        check_hosts(places, sizes, cross_hosts=False)
    assert fix in str(refusal.value)
    check_hosts(places, follows, cross_hosts=False)


@pytest.mark.parametrize(
    ('counts', 'size', 'spans', 'named'),
    [
        ((8, 8), 8, False, None),
        ((8, 8), 16, True, 'host0, host1'),
        ((8, 8, 8, 8), 16, True, 'host0, host1'),
        ((8, 8, 8, 8), 32, True, 'host0, host1, ...'),
        ((4, 8), 4, False, None),
        ((4, 8), 6, True, 'host0, host1'),
        ((9, 9), 3, False, None),
        ((9, 9), 2, True, 'host0, host1'),
        ((8,), 8, False, None),
    ],
)
def test_the_first_hosts_of_a_group_that_spans_hosts_are_named(counts, size, spans, named):
    places = hosts(*counts)
    assert places.span(size) == spans
    if named:
        assert places.crossed(size) == named


def test_hosts_whose_devices_alternate_hold_no_group():
    assert Hosts(['a', 'b'] * 4).largest_inside == 1


@pytest.mark.parametrize(
    ('kind', 'joined'), [('NVIDIA GB200', 72), ('NVIDIA H100 80GB HBM3', 0), ('cpu', 0)]
)
def test_nvlink_joins_gpus_of_several_hosts_only_in_racks(kind, joined):
    assert nvlink_domain(kind) == joined
