"""Open a trained model from a checkpoint: config, parameters and tokenizer, not the optimizer."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from megajax.base.errors import reason
from megajax.core.config import CheckpointError, Config, LoraConfig, overridden, reload
from megajax.core.config.lora import without_adapters
from megajax.core.config.one_dimensional import one_dimensional
from megajax.core.counts.declaration import Parameter
from megajax.core.model.merged import merged
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layer_order import tree_on_stages
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete, mesh_for
from megajax.core.train.step import make_params
from megajax.core.train.zero import between_steps
from megajax.runtime.checkpoint.compare import check_same_arrays, renames
from megajax.runtime.checkpoint.copies import check_copies, with_copies_that_fit
from megajax.runtime.checkpoint.digests import sound_checkpoint
from megajax.runtime.checkpoint.hf_files import Companions, read_companions
from megajax.runtime.checkpoint.orbax_manager import restore_gb
from megajax.runtime.checkpoint.record import RECORD, TOKENIZER, read_record
from megajax.runtime.checkpoint.shared_reads import as_stored, to_read
from megajax.runtime.checkpoint.unpadded import unpadded
from megajax.runtime.data.image_text.chat import Template, read_template
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready to use."""

    config: Config  # the checkpoint's config with the overrides
    mesh: Mesh
    params: nnx.State  # the parameters, placed on `mesh`
    tokenizer: Tokenizer | None  # the tokenizer; its `ends` include the ends in `companions`
    companions: Companions
    step: int  # the step of the checkpoint

    def chat_template(self, run: Path, overrides: Sequence[str]) -> Template | None:
        """Return the chat template or None; it gets the time of its first use.

        An override of `data.chat_template` has precedence. Otherwise, the template is the one that
        the checkpoint was trained with, or else the one that its model was imported with.
        """
        path = self.config.data.chat_template
        carried = self.companions.with_chat_time(None).template(f'the chat template of {run}')
        if path is not None and (carried is None or overridden(overrides, 'data.chat_template')):
            return read_template(path)
        return carried


def open_model(path: Path, overrides: Sequence[str] = (), *, cast: bool = False) -> Opened:
    """Open the model of a run or of one checkpoint (RUN/STEP).

    For a run this is its newest checkpoint that verifies. The model's mesh has as many devices as
    the run's, but without ZeRO, replicas, and pipeline, context and 2-D tensor parallelism
    (`one_dimensional`), and its adapters are merged into its weights. If this machine has too few
    devices for that, or too little memory, the mesh has fewer data shards and, if necessary, a
    smaller `mesh.experts`. `overrides` work as in `load` and may set the mesh, which is made here;
    use the model under `jax.set_mesh(opened.mesh)`:

        opened = open_model(Path('runs/mine'), ['mesh.data=1', 'mesh.model=2'])
        with jax.set_mesh(opened.mesh):
            ...

    With `cast`, the matrices are read in the compute dtype, for a `Generator`, which casts them in
    any case. Raises ConfigError if there is no checkpoint or the overrides do not fit it or the
    machine, and CheckpointError if every checkpoint is damaged.
    """
    with sound_checkpoint(path) as folder:
        record = read_record(folder)
        place = str(folder / RECORD)
        trained = one_dimensional(reload(record.config, place=place))
        config = without_adapters(reload(trained.model_dump(mode='json'), overrides, place=place))
        if overridden(overrides, 'mesh.data') is None:
            config = with_copies_that_fit(config, cast=cast)
        tokenizer = (
            load_tokenizer(str(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else None
        )
        companions = read_companions(folder)
        if tokenizer is not None:
            tokenizer.also_ends(companions.ends)
            tokenizer.limit(config.model.vocab_size)
        mesh = mesh_for(config)
        check_copies(config, [*mesh.devices.flat], cast=cast)
        with jax.set_mesh(mesh):
            params = restore_params(folder, config, cast=cast)
        return Opened(
            config=config,
            mesh=mesh,
            params=params,
            tokenizer=tokenizer,
            companions=companions,
            step=record.step,
        )


def abstract_params(config: Config, *, cast: bool = False) -> nnx.State:
    """Return the parameters' shapes and their stored shardings on the current mesh.

    With `cast`, the matrices are in the compute dtype.
    """
    make = partial(make_params, config)
    return concrete(jax.eval_shape(lambda: _cast(make(), config) if cast else make()))


def restore_params(folder: Path, config: Config, *, cast: bool = False) -> nnx.State:
    """Restore the parameters in a checkpoint's folder, with their stored shardings.

    Each process reads the shards of its own devices, or its part of them if other processes have
    the same ones. Adapters that only the config has are initialized; adapters that only the
    checkpoint has are merged into its weights. With `cast`, the matrices are in the compute dtype,
    and no device has them in fp32. Raises ConfigError if the folder contains different parameters,
    and CheckpointError if they cannot be restored.
    """
    record = read_record(folder).config
    there = record.get('lora')
    if there is None and config.lora is not None:
        return nnx.merge_state(_restore(folder, config, with_adapters=False), _adapters(config))
    if there is not None and config.lora is None:
        # Frozen weights have the dtype of the run that saved them, and are merged in fp32.
        dtype = record['train']['dtype']
        train = config.train.model_copy(update={'dtype': dtype})
        lora = LoraConfig.model_validate(there)
        saved = config.model_copy(update={'train': train, 'lora': lora})
        params = _restore(folder, saved)

        def merge(params: nnx.State) -> nnx.State:
            weights = between_steps(merged(params, saved), config)
            return _cast(weights, config) if cast else weights

        return jax.jit(merge)(params)
    return _restore(folder, config, cast=cast)


def _cast(params: nnx.State, config: Config) -> nnx.State:
    """Return the parameters with their matrices in the compute dtype."""

    def cast(declared: Parameter, x: jax.Array) -> jax.Array:
        return x.astype(config.train.compute_dtype) if declared.is_matrix else x

    cast_params: nnx.State = map_parameters(cast, params)
    return cast_params


def _restore(
    folder: Path, config: Config, *, with_adapters: bool = True, cast: bool = False
) -> nnx.State:
    """Restore the parameters, with or without adapters; raises like `restore_params`."""
    item: Any = {'params': abstract_params(config, cast=cast)}
    if not with_adapters:
        item['params'] = nnx.filter_state(
            item['params'], lambda _, param: not param.declared.is_adapter
        )
    check_same_arrays(
        folder,
        unpadded(item, Layout.of(config)),
        under='params/',
        any_dtype=cast or config.lora is not None,
    )
    to_saved, to_current = renames(folder)
    params, item = item['params'], to_saved(to_read(item))
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    padded = jax.tree.map(lambda each: dataclasses.replace(each, strict=False), restore_args)
    args = ocp.args.PyTreeRestore(item=item, restore_args=padded, partial_restore=True)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=restore_gb(config.model))
    try:
        restored = handler.restore(folder / 'state', args=args)['params']
        return tree_on_stages(as_stored(to_current(restored), params), Layout.of(config))
    except Exception as error:
        raise CheckpointError(f'{folder} cannot be restored: {reason(error)}') from error
    finally:
        handler.close()


def _adapters(config: Config) -> nnx.State:
    """Make the initial adapters of a run; no value depends on the mesh."""

    def make() -> nnx.State:
        return nnx.filter_state(make_params(config), lambda _, param: param.declared.is_adapter)

    return jax.jit(make)()
