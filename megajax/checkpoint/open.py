"""A trained model from a checkpoint: config, parameters and tokenizer, without the optimizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from megajax.checkpoint.compare import check_same_arrays
from megajax.checkpoint.digests import find_sound
from megajax.checkpoint.record import RECORD, TOKENIZER, read_record
from megajax.config import CheckpointError, Config, reload
from megajax.data.text.tokenizer import Tokenizer, load_tokenizer
from megajax.model.transformer import make_model
from megajax.parallel.layout import Layout
from megajax.parallel.mesh import concrete, mesh_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready to use."""

    config: Config  # the checkpoint's config with the overrides
    mesh: Mesh
    params: nnx.State  # the parameters, placed on `mesh`
    tokenizer: Tokenizer | None
    step: int  # the step of the checkpoint


def open_model(path: Path, overrides: Sequence[str] = ()) -> Opened:
    """Open the model of a run or of one checkpoint (RUN/checkpoints/STEP, or RUN/STEP).

    For a run this is its newest checkpoint that verifies. `overrides` are like those of `load` and
    may set the mesh, which is made here; use the model under `jax.set_mesh(opened.mesh)`:

        opened = open_model(Path('runs/mine'), ['mesh.data=1', 'mesh.model=2'])
        with jax.set_mesh(opened.mesh):
            ...

    Raises ConfigError if there is no checkpoint or the overrides do not fit it, and CheckpointError
    if no checkpoint holds what was written.
    """
    folder = find_sound(path)
    record = read_record(folder)
    config = reload(record.config, overrides, place=str(folder / RECORD))
    tokenizer = load_tokenizer(str(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else None
    mesh = mesh_for(config)
    with jax.set_mesh(mesh):
        params = restore_params(folder, config)
    return Opened(config=config, mesh=mesh, params=params, tokenizer=tokenizer, step=record.step)


def abstract_params(config: Config) -> nnx.State:
    """The shapes of the model's parameters and their placements on the current mesh."""
    layout, key = Layout.of(config), jax.random.key(0)
    return concrete(jax.eval_shape(lambda: nnx.state(make_model(config.model, layout, key=key))))


def restore_params(folder: Path, config: Config) -> nnx.State:
    """Restore the parameters in a checkpoint's folder, placed on the current mesh.

    Raises ConfigError if the folder holds other parameters, and CheckpointError if they cannot be
    restored.
    """
    item: Any = {'params': abstract_params(config)}
    check_same_arrays(folder, item, under='params/')
    args = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    handler = ocp.PyTreeCheckpointHandler()
    try:
        return handler.restore(folder / 'state', args=args)['params']
    except Exception as error:
        raise CheckpointError(
            f'{folder} cannot be restored: {str(error).splitlines()[0]}'
        ) from error
    finally:
        handler.close()
