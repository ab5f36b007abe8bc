"""A pickle is read as data, with memory and time in proportion to its size."""

import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interop.dist_writer import METADATA, Global, Object, program
from interop.oracles import write_file
from interop.test_ranks import write_zip

from megajax.core.config import ConfigError
from megajax.interop.megatron.dist_metadata import FILE, read_metadata
from megajax.interop.megatron.pickles import Unpickler
from megajax.interop.megatron.rank_files import read_rank
from megajax.interop.megatron.torch_files import load_torch


def read(content: bytes) -> Any:
    return Unpickler(content, 'file').load()


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_back(protocol: int) -> None:
    shared = [1, 2.5, 2**62, -3, None, True, 'ä', b'\xff' * 300]
    data = {'a': shared, ('b', 1): (shared, {}), 3: {'c': [[]] * 3}}
    if protocol < 3:
        shared.pop()  # which needs a call there
    assert read(pickle.dumps(data, protocol)) == data


def nest(innermost: bytes, levels: int, opening: bytes, closing: bytes) -> bytes:
    """Two references to the level below at each level."""
    steps = b''.join(
        b'q' + bytes([n]) + b'0' + opening + b'h' + bytes([n]) + b'h' + bytes([n]) + closing
        for n in range(levels)
    )
    return innermost + steps


STORAGE = (
    b'(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ'
)
HOSTILE = {
    'memo': b'\x80\x02]r\xff\xff\xff\x7f.',
    'memo of text': b'(lp2147483647\n.',
    'reserved bytes': b'\x80\x05\x96' + (2**40).to_bytes(8, 'little') + b'.',
    'bytes': b'\x80\x04\x8e' + (2**40).to_bytes(8, 'little') + b'.',
    'text': b'\x80\x04\x8d' + (2**40).to_bytes(8, 'little') + b'.',
    'frame': b'\x80\x04\x95' + (2**40).to_bytes(8, 'little') + b'N.',
    'a key of tuples': b'\x80\x02}' + nest(b')', 60, b'(', b't') + b'Ns.',
    'a set of tuples': b'\x80\x04\x8f(' + nest(b')', 60, b'(', b't') + b'\x90.',
    'digits': b'I' + b'9' * 100_000 + b'\n.',
    'no end': b'\x80\x02]' * 1000,
    'a call': b'\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.',
    'a call of data': b'\x80\x02X\x04\x00\x00\x00true)R.',
    'a call through a tensor': b'\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cposix\nsystem\n'
    b'ctorch\nTensor\nX\x04\x00\x00\x00true\x85}tR.',
    'a tensor that is not one': b'\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n('
    b'cargparse\nNamespace\nctorch\nTensor\n)}tR.',
    'tensors in tensors': b'\x80\x02'
    + b'ctorch._tensor\n_rebuild_from_type_v2\n(' * 2
    + b'ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n)}tRctorch\nTensor\n)}tR.',
    'a tensor of a tensor': b'\x80\x02'
    + b'ctorch._utils\n_rebuild_tensor_v2\n(' * 2
    + STORAGE
    + b'K\x00(J\x00\x00\x00\x40t(K\x00ttR'  # 2^30 elements with a stride of 0
    + b'K\x00(J\x00\x00\x00\x40t(K\x01ttR.',
    'attributes of a type': b'\x80\x02ctorch\nSize\n}b.',
    'a registered extension': b'\x80\x02\x82\x01.',
    'nothing': b'',
    'an empty stack': b'\x80\x02R.',
}


@pytest.mark.parametrize('hostile', HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_is_refused_at_once(hostile: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(hostile)
    write_zip(tmp_path / 'x.pt', hostile, bytes(16))
    tracemalloc.start()
    begin = time.process_time()
    try:
        for reader in (lambda: read_metadata(tmp_path), lambda: read_rank(tmp_path / 'x.pt')):
            with pytest.raises(ConfigError) as refused:
                reader()
            assert str(tmp_path) in str(refused.value)
            assert len(str(refused.value)) < 1000
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 5


def test_a_dict_in_itself_and_one_in_many_places_are_refused(tmp_path: Path) -> None:
    key = b'X\x01\x00\x00\x00a'
    start = b'\x80\x02}q\x00X\x12\x00\x00\x00checkpoint_versionK\x03s'
    itself = start + b'X\x05\x00\x00\x00model' + b'}q\x01' + key + b'h\x01ss.'
    levels = b'}' + b''.join(
        b'q' + bytes([n]) + b'0}(' + key + b'h%cX\x01\x00\x00\x00bh%cu' % (n, n) for n in range(60)
    )
    many = start + b'X\x05\x00\x00\x00model' + levels + b's.'
    for content in (itself, many):
        write_zip(tmp_path / 'x.pt', content)
        with pytest.raises(ConfigError, match='is a dict that occurs twice'):
            read_rank(tmp_path / 'x.pt')


@pytest.mark.parametrize('version', [float('nan'), 1.0, 'three', None])
def test_a_version_that_is_none_is_refused(version: Any, tmp_path: Path) -> None:
    write_zip(tmp_path / 'x.pt', pickle.dumps({'model': {}, 'checkpoint_version': version}, 2))
    with pytest.raises(ConfigError, match='checkpoint_version'):
        read_rank(tmp_path / 'x.pt')


def test_a_file_without_a_version_is_of_version_0_as_in_megatron(tmp_path: Path) -> None:
    write_zip(tmp_path / 'x.pt', pickle.dumps({'model': {}}, 2))
    with pytest.raises(ConfigError, match=r'x.pt: checkpoint_version 0 orders QKV differently'):
        read_rank(tmp_path / 'x.pt')


def test_a_storage_of_fewer_than_no_elements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / 'x.pt'
    write_file(path, {'a': np.arange(4, dtype=np.float32)}, None)
    content = path.read_bytes()
    count = b'\x8a\x08' + (4).to_bytes(8, 'little')
    path.write_bytes(content.replace(count, b'\x8a\x08' + (-1).to_bytes(8, 'little', signed=True)))
    with pytest.raises(ConfigError):
        load_torch(path)


@pytest.mark.parametrize(
    'broken',
    [
        None,
        [],
        {},
        Object(METADATA, 'Metadata', {'storage_data': {}}),
        Object(METADATA, 'Metadata', {'storage_data': [], 'state_dict_metadata': {}}),
        Object(METADATA, 'Metadata', {'storage_data': {'a': 1}, 'state_dict_metadata': {}}),
        Object(METADATA, 'Metadata', {'storage_data': {}, 'state_dict_metadata': 3}),
        Object(
            METADATA,
            'Metadata',
            {
                'storage_data': {},
                'state_dict_metadata': {'w': Object(METADATA, 'TensorStorageMetadata', {})},
            },
        ),
    ],
)
def test_an_index_of_other_things_is_refused(broken: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(program(broken))
    with pytest.raises(ConfigError, match=str(tmp_path / FILE)):
        read_metadata(tmp_path)


def test_an_index_that_would_take_forever_is_refused_at_once(tmp_path: Path) -> None:
    tree = nest(b')', 60, b'(', b't')  # 2^60 tuples, which a hash would visit
    tensor = Object(METADATA, 'TensorStorageMetadata', {'size': (1,), 'chunks': []})
    begin = time.process_time()
    for fqn, offset in ((tree, (0,)), ('w', (tree,))):
        place = Object(METADATA, 'MetadataIndex', {'fqn': fqn, 'offset': offset})
        info = {'relative_path': '__0_0.distcp', 'offset': 0, 'length': 7}
        entry = Object(METADATA, '_StorageInfo', info)
        index = {'storage_data': {place: entry}, 'state_dict_metadata': {'w': tensor}}
        (tmp_path / FILE).write_bytes(program(Object(METADATA, 'Metadata', index)))
        with pytest.raises(ConfigError, match=r'without a name|is not a number'):
            read_metadata(tmp_path)
    assert time.process_time() - begin < 5


def test_mutants_of_an_index_are_read_or_refused(tmp_path: Path) -> None:
    size = Object(METADATA, 'ChunkStorageMetadata', {'offsets': (0, 0), 'sizes': (2, 3)})
    place = Object(METADATA, 'MetadataIndex', {'fqn': 'w', 'offset': (0, 0)})
    info = {'relative_path': '__0_0.distcp', 'offset': 0, 'length': 7}
    entry = Object('torch.distributed.checkpoint.filesystem', '_StorageInfo', info)
    properties = Object(METADATA, 'TensorProperties', (Global('torch', 'float32'), None))
    about = {'properties': properties, 'size': (2, 3), 'chunks': [size]}
    index = {
        'state_dict_metadata': {'w': Object(METADATA, 'TensorStorageMetadata', about)},
        'storage_data': {place: entry},
    }
    whole = program(Object(METADATA, 'Metadata', index))
    (tmp_path / FILE).write_bytes(whole)
    assert read_metadata(tmp_path)[0]['w'].chunks[0].entry == ('__0_0.distcp', 0, 7)
    random, refused = np.random.default_rng(0), 0
    for _ in range(400):
        mutant = bytearray(whole)
        for at in random.integers(len(whole), size=int(random.integers(1, 4))):
            mutant[at] = random.integers(256)
        (tmp_path / FILE).write_bytes(mutant[: random.integers(1, len(whole) + 100)])
        try:
            read_metadata(tmp_path)
        except ConfigError:
            refused += 1
    assert refused > 200
    assert sorted(os.listdir(tmp_path)) == [FILE]
