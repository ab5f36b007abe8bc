"""Import and export Hugging Face directories. A request is checked before jax is imported."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from megajax.base.files.json_file import read_json
from megajax.core.config import Config, ConfigError, ModelConfig, reload
from megajax.core.config.lora import without_adapters
from megajax.interop.folder import check_new, new_folder, settings
from megajax.interop.huggingface.families import read_config_json, write_family
from megajax.interop.huggingface.hub import Repository
from megajax.interop.huggingface.preprocessor import note_limit, read_preprocessor, write_files
from megajax.interop.huggingface.reader import Keys
from megajax.interop.huggingface.tensors import (
    SHARD_BYTES,
    Tensor,
    check_adapter,
    read_tensors,
    write_tensors,
)
from megajax.runtime.checkpoint.digests import sound_checkpoint
from megajax.runtime.checkpoint.hf_files import (
    GENERATION,
    OURS,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    companions_of_model,
    read_companions,
)
from megajax.runtime.checkpoint.record import FAMILY, RECORD, TOKENIZER, Record, read_record

Dtype = Literal['float32', 'bfloat16', 'float16']
EXPORT_DTYPES = {
    'float32': np.dtype(np.float32),
    'bfloat16': np.dtype(ml_dtypes.bfloat16),
    'float16': np.dtype(np.float16),
}
# The start tokens of Llama 2 and Mistral, of Llama 3, and of Gemma; other families start a document
# with the previous document's end-of-document token.
BEGIN_OF_DOCUMENT = '<s>', '<|begin_of_text|>', '<bos>'
# For each of the tokenizer's tokens around an image, the key of config.json that has its id.
BESIDE_PICTURES = {
    '<|vision_start|>': 'vision_start_token_id',
    '<|vision_end|>': 'vision_end_token_id',
    '<|video_pad|>': 'video_token_id',
}
USUAL_IMAGE = '<|image_pad|>'  # the token for an image of a tokenizer that names none
# Keys in the record of an imported checkpoint.
DTYPE, REPOSITORY = 'imported in', 'imported from'
OTHERS = 'tensors in other dtypes'  # their names and dtypes, as JSON

logger = logging.getLogger(__name__)


def import_huggingface(
    folder: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    repository: Repository | None = None,
) -> Config:
    """Make `out` a run at step 0 with a directory's model, weights, tokenizer and other files.

    If there is a `repository`, `folder` has only the model's description, and the weights are
    downloaded after the description is accepted. Returns the config of the run. Raises ConfigError
    for settings in config.json that are not supported, for a tokenizer or a mesh that cannot be
    used, and for incomplete weights.
    """
    check_new(out)
    check_adapter(folder)
    family, model, left = read_config_json(folder)
    if 'vision' in model:
        model['vision'] |= read_preprocessor(folder, model['vision'])
    tokenizer = folder / 'tokenizer.json' if (folder / 'tokenizer.json').is_file() else None
    config = reload(settings(model, out, tokenizer), overrides, place=str(folder / 'config.json'))
    keys, vocab_size = read_json(folder / 'config.json'), config.model.vocab_size
    companions = companions_of_model(folder, keys, vocab_size, sees=config.vision is not None)
    from megajax.interop.runs import prepare, start_run

    prepared = prepare(out, config, tokenizer)
    if repository is not None:
        repository.fetch_weights()
    tensors = read_tensors(folder)
    if left:
        logger.warning('%s: unused keys: %s', folder / 'config.json', ', '.join(left))
    if config.vision is not None:
        note_limit(folder, config.vision)
    if config.data.tokenizer == 'none':
        logger.warning(
            '%s has no tokenizer.json: the run works on token ids only; for text, put the '
            'tokenizer.json from transformers there, or give data.tokenizer=FILE',
            folder,
        )
    from megajax.interop.huggingface.weights import from_huggingface

    origin = {FAMILY: family} | _dtypes_in(tensors, family)
    if repository is not None:
        origin |= {REPOSITORY: str(repository)}
    start_run(
        out,
        config,
        prepared,
        lambda config: from_huggingface(config, tensors, source=str(folder), family=family),
        origin=origin,
        companions=companions,
    )
    return config


def _dtypes_in(tensors: Mapping[str, np.ndarray], family: str) -> dict[str, str]:
    """Return what a record says about the dtypes of a directory's tensors."""
    from megajax.interop.huggingface.weights import full_names

    found = {name: str(x.dtype) for name, x in tensors.items()}
    sizes = Counter[str]()
    for name, dtype in found.items():
        if dtype in EXPORT_DTYPES:
            sizes[dtype] += tensors[name].size
    if not sizes:
        return {}
    usual, full = max(sizes, key=lambda dtype: sizes[dtype]), full_names(family, tensors)
    others = {full[name]: dtype for name, dtype in found.items() if dtype in {*sizes} - {usual}}
    return {DTYPE: usual} | ({OTHERS: json.dumps(others)} if others else {})


def _dtypes_of(record: Record, family: str) -> tuple[Dtype, dict[str, Dtype]]:
    """Return the usual dtype of an import's tensors, and others by name; fp32 if unknown."""
    others = json.loads(record.data.get(OTHERS, '{}'))
    if others and family != record.data[FAMILY]:  # in which tensors have other names
        return 'float32', {}
    return record.data.get(DTYPE, 'float32'), others  # type: ignore[return-value]


def export_huggingface(
    source: Path,
    out: Path,
    *,
    family: str | None = None,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[str, str]:
    """Write a checkpoint as a directory that transformers and vLLM load; return family and dtype.

    `source` is a run, whose newest checkpoint is written, or one checkpoint. The default family is
    the one of the import with which the training began, or else the first that fits. If an imported
    checkpoint has not been trained since, the dtype defaults to the import's, so that the weights
    are restored bit for bit, and otherwise to fp32, the dtype of checkpoints. Host memory holds one
    parameter and one of its tensors at a time. Raises ConfigError if no family can represent this
    model, or if `out` already exists.
    """
    with sound_checkpoint(source) as checkpoint:
        record = read_record(checkpoint)
        model = without_adapters(reload(record.config, place=str(checkpoint / RECORD))).model
        family, keys = write_family(model, family) if family else _own_family(model, record)
        usual, others = (dtype, {}) if dtype else _dtypes_of(record, family)
        from megajax.interop.huggingface.weights import huggingface_pieces, joined_tensors
        from megajax.interop.runs import parts, weight_shapes

        pieces = huggingface_pieces(model, weight_shapes(checkpoint), family=family)
        joined = joined_tensors(pieces, family)
        plan = [
            Tensor(
                name,
                (sum(part.shape[0] for part in group), *group[0].shape[1:]),
                EXPORT_DTYPES[others.get(name, usual)],
            )
            for name, group in joined.items()
        ]
        with new_folder(out) as partial:
            tokens = _write_companions(checkpoint, partial, model)
            keys |= {'torch_dtype': usual, 'use_cache': True, **tokens}
            (partial / 'config.json').write_text(json.dumps(keys, indent=2) + '\n')
            _name_end(checkpoint, partial)
            if model.vision is not None:
                write_files(partial, model.vision)
            stored = ((name, x) for _, name, x in parts(checkpoint, [pieces]))
            arrays = (
                _together([_cast(*next(stored), others.get(name, usual), source) for _ in group])
                for name, group in joined.items()
            )
            write_tensors(partial, plan, arrays, shard_bytes=shard_bytes)
        _warn_of_other_texts(out, record.tokenizer_sha256)
        return family, usual


def _own_family(model: ModelConfig, record: Record) -> tuple[str, Keys]:
    """Return the family of the model's import, or the first that fits, and its config.json."""
    if record.family is None:
        return write_family(model)
    with suppress(ConfigError):
        return write_family(model, record.family)
    family, keys = write_family(model)
    logger.warning(
        'written as %s, because the family of the import no longer fits the config; '
        '--family %s gives the reason',
        family,
        record.family,
    )
    return family, keys


def _warn_of_other_texts(folder: Path, fingerprint: str | None) -> None:
    """Warn if transformers would build a tokenizer that differs from tokenizer.json."""
    if fingerprint is None:
        return
    from megajax.runtime.data.text.tokenizer import load_tokenizer

    with suppress(ConfigError):
        if load_tokenizer(str(folder / 'tokenizer.json')).fingerprint == fingerprint:
            return
    logger.warning(
        '%s: AutoTokenizer of transformers 5 reads texts differently from the run; use '
        'PreTrainedTokenizerFast.from_pretrained',
        folder,
    )


def _together(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _cast(name: str, x: np.ndarray, dtype: Dtype, source: Path) -> np.ndarray:
    with np.errstate(over='ignore'):  # the error below is clearer
        cast = x.astype(EXPORT_DTYPES[dtype], copy=False)
    if not np.isfinite(cast).all():
        from megajax.interop.pieces import check_finite

        check_finite(name, x, of=str(source))
        largest = float(np.abs(x).max())
        raise ConfigError(
            f'{name}: {largest:.6g} is beyond the range of {dtype}: export as bfloat16 or float32'
        )
    return cast


def _write_companions(checkpoint: Path, folder: Path, model: ModelConfig) -> dict[str, Any]:
    """Write the tokenizer, and the files imported with it or else what AutoTokenizer needs.

    Returns the keys of config.json that name tokens, from the import or else from the tokenizer.
    """
    companions = read_companions(checkpoint)
    for name, content in companions.files.items():
        if name not in OURS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    # If pad_token_id is missing, transformers uses an id of the family's released vocabulary.
    own = {'pad_token_id': None} | companions.token_ids
    if not (checkpoint / TOKENIZER).is_file():
        return {'bos_token_id': None, 'eos_token_id': None} | own
    from megajax.runtime.data.text.tokenizer import load_tokenizer

    shutil.copyfile(checkpoint / TOKENIZER, folder / 'tokenizer.json')
    tokenizer = load_tokenizer(str(checkpoint / TOKENIZER))
    end = tokenizer.decode([tokenizer.eod])
    added = json.loads((checkpoint / TOKENIZER).read_bytes())['added_tokens']
    ids = {token['content']: token['id'] for token in added}
    named = tokenizer.named_tokens
    if 'eos_token' not in named:
        begin = next((name for name in BEGIN_OF_DOCUMENT if name in ids), end)
        named = {'bos_token': begin, **named, 'eos_token': end}
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': model.max_seq_len}
    about |= named
    if TOKENIZER_CONFIG not in companions.files:
        (folder / TOKENIZER_CONFIG).write_text(
            json.dumps(about | {'clean_up_tokenization_spaces': False}, indent=2) + '\n'
        )
    if model.vision is not None:
        special = {i: name for name, i in tokenizer.special_tokens().items()}
        _name_image_token(folder / TOKENIZER_CONFIG, special.get(model.vision.image_token))
    beside = {
        key: ids[name] for name, key in BESIDE_PICTURES.items() if model.vision and name in ids
    }
    begin_id = tokenizer.token_id(named['bos_token']) if 'bos_token' in named else None
    return {'bos_token_id': begin_id, 'eos_token_id': tokenizer.eod, **beside} | own


def _name_end(checkpoint: Path, folder: Path) -> None:
    """Name the token that ends a document in the run, if the files of the import name another."""
    if not (checkpoint / TOKENIZER).is_file():
        return
    from megajax.runtime.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(checkpoint / TOKENIZER))
    with suppress(ConfigError):
        if load_tokenizer(str(folder / 'tokenizer.json')).eod == tokenizer.eod:
            return
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if (path := folder / name).is_file():
            end = {'eos_token': tokenizer.decode([tokenizer.eod])}
            path.write_text(json.dumps(read_json(path) | end, indent=2) + '\n')
    for name in ('config.json', GENERATION):
        if (path := folder / name).is_file():
            keys = read_json(path)
            ids = keys.get('eos_token_id') or []
            others = [i for i in (ids if isinstance(ids, list) else [ids]) if i != tokenizer.eod]
            keys['eos_token_id'] = [tokenizer.eod, *others] if others else tokenizer.eod
            path.write_text(json.dumps(keys, indent=2) + '\n')


def _name_image_token(path: Path, name: str | None) -> None:
    """Tell the processor which token stands for an image, if it is not the usual one."""
    keys = read_json(path)
    extra = keys.get('extra_special_tokens') or {}
    named = {**keys, **extra} if isinstance(extra, dict) else keys
    if name in (None, USUAL_IMAGE) or 'image_token' in named:
        return
    if isinstance(extra, dict):
        keys['extra_special_tokens'] = {**extra, 'image_token': name}
    else:
        keys['image_token'] = name
    path.write_text(json.dumps(keys, indent=2) + '\n')
