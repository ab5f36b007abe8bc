"""The data of a Megatron-LM command line: its corpora, its tokenizer and their vocabulary.

Imports no jax.
"""

import json
import re
from pathlib import Path
from typing import Any

from megajax.core.config import ConfigError
from megajax.interop.megatron.command_line.arguments import VOCABULARIES
from megajax.interop.megatron.command_line.line import Line
from megajax.interop.megatron.command_line.table import DEFAULTS

Keys = dict[str, Any]
# Tokenizer types whose vocabulary is in --vocab-file.
OF_FILES = 'GPT2BPETokenizer', 'BertWordPieceLowerCase', 'BertWordPieceCase'


def vocab_size_of(line: Line) -> int:
    """Return the number of tokens. Raises ConfigError if neither arguments nor files tell it.

    As in Megatron-LM, the tokenizer's own file comes before `--vocab-size`.
    """
    # The programs' defaults if the arguments choose none.
    usual = 'BertWordPieceLowerCase' if line.is_bert else 'GPT2BPETokenizer'
    kind, size = line.get('tokenizer_type') or usual, line.get('vocab_size')
    if tokenizer := tokenizer_of(line):
        return _size_of(tokenizer)
    if kind in OF_FILES and (file := line.get('vocab_file')) and Path(file).is_file():
        return _num_tokens(file, is_json=kind == 'GPT2BPETokenizer')
    if size is not None:
        return int(size)
    if kind in VOCABULARIES:
        return VOCABULARIES[kind]
    raise ConfigError(
        f'--tokenizer-type {kind}: the number of its tokens is not in the arguments: '
        'add --vocab-size N'
    )


def _size_of(tokenizer: str) -> int:
    """Return the number of tokens in a tokenizer.json."""
    try:
        content = json.loads(Path(tokenizer).read_bytes())
        added = (token['id'] for token in content['added_tokens'])
        vocab = content['model']['vocab']
        ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
        return 1 + max([*ids, *added])
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f'{tokenizer}: is not a tokenizer.json: {error!r:.80}') from error


def _num_tokens(file: str, *, is_json: bool) -> int:
    """Return the number of tokens in a vocabulary: an object of JSON, or a line for each token."""
    try:
        text = Path(file).read_text(encoding='utf-8')
        tokens = json.loads(text) if is_json else dict.fromkeys(text.rstrip('\n').split('\n'))
        return len({**tokens})
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f'{file}: is not a vocabulary: {error!r:.80}') from error


def tokenizer_of(line: Line) -> str | None:
    """Return the tokenizer.json that an argument points to, if the file is there."""
    model = line.get('tokenizer_model')
    if line.get('tokenizer_type') != 'HuggingFaceTokenizer' or not model:
        return None
    path = model if model.endswith('.json') else f'{model}/tokenizer.json'
    return path if Path(path).is_file() else None


def data_of(line: Line, problems: list[str]) -> Keys:
    """Return the keys of `data`. Appends contradictions to `problems`."""
    data: Keys = {'split': ','.join(split_of(line))}
    paths = line.get('data_path') or []
    if len(paths) == 1:
        data['corpus'] = paths[0]
    elif paths:
        data['blend'] = _blend(paths, problems)
        if line.default(surplus := 'mid_level_dataset_surplus') != DEFAULTS[surplus]:
            why = 'is not supported with several corpora, whose order depends on it'
            problems.append(f'{line.spelled[surplus]}: {why}: give {DEFAULTS[surplus]}')
    tokenizer = tokenizer_of(line)
    if line.is_bert and tokenizer:
        data['tokenizer'] = tokenizer
    elif paths and not line.is_bert:
        # The same samples in the same order; the corpus already consists of token ids.
        data |= {'order': 'megatron', 'tokenizer': tokenizer or 'none'}
    resets = [bool(line.get(f'reset_{what}')) for what in ('position_ids', 'attention_mask')]
    if any(resets) and not all(resets):
        both = '--reset-position-ids, --reset-attention-mask'
        problems.append(f'{both}: data.document_mask does both: give both, or neither')
    if line.get('eod_mask_loss') and not any(resets):
        problems.append(
            '--eod-mask-loss: is not supported alone: give --reset-position-ids and '
            '--reset-attention-mask too, which data.document_mask includes, or leave it out'
        )
    return data | {'document_mask': all(resets)}


def split_of(line: Line) -> list[str]:
    """Return the three parts of the data: as in Megatron-LM, the numbers in the text, then 0."""
    parts = re.findall(r'[.0-9]+', line.default('split'))
    return parts + ['0'] * (3 - len(parts))


def _blend(paths: list[str], problems: list[str]) -> Keys:
    prefixes = paths[1::2]
    if twice := [path for number, path in enumerate(prefixes) if path in prefixes[:number]]:
        problems.append(
            f'--data-path {" ".join(paths)}: names {twice[0]} twice, which data.blend cannot: '
            'name it once, with the sum of its weights'
        )
    try:
        weights = [float(weight) for weight in paths[::2]]
        return dict(zip(prefixes, weights, strict=True))
    except ValueError:
        problems.append(
            f'--data-path {" ".join(paths)}: give each prefix its weight before it, '
            'as in --data-path 0.3 web 0.7 books'
        )
        return {}
