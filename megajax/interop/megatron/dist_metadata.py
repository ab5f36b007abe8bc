"""The index of a `torch_dist` checkpoint: its tensors, and where their chunks are stored.

This is the format of Megatron-LM since megatron-core, and of `torch.distributed.checkpoint`. The
file `.metadata` is a pickle of records. It has the global shape and the chunks of each tensor; any
rank may have written a chunk. Imports no jax.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from megajax.base.errors import reason
from megajax.core.config import ConfigError
from megajax.interop.megatron.pickles import Call, Inert, Record, Unpickler

FILE = '.metadata'
MAX_FILE_BYTES = 2**28
MAX_CHUNKS = 2**17  # of one tensor: 64 layers x 512 experts x 2 gates x 2 ranks
# Chunks of a tensor that do not form a grid; each is compared with all others.
MAX_IRREGULAR = 2**14
MAX_DIMS = 8
PACKAGES = ('torch.distributed.checkpoint.', 'torch.distributed._shard.', 'megatron.')
# Records that are not needed: of other ways to write, and of the save itself.
INERT = (
    ('torch.serialization', '_get_layout'),
    ('pathlib', 'PosixPath'),
    ('pathlib._local', 'PosixPath'),
)
DTYPES = {
    'float32': np.dtype(np.float32),
    'float16': np.dtype(np.float16),
    'bfloat16': np.dtype(ml_dtypes.bfloat16),
    'float64': np.dtype(np.float64),
}

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """The bytes of a file that contain one chunk, as written by `torch.save`."""

    file: str
    start: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor, and the location of its elements."""

    offsets: Shape
    sizes: Shape
    entry: Entry
    stored: Shape  # shape of the array in the file
    at: tuple[int, ...] = ()  # index in the array's first dims, the layers and perhaps the experts


class Tensor(NamedTuple):
    """A tensor of a model: its global shape and the chunks that it consists of."""

    shape: Shape
    dtype: Any  # a numpy dtype, or the name of a torch dtype that numpy lacks
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> tuple[dict[str, Tensor], dict[str, Entry | None]]:
    """Return the tensors of a checkpoint by name, and the locations of its other entries.

    Raises ConfigError, with the entry, if the file is damaged or asks for more than records, or if
    a tensor's chunks do not cover it exactly.
    """
    path = folder / FILE
    metadata = _load(path)
    try:
        places = dict(_places(metadata.storage_data))
        stored = metadata.state_dict_metadata.items()
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f'{path}: no index of a checkpoint: {reason(error)}') from error
    tensors: dict[str, Tensor] = {}
    others: dict[str, Entry | None] = {}
    for name, about in stored:
        if isinstance(about, _Tensor):
            try:
                tensors[str(name)] = _tensor(name, about, places)
            except (AttributeError, TypeError, ValueError) as error:
                raise ConfigError(f'{path}: {name}: {reason(error)}') from error
        else:
            others[str(name)] = places.get((str(name), ()))
    return tensors, others


def _load(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f'{path}: has {size:,} bytes, but at most {MAX_FILE_BYTES:,} are read'
            )
        return _Unpickler(path.read_bytes(), str(path)).load()
    except OSError as error:
        raise ConfigError(f'{path}: cannot be read: {error.strerror}') from error
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise ConfigError(
            f'{path}: not what torch.distributed.checkpoint writes: '
            f'{type(error).__name__}: {reason(error)}'
        ) from error


class _Properties(Record):
    """The properties of a tensor; the first one is the dtype."""

    dtype: Any = None

    def set_state(self, state: Any) -> None:
        """Take the dtype from a tuple, or from a dict."""
        self.dtype = state['dtype'] if isinstance(state, dict) else state[0]


class _Tensor(Record):
    """The entry of a tensor in the index; other objects have entries of other kinds."""


RECORDS = {
    'Metadata': Record,
    'MetadataIndex': Record,
    'TensorStorageMetadata': _Tensor,
    'ChunkStorageMetadata': Record,
    'TensorProperties': _Properties,
    '_StorageInfo': Record,
}


class _Unpickler(Unpickler):
    """An unpickler that knows the records of an index by name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for a global of the pickle."""
        if module.startswith(PACKAGES):
            return Call(RECORDS[name]) if name in RECORDS else Inert
        if (module, name) == ('torch', 'Size'):
            return Call(tuple)
        if module == 'torch':
            return name
        if (module, name) in INERT:
            return Inert
        return super().find_class(module, name)


def _places(storage: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, Shape], Entry]]:
    """Yield the entry of each chunk, by the name of its tensor and its offsets."""
    for index, info in storage.items():
        if not isinstance(index.fqn, str):
            raise ValueError('an entry is stored without a name')
        if getattr(info, 'transform_descriptors', None):
            raise ValueError(f'{index.fqn} is compressed: save it without transforms')
        file, start, length = info.relative_path, info.offset, info.length
        if not isinstance(file, str) or not re.fullmatch(r'[\w.-]+', file):
            raise ValueError(f'{index.fqn} is stored in {file!r}, which is not a file name')
        offsets = tuple(getattr(index, 'offset', None) or ())  # only tensors have an offset
        _check_numbers((start, length, *offsets))
        yield (index.fqn, offsets), Entry(file, start, length)


def _tensor(name: str, about: Any, places: Mapping[tuple[str, Shape], Entry]) -> Tensor:
    shape, dtype = tuple(about.size), about.properties.dtype
    _check_numbers(shape)
    if not isinstance(dtype, str):
        raise ValueError('has no dtype')
    if len(shape) > MAX_DIMS or len(about.chunks) > MAX_CHUNKS:
        raise ValueError(f'has {len(shape)} dims in {len(about.chunks)} chunks')
    chunks = []
    for chunk in about.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        _check_numbers((*offsets, *sizes))
        if 0 in sizes:
            raise ValueError(f'its chunk at {offsets} has no elements')
        if (entry := places.get((name, offsets))) is None:
            raise ValueError(f'its chunk at {offsets} is stored nowhere')
        chunks.append(Chunk(offsets, sizes, entry, sizes))
    _check_cover(shape, chunks)
    return Tensor(shape, DTYPES.get(dtype, dtype), tuple(chunks))


def _check_numbers(numbers: tuple[Any, ...]) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError('a size or an offset is not a number from 0 to 2^63')


def _check_cover(shape: Shape, chunks: list[Chunk]) -> None:
    """Raise ValueError unless each element of a tensor is in exactly one of its chunks."""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or any(
            start + size > end
            for start, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise ValueError(f'its chunk {chunk.sizes} at {chunk.offsets} is not within {shape}')
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise ValueError(f'its chunks hold {covered} of {math.prod(shape)} elements')
    boxes = np.array([(c.offsets, c.sizes) for c in chunks], np.int64).reshape(-1, 2, len(shape))
    boxes[:, 1] += boxes[:, 0]
    if (overlapping := _overlapping(boxes)) is not None:
        raise ValueError(f'its chunk at {tuple(map(int, overlapping))} overlaps another')


def _overlapping(boxes: np.ndarray, dim: int = 0) -> np.ndarray | None:
    """Return the start of a box that overlaps another; a box has [start, end] for each dim."""
    if len(boxes) < 2:
        return None
    if dim == boxes.shape[2]:
        return boxes[1, 0]
    ordered = boxes[np.argsort(boxes[:, 0, dim], kind='stable')]
    starts, ends = ordered[:, 0, dim], ordered[:, 1, dim]
    groups = np.split(ordered, np.flatnonzero(starts[1:] >= np.maximum.accumulate(ends)[:-1]) + 1)
    is_flat = (ordered[:, :, dim] == ordered[0, :, dim]).all()
    if len(groups) > 1 or is_flat:
        found = (_overlapping(group, dim + is_flat) for group in groups)
        return next((start for start in found if start is not None), None)
    if len(boxes) > MAX_IRREGULAR:
        raise ValueError(f'{len(boxes):,} of its chunks form no grid')
    for index in range(1, len(boxes)):
        overlaps = (boxes[index, 0] < boxes[:index, 1]) & (boxes[:index, 0] < boxes[index, 1])
        if overlaps.all(axis=1).any():
            return boxes[index, 0]
    return None
