"""Read the special tokens that the files next to a tokenizer.json name, as transformers does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megajax.base.errors import ConfigError
from megajax.base.files.exists import is_file
from megajax.base.files.json_file import read_json
from megajax.base.render.text import shorten
from megajax.runtime.data.text.tokenizer_class import build_as_class, fix_mistral_regex

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, CONFIG = 'tokenizer.json', 'tokenizer_config.json'
MAP, ADDED = 'special_tokens_map.json', 'added_tokens.json'
MODEL, GENERATION = 'config.json', 'generation_config.json'
END = 'end_of_document'  # megajax's own key in a run's tokenizer_config.json
STANDARD = tuple(f'{x}_token' for x in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask'))
# The tokenizer class that transformers 5 uses for a family, whatever the files say ...
OF_FAMILY = {
    'qwen2': 'Qwen2Tokenizer',
    **dict.fromkeys(('glm', 'glm4', 'glm4_moe', 'ministral', 'mistral', 'mixtral'), ''),
    **dict.fromkeys(('olmo2', 'olmo3', 'phi3'), ''),
}
# ... or the class that it uses if the files name none, ...
BY_DEFAULT = {
    'gpt2': 'GPT2Tokenizer',
    'megatron-bert': 'BertTokenizer',
    'gemma3_text': 'GemmaTokenizer',
    'olmoe': 'GPTNeoXTokenizer',
    **dict.fromkeys(('qwen3', 'qwen3_moe', 'qwen3_vl'), 'Qwen2Tokenizer'),
}
# ... and the tokens of a class that the files need not name.
DEFAULTS = {
    'GPT2Tokenizer': dict.fromkeys(('unk_token', 'bos_token', 'eos_token'), '<|endoftext|>'),
    'GPTNeoXTokenizer': {
        **dict.fromkeys(('unk_token', 'bos_token', 'eos_token'), '<|endoftext|>'),
        'pad_token': '<|padding|>',
    },
    'Qwen2Tokenizer': dict.fromkeys(('unk_token', 'eos_token', 'pad_token'), '<|endoftext|>'),
    'LlamaTokenizer': {'unk_token': '<unk>', 'bos_token': '<s>', 'eos_token': '</s>'},
    'GemmaTokenizer': {f'{x}_token': f'<{x}>' for x in ('unk', 'bos', 'eos', 'pad', 'mask')},
    'BertTokenizer': {f'{x}_token': f'[{x.upper()}]' for x in ('unk', 'sep', 'pad', 'cls', 'mask')},
}

Keys = dict[str, Any]


@dataclass(frozen=True)
class TokenNames:
    """The tokens that a folder names, by transformers' names such as eos_token.

    `end` is the name of the token that ends a document, or None if the folder does not say.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    end: str | None = None

    def save(self, path: Path) -> None:
        """Write the names next to the tokenizer.json of `path`, where `name_tokens` finds them."""
        if self.content:
            _next_to(path, CONFIG).write_bytes(self.content)
        else:
            _next_to(path, CONFIG).unlink(missing_ok=True)

    @property
    def content(self) -> bytes:
        """The content of a tokenizer_config.json with these names; b'' if there are none."""
        if not self.named and self.end is None:
            return b''
        keys = {'tokenizer_class': 'PreTrainedTokenizerFast', **self.named, END: self.end}
        return (json.dumps(keys, indent=2) + '\n').encode()


def name_tokens(
    path: Path, backend: 'tokenizers.Tokenizer'
) -> tuple[TokenNames, 'tokenizers.Tokenizer']:
    """Return the names in the files next to the tokenizer.json of `path`, and the full tokenizer.

    The tokenizer has the tokens of these files. A token that tokenizer.json lacks gets the next id,
    or its own id if it is in the vocabulary. PREFIX.tokenizer.json goes with
    PREFIX.tokenizer_config.json. Raises ConfigError for a file that transformers could not use
    either.
    """
    config, model = _read(path, CONFIG), _read(path, MODEL)
    special_map = {} if 'added_tokens_decoder' in config else _read(path, MAP)
    if not (config or special_map or 'model_type' in model):
        return TokenNames(), backend
    name = _class_of(config, model, backend)
    where, by_class = _next_to(path, CONFIG), DEFAULTS.get(name, {})
    by_family = bool(OF_FAMILY.get(str(model.get('model_type'))))
    backend = build_as_class(backend, name, config, str(where), by_family=by_family)
    keys, further = _merged(where, by_class, config, special_map)
    tokens = {
        key: token for key, x in keys.items() if key.endswith('_token') and (token := _token(x))
    }
    named = {key: token['content'] for key, token in tokens.items()}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    special = {named[key] for key in STANDARD if key in named} | {x['content'] for x in further}
    added = _added(path, config, special, known)
    end = config[END] if END in config else named.get('eos_token')
    if end and end == by_class.get('eos_token') and end not in {*added, *backend.get_vocab()}:
        end = None  # the default of its class, which transformers adds: no text ends with it
    for token in (*tokens.values(), *further):
        if token['content'] not in known:
            added.setdefault(token['content'], {**token, 'special': True})
    _add(backend, added, {*named.values()}, where)
    fix_mistral_regex(backend, config, model)
    if name == 'Qwen2Tokenizer':  # this class gives special tokens the usual properties
        _add(backend, {token: {} for token in special}, special, where)
    return TokenNames(named, str(end) if end else _end(path, model, backend)), backend


def start_ids(backend: 'tokenizers.Tokenizer') -> list[int]:
    """Return the ids that a tokenizer.json adds before every text, except [CLS].

    [CLS] is added with the masks (`masked.py`).
    """
    try:
        encoding = backend.encode('a')
    except Exception:  # the texts may contain only characters that the vocabulary has
        return []
    prefix = takewhile(
        lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    )
    return [i for i, _ in prefix if backend.id_to_token(i) != '[CLS]']


def _merged(
    where: Path, by_class: Keys, config: Keys, special_map: Keys
) -> tuple[Keys, list[Keys]]:
    """Return the keys that name tokens, in transformers' order, and the tokens without a name."""
    keys: Keys = dict.fromkeys(STANDARD) | by_class | config
    if 'additional_special_tokens' in keys and not keys.get('extra_special_tokens'):
        keys['extra_special_tokens'] = keys.pop('additional_special_tokens')
    keys |= special_map
    further = keys.get('extra_special_tokens') or []
    if isinstance(further, dict):
        keys, further = keys | further, keys.get('additional_special_tokens') or []
    if not isinstance(further, list):
        _refuse(where, 'extra_special_tokens', further)
    if wrong := [key for key in STANDARD if keys.get(key) is not None and not _token(keys[key])]:
        _refuse(where, wrong[0], keys[wrong[0]])
    return keys, [_token(x) or _refuse(where, 'extra_special_tokens', x) for x in further]


def _class_of(config: Keys, model: Keys, backend: 'tokenizers.Tokenizer') -> str:
    """Return the tokenizer class that transformers uses; '' if it has no own parts or tokens."""
    family = model.get('model_type')
    family = family if isinstance(family, str) else ''
    said = config.get('tokenizer_class') or model.get('tokenizer_class')
    said = said.removesuffix('Fast') if isinstance(said, str) else BY_DEFAULT.get(family, '')
    name = OF_FAMILY.get(family, said)
    # Llama 3's files name this class, although its tokens are not SentencePiece's.
    return '' if name == 'LlamaTokenizer' and '"ByteLevel"' in backend.to_str() else name


def _added(path: Path, config: Keys, special: set[str], known: set[str]) -> dict[str, Keys]:
    """Return the tokens that the files add or change, by name, in the order of their ids."""
    listed = config.get('added_tokens_decoder')
    where = _next_to(path, CONFIG)
    if listed is None:
        ids = _read(path, ADDED)
        if wrong := [name for name, i in ids.items() if type(i) is not int]:
            _refuse(_next_to(path, ADDED), wrong[0], ids[wrong[0]])
        return {
            name: {'content': name, 'special': name in special, 'normalized': name not in special}
            for name in sorted(ids.keys() - known, key=ids.__getitem__)
        }
    if not isinstance(listed, dict) or not all(map(str.isdecimal, listed)):
        _refuse(where, 'added_tokens_decoder', listed)
    tokens = [listed[i] for i in sorted(listed, key=int)]
    if wrong := [x for x in tokens if not (isinstance(x, dict) and _token(x))]:
        _refuse(where, 'added_tokens_decoder', wrong[0])
    return {token['content']: token for token in tokens}


def _add(
    backend: 'tokenizers.Tokenizer', added: Mapping[str, Keys], special: set[str], where: Path
) -> None:
    from tokenizers import AddedToken

    tokens = []
    for name, token in added.items():
        flags = {key: value for key, value in token.items() if key not in ('__type', 'content')}
        flags['special'] = flags.get('special', False) or name in special
        try:
            tokens.append(AddedToken(name, **flags))
        except TypeError:
            _refuse(where, 'added_tokens_decoder', token)
    backend.add_tokens(tokens)


def _end(path: Path, model: Keys, backend: 'tokenizers.Tokenizer') -> str | None:
    """Return the name of the first eos_token_id of config.json, else of generation_config.json."""
    text = model.get('text_config')
    for keys in (model, text if isinstance(text, dict) else {}, _read(path, GENERATION)):
        ids = keys.get('eos_token_id')
        first = ids[0] if isinstance(ids, list) and ids else ids
        name = backend.id_to_token(first) if type(first) is int and 0 <= first < 2**31 else None
        if name is not None:
            return str(name)
    return None


def _token(value: Any) -> Keys | None:
    """Return a token with its flags, or None if the value is not a token."""
    if isinstance(value, str):
        return {'content': value}
    return value if isinstance(value, dict) and isinstance(value.get('content'), str) else None


def _next_to(path: Path, name: str) -> Path:
    """Return the path of a file in the same folder, with the prefix of PREFIX.tokenizer.json."""
    return path.with_name(path.name.removesuffix(TOKENIZER) + name)


def names_file(path: str) -> str:
    """Return, for an error, the file in which a user can name the tokens of a tokenizer.json."""
    if _is_read(Path(path), CONFIG):
        return f'a {_next_to(Path(path), CONFIG).name} next to it'
    return f'a {CONFIG} next to it, after you rename it to {TOKENIZER}'


def _is_read(path: Path, name: str) -> bool:
    """Whether a file with this name is read for the tokenizer.json of `path`."""
    return path.name == TOKENIZER or (path.name.endswith(f'.{TOKENIZER}') and name == CONFIG)


def _read(path: Path, name: str) -> Keys:
    """Return the object of a file next to a tokenizer.json, {} if there is no such file."""
    file = _next_to(path, name)
    return read_json(file) if _is_read(path, name) and is_file(file) else {}


def _refuse(file: Path, key: str, value: Any) -> NoReturn:
    raise ConfigError(f'{file}: {key}: {shorten(json.dumps(value))}: names no token; correct it')
