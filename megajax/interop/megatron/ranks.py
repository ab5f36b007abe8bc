"""Import of Megatron-LM checkpoints of both formats, and the merging of files of ranks.

The files are `mp_rank_TT/model_optim_rng.pt` (`rank_files.py`); in a pipeline, there is one for
each stage of each tensor-parallel rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megajax.core.config import Config, ConfigError, ModelConfig, load, reload
from megajax.interop.folder import check_new, settings
from megajax.interop.megatron.command_line.arguments import of_model, read_arguments
from megajax.interop.megatron.dist_checkpoint import COMMON, is_dist, open_checkpoint
from megajax.interop.megatron.rank_files import (
    Progress,
    RankFile,
    chunk_names,
    find_ranks,
    newest,
    read_rank,
)

if TYPE_CHECKING:
    from megajax.interop.pieces import Pieces

LAYER = re.compile(r'decoder\.layers\.(\d+)\.')
ITERATION = 'iteration of megatron'  # key in the record of an import
COPY = 'output_layer.weight'  # copy of a tied embedding, on the last stage of a pipeline


def import_megatron(
    folder: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    stages: int | None = None,
    finetune: bool = False,
) -> Config:
    """Make `out` a run at step 0 with a checkpoint's weights, merged over ranks and stages.

    Returns the config of the run. The checkpoint's arguments, or a config.yaml next to the ranks,
    describe the model. With `finetune`, as in Megatron-LM, a run from the import begins with the
    first sample of its corpus, and not after the checkpoint's samples. Raises ConfigError for
    unsupported settings, for files that ask for more than tensors, and for incomplete weights.
    """
    check_new(out)
    folder = newest(folder)
    if is_dist(folder):
        return _import_dist(folder, out, overrides, ranks=ranks, stages=stages, finetune=finetune)
    files = [[read_rank(path) for path in group] for group in find_ranks(folder, ranks, stages)]
    first = files[0][0]
    if (experts := first.arguments.get('expert_model_parallel_size') or 1) != 1:
        raise ConfigError(
            f'{first.path}: is one of {experts} expert-parallel ranks, whose files cannot be '
            'merged: save the checkpoint with --ckpt-format torch_dist'
        )
    config = _config(folder, first.path, first.arguments, out, overrides)
    progress = _kept(first.progress, finetune=finetune)
    _start(out, config, lambda config: _merge(config, files), progress)
    return config


def _import_dist(
    folder: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    ranks: int | None,
    stages: int | None,
    finetune: bool,
) -> Config:
    if ranks or stages:
        raise ConfigError(
            f'{folder}: a torch_dist checkpoint has no ranks and no stages: '
            'leave --tensor-parallel and --pipeline-parallel out'
        )
    checkpoint = open_checkpoint(folder)
    config = _config(folder, folder / COMMON, checkpoint.arguments, out, overrides)
    from megajax.interop.megatron.dist_import import merge_chunks

    progress = _kept(checkpoint.progress, finetune=finetune)
    _start(out, config, lambda config: merge_chunks(config, checkpoint), progress)
    return config


def _kept(progress: Progress, *, finetune: bool) -> Progress:
    """Return what a run from the import continues with."""
    return progress._replace(samples=None, total=None) if finetune else progress


def _start(out: Path, config: Config, load: Callable[[Config], Any], progress: Progress) -> None:
    from megajax.interop.runs import prepare, start_run

    origin = {'imported from': 'megatron'}
    if progress.iteration:
        origin[ITERATION] = str(progress.iteration)
    place = {'samples': progress.samples, 'order_of': progress.total} if progress.samples else {}
    start_run(out, config, prepare(out, config), load, origin=origin, place=place)


def _config(
    folder: Path, file: Path, arguments: Mapping[str, Any], out: Path, overrides: Sequence[str]
) -> Config:
    """Return the config of a run with the model of a file's arguments, or of a config.yaml."""
    beside = folder / 'config.yaml'
    if not arguments and not beside.is_file():
        beside = folder.parent / 'config.yaml'
    if not arguments and not beside.is_file():
        raise ConfigError(
            f"{file}: holds no arguments ('args') that describe the model; "
            f'write its config to {folder / beside.name}'
        )
    model = (
        read_arguments(of_model(arguments, str(file)), str(file))
        if arguments
        else load(beside).model.model_dump(mode='json')
    )
    return reload(settings(model, out, None), overrides, place=str(file if arguments else beside))


class _Holder(NamedTuple):
    """A chunk of layers on one rank: the file, the tensors, and the tensors' pieces."""

    path: Path
    tensors: Mapping[str, np.ndarray]
    pieces: 'Pieces'


def _merge(config: Config, files: Sequence[Sequence[RankFile]]) -> Any:
    """Return the parameters assembled from the tensors of all ranks; names include the rank."""
    from megajax.core.parallel.layer_order import tree_on_stages
    from megajax.core.parallel.layout import Layout
    from megajax.interop.megatron.weights import KEYS
    from megajax.interop.pieces import check, place
    from megajax.runtime.checkpoint.open import abstract_params

    abstract = abstract_params(config)
    holders: dict[str, _Holder] = {}
    for name, holder in _holders(config.model, files):
        of = str(holder.path) + (f', {chunk}' if (chunk := name.partition('/')[2]) else '')
        check(abstract, holder.pieces, holder.tensors, of=of, keys=KEYS)
        holders[name] = holder
    merged: dict[str, list[Any]] = {}
    for name, holder in holders.items():
        for path, group in holder.pieces.items():
            renamed = (piece._replace(name=f'{name}:{piece.name}') for piece in group)
            merged.setdefault(path, []).extend(renamed)
    _check_copies(merged, holders)
    tensors = {
        f'{name}:{tensor}': x
        for name, holder in holders.items()
        for tensor, x in holder.tensors.items()
    }
    params = place(abstract, merged, tensors, of=str(files[0][0].path.parent.parent))
    return tree_on_stages(params, Layout.of(config))


def _holders(
    model: ModelConfig, files: Sequence[Sequence[RankFile]]
) -> Iterator[tuple[str, _Holder]]:
    """Yield the chunks of all ranks in the order of the layers, by names of rank and chunk.

    The number of layers in a chunk follows from its tensors, so stages may have different numbers.
    """
    from megajax.interop.megatron.weights import chunks_of, megatron_pieces
    from megajax.interop.pieces import shapes_of

    stages, names = len(files[0]), chunk_names(len(files[0][0].chunks))
    for file in (file for group in files for file in group):
        if len(file.chunks) != len(names):
            raise ConfigError(
                f'{file.path}: holds {len(file.chunks)} chunks of layers, but '
                f'{files[0][0].path} holds {len(names)}'
            )
    shapes, rows = shapes_of(model), _vocab_rows(model, files)
    for rank, group in enumerate(files):
        # The layers pass through all stages before they reach the next chunk of the first stage.
        order = [(file, index) for index in range(len(names)) for file in group]
        sizes = [_num_layers(file.chunks[index]) for file, index in order]
        if stages * len(names) > 1 and sum(sizes) != model.num_layers:
            raise ConfigError(
                f'{group[0].path.parent.parent}: the stages of rank {rank:02} hold '
                f'{" + ".join(map(str, sizes))} = {sum(sizes)} layers, '
                f'but model.num_layers is {model.num_layers}'
            )
        if len(sizes) == 1:
            sizes = [model.num_layers]
        for (file, index), chunk in zip(order, chunks_of(sizes), strict=True):
            pieces = dict(
                megatron_pieces(
                    model, shapes, rank=rank, ranks=len(files), vocab_rows=rows, chunk=chunk
                )
            )
            tensors = file.chunks[index]
            if not chunk.is_first and model.tie_embeddings and COPY not in tensors:
                # Megatron-LM's own layers store the copy under a different name
                pieces['embedding.table'] = []
            name = file.path.parent.name + (f'/{names[index]}' if len(names) > 1 else '')
            yield name, _Holder(file.path, tensors, pieces)


def _num_layers(tensors: Mapping[str, np.ndarray]) -> int:
    matches = (LAYER.match(name) for name in tensors)
    return max((1 + int(match[1]) for match in matches if match), default=0)


def _vocab_rows(model: ModelConfig, files: Sequence[Sequence[RankFile]]) -> int:
    first = files[0][0]
    embedding = first.chunks[0].get('embedding.word_embeddings.weight')
    rows = model.vocab_size if embedding is None else len(embedding) * len(files)
    if rows < model.vocab_size:
        raise ConfigError(
            f'{first.path}: {len(files)} ranks hold {rows} rows of the embedding, '
            f'but model.vocab_size is {model.vocab_size}; set model.vocab_size to the number of '
            f'tokens, at most {rows}'
        )
    return rows


def _check_copies(merged: 'Pieces', holders: Mapping[str, _Holder]) -> None:
    """Raise ConfigError if ranks that should have copies of a tensor have different values."""
    from megajax.interop.pieces import check_finite

    for group in merged.values():
        firsts: dict[Any, tuple[_Holder, str]] = {}
        for piece in group:
            place, _, name = piece.name.partition(':')
            holder = holders[place]
            where = tuple((part.start, part.stop) for part in piece.at)
            first, its_name = firsts.setdefault(where, (holder, name))
            # The rank contains only padding of the vocabulary.
            if any(start == stop for start, stop in where):
                continue
            if first is not holder and not np.array_equal(
                first.tensors[its_name], holder.tensors[name]
            ):
                # Otherwise NaN would differ even from itself.
                check_finite(name, holder.tensors[name], of=str(holder.path))
                other = '' if its_name == name else f'{its_name} '
                raise ConfigError(
                    f'{holder.path}: {name} differs from {other or "that "}in {first.path}, '
                    'but both should hold the same'
                )
