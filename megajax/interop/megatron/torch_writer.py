"""Write `torch.save` files without torch; `torch_files.py` describes and reads them."""

import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megajax.interop.megatron.torch_files import STORAGES


class Stored(NamedTuple):
    """The shape and dtype of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype


class _Archive(zipfile.ZipFile):
    """An archive that stays incomplete if it is not closed, for example after an error."""

    def __del__(self) -> None:
        pass


class TorchFile:
    """A `torch.save` file that is being written.

    The pickle comes first, then each tensor's data.
    """

    def __init__(self, file: BinaryIO, contents: Mapping[str, Any]):
        self._archive = _Archive(file, 'w', zipfile.ZIP_STORED)
        self._tensors: list[Stored] = []
        self._written: set[int] = set()
        self._write('data.pkl', b'\x80\x02' + b''.join(self._pickle(contents)) + b'.')
        self._write('version', b'3\n')
        self._write('byteorder', b'little')

    def append(self, x: np.ndarray) -> None:
        """Write the data of the next tensor, in the order of the names."""
        self.write(len(self._written), x)

    def write(self, index: int, x: np.ndarray) -> None:
        """Write the data of a tensor, given its index in the order of the names."""
        assert index not in self._written
        assert (x.shape, x.dtype) == self._tensors[index]
        self._write(f'data/{index}', np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        self._written.add(index)

    def close(self) -> None:
        """Write the archive's directory; every tensor must have been written."""
        assert len(self._written) == len(self._tensors)
        self._archive.close()

    def _write(self, name: str, data: bytes | memoryview) -> None:
        with self._archive.open(zipfile.ZipInfo(f'archive/{name}'), 'w', force_zip64=True) as entry:
            entry.write(data)

    def _pickle(self, x: Any) -> Iterator[bytes]:
        """Yield opcodes of protocol 2.

        They are written manually, because pickling torch's functions would import them.
        """
        match x:
            case Stored():
                yield from self._pickle_tensor(x)
            case Mapping():
                yield b'}('
                for key, value in x.items():
                    yield from (*self._pickle(key), *self._pickle(value))
                yield b'u'
            case str():
                yield b'X' + struct.pack('<I', len(x.encode())) + x.encode()
            case bool():
                yield b'\x88' if x else b'\x89'
            case int():
                yield b'\x8a\x08' + struct.pack('<q', x)
            case float():
                yield b'G' + struct.pack('>d', x)
            case tuple():
                yield from (b'(', *(part for item in x for part in self._pickle(item)), b't')
            case _:
                raise TypeError(f'{type(x).__name__} cannot be written to a checkpoint')

    def _pickle_tensor(self, x: Stored) -> Iterator[bytes]:
        storage = next(name for name, dtype in STORAGES.items() if dtype == x.dtype)
        count = int(np.prod(x.shape))
        stride = tuple(int(np.prod(x.shape[dim + 1 :])) for dim in range(len(x.shape)))
        yield b'ctorch._utils\n_rebuild_tensor_v2\n('
        key = str(len(self._tensors))
        yield from (
            b'(',
            *self._pickle('storage'),
            f'ctorch\n{storage}\n'.encode(),
            *self._pickle(key),
            *self._pickle('cpu'),
        )
        yield from (
            *self._pickle(count),
            b'tQ',
            *self._pickle(0),
            *self._pickle(x.shape),
            *self._pickle(stride),
            *self._pickle(False),
        )
        yield b'ccollections\nOrderedDict\n)RtR'
        self._tensors.append(x)


@contextmanager
def torch_files(
    paths: Iterable[Path], contents: Iterable[Mapping[str, Any]]
) -> Iterator[list[TorchFile]]:
    """Yield files to append tensors to; close them at the end, when all are filled."""
    opened = [path.open('wb') for path in paths]
    try:
        files = [TorchFile(file, content) for file, content in zip(opened, contents, strict=True)]
        yield files
        for file in files:
            file.close()
    finally:
        for raw in opened:
            raw.close()
