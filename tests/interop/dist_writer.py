"""A small writer of `torch_dist` checkpoints with any chunks, and with any mistakes."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.interop.megatron.torch_writer import Stored, TorchFile

METADATA = 'torch.distributed.checkpoint.metadata'
ITERATION = 'iter_0000005'


class Part(NamedTuple):
    """A chunk to be written: its tensor, its place there, its elements."""

    name: str
    offsets: tuple[int, ...]
    x: np.ndarray


@dataclass(frozen=True, eq=False)
class Object:
    """An object to be pickled, by the name of its class; it can be a key."""

    module: str
    name: str
    state: Any


class Global(NamedTuple):
    module: str
    name: str


def write_checkpoint(
    folder: Path, parts: list[Part], shapes: Mapping[str, tuple[int, ...]], **common: Any
) -> Path:
    """Write a checkpoint and return its folder; every other chunk goes to a second file."""
    iteration = folder / ITERATION
    iteration.mkdir(parents=True)
    files = [io.BytesIO(), io.BytesIO()]
    chunks: dict[str, list[Object]] = {name: [] for name in shapes}
    storage, dtypes = {}, {}
    for index, part in enumerate(parts):
        file, entry = files[index % 2], io.BytesIO()
        one = TorchFile(entry, Stored(part.x.shape, part.x.dtype))
        one.append(part.x)
        one.close()
        info = {'relative_path': f'__{index % 2}_0.distcp', 'offset': file.tell()}
        info['length'] = file.write(entry.getvalue())
        place = Object(METADATA, 'MetadataIndex', {'fqn': part.name, 'offset': part.offsets})
        storage[place] = Object('torch.distributed.checkpoint.filesystem', '_StorageInfo', info)
        dtypes[part.name] = str(part.x.dtype)
        about = {'offsets': part.offsets, 'sizes': part.x.shape}
        chunks[part.name].append(Object(METADATA, 'ChunkStorageMetadata', about))
    tensors = {
        name: Object(
            METADATA,
            'TensorStorageMetadata',
            {
                'properties': Object(
                    METADATA, 'TensorProperties', (Global('torch', dtypes[name]), None)
                ),
                'size': shape,
                'chunks': chunks[name],
            },
        )
        for name, shape in shapes.items()
    }
    index = {'state_dict_metadata': tensors, 'storage_data': storage}
    (iteration / '.metadata').write_bytes(program(Object(METADATA, 'Metadata', index)))
    for number, file in enumerate(files):
        (iteration / f'__{number}_0.distcp').write_bytes(file.getvalue())
    with (iteration / 'common.pt').open('wb') as file:
        TorchFile(file, common).close()
    (iteration / 'metadata.json').write_text(json.dumps({'sharded_backend': 'torch_dist'}))
    (folder / 'latest_checkpointed_iteration.txt').write_text('5')
    return iteration


def program(x: Any) -> bytes:
    """Return a pickle of plain values, lists and objects."""
    return b'\x80\x02' + b''.join(_pickle(x)) + b'.'


def _pickle(x: Any) -> Iterator[bytes]:
    match x:
        case bytes():  # instructions
            yield x
        case Global():
            yield f'c{x.module}\n{x.name}\n'.encode()
        case Object():
            yield f'c{x.module}\n{x.name}\n)\x81'.encode('latin-1')
            yield from _pickle(x.state)
            yield b'b'
        case dict():
            yield b'}('
            for key, value in x.items():
                yield from (*_pickle(key), *_pickle(value))
            yield b'u'
        case list() | tuple():
            yield b'('
            for item in x:
                yield from _pickle(item)
            yield b'l' if isinstance(x, list) else b't'
        case str():
            yield b'X' + len(x.encode()).to_bytes(4, 'little') + x.encode()
        case int():
            yield b'\x8a\x09' + x.to_bytes(9, 'little', signed=True)
        case None:
            yield b'N'
        case _:
            raise TypeError(type(x).__name__)
