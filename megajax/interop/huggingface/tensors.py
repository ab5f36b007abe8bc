"""Read and write the weights of a Hugging Face directory: memory-mapped safetensors files.

Imports no jax.
"""

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from megajax.base.files.json_file import read_json
from megajax.base.files.pointers import repair
from megajax.base.render.text import shorten
from megajax.core.config import ConfigError

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
ADAPTER = 'adapter_config.json'  # PEFT's config file
SHARD_BYTES = 5_000_000_000  # maximum bytes of a file, as in `save_pretrained`
SAFETENSORS_DTYPES = {
    'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F64': np.dtype(np.float64),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'I64': np.dtype(np.int64),
    'I32': np.dtype(np.int32),
    'I16': np.dtype(np.int16),
    'I8': np.dtype(np.int8),
    'U8': np.dtype(np.uint8),
    'BOOL': np.dtype(np.bool_),
}
CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


class Tensor(NamedTuple):
    """The name, shape and dtype of an array to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a directory by name, as views of the memory-mapped files.

    A tensor's bytes are read only when it is used. As in transformers, `model.safetensors` takes
    precedence over an index, which an older `save_pretrained` may have left behind. Raises
    ConfigError, with the file and the tensor, if a file is damaged or missing, or if the index and
    the files disagree. Also raises ConfigError for a folder with an adapter that transformers would
    add to the weights.
    """
    check_adapter(folder)
    if (folder / SINGLE).is_file():
        return _read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    pickles = sorted(path.name for path in folder.glob('*.bin'))
    why = (
        f'; {pickles[0]} is a pickle, which could run any code: save the model as safetensors first'
        if pickles
        else ''
    )
    raise ConfigError(f'{folder}: there is neither {SINGLE} nor {INDEX}{why}')


def check_adapter(folder: Path) -> None:
    """Raise ConfigError for a PEFT adapter, including one that transformers adds to a model."""
    file = folder / ADAPTER
    if not file.is_file():
        return
    settings = read_json(file)
    base, adapter = str(settings.get('base_model_name_or_path')), str(folder)
    model = _class_of(settings, base, folder)
    why, first = f'an adapter of {shorten(base)}, and no model', ''
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        why = 'transformers adds this adapter to the weights of the folder, but megajax does not'
        base, adapter = adapter, 'ADAPTER'
        first = 'move adapter_* to a folder ADAPTER, to leave it out or '
    raise ConfigError(
        f'{file}: {why}; {first}to merge it: PeftModel.from_pretrained({model}'
        f'.from_pretrained({shorten(base)!r}), {adapter!r}).merge_and_unload()'
        ".save_pretrained('merged'), with the files of the tokenizer copied to merged"
    )


def _class_of(adapter: Mapping[str, Any], base: str, folder: Path) -> str:
    """Return the name of the transformers class that loads an adapter's model."""
    files = [each for path in (folder, Path(base)) if (each := path / 'config.json').is_file()]
    named = [read_json(file).get('architectures') for file in files]
    found = [names[0] for names in named if isinstance(names, list) and names]
    mapping = adapter.get('auto_mapping')
    found += [mapping.get('base_model_class')] if isinstance(mapping, dict) else []
    sees = re.search(r'vision|visual|llava|(?<![a-z])vl(?![a-z])', base, re.IGNORECASE)
    general = 'AutoModelForImageTextToText' if sees else 'AutoModelForCausalLM'
    known = (name for name in found if isinstance(name, str) and name.isidentifier())
    return next(known, general)


def _read_indexed(folder: Path) -> dict[str, np.ndarray]:
    index = folder / INDEX
    try:
        names = {str(name): str(file) for name, file in read_json(index)['weight_map'].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{index}: not an index of tensors: {error!r}') from error
    return _read_files(folder, index, names)


def _read_files(folder: Path, index: Path, files: Mapping[str, str]) -> dict[str, np.ndarray]:
    for name, file in files.items():
        if Path(file).name != file or not file.endswith('.safetensors'):
            raise ConfigError(
                f'{index}: {name} is said to be in {file!r}, '
                'which is not the name of a safetensors file next to it'
            )
        if not (folder / file).is_file():
            raise ConfigError(f'{index}: {name} is said to be in {file}, which is missing')
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(files.values())):
        file_tensors = _read_file(folder / file)
        for name in file_tensors:
            if files.get(name) != file:
                where = f'says that it is in {files[name]}' if name in files else 'does not list it'
                raise ConfigError(f'{folder / file}: holds {name}, but {index.name} {where}')
        tensors |= file_tensors
    if missing := [name for name in files if name not in tensors]:
        raise ConfigError(
            f'{index}: {missing[0]} is said to be in {files[missing[0]]}, which does not hold it'
        )
    return tensors


def _read_file(path: Path) -> dict[str, np.ndarray]:
    try:
        # Opening checks that the header is valid and matches the length of the file.
        with safe_open(path, framework='numpy'):
            pass
        with path.open('rb') as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise ConfigError(f'{path}: cannot be read: {error}') from error
    except SafetensorError as error:
        message = f'{path}: not a valid safetensors file ({error}); {repair(path)}'
        raise ConfigError(message) from error
    start = 8 + int(content[:8].view('<u8')[0])
    header = json.loads(content[8:start].tobytes())
    return {
        name: _view(path, name, about, content[start:])
        for name, about in header.items()
        if name != '__metadata__'
    }


def _view(path: Path, name: str, about: Mapping[str, Any], content: np.ndarray) -> np.ndarray:
    if about['dtype'] not in SAFETENSORS_DTYPES:
        raise ConfigError(f'{path}: {name} has dtype {about["dtype"]}; expected F32, F16 or BF16')
    start, end = about['data_offsets']
    return content[start:end].view(SAFETENSORS_DTYPES[about['dtype']]).reshape(about['shape'])


def write_tensors(
    folder: Path,
    plan: Iterable[Tensor],
    arrays: Iterator[np.ndarray],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the arrays, in the order of `plan`, to files of at most `shard_bytes`.

    If there are several files, an index is written too. Only the current array is in memory. A
    tensor larger than `shard_bytes` gets its own file.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in plan:
        if shards[-1] and sum(each.size for each in shards[-1]) + tensor.size > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    count = len(shards)
    names = (
        [SINGLE]
        if count == 1
        else [f'model-{n:05}-of-{count:05}.safetensors' for n in range(1, count + 1)]
    )
    for name, tensors in zip(names, shards, strict=True):
        _write_file(folder / name, tensors, arrays)
    if count > 1:
        weight_map = {
            tensor.name: name
            for name, tensors in zip(names, shards, strict=True)
            for tensor in tensors
        }
        total = sum(tensor.size for tensors in shards for tensor in tensors)
        (folder / INDEX).write_text(
            json.dumps({'metadata': {'total_size': total}, 'weight_map': weight_map}, indent=2)
        )


def _write_file(path: Path, tensors: list[Tensor], arrays: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # transformers requires it
    start = 0
    for tensor in tensors:
        header[tensor.name] = {
            'dtype': CODES[tensor.dtype],
            'shape': tensor.shape,
            'data_offsets': [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)  # padding that aligns the data
    with path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for tensor in tensors:
            array = next(arrays)
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), tensor
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
