"""Whether every device gets something from a permute, by its pairs alone."""

import pytest

from megajax.xla.hlo.permutes import along, fault

MESH = {'data': 2, 'stage': 3}


@pytest.mark.parametrize(
    ('pairs', 'rule', 'sentence'),
    [
        (((0, 1), (1, 2), (2, 0)), None, None),
        (((0, 0), (1, 1), (2, 2)), None, None),
        ((), 'permute without pairs', 'it has no pairs, so every device gets zeros'),
        (((0, 1), (1, 2)), 'permute without a source', 'device 0 has no source and gets zeros'),
        (((0, 1),), 'permute without a source', 'devices 0, 2 have no source and get zeros'),
        (
            ((0, 1), (2, 1), (1, 0)),
            'permute with a target twice',
            'device 1 is the target of more than one pair',
        ),
        (
            ((0, 1), (0, 2), (1, 0)),
            'permute with a source twice',
            'device 0 is the source of more than one pair',
        ),
    ],
)
def test_a_device_without_one_source_is_found(pairs, rule, sentence):
    assert fault(pairs, 3) == ((rule, sentence) if rule else None)


def test_a_message_about_many_devices_names_the_first():
    _, sentence = fault(((0, 1),), 64)
    assert sentence == 'devices 0, 2, 3, 4, 5, 6, 7, 8 and 55 more have no source and get zeros'


@pytest.mark.parametrize(
    ('declared', 'axes', 'pairs'),
    [
        ([(0, 2)], ['stage'], [{(0, 2), (3, 5)}]),
        ('chain', ['stage'], [{(0, 1), (1, 2), (3, 4), (4, 5)}]),
        (
            'ring',
            ['stage'],
            [
                {(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)},
                {(1, 0), (2, 1), (0, 2), (4, 3), (5, 4), (3, 5)},
            ],
        ),
        ('chain', ['data'], [{(0, 3), (1, 4), (2, 5)}]),
        ('chain', ['data', 'stage'], [{(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)}]),
    ],
)
def test_positions_along_an_axis_are_pairs_of_devices_in_each_group(declared, axes, pairs):
    assert [set(one) for one in along(declared, axes, MESH)] == pairs
