"""The files of a Megatron-LM checkpoint: one for each tensor-parallel rank of each stage.

They are `mp_rank_TT/model_optim_rng.pt`, in a pipeline `mp_rank_TT_PPP/model_optim_rng.pt`. A stage
with several chunks of layers has them as `model0`, `model1` and so on. Imports no jax.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config import ConfigError
from megajax.interop.torch_files import Namespace, load_torch

FILE, TRACKER, RELEASE = 'model_optim_rng.pt', 'latest_checkpointed_iteration.txt', 'release'
VERSION = 3.0  # version of the layout; since 2.0 QKV is grouped by head
IGNORED = re.compile(r'.*_extra_state(\..*)?|.*rotary_pos_emb\.inv_freq')
# Translation of names in Transformer Engine's layers and in Megatron-LM before megatron-core to
# those of the local layer specification.
ALIASES = (
    (r'linear_qkv\.layer_norm_(weight|bias)$', r'input_layernorm.\1'),
    (r'self_attention\.input_layernorm', 'input_layernorm'),
    (r'mlp\.linear_fc1\.layer_norm_(weight|bias)$', r'pre_mlp_layernorm.\1'),
    (r'^language_model\.(encoder|transformer)\.', 'decoder.'),
    (r'^language_model\.', ''),
    (r'^decoder\.(layers\.\d+)\.attention\.', r'decoder.\1.self_attention.'),
    (r'\.query_key_value\.', '.linear_qkv.'),
    (r'\.self_attention\.dense\.', '.self_attention.linear_proj.'),
    (r'\.post_attention_layernorm\.', '.pre_mlp_layernorm.'),
    (r'\.dense_h_to_4h\.', '.linear_fc1.'),
    (r'\.dense_4h_to_h\.', '.linear_fc2.'),
)


class RankFile(NamedTuple):
    """The contents of one rank's file."""

    path: Path
    arguments: Mapping[str, Any]  # empty if it has none
    chunks: tuple[Mapping[str, np.ndarray], ...]  # tensors by megatron-core's names


def rank_name(rank: int, stage: int, stages: int) -> str:
    """Return the name of a rank's folder."""
    return f'mp_rank_{rank:02}' + (f'_{stage:03}' if stages > 1 else '')


def chunk_names(count: int) -> list[str]:
    """Return the names in a file of the chunks of a stage."""
    return ['model'] if count == 1 else [f'model{index}' for index in range(count)]


def find_ranks(
    folder: Path, ranks: int | None = None, stages: int | None = None
) -> list[list[Path]]:
    """Return the files of a checkpoint, of each tensor-parallel rank those of its stages in order.

    `folder` is a checkpoint's folder, or one that holds several, of which the newest is used.
    Raises ConfigError if there are no ranks, not every one, or not `ranks` x `stages` of them.
    """
    folder = _newest(folder)
    names = sorted(path.name for path in folder.glob('mp_rank_*') if path.is_dir())
    if not names:
        raise ConfigError(
            f'{folder}: there is no mp_rank_00: '
            f'give the folder of a checkpoint, or one that holds {TRACKER}'
        )
    found = [re.fullmatch(r'mp_rank_(\d\d+)(?:_(\d{3,}))?', name) for name in names]
    if other := [name for name, match in zip(names, found, strict=True) if match is None]:
        raise ConfigError(
            f'{folder}: {other[0]} is neither a tensor-parallel rank nor one of a pipeline, '
            'and ranks of experts cannot be merged'
        )
    places = [(int(match[1]), int(match[2] or 0)) for match in found if match]
    count, depth = (1 + max(numbers) for numbers in zip(*places, strict=True))
    is_staged = any(match[2] for match in found if match)
    expected = [
        [rank_name(rank, stage, 2 if is_staged else 1) for stage in range(depth)]
        for rank in range(count)
    ]
    if names != [name for group in expected for name in group]:
        raise ConfigError(
            f'{folder}: holds {", ".join(names)}, '
            f'but not every rank from {"00_000" if is_staged else "00"} on'
        )
    for wanted, number, what in ((ranks, count, 'ranks'), (stages, depth, 'pipeline stages')):
        if wanted not in (None, number):
            raise ConfigError(f'{folder}: holds {number} {what}, not {wanted}')
    paths = [[folder / name / FILE for name in group] for group in expected]
    if missing := [path for group in paths for path in group if not path.is_file()]:
        raise ConfigError(f'{missing[0]}: is missing')
    return paths


def _newest(folder: Path) -> Path:
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    newest = tracker.read_text().strip()
    return folder / (f'iter_{int(newest):07}' if newest.isdecimal() else newest)


def read_rank(path: Path) -> RankFile:
    """Read a rank's file. Raises ConfigError if it asks for more than tensors, or has none."""
    contents = load_torch(path)
    names = (
        [name for name in contents if re.fullmatch(r'model\d*', str(name))]
        if isinstance(contents, Mapping)
        else []
    )
    if names not in (['model'], chunk_names(max(len(names), 2))) or not all(
        isinstance(contents[name], Mapping) for name in names
    ):
        raise ConfigError(f"{path}: holds no 'model', nor 'model0', 'model1' and so on")
    version = contents.get('checkpoint_version', VERSION)
    if not isinstance(version, (int, float)) or version < 2:
        raise ConfigError(
            f'{path}: checkpoint_version {version} orders QKV differently; '
            'only 2.0 and later are supported'
        )
    arguments = contents.get('args')
    known = (
        vars(arguments)
        if isinstance(arguments, Namespace)
        else arguments
        if isinstance(arguments, Mapping)
        else {}
    )
    return RankFile(path, known, tuple(dict(_tensors(contents[name], path)) for name in names))


def _tensors(
    model: Mapping[str, Any], path: Path, prefix: str = ''
) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in model.items():
        name = f'{prefix}{key}'
        if IGNORED.fullmatch(name) or name == 'word_embeddings_for_head':
            continue
        if isinstance(value, Mapping):
            yield from _tensors(value, path, f'{name}.')
        elif isinstance(value, np.ndarray):
            for pattern, replacement in ALIASES:
                name = re.sub(pattern, replacement, name)
            yield name, value
        else:
            raise ConfigError(f'{path}: {name} is not a tensor')
