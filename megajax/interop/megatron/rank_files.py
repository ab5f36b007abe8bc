"""The files of a Megatron-LM checkpoint: one for each tensor-parallel rank of each stage.

The files are `mp_rank_TT/model_optim_rng.pt`; in a pipeline, `mp_rank_TT_PPP/model_optim_rng.pt`. A
stage with several chunks of layers stores them as `model0`, `model1` and so on. Imports no jax.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.core.config import ConfigError
from megajax.interop.megatron.torch_files import Namespace, load_torch

FILE, TRACKER, RELEASE = 'model_optim_rng.pt', 'latest_checkpointed_iteration.txt', 'release'
MAX_TRACKER_BYTES = 100
VERSION = 3.0  # version of the layout; since 2.0, QKV is grouped by head
IGNORED = re.compile(r'.*_extra_state(\..*)?|.*rotary_pos_emb\.inv_freq')
# Translates names in Transformer Engine's layers, and in Megatron-LM before megatron-core, to names
# in the local layer specification.
ALIASES = (
    (r'linear_qkv\.layer_norm_(weight|bias)$', r'input_layernorm.\1'),
    (r'self_attention\.input_layernorm', 'input_layernorm'),
    (r'mlp\.linear_fc1\.layer_norm_(weight|bias)$', r'pre_mlp_layernorm.\1'),
    (r'^language_model\.(encoder|transformer)\.', 'decoder.'),
    (r'^language_model\.', ''),
    (r'^decoder\.(layers\.\d+)\.attention\.', r'decoder.\1.self_attention.'),
    (r'\.query_key_value\.', '.linear_qkv.'),
    (r'\.self_attention\.dense\.', '.self_attention.linear_proj.'),
    (r'\.input_norm\.', '.input_layernorm.'),
    (r'\.post_attention_(layer)?norm\.', '.pre_mlp_layernorm.'),
    (r'^decoder\.final_norm\.', 'decoder.final_layernorm.'),
    (r'\.dense_h_to_4h\.', '.linear_fc1.'),
    (r'\.dense_4h_to_h\.', '.linear_fc2.'),
    (r'\.mlp\.experts\.experts\.(\d+)\.', r'.mlp.experts.local_experts.\1.'),
    (
        r'\.mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$',
        r'.mlp.experts.local_experts.\2.\1',
    ),
)


class Progress(NamedTuple):
    """The progress of Megatron-LM's run; None for values that a checkpoint does not have."""

    iteration: int | None = None
    samples: int | None = None  # consumed in training
    total: int | None = None  # samples of the whole run, on which the order depends


class RankFile(NamedTuple):
    """The contents of one rank's file."""

    path: Path
    arguments: Mapping[str, Any]  # empty if it has none
    progress: Progress
    chunks: tuple[Mapping[str, np.ndarray], ...]  # tensors by megatron-core's names


def rank_name(rank: int, stage: int, stages: int) -> str:
    """Return the name of a rank's folder."""
    return f'mp_rank_{rank:02}' + (f'_{stage:03}' if stages > 1 else '')


def chunk_names(count: int) -> list[str]:
    """Return the names under which a file stores the chunks of a stage."""
    return ['model'] if count == 1 else [f'model{index}' for index in range(count)]


def find_ranks(
    folder: Path, ranks: int | None = None, stages: int | None = None
) -> list[list[Path]]:
    """Return the files of a checkpoint: for each tensor-parallel rank, its stages' files in order.

    `folder` is a checkpoint's folder, or a folder with several checkpoints; the newest is then
    used. Raises ConfigError if there are no ranks, if some are missing, or if there are not `ranks`
    x `stages`.
    """
    folder = newest(folder)
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


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a folder that contains several, or the folder itself.

    Raises ConfigError if the file that names the newest contains neither a number of steps nor
    `release`.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    with tracker.open('rb') as file:
        name = file.read(MAX_TRACKER_BYTES).decode(errors='replace').strip()
    if name == RELEASE:
        return folder / RELEASE
    if not re.fullmatch('[0-9]+', name):
        raise ConfigError(f'{tracker}: {name!r:.80} is neither a number of steps nor {RELEASE!r}')
    return folder / f'iter_{int(name):07}'


def read_rank(path: Path) -> RankFile:
    """Read a rank's file. Raises ConfigError if it has no tensors or asks for more."""
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
    # As in Megatron-LM: its first releases wrote no version.
    check_version({'checkpoint_version': 0, **contents}, path)
    return RankFile(
        path,
        arguments_of(contents),
        progress_of(contents),
        tuple(_tensors(contents[name], path) for name in names),
    )


def check_version(contents: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if a checkpoint's layout is older than the oldest supported one.

    A layout without a version is the newest.
    """
    version = contents.get('checkpoint_version', VERSION)
    if not (isinstance(version, (int, float)) and version >= 2):  # NaN is not
        raise ConfigError(
            f'{path}: checkpoint_version {version!r:.80} orders QKV differently; '
            'only 2.0 and later are supported: load it in Megatron-LM and save it again'
        )


def arguments_of(contents: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Megatron-LM's arguments in a checkpoint by name; empty if there are none."""
    arguments = contents.get('args')
    if isinstance(arguments, Namespace):
        return vars(arguments)
    return arguments if isinstance(arguments, Mapping) else {}


def progress_of(contents: Mapping[str, Any]) -> Progress:
    """Return the iteration of a checkpoint, its consumed samples and the whole run's samples."""
    arguments = arguments_of(contents)

    def count(name: str, source: Mapping[str, Any] = arguments) -> int | None:
        value = source.get(name)
        return value if type(value) is int and 0 <= value < 2**53 else None

    iteration, samples, total = (
        count('iteration', contents),
        count('consumed_train_samples'),
        count('train_samples'),
    )
    if total is None and (batch := count('global_batch_size')) and (steps := count('train_iters')):
        total = steps * batch
    return Progress(iteration, samples, total)


def local_name(name: str) -> str:
    """Return a tensor's name in megatron-core's local layer specification."""
    for pattern, replacement in ALIASES:
        name = re.sub(pattern, replacement, name)
    return name


def _tensors(model: Mapping[str, Any], path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model; a name joins the keys of the nested dicts."""
    tensors = {}
    pending, visited = [('', model)], {id(model)}
    while pending:
        prefix, group = pending.pop()
        for key, value in group.items():
            name = f'{prefix}{key}'
            if IGNORED.fullmatch(name) or name == 'word_embeddings_for_head':
                continue
            if isinstance(value, Mapping):
                if id(value) in visited:
                    raise ConfigError(f'{path}: {name:.200} is a dict that occurs twice')
                visited.add(id(value))
                pending.append((f'{name}.', value))
            elif isinstance(value, np.ndarray):
                tensors[local_name(name)] = value
            else:
                raise ConfigError(f'{path}: {name:.200} is not a tensor')
    return tensors
