"""Import and export of Megatron-LM checkpoints with one file for each tensor-parallel rank.

The files are `mp_rank_XX/model_optim_rng.pt`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megajax.checkpoint.digests import find_sound
from megajax.checkpoint.record import RECORD, read_record
from megajax.config import Config, ConfigError, dump, load, reload
from megajax.interop.arguments import read_arguments
from megajax.interop.folder import check_new, new_folder, settings
from megajax.interop.torch_files import Namespace, Stored, load_torch, torch_files

if TYPE_CHECKING:
    from megajax.interop.pieces import Pieces

FILE, TRACKER, RELEASE = 'model_optim_rng.pt', 'latest_checkpointed_iteration.txt', 'release'
VERSION = 3.0  # version of the layout; since 2.0 QKV is grouped by head
MEGATRON_VOCAB_MULTIPLE = 128  # rows on each rank, Megatron's make_vocab_size_divisible_by
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
    tensors: Mapping[str, np.ndarray]  # by megatron-core's names


def import_megatron(
    folder: Path, out: Path, overrides: Sequence[str] = (), *, ranks: int | None = None
) -> Config:
    """Make `out` a run at step 0 with a checkpoint's weights, merged over tensor-parallel ranks.

    Returns the config of the run. The checkpoint's arguments, or a config.yaml beside the ranks,
    describe the model. Raises ConfigError for unsupported settings, for files that ask for more
    than tensors, and for incomplete weights.
    """
    check_new(out)
    files = [_read_file(path) for path in find_ranks(folder, ranks)]
    config = _config(folder, files[0], out, overrides)
    from megajax.interop.runs import start_run

    start_run(
        out,
        config,
        lambda config: _merge(config, files),
        tokenizer=None,
        origin={'imported from': 'megatron'},
    )
    return config


def export_megatron(source: Path, out: Path, *, ranks: int) -> None:
    """Write a checkpoint as Megatron-LM's release checkpoint for tensor-parallel `ranks`, in fp32.

    `source` is a run, whose newest checkpoint is written, or one checkpoint. Host memory holds one
    parameter and one of its tensors at a time. Raises ConfigError if the ranks do not divide the
    model.
    """
    checkpoint = find_sound(source)
    record = read_record(checkpoint)
    config = reload(record.config, place=str(checkpoint / RECORD))
    from megajax.checkpoint.compare import parameter_shapes
    from megajax.interop.megatron import megatron_pieces
    from megajax.interop.runs import parts

    shapes = parameter_shapes(checkpoint)
    rows = (
        -(-config.model.vocab_size // (MEGATRON_VOCAB_MULTIPLE * ranks))
        * MEGATRON_VOCAB_MULTIPLE
        * ranks
    )
    pieces = [
        megatron_pieces(config.model, shapes, rank=rank, ranks=ranks, vocab_rows=rows)
        for rank in range(ranks)
    ]
    float32 = np.dtype(np.float32)
    contents = [
        {
            'checkpoint_version': VERSION,
            'iteration': record.step,
            'model': {
                piece.name: Stored(piece.shape, float32)
                for group in of_rank.values()
                for piece in group
            },
        }
        for of_rank in pieces
    ]
    with new_folder(out) as partial:
        paths = [partial / RELEASE / f'mp_rank_{rank:02}' / FILE for rank in range(ranks)]
        for path in paths:
            path.parent.mkdir(parents=True)
        with torch_files(paths, contents) as files:
            for rank, x in parts(checkpoint, pieces):
                files[rank].append(x)
        (partial / 'config.yaml').write_text(dump(config))
        (partial / TRACKER).write_text(RELEASE)


def find_ranks(folder: Path, ranks: int | None = None) -> list[Path]:
    """Return the files of all ranks of a checkpoint, in order.

    `folder` is a checkpoint's folder, or one that holds several, of which the newest is used.
    Raises ConfigError if there are no ranks, not `ranks` of them, or pipeline stages among them.
    """
    tracker = folder / TRACKER
    if tracker.is_file():
        newest = tracker.read_text().strip()
        folder = folder / (
            newest
            if newest == RELEASE
            else f'iter_{int(newest):07}'
            if newest.isdecimal()
            else newest
        )
    names = sorted(path.name for path in folder.glob('mp_rank_*') if path.is_dir())
    if not names:
        raise ConfigError(
            f'{folder}: there is no mp_rank_00: '
            f'give the folder of a checkpoint, or one that holds {TRACKER}'
        )
    if staged := [name for name in names if not re.fullmatch(r'mp_rank_\d\d', name)]:
        raise ConfigError(
            f'{folder}: {staged[0]} is a pipeline or expert stage, '
            'but only tensor-parallel ranks can be merged'
        )
    if names != [f'mp_rank_{rank:02}' for rank in range(len(names))]:
        raise ConfigError(f'{folder}: holds {", ".join(names)}, but not every rank from 00 on')
    if ranks is not None and ranks != len(names):
        raise ConfigError(f'{folder}: holds {len(names)} ranks, not {ranks}')
    paths = [folder / name / FILE for name in names]
    if missing := [path for path in paths if not path.is_file()]:
        raise ConfigError(f'{missing[0]}: is missing')
    return paths


def _read_file(path: Path) -> RankFile:
    contents = load_torch(path)
    if not isinstance(contents, Mapping) or not isinstance(contents.get('model'), Mapping):
        raise ConfigError(f"{path}: holds no 'model'")
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
    return RankFile(path, known, dict(_tensors(contents['model'], path)))


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


def _config(folder: Path, first: RankFile, out: Path, overrides: Sequence[str]) -> Config:
    beside = folder / 'config.yaml'
    if not first.arguments and not beside.is_file():
        raise ConfigError(
            f"{first.path}: holds no arguments ('args') that describe the model; "
            f'write its config to {beside}'
        )
    model = (
        read_arguments(first.arguments, str(first.path))
        if first.arguments
        else load(beside).model.model_dump(mode='json')
    )
    return reload(
        settings(model, out, None), overrides, place=str(first.path if first.arguments else beside)
    )


def _merge(config: Config, files: Sequence[RankFile]) -> Any:
    """Return the parameters assembled from all ranks' tensors, whose names get the rank."""
    from megajax.checkpoint.open import abstract_params
    from megajax.interop.megatron import KEYS, megatron_pieces
    from megajax.interop.pieces import check, place, shapes_of
    from megajax.parallel.layer_order import tree_on_stages
    from megajax.parallel.layout import Layout

    abstract = abstract_params(config)
    embedding = next(
        (x for name, x in files[0].tensors.items() if name == 'embedding.word_embeddings.weight'),
        None,
    )
    rows = config.model.vocab_size if embedding is None else len(embedding) * len(files)
    if rows < config.model.vocab_size:
        raise ConfigError(
            f'{files[0].path}: {len(files)} ranks hold {rows} rows of the embedding, '
            f'but model.vocab_size is {config.model.vocab_size}'
        )
    merged: dict[str, list[Any]] = {}
    for rank, file in enumerate(files):
        pieces = megatron_pieces(
            config.model, shapes_of(config.model), rank=rank, ranks=len(files), vocab_rows=rows
        )
        check(abstract, pieces, file.tensors, of=str(file.path), keys=KEYS)
        for path, group in pieces.items():
            merged.setdefault(path, []).extend(
                piece._replace(name=f'{rank}/{piece.name}') for piece in group
            )
    tensors = {
        f'{rank}/{name}': x for rank, file in enumerate(files) for name, x in file.tensors.items()
    }
    _check_copies(merged, files)
    params = place(abstract, merged, tensors, of=f'{files[0].path.parent.parent}: rank')
    return tree_on_stages(params, Layout.of(config))


def _check_copies(merged: 'Pieces', files: Sequence[RankFile]) -> None:
    """Raise ConfigError if ranks that should hold copies of a tensor hold different values."""
    from megajax.interop.pieces import check_finite

    for group in merged.values():
        firsts: dict[Any, int] = {}
        for piece in group:
            rank, name = int(piece.name.partition('/')[0]), piece.name.partition('/')[2]
            where = tuple((part.start, part.stop) for part in piece.at)
            first = firsts.setdefault(where, rank)
            if any(start == stop for start, stop in where):  # nothing but padding of the vocabulary
                continue
            if first != rank and not np.array_equal(
                files[first].tensors[name], files[rank].tensors[name]
            ):
                # NaN would differ even from itself.
                check_finite(name, files[rank].tensors[name], of=str(files[rank].path))
                raise ConfigError(
                    f'{files[rank].path}: {name} differs from that in {files[first].path}, '
                    'but every rank should hold the same'
                )
