"""A `torch_dist` checkpoint of Megatron-LM: its arguments, and the tensors of its model.

The tensors get the names of megatron-core's local layer specification, with one tensor per layer,
no matter how they were named and stacked when written. Imports no jax.
"""

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.core.config import ConfigError
from megajax.interop.megatron.dist_metadata import FILE as METADATA
from megajax.interop.megatron.dist_metadata import Chunk, Entry, Tensor, read_metadata
from megajax.interop.megatron.rank_files import (
    IGNORED,
    Progress,
    arguments_of,
    check_version,
    local_name,
    progress_of,
)
from megajax.interop.megatron.torch_files import load_archive, load_torch, map_file

BACKEND, COMMON = 'metadata.json', 'common.pt'
COMMON_STATE = 'common_state/shard_0_1'  # replaces common.pt since megatron-core 0.19
WRAPPERS = re.compile(r'^(module|model)\.')  # prefix of each name in NeMo's checkpoints
# Beginnings of the names of entries that do not belong to the model, with a description.
LEFT_OUT = {
    'the state of the optimizer': r'optimizer\.|chained_\d+\.|param_state',
    'the random states': r'rng_state',
    "the states of the scheduler and of Megatron-LM's checks": r'opt_param_scheduler|rerun_state',
}
# A name without a number after one of these prefixes is a stack of all layers or all experts.
STACKS = 'decoder.layers.', '.mlp.experts.experts.'
MAX_CHUNKS = 2**20  # most chunks of all stacks; 128 layers on 128 ranks have a fifth as many
GATED = re.compile(r'(.*\.linear_fc1\.(?:weight|bias))_([wv])')

logger = logging.getLogger(__name__)


class DistCheckpoint(NamedTuple):
    """A checkpoint whose tensors' elements have not been read."""

    folder: Path
    arguments: Mapping[str, Any]  # empty if the checkpoint has none
    progress: Progress
    tensors: Mapping[str, Tensor]


def is_dist(folder: Path) -> bool:
    """Return whether a folder is a distributed checkpoint of megatron-core.

    Raises ConfigError for the formats of PyTorch's FSDP and of Megatron-FSDP.
    """
    is_dist = (folder / BACKEND).is_file()
    if not is_dist and (folder / METADATA).is_file() and not any(folder.glob('mp_rank_*')):
        raise ConfigError(
            f'{folder}: has {METADATA} and no {BACKEND}, as in the formats torch_dcp and '
            'fsdp_dtensor, which are not supported; Megatron-LM converts torch_dcp to torch_dist: '
            'load it with --auto-detect-ckpt-format --ckpt-format torch_dist, and save'
        )
    return is_dist


def open_checkpoint(folder: Path) -> DistCheckpoint:
    """Read everything but the elements of the tensors.

    Raises ConfigError if the format is different, or if a file is damaged.
    """
    try:
        backend = json.loads((folder / BACKEND).read_bytes())['sharded_backend']
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{folder / BACKEND}: names no sharded_backend: {error!r:.200}'
        ) from error
    if backend != 'torch_dist':
        raise ConfigError(
            f'{folder / BACKEND}: sharded_backend={backend!r:.80} is not supported, '
            'only torch_dist: save it with --ckpt-format torch_dist'
        )
    tensors, others = read_metadata(folder)
    common = _common(folder, others.pop(COMMON_STATE, None))
    left = _left_out([*tensors, *others])
    model = {WRAPPERS.sub('', name): tensor for name, tensor in tensors.items() if name not in left}
    for name, tensor in model.items():
        if not isinstance(tensor.dtype, np.dtype):
            raise ConfigError(
                f'{folder / METADATA}: {name} has dtype {tensor.dtype}, '
                'but weights are float32, float16 or bfloat16'
            )
    unknown = [name for name in others if name not in left and not _is_ignored(name)]
    if unknown:
        raise ConfigError(f'{folder}: unexpected entries: {", ".join(unknown[:8])}')
    for what in dict.fromkeys(left.values()):
        count = sum(each == what for each in left.values())
        logger.warning('%s: left out: %s (%d entries)', folder, what, count)
    return DistCheckpoint(
        folder, arguments_of(common), progress_of(common), dict(_of_layers(model))
    )


def _common(folder: Path, entry: Entry | None) -> dict[str, Any]:
    """Return the unsharded state, from a file of its own or from an entry."""
    path = folder / COMMON
    if path.is_file():
        common = load_torch(path)
    elif entry is None:
        return {}
    else:
        path = folder / entry.file
        common = load_archive(_stored(folder, entry, COMMON_STATE, {}), f'{path}: {COMMON_STATE}')
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
    if not isinstance(common, dict):
        raise ConfigError(f'{path}: holds no dict')
    check_version(common, path)
    return common


def _left_out(names: Iterable[str]) -> dict[str, str]:
    """Return a description of each entry that does not belong to the model, by name."""
    return {
        name: what
        for name in names
        for what, pattern in LEFT_OUT.items()
        if re.match(pattern, WRAPPERS.sub('', name))
    }


def _is_ignored(name: str) -> bool:
    return IGNORED.fullmatch(name.partition('/')[0]) is not None


def _of_layers(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names of the local layer specification."""
    gates: dict[str, dict[str, Tensor]] = defaultdict(dict)
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_ignored(name)}
    if sum(_num_parts(name, tensor) for name, tensor in tensors.items()) > MAX_CHUNKS:
        raise ConfigError(f'the stacks of layers and experts have more than {MAX_CHUNKS:,} chunks')
    for name, tensor in tensors.items():
        for part, its in _unstacked(name, tensor):
            if gate := GATED.fullmatch(part):
                gates[gate[1]][gate[2]] = its
            else:
                yield local_name(part), its
    for name, halves in gates.items():
        if halves.keys() != {'w', 'v'} or halves['w'].shape != halves['v'].shape:
            raise ConfigError(f'{name}_w and {name}_v are not two halves of a gated layer')
        yield local_name(name), _joined(halves['w'], halves['v'])


def _stacks(name: str) -> list[str]:
    """Return the prefixes after which a name has no number, in the order of its first dims."""
    rests = [(prefix, name.partition(prefix)[1:]) for prefix in STACKS]
    return [
        prefix
        for prefix, (found, rest) in rests
        if found and not rest.partition('.')[0].isdecimal()
    ]


def _num_parts(name: str, stack: Tensor) -> int:
    """Return the number of chunks of a tensor's layers and experts. Raises ConfigError."""
    dims = len(_stacks(name))
    if len(stack.shape) < dims:
        raise ConfigError(f'{name}: has the shape {stack.shape}, but should have one more dim')
    return sum(math.prod(chunk.sizes[:dims]) for chunk in stack.chunks)


def _unstacked(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a stack, whose first dims are the layers and perhaps the experts."""
    if not (prefixes := _stacks(name)):
        yield name, stack
        return
    chunks = defaultdict(list)
    for chunk in stack.chunks:
        for n in range(chunk.sizes[0]):
            offsets, sizes = chunk.offsets[1:], chunk.sizes[1:]
            part = chunk._replace(offsets=offsets, sizes=sizes, at=(*chunk.at, n))
            chunks[chunk.offsets[0] + n].append(part)
    for n in range(stack.shape[0]):
        numbered = name.replace(prefixes[0], f'{prefixes[0]}{n}.', 1)
        yield from _unstacked(numbered, Tensor(stack.shape[1:], stack.dtype, tuple(chunks[n])))


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    rows, *rest = gate.shape
    moved = (
        chunk._replace(offsets=(chunk.offsets[0] + rows, *chunk.offsets[1:])) for chunk in up.chunks
    )
    return Tensor((2 * rows, *rest), gate.dtype, (*gate.chunks, *moved))


def open_chunks(
    folder: Path, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Chunk, np.ndarray]]:
    """Yield a tensor's name, one of its chunks, and the elements as a view of a mapped file.

    Raises ConfigError, with file and tensor, if the file contains something else.
    """
    files: dict[str, memoryview] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            what = f'{name} at {chunk.offsets}'
            place = f'{folder / chunk.entry.file}: {what}'
            x = load_archive(_stored(folder, chunk.entry, what, files), place)
            if not isinstance(x, np.ndarray):
                raise ConfigError(f'{place}: is not a tensor')
            if (x.shape, x.dtype) != (chunk.stored, tensor.dtype):
                raise ConfigError(
                    f'{place}: is {x.dtype} {x.shape}, '
                    f'but {METADATA} says {tensor.dtype} {chunk.stored}'
                )
            yield name, chunk, x[chunk.at]


def _stored(folder: Path, entry: Entry, what: str, files: dict[str, memoryview]) -> memoryview:
    """Return the bytes of an entry; `files` caches the mapped files."""
    file, start, length = entry
    if file not in files:
        if not (folder / file).is_file():
            raise ConfigError(f'{folder / file}: is missing, and should hold {what}')
        files[file] = map_file(folder / file)
    if start + length > len(files[file]):
        raise ConfigError(
            f'{folder / file}: {what}: should end at byte {start + length:,}, '
            f'but the file has {len(files[file]):,}: it is cut short'
        )
    return files[file][start : start + length]
