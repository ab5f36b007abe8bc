import itertools
import random

import numpy as np
import pytest

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.groups import axes_of, crosses_hosts, device_groups
from megajax.xla.hlo.program import Instruction, Program

MESH = {'data': 2, 'model': 4}
DATA = ((0, 4), (1, 5), (2, 6), (3, 7))
MODEL = ((0, 1, 2, 3), (4, 5, 6, 7))
ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


def instruction(attributes: str, opcode: str = 'all-reduce') -> Instruction:
    text = f"""
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %sent = f32[8]{{0}} {opcode}(%p), channel_id=1, {attributes}, \
metadata={{op_name="a{{{{0,1}}}}/psum" stack_frame_id=1}}
}}
"""
    return Program(text).entry.root


@pytest.mark.parametrize(
    ('spelling', 'groups', 'axes'),
    [
        ('{{0,4},{1,5},{2,6},{3,7}}', DATA, 'data'),
        ('{{0,1,2,3},{4,5,6,7}}', MODEL, 'model'),
        ('{{0,1},{2,3},{4,5},{6,7}}', PAIRS, 'model'),
        ('{{0,1,2,3,4,5,6,7}}', ALL, 'data model'),
        ('{{0,5},{1,4},{2,7},{3,6}}', ((0, 5), (1, 4), (2, 7), (3, 6)), 'data model'),
        ('{{0},{1},{2},{3},{4},{5},{6},{7}}', tuple((i,) for i in range(8)), ''),
        ('{}', ALL, 'data model'),
        ('[2,4]<=[8]', MODEL, 'model'),
        ('[1,8]<=[8]', ALL, 'data model'),
        ('[4,2]<=[8]', PAIRS, 'model'),
        ('[4,2]<=[2,4]T(1,0)', DATA, 'data'),
        ('[4,2]<=[2,2,2]T(0,2,1)', ((0, 2), (1, 3), (4, 6), (5, 7)), 'model'),
        ("mesh['data'=2,'model'=4] {'model'}", MODEL, 'model'),
        ("mesh['data'=2,'model'=4] {'data'}", DATA, 'data'),
        ("mesh['data'=2,'model'=4] {'data','model'}", ALL, 'data model'),
        ("mesh['data'=2,'model'=4] {'model','data'}", ((0, 4, 1, 5, 2, 6, 3, 7),), 'data model'),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", MODEL, 'model'),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_1','axis_2'}", MODEL, 'model'),
        (
            "mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
            'data model',
        ),
        (
            "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            MODEL,
            'model',
        ),
        (
            "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}",
            DATA,
            'data',
        ),
        (
            "mesh['a'=2,'b'=4], device_ids=(3,2,1,0,7,6,5,4) {'b'}",
            ((3, 2, 1, 0), (7, 6, 5, 4)),
            'model',
        ),
        ("mesh['a'=8] {'a':(2)4}", MODEL, 'model'),
        ("mesh['a'=8] {'a':(1)2}", DATA, 'data'),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7)), 'model'),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7)), 'data model'),
    ],
)
def test_every_spelling_of_groups_gives_the_devices_and_the_fewest_axes_that_join_them(
    spelling, groups, axes
):
    found = device_groups(instruction(f'replica_groups={spelling}, use_global_device_ids=true'), 8)
    assert found == groups
    assert axes_of(found, MESH) == tuple(axes.split())


@pytest.mark.parametrize(
    ('replicas', 'groups'),
    [
        ('{{0}}', ALL),
        ('[1,1]<=[1]', ALL),
        ('{}', ALL),
        ('{{0,1}}', ALL),
        ('{{0},{1}}', MODEL),
        ('{{0,2},{1,3}}', ((0, 1, 4, 5), (2, 3, 6, 7))),
        ('{{0,4},{1,5},{2,6},{3,7}}', DATA),  # one partition for each replica
    ],
)
def test_groups_of_replicas_have_all_their_partitions(replicas, groups):
    written = f'replica_groups={replicas}'
    assert device_groups(instruction(written), 8) == groups
    # The groups of others are those of partitions, or of devices.
    assert device_groups(instruction('replica_groups={{0,1}}', 'all-to-all'), 8) == ((0, 1),)


@pytest.mark.parametrize(
    ('pairs', 'axes'),
    [
        ('{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}', ('model',)),
        ('{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}', ('data',)),
        ('{{0,5},{5,0}}', ('data', 'model')),
        ('{{3,3}}', ()),
    ],
)
def test_the_pairs_of_a_permute_are_read_with_their_axes(pairs, axes):
    found = device_groups(instruction(f'source_target_pairs={pairs}', 'collective-permute'), 8)
    assert str(found).replace(' ', '') == pairs.replace('{', '(').replace('}', ')').replace(
        '((3,3))', '((3,3),)'
    )
    assert axes_of(found, MESH) == axes


@pytest.mark.parametrize('seed', range(20))
def test_groups_along_any_axes_of_any_mesh_are_known_in_every_spelling(seed):
    source = random.Random(seed)
    sizes = [source.choice([1, 2, 3, 4]) for _ in range(source.randint(1, 4))]
    mesh = {f'axis_{i}': size for i, size in enumerate(sizes)}
    along = [i for i in range(len(sizes)) if source.random() < 0.5] or [0]
    rest = [i for i in range(len(sizes)) if i not in along]
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    groups = devices.transpose(rest + along).reshape(-1, np.prod([sizes[i] for i in along]))
    dims, before, order = (','.join(map(str, part)) for part in (groups.shape, sizes, rest + along))
    iota = f'[{dims}]<=[{before}]T({order})'
    named = 'mesh[{}] {{{}}}'.format(
        ','.join(f"'{name}'={size}" for name, size in mesh.items()),
        ','.join(f"'{[*mesh][i]}'" for i in along),
    )
    listed = '{' + ','.join('{' + ','.join(map(str, row)) + '}' for row in groups) + '}'
    for spelling in (iota, named, listed):
        found = device_groups(instruction(f'replica_groups={spelling}'), devices.size)
        assert found == tuple(map(tuple, groups.tolist()))
        assert axes_of(found, mesh) == tuple([*mesh][i] for i in along if sizes[i] > 1)


@pytest.mark.parametrize(
    'attributes',
    [
        'dimensions={0}',
        "replica_groups=mesh['a'=8] {'b'}",
        "replica_groups=mesh['a'=8] {'a':2}",
        'replica_groups=@groups',
    ],
)
def test_groups_that_are_not_understood_raise_with_the_line(attributes):
    with pytest.raises(HloError, match=r'%sent = f32\[8\]\{0\} all-reduce\(%p\)'):
        device_groups(instruction(attributes), 8)


def test_groups_of_devices_that_the_mesh_does_not_have_raise():
    with pytest.raises(HloError, match='devices that the mesh'):
        axes_of(((0, 9),), MESH)


@pytest.mark.parametrize(
    ('groups', 'per_host'), [*itertools.product((DATA, MODEL, ALL, PAIRS), (1, 2, 4, 8))]
)
def test_groups_cross_hosts_where_one_has_devices_of_two(groups, per_host):
    widest = {DATA: 5, MODEL: 4, ALL: 8, PAIRS: 2}[groups]
    assert crosses_hosts(groups, per_host) == (widest > per_host)


def test_axes_of_one_device_are_not_tried_and_each_groups_axes_are_found_once(monkeypatch):
    mesh = {f'one_{i}': 1 for i in range(10)} | {'data': 8, 'fsdp': 8, 'model': 8}
    tried, moveaxis = [], np.moveaxis
    monkeypatch.setattr(np, 'moveaxis', lambda *given: tried.append(given) or moveaxis(*given))
    for _ in range(300):
        assert axes_of((tuple(range(512)),), mesh) == ('data', 'fsdp', 'model')
    assert len(tried) == 2**3 - 1
