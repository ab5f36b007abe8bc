"""Runs as the source and the destination of a conversion."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from megajax.base.files.outputs import write_output
from megajax.core.config import Config, ConfigError, LoraConfig
from megajax.core.config.overrides import typed_override
from megajax.core.parallel.mesh import mesh_for
from megajax.interop.folder import tokenizer_of
from megajax.interop.pieces import Pieces, cut
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import parameter_shapes, read_parameter
from megajax.runtime.checkpoint.hf_files import TEMPLATE, Companions
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.data.masked import SPECIAL
from megajax.runtime.data.text.tokenizer import Tokenizer, make_tokenizer
from megajax.runtime.run.inputs import REPLACED, foreign_files, write_inputs
from megajax.runtime.run.lock import run_lock
from megajax.runtime.run.shared_folder import check_shared

ADAPTER = '.adapter.'  # follows the linear layer's name in the names of an adapter's matrices


class Prepared(NamedTuple):
    """The tokenizer of a run, or None if it works on token ids only, and its mesh."""

    tokenizer: Tokenizer | None
    mesh: Mesh


def prepare(out: Path, config: Config, tokenizer: Path | None = None) -> Prepared:
    """Return what a run in `out` needs in addition to its weights.

    `tokenizer` is the file that becomes the tokenizer.json of `out`. Raises ConfigError for a
    tokenizer or a mesh that cannot be used, for a config with adapters, and for files in `out` that
    an import would replace and that no run has written, such as a downloaded model.
    """
    found = foreign_files(out, (*REPLACED, TEMPLATE)) if jax.process_index() == 0 else []
    if found:
        raise ConfigError(
            f'{out} has files that no run has written and that the import would replace: '
            f'{", ".join(found)}; choose another path'
        )
    if config.lora is not None:
        raise ConfigError(
            f'lora.rank={config.lora.rank}: an import has no adapters yet; leave lora out, and '
            'give it to the run that trains them: megajax train '
            f'{typed_override("run.dir", out)} lora.rank=...'
        )
    spec = (
        str(tokenizer)
        if tokenizer and config.data.tokenizer == tokenizer_of(out)
        else config.data.tokenizer
    )
    special = SPECIAL if config.model.is_bert else ()
    loaded = (
        None if spec == 'none' else make_tokenizer(spec, config.model.vocab_size, special=special)
    )
    return Prepared(loaded, mesh_for(config))


def start_run(
    out: Path,
    config: Config,
    prepared: Prepared,
    load: Callable[[Config], nnx.State],
    *,
    origin: Mapping[str, str],
    companions: Companions = Companions(),  # noqa: B008 (immutable)
    place: Mapping[str, int | None] | None = None,
) -> None:
    """Make `out` a run at step 0 with the parameters that `load` returns, and a fresh optimizer.

    `load` is called on the mesh of `prepared`. `origin` goes into the checkpoint's record, with the
    `place` of the next sample in Megatron-LM's order; `companions` are stored next to the record.
    Nothing in `out` looks like a checkpoint until it is complete. Raises ConfigError if a file of
    the run cannot be written.
    """
    tokenizer, mesh = prepared
    with jax.set_mesh(mesh):
        params = load(config)
    with run_lock(out), jax.set_mesh(mesh):
        check_shared(out)
        write_inputs(out, config, tokenizer, companions)
        if jax.process_index() == 0 and companions.chat_template is not None:
            write_output(out / TEMPLATE, companions.chat_template)
        with Checkpoints(
            out / 'checkpoints', config, tokenizer=tokenizer, data=origin
        ) as checkpoints:
            checkpoints.companions = companions
            checkpoints.save({'params': params}, 0, **(place or {}))


def parts(checkpoint: Path, ranks: Sequence[Pieces]) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield for every piece the index of its rank, its name, and its array in fp32.

    Each parameter is read once, with its adapter merged. Each rank's arrays come in the order of
    the rank's pieces.
    """
    scale = adapter_scale(checkpoint)
    for path in ranks[0]:
        x = _read(checkpoint, path, scale)
        for rank, pieces in enumerate(ranks):
            for piece in pieces[path]:
                yield rank, piece.name, cut(x, piece)


def weight_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter in a checkpoint except adapters, by its name."""
    shapes = parameter_shapes(checkpoint)
    return {name: shape for name, shape in shapes.items() if ADAPTER not in name}


def adapter_scale(checkpoint: Path) -> float | None:
    """Return the scale of a checkpoint's adapters; None if it has no adapters."""
    lora = read_record(checkpoint).config.get('lora')
    return None if lora is None else LoraConfig.model_validate(lora).scale


def _read(checkpoint: Path, path: str, scale: float | None) -> np.ndarray:
    """Read a parameter in fp32; a weight's adapter is merged into the weight."""
    x = read_parameter(checkpoint, path).astype(np.float32, copy=False)
    module, _, kind = path.rpartition('.')
    if (
        scale is None
        or kind != 'weight'
        or f'{module}{ADAPTER}A' not in parameter_shapes(checkpoint)
    ):
        return x
    a, b = (read_parameter(checkpoint, f'{module}{ADAPTER}{which}') for which in 'AB')
    layers, rank = len(a), a.shape[-1]
    added = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
    return x + np.float32(scale) * added.reshape(x.shape)
