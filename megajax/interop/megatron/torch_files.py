"""Read `torch.save` files without torch and without running code in them.

Imports no jax. Such a file is a zip archive of a pickle and the storages of its tensors. A pickle
is a program that may call any function by name. This reader provides only tensors, plain
containers, and an inert placeholder for objects that are known to be stored with weights. A file
that asks for anything else is rejected.
"""

import io
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from megajax.base.errors import reason
from megajax.core.config import ConfigError
from megajax.interop.megatron.pickles import Call, Inert, Record, Unpickler

MAX_PROGRAM_BYTES = 2**26  # most bytes of a pickle, without its tensors' data
STORAGES = {
    'FloatStorage': np.dtype(np.float32),
    'HalfStorage': np.dtype(np.float16),
    'BFloat16Storage': np.dtype(ml_dtypes.bfloat16),
    'DoubleStorage': np.dtype(np.float64),
    'LongStorage': np.dtype(np.int64),
    'IntStorage': np.dtype(np.int32),
    'ShortStorage': np.dtype(np.int16),
    'CharStorage': np.dtype(np.int8),
    'ByteStorage': np.dtype(np.uint8),
    'BoolStorage': np.dtype(np.bool_),
}
# Globals in arguments, random states and Transformer Engine's extra states. A placeholder replaces
# these objects, and their contents are ignored.
INERT = frozenset(
    {
        ('signal', 'Signals'),
        ('_codecs', 'encode'),
        ('io', 'BytesIO'),
        ('_io', 'BytesIO'),
        ('torch', 'device'),
        ('torch', 'Size'),
        ('torch', 'Tensor'),
    }
    | {
        (f'numpy.{core}.multiarray', name)
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    }
    | {
        ('numpy', 'ndarray'),
        ('numpy', 'dtype'),
        ('collections', 'deque'),
        ('datetime', 'timedelta'),
        ('pathlib', 'PosixPath'),
    }
    | {
        ('torch', name)
        for name in ('float32', 'float16', 'bfloat16', 'float64', 'int64', 'int32', 'uint8', 'bool')
    }
)
INERT_PACKAGES = ('megatron.', 'transformer_engine.')  # enumerations and settings


class Namespace(Record):
    """A substitute for `argparse.Namespace`: attributes, and nothing else."""


class _Kind(NamedTuple):
    """A substitute for a storage class.

    The dtype itself would not be safe, because a pickle can change the state of objects that it
    gets.
    """

    dtype: np.dtype


def load_torch(path: Path) -> Any:
    """Read a file that `torch.save` wrote.

    Returns plain containers, arrays in place of tensors (views of the mapped file), `Namespace` and
    `Inert`. Raises ConfigError, with the file's name, if the file is damaged, older than torch 1.6,
    or asks for anything else.
    """
    return load_archive(map_file(path), str(path))


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file, which are read only when they are used."""
    try:
        with path.open('rb') as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ConfigError(f'{path}: cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise ConfigError(f'{path}: is empty') from error


def load_archive(content: memoryview, path: str) -> Any:
    """Read the bytes of a file as `load_torch` does; `path` is its name in messages."""
    try:
        with zipfile.ZipFile(_Window(content)) as archive:
            entries = {name.partition('/')[2]: archive.getinfo(name) for name in archive.namelist()}
            if 'byteorder' in entries and _read(archive, entries['byteorder']) != b'little':
                raise ConfigError(f'{path}: not little-endian, the only supported byte order')
            program = _read(archive, entries['data.pkl'])
            return _Unpickler(program, path, entries, content).load()
    except ConfigError:
        raise
    except zipfile.BadZipFile as error:
        raise ConfigError(
            f'{path}: not a zip archive as torch.save writes since 1.6, or cut short: {error}'
        ) from error
    except Exception as error:  # a pickle can be wrong in any way
        raise ConfigError(
            f'{path}: not what torch.save writes: {type(error).__name__}: {reason(error)}'
        ) from error


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_PROGRAM_BYTES:
        raise ValueError(f'{entry.filename} is compressed, or larger than {MAX_PROGRAM_BYTES:,}')
    return archive.read(entry)


class _Window(io.RawIOBase):
    """Bytes in memory, or mapped into memory, as a file; `io.BytesIO` would copy them."""

    def __init__(self, content: memoryview):
        self.content, self.place = content, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: len(self.content)}[whence]
        if start + offset < 0:
            raise OSError('an offset before the first byte')
        self.place = start + offset
        return self.place

    def readinto(self, buffer: Any) -> int:
        part = self.content[self.place : self.place + len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)


class _Unpickler(Unpickler):
    """An unpickler that knows the tensors of a file and plain containers."""

    def __init__(
        self,
        program: bytes,
        path: str,
        entries: Mapping[str, zipfile.ZipInfo],
        content: memoryview,
    ):
        super().__init__(program, path)
        self.entries, self.content = entries, content

    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for a global of the pickle."""
        if (module, name) in CALLS:
            return CALLS[module, name]
        if module == 'torch' and name in STORAGES:
            return _Kind(STORAGES[name])
        if (module, name) in INERT or module.startswith(INERT_PACKAGES):
            return Inert
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Return a storage as a view of the file."""
        storage, (dtype,), key, _, count = pid
        entry = self.entries[f'data/{key}']
        if (
            storage != 'storage'
            or entry.compress_type != zipfile.ZIP_STORED
            or not 0 <= count * dtype.itemsize <= entry.file_size
        ):
            raise ValueError(f'storage {key} is shorter than its tensors, or compressed')
        # These lengths are in the entry's own header.
        name_length, extra_length = struct.unpack_from(
            '<HH', self.content, entry.header_offset + 26
        )
        start = entry.header_offset + 30 + name_length + extra_length
        data = self.content[start : start + count * dtype.itemsize]
        return np.frombuffer(data, np.uint8, count * dtype.itemsize).view(dtype)


def _rebuild_tensor(
    storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> np.ndarray:
    # Only a contiguous 1-D array has as many elements in memory as its length says.
    if type(storage) is not np.ndarray or storage.strides != (storage.itemsize,):
        raise ValueError('a tensor is made of something other than a storage')
    if not all(type(n) is int for n in (offset, *size, *stride)):
        raise ValueError('an offset, a size or a stride of a tensor is not an integer')
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if (
        offset < 0
        or min((*size, *stride), default=0) < 0
        or (0 not in size and last >= len(storage))
    ):
        raise ValueError(f'a tensor of {size} reaches beyond its storage of {len(storage)}')
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)


def _rebuild_parameter(x: Any, *_: Any) -> Any:
    return x


def _rebuild_with_attributes(
    function: Any, _kind: Any, arguments: tuple[Any, ...], _attributes: Any
) -> np.ndarray:
    """Return a tensor that had Python attributes, such as Megatron's `partition_dim`, without them.

    The pickle passes the function that makes the tensor. Only `_rebuild_tensor` is accepted, which
    returns a view of the file or fails.
    """
    if function is not REBUILD_TENSOR:
        raise ValueError(f'{type(function).__name__} is to make a tensor')
    return _rebuild_tensor(*arguments)


REBUILD_TENSOR = Call(_rebuild_tensor)
# The functions that a pickle may call. Each returns a view of the file, its argument, or a new
# container.
CALLS = {
    ('torch._utils', '_rebuild_tensor_v2'): REBUILD_TENSOR,
    ('torch._utils', '_rebuild_parameter'): Call(_rebuild_parameter),
    ('torch._utils', '_rebuild_parameter_with_state'): Call(_rebuild_parameter),
    ('torch._tensor', '_rebuild_from_type_v2'): Call(_rebuild_with_attributes),
    ('collections', 'OrderedDict'): Call(lambda *_: {}),  # the items of the dict follow
    ('argparse', 'Namespace'): Call(Namespace),
    ('types', 'SimpleNamespace'): Call(Namespace),
}
