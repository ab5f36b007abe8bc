"""Read and write the config.json of the supported Hugging Face families. Imports no jax.

Every file in this folder defines families; to add a family, add a file. A family is read strictly:
a setting that megajax's decoder does not implement is rejected with its key and value. A model is
written as a family only if reading the written file gives the same model, or one whose scale of the
embeddings is the model's after transformers has rounded it to bfloat16.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from megajax.base.files.json_file import read_json
from megajax.base.render.text import shorten
from megajax.core.config import ConfigError, LayerConfig, ModelConfig, VisionConfig
from megajax.core.config.experts import OF_ROUTING, ExpertsConfig
from megajax.interop.huggingface.family import Family
from megajax.interop.huggingface.reader import Keys, Reader

logger = logging.getLogger(__name__)

POST_NORM = 'norms come after the residual connections, but only models with norms before them are'
UNSUPPORTED = {  # families that users are likely to have, and why they are rejected
    **dict.fromkeys(('bert', 'roberta'), f'its {POST_NORM} supported, such as "megatron-bert"'),
    'qwen3_vl_moe': 'experts are not supported with images, but "qwen3_vl", which is dense, is',
    **dict.fromkeys(
        ('qwen2_vl', 'qwen2_5_vl'),
        'windows in the encoder and rotary angles in chunks are not supported, but "qwen3_vl" is',
    ),
    'gemma3': 'images are not supported, but "gemma3_text" is',
    'ministral3': (
        'queries that are scaled by their position (rope_parameters.llama_4_scaling_beta) are not '
        'supported, but "ministral" is'
    ),
    'mllama': 'an encoder of tiles and two towers is not supported, but "qwen3_vl" is',
}
# Keys of `model` that only some families can express.
IN_TRAINING = frozenset({'dropout', 'attention_dropout', 'init_std'})
# Keys of `model` that a pattern of layers may set for each layer.
OF_A_LAYER = LayerConfig.model_fields.keys() - {'repeat'}
# Keys of `vision` that are not in config.json: they belong to a run, or to
# preprocessor_config.json.
OF_A_RUN = frozenset({'images', 'max_patches', 'min_patches', 'freeze'})


def _families() -> Iterator[Family]:
    """Yield the families of every file in this folder: first the families that most tools read."""
    names = (module.name for module in iter_modules(__path__))
    for name in sorted(names, key=lambda name: (name not in ('gpt2', 'llama'), name)):
        yield from import_module(f'{__name__}.{name}').FAMILIES


FAMILIES = {family.name: family for family in _families()}
ARCHITECTURES = {name: family.architecture for name, family in FAMILIES.items()}


def read_family(keys: Mapping[str, Any], file: str) -> tuple[str, Keys, list[str]]:
    """Read a config.json; return its family, the keys of `model`, and the keys that were not used.

    For a vision-language family, `model` contains the keys of the section `vision`, under that
    name. Raises ConfigError with every key and value that is not supported.
    """
    family = keys.get('model_type')
    if isinstance(family, str) and family in UNSUPPORTED:
        raise ConfigError(f'{file}: model_type: {json.dumps(family)}: {UNSUPPORTED[family]}')
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ConfigError(
            f'{file}: model_type: {shorten(json.dumps(family))}: '
            f'only {", ".join(ARCHITECTURES)} are supported'
        )
    read = Reader(keys, file)
    read.only('architectures', [ARCHITECTURES[family]], None, default=None)
    _read_quantization(read, FAMILIES[family])
    read.only('transformers_weights', None, default=None)  # this key names a different file
    model = FAMILIES[family].read_config(read)
    if read.problems:
        raise ConfigError(*read.problems)
    return family, model, read.left


def _read_quantization(read: Reader, family: Family) -> None:
    key = 'quantization_config'
    value = read.get(key, None)
    method = value.get('quant_method') if isinstance(value, Mapping) else None
    if value is None or method in [*family.packings]:  # a method may be anything that JSON has
        return
    kind = f'weights quantized as {shorten(json.dumps(method))}' if method else 'quantized weights'
    methods = ''.join(f', only those as {json.dumps(name)}' for name in family.packings)
    read.refuse(
        key,
        value,
        f'{kind} are not supported{methods}; import a model that is not quantized, or dequantize '
        'this one with transformers and save it',
    )


def read_config_json(folder: Path) -> tuple[str, Keys, list[str]]:
    """Read a directory's config.json as `read_family` does.

    Raises ConfigError as `read_family` does, and also if the file is missing or cannot be parsed.
    """
    file = folder / 'config.json'
    return read_family(read_json(file), str(file))


def write_family(model: ModelConfig, family: str | None = None) -> tuple[str, Keys]:
    """Return a model's family, by default the first that fits, and its config.json.

    Raises ConfigError, with the keys that are not supported, if no family fits. Logs a warning if
    transformers has the model's scale of the embeddings only in bfloat16.
    """
    if family and family not in ARCHITECTURES:
        raise ConfigError(f'family {family}: choose among {", ".join(ARCHITECTURES)}')
    problems = []
    for candidate in [family] if family else ARCHITECTURES:
        if FAMILIES[candidate].sees != (model.vision is not None):
            without = 'models without ' if FAMILIES[candidate].sees else ''
            problems.append(f'{candidate} does not support {without}vision')
            continue
        keys = FAMILIES[candidate].write_config(model)
        keys |= {'architectures': [ARCHITECTURES[candidate]], 'model_type': candidate}
        different = _differences(model, keys)
        if not different:
            _warn_of_scale(model, keys)
            return candidate, keys
        problems.append(f'{candidate} does not support {", ".join(different)}')
    raise ConfigError(
        f'no Hugging Face architecture can represent this model: {"; ".join(problems)}'
    )


def _differences(model: ModelConfig, keys: Keys) -> list[str]:
    """Return the keys of `model`, with their values, that differ when `keys` are read back."""
    try:
        back = ModelConfig(**read_family(keys, 'config.json')[1])
    except ConfigError as error:
        return str(error).splitlines()
    names = ModelConfig.model_fields.keys() - IN_TRAINING - OF_A_LAYER - {'layers'}
    if model.embedding_scale == _in_bfloat16(back.embedding_scale):
        names -= {'embedding_scale'}
    if model.position != 'mrope':
        names -= {'mrope_section'}
    pairs: list[tuple[str, Any, Any, set[str]]] = []
    if model.experts:
        names -= set() if model.has_dense_and_experts else {'ffn_size'}  # no layer has an MLP
    if model.experts and back.experts:
        of_experts = ExpertsConfig.model_fields.keys() - OF_ROUTING
        pairs.append(('model.experts', model.experts, back.experts, of_experts))
        names -= {'experts'}
    pairs.append(('model', model, back, names - {'vision'}))
    if model.vision and back.vision:
        names = VisionConfig.model_fields.keys() - OF_A_RUN
        if not model.vision.is_crossed:
            names -= {'cross_every'}
        pairs.append(('vision', model.vision, back.vision, names))
    return _different_layers(model, back) + [
        f'{section}.{name}={getattr(ours, name)}'
        for section, ours, theirs, names in pairs
        for name in type(ours).model_fields
        if name in names and getattr(ours, name) != getattr(theirs, name)
    ]


def _warn_of_scale(model: ModelConfig, keys: Keys) -> None:
    scale = read_family(keys, 'config.json')[1].get('embedding_scale', 1.0)
    if scale != model.embedding_scale:
        logger.warning(
            'model.embedding_scale=%g: config.json has no key for it; transformers multiplies by '
            'it in bfloat16, and by %.8g in float32',
            *(model.embedding_scale, scale),
        )


def _in_bfloat16(value: float) -> float:
    import ml_dtypes  # here, because reading a config needs no numpy
    import numpy as np

    return float(np.float32(value).astype(ml_dtypes.bfloat16))


def _different_layers(model: ModelConfig, back: ModelConfig) -> list[str]:
    """Return the keys that layers may replace, with the first value that differs."""
    found: dict[str, str] = {}
    for ours, theirs in zip(model.layer_configs, back.layer_configs, strict=False):
        unused = set() if ours.rotates else {'rope_theta', 'rope_scaling'}
        for name in OF_A_LAYER - unused - found.keys():
            own, other = getattr(ours, name), getattr(theirs, name)
            if name == 'experts':  # the keys of experts are compared once, for all layers
                own, other = own is not None, other is not None
            if own != other:
                found[name] = f'model.{name}={getattr(ours, name)}'
    return [found[name] for name in ModelConfig.model_fields if name in found]
