"""Export only the adapters, in the format of the PEFT library."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megajax.base.files.json_file import read_json
from megajax.core.config import Config, ConfigError, ModelConfig, reload
from megajax.core.config.lora import without_adapters
from megajax.interop.folder import new_folder
from megajax.interop.huggingface.families import FAMILIES, write_family
from megajax.interop.huggingface.family import Family, There
from megajax.interop.huggingface.tensors import INDEX, SINGLE, read_tensors
from megajax.interop.pieces import cut, dims_here, groups_of, make_pieces, with_pairs
from megajax.runtime.checkpoint.digests import sound_checkpoint
from megajax.runtime.checkpoint.record import RECORD, read_record

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # prefix of module names in PEFT's model


def export_adapters(
    source: Path, out: Path, *, base: str | None = None, family: str | None = None
) -> str:
    """Write the adapters of a checkpoint as a directory that PEFT loads; return the family.

    `base` is the directory or the name of the model to which the adapters belong; PEFT reads this
    model if the user passes none. The modules have the names of `family`, or else of the family in
    the config.json of `base`, or else of the import with which the training began. Raises
    ConfigError if the checkpoint has no adapters, if no family can represent its model, if a
    directory `base` has different weights, or if `out` already exists.
    """
    with sound_checkpoint(source) as checkpoint:
        record = read_record(checkpoint)
        config = reload(record.config, place=str(checkpoint / RECORD))
        if config.lora is None:
            raise ConfigError(
                f'{checkpoint} was trained without lora and has no adapters: export it without '
                '--adapter'
            )
        family = family or _family_of(base) or record.family
        name, _ = write_family(without_adapters(config).model, family)
        _check_base(checkpoint, without_adapters(config).model, base, name)
        tensors = dict(_tensors(checkpoint, config, FAMILIES[name]))
        from safetensors.numpy import save

        with new_folder(out) as partial:
            modules = _target_modules(tensors, checkpoint, FAMILIES[name])
            (partial / CONFIG).write_text(
                json.dumps(_settings(config, modules, base, name), indent=2) + '\n'
            )
            (partial / WEIGHTS).write_bytes(save(tensors, metadata={'format': 'pt'}))
        return name


def _family_of(base: str | None) -> str | None:
    """Return the family in the config.json of a directory `base`; None if it is unknown."""
    file = Path(base or '') / 'config.json'
    family = read_json(file).get('model_type') if base and file.is_file() else None
    return None if family is None else str(family)


def _check_base(checkpoint: Path, model: ModelConfig, base: str | None, family: str) -> None:
    """Raise ConfigError if the weights in a directory `base` differ from the adapted model's.

    Weights count as equal if they are equal in the dtype of either side. Quantized weights are not
    compared.
    """
    folder = Path(base or '')
    if not base or not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        return
    from megajax.interop.huggingface.weights import huggingface_pieces, tensors_of_pieces
    from megajax.interop.runs import weight_shapes
    from megajax.runtime.checkpoint.compare import read_parameter

    began = read_record(checkpoint).origin.get('checkpoint', 'unknown weights')
    fix = (
        'give --base an export of the weights to which adapters were added first (this run started '
        f'from {began}): megajax export hf RUN NEW'
    )
    pieces = huggingface_pieces(model, weight_shapes(checkpoint), family=family)
    tensors = tensors_of_pieces(
        model, pieces, read_tensors(folder), source=f'--base {base}', family=family
    )
    for path, parts in pieces.items():
        here = read_parameter(checkpoint, path)
        for piece in parts:
            there = tensors.get(piece.name)
            if there is None:
                raise ConfigError(f'--base {base}: has no {piece.name}, of a {family}; {fix}')
            if there.dtype.itemsize > 1 and not _are_equal(cut(here, piece), np.asarray(there)):
                raise ConfigError(
                    f'--base {base}: {piece.name} differs from the base model of the run; {fix}'
                )


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size == b.size and (
        np.array_equal(a.ravel(), b.ravel().astype(a.dtype))
        or np.array_equal(a.ravel().astype(b.dtype), b.ravel())
    )


def _settings(config: Config, modules: list[str], base: str | None, family: str) -> dict[str, Any]:
    assert config.lora is not None
    return {
        'peft_type': 'LORA',
        # PEFT has no type for a model with BERT's two heads or with images, and then needs none.
        'task_type': None if config.model.is_bert or FAMILIES[family].sees else 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'inference_mode': True,
        'r': config.lora.rank,
        'lora_alpha': config.lora.alpha,
        'lora_dropout': 0.0,
        'target_modules': modules,
        'fan_in_fan_out': family == 'gpt2',  # whose weights are [in, out]
        'bias': 'none',
    }


def _target_modules(tensors: Iterable[str], checkpoint: Path, family: Family) -> list[str]:
    """Return names that select the modules of PEFT's tensors, and no others.

    A name selects each module that ends in it: `self_attn.q_proj` selects one in each layer. The
    whole name of a module is returned if its end is also the end of another linear layer.
    """
    adapted = {f'{linear}.weight' for linear in _adapted(checkpoint)}
    others = {
        _end(there.name.removesuffix('.weight'))
        for path, parts in family.tensors.items()
        if path not in adapted
        for there in parts
    }
    modules = {tensor.removeprefix(PREFIX).rsplit('.lora_', 1)[0] for tensor in tensors}
    return sorted({name if _end(name) in others else _end(name) for name in modules})


def _end(module: str) -> str:
    """Return the part of a module's name that is the same in all layers."""
    return '.'.join(module.split('.')[-2:])


def _adapted(checkpoint: Path) -> list[str]:
    """Return the names of the linear layers that have an adapter."""
    from megajax.runtime.checkpoint.compare import parameter_shapes

    paths = parameter_shapes(checkpoint)
    return [path.removesuffix('.adapter.A') for path in paths if path.endswith('.adapter.A')]


def _tensors(checkpoint: Path, config: Config, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yield PEFT's tensors: A [Q, inputs] and B [outputs, Q] for each module of a layer.

    Modules that are one matmul in megajax, such as queries, keys and values, have the same A.
    """
    from megajax.runtime.checkpoint.compare import read_parameter

    whole = {part: name for name, parts in family.joined.items() for part in parts}
    dims = dims_here(config.model)
    for linear in _adapted(checkpoint):
        a, b = (read_parameter(checkpoint, f'{linear}.adapter.{which}') for which in 'AB')
        of_modules = defaultdict[str, list[list[np.ndarray]]](list)
        for there in family.tensors[f'{linear}.weight']:
            name = whole.get(there.name, there.name).removesuffix('.weight')
            of_modules[name].append(_outputs(b, there, dims[f'{linear}.adapter.B'], config.model))
        for name, parts in of_modules.items():
            for layer, of_layer in enumerate(zip(*parts, strict=True)):
                module = PREFIX + name.format(layer)
                inputs = a[layer].reshape(-1, a.shape[-1]).T
                yield f'{module}.lora_A.weight', np.ascontiguousarray(inputs)
                yield f'{module}.lora_B.weight', np.concatenate(of_layer)


def _outputs(b: np.ndarray, there: There, dims: str, model: ModelConfig) -> list[np.ndarray]:
    """Return a module's part of B, which has `dims`: [outputs, Q] for each layer."""
    (outputs,) = (group for group in groups_of(there.dims, dims) if group)
    ranges = {'C': there.columns, 'U': there.columns}
    pieces = make_pieces('', f'({outputs})Q', dims, b.shape, ranges)
    if there.in_pairs:
        pieces = with_pairs(pieces, dims, model)
    return [cut(b, piece) for piece in pieces]
