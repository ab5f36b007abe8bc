"""Export of Megatron-LM checkpoints with one file for each rank (`rank_files.py`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from megajax.core.config import ConfigError, ModelConfig, dump, reload
from megajax.core.config.lora import without_adapters
from megajax.interop.folder import new_folder
from megajax.interop.megatron.limits import check_arguments, scaling_of
from megajax.interop.megatron.rank_files import (
    FILE,
    RELEASE,
    TRACKER,
    VERSION,
    chunk_names,
    rank_name,
)
from megajax.interop.megatron.torch_writer import Stored, torch_files
from megajax.runtime.checkpoint.digests import sound_checkpoint
from megajax.runtime.checkpoint.record import RECORD, read_record

if TYPE_CHECKING:
    from megajax.interop.pieces import Pieces

TransformerImpl = Literal['transformer_engine', 'local']
MEGATRON_VOCAB_MULTIPLE = 128  # rows on each rank: Megatron's make_vocab_size_divisible_by


def export_megatron(
    source: Path,
    out: Path,
    *,
    ranks: int,
    stages: int = 1,
    virtual_stages: int = 1,
    transformer_impl: TransformerImpl = 'transformer_engine',
) -> str:
    """Write a checkpoint as Megatron-LM's release checkpoint for tensor-parallel `ranks`, in fp32.

    `source` is a run, whose newest checkpoint is written, or one checkpoint. For a pipeline, there
    is a file for each of the `stages` of a rank, with `virtual_stages` chunks of layers. The
    tensors have the names of `transformer_impl`. Returns the arguments of Megatron-LM that the
    files depend on. Host memory holds one parameter and one of its tensors at a time. Raises
    ConfigError if ranks or stages do not divide the model, and for a model that Megatron-LM cannot
    express.
    """
    with sound_checkpoint(source) as checkpoint:
        record = read_record(checkpoint)
        config = without_adapters(reload(record.config, place=str(checkpoint / RECORD)))
        _check_stages(config.model, stages, virtual_stages)
        check_arguments(config.model)
        from megajax.interop.megatron.weights import chunks_of, megatron_pieces
        from megajax.interop.runs import parts, weight_shapes

        shapes = weight_shapes(checkpoint)
        multiple = MEGATRON_VOCAB_MULTIPLE * ranks
        rows = -(-config.model.vocab_size // multiple) * multiple
        count = stages * virtual_stages
        chunks = chunks_of([config.model.num_layers // count] * count)
        pieces = [
            megatron_pieces(
                config.model,
                shapes,
                rank=rank,
                ranks=ranks,
                vocab_rows=rows,
                chunk=chunk,
                is_fused=transformer_impl == 'transformer_engine',
            )
            for rank in range(ranks)
            for chunk in chunks
        ]
        models_of, places = _files(pieces, ranks, stages, virtual_stages)
        versions = {'checkpoint_version': VERSION, 'iteration': record.step}
        contents = [versions | models for models in models_of]
        names = [rank_name(rank, stage, stages) for rank in range(ranks) for stage in range(stages)]
        with new_folder(out) as partial:
            paths = [partial / RELEASE / name / FILE for name in names]
            for path in paths:
                path.parent.mkdir(parents=True)
            with torch_files(paths, contents) as files:
                for holder, name, x in parts(checkpoint, pieces):
                    file, index = places[holder, name]
                    files[file].write(index, x)
            (partial / 'config.yaml').write_bytes(dump(config).encode())
            (partial / TRACKER).write_text(RELEASE)
    return _arguments(config.model, ranks, stages, virtual_stages, transformer_impl)


def _files(
    pieces: Sequence['Pieces'], ranks: int, stages: int, virtual_stages: int
) -> tuple[list[dict[str, dict[str, Stored]]], dict[tuple[int, str], tuple[int, int]]]:
    """Return the models in each file, and the file and index of each tensor of `pieces`."""
    models_of, places = [], {}
    for file in range(ranks * stages):
        rank, stage = divmod(file, stages)
        models, index = dict[str, dict[str, Stored]](), 0
        for number, name in enumerate(chunk_names(virtual_stages)):
            holder = (rank * virtual_stages + number) * stages + stage
            models[name] = _stored(pieces[holder])
            for tensor in models[name]:
                places[holder, tensor] = file, index
                index += 1
        models_of.append(models)
    return models_of, places


def _arguments(
    model: ModelConfig, ranks: int, stages: int, virtual_stages: int, transformer_impl: str
) -> str:
    given = [
        f'--transformer-impl {transformer_impl}',
        f'--tensor-model-parallel-size {ranks}',
        f'--pipeline-model-parallel-size {stages}',
    ]
    if virtual_stages > 1:
        layers = model.num_layers // (stages * virtual_stages)
        given.append(f'--num-layers-per-virtual-pipeline-stage {layers}')
    if model.zero_centered_norm:
        given.append('--apply-layernorm-1p')
    scaling = scaling_of(model)
    if scaling and scaling.type == 'linear':
        given.append(f'--rotary-seq-len-interpolation-factor {scaling.factor:.0f}')
    elif scaling:
        given.append(f'--use-rope-scaling --rope-scaling-factor {scaling.factor:g}')
    if model.experts is None:
        return ' '.join(given)
    # Each expert has its own tensors, which the grouped matmuls of Megatron-LM do not load.
    return ' '.join((*given, '--expert-model-parallel-size 1, without --moe-grouped-gemm'))


def _stored(pieces: 'Pieces') -> dict[str, Stored]:
    float32 = np.dtype(np.float32)
    return {
        piece.name: Stored(piece.shape, float32) for group in pieces.values() for piece in group
    }


def _check_stages(model: ModelConfig, stages: int, virtual_stages: int) -> None:
    if virtual_stages > 1 and stages == 1:
        raise ConfigError(
            f'{virtual_stages} virtual stages need a pipeline: give --pipeline-parallel, or omit '
            '--virtual-stages'
        )
    if model.num_layers % (stages * virtual_stages):
        raise ConfigError(
            f'{stages} pipeline stages x {virtual_stages} virtual stages must divide '
            f'model.num_layers={model.num_layers}'
        )
