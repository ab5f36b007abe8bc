"""Files of a Hugging Face model, except its weights, that a checkpoint carries along unchanged.

They define the tokens that end a text, the chat template, and how transformers builds the
tokenizer. They are in the folder `huggingface` of a run and of each of its checkpoints. Imports no
jax.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megajax.base.files.outputs import write_file
from megajax.base.render.text import shorten
from megajax.core.config import ConfigError
from megajax.runtime.data.image_text.chat import DEFAULT, Template, named_templates

FOLDER = 'huggingface'
GENERATION, TOKENIZER_CONFIG = 'generation_config.json', 'tokenizer_config.json'
SPECIAL_TOKENS = 'special_tokens_map.json'
TEMPLATE, TEMPLATE_OF_PROCESSOR = 'chat_template.jinja', 'chat_template.json'
# How a processor prepares images and videos; models without an encoder do not keep these files.
PROCESSOR, IMAGES = 'processor_config.json', 'preprocessor_config.json'
PREPARING = frozenset({PROCESSOR, IMAGES, 'video_preprocessor_config.json'})
COMPANIONS = (
    GENERATION,
    TOKENIZER_CONFIG,
    TEMPLATE,
    TEMPLATE_OF_PROCESSOR,
    SPECIAL_TOKENS,
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'vocab.txt',
    'tokenizer.model',
    *sorted(PREPARING),
)
TOKEN_IDS = 'token_ids.json'  # the values of the NAMED keys of config.json
CHAT_TIME = 'chat_time.txt'  # the time that the run's chat template gets
OURS = TOKEN_IDS, CHAT_TIME  # files that no Hugging Face folder has
TEMPLATES = 'additional_chat_templates'  # folder of templates other than the default template
NAMED = 'bos_token_id', 'eos_token_id', 'pad_token_id'
MAX_BYTES = 100_000_000  # maximum size of a file


@dataclass(frozen=True)
class Companions:
    """The contents of these files by name; empty for a model that was not imported."""

    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def token_ids(self) -> dict[str, Any]:
        """The keys of config.json that name tokens, such as eos_token_id."""
        return self._read(TOKEN_IDS)

    @property
    def generation(self) -> dict[str, Any]:
        """The keys of generation_config.json."""
        return self._read(GENERATION)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which transformers ends a text.

        Raises ConfigError if they are not ids.
        """
        for file in (GENERATION, TOKEN_IDS):
            ids = self._read(file).get('eos_token_id')
            if ids is None:
                continue
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and 0 <= i < 2**31 for i in listed):
                raise ConfigError(
                    f'{file}: eos_token_id: {shorten(json.dumps(ids))}: give an id or a list of ids'
                )
            return tuple(listed)
        return ()

    @property
    def chat_template(self) -> str | None:
        """The default template for messages in transformers, or None if there is none."""
        return self.chat_templates.get(DEFAULT)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The templates that transformers finds, by name.

        The processor of a model that reads images has other sources than a tokenizer.
        """
        if PREPARING & self.files.keys():
            for file in (PROCESSOR, TEMPLATE_OF_PROCESSOR):
                if found := named_templates(self._read(file).get('chat_template')):
                    return found
        names = {TEMPLATE: DEFAULT}
        names |= {name: Path(name).stem for name in self.files if name.startswith(f'{TEMPLATES}/')}
        in_files = {
            short: self.files[name].decode(errors='replace')
            for name, short in names.items()
            if name in self.files
        }
        if in_files:
            return in_files
        of_tokenizer = self._read(TOKENIZER_CONFIG).get('chat_template')
        if of_tokenizer is None:
            of_tokenizer = self._read(TEMPLATE_OF_PROCESSOR).get('chat_template')
        return named_templates(of_tokenizer)

    def template(self, name: str) -> Template | None:
        """Return the chat templates, called `name` in messages, with the time that they use."""
        if not self.chat_templates:
            return None
        time = self.files.get(CHAT_TIME)
        now = datetime.fromisoformat(time.decode()) if time else None
        return Template(name=name, texts=self.chat_templates, now=now)

    def with_template(self, text: str, others: Mapping[str, str] | None = None) -> 'Companions':
        """Return these files with another chat template, in the file that transformers reads first.

        `others` are templates other than the default one, by name. The files of a processor that
        take precedence over them lose theirs.
        """
        kept = {x: files for x, files in self.files.items() if not x.startswith(f'{TEMPLATES}/')}
        kept.pop(TEMPLATE_OF_PROCESSOR, None)
        if 'chat_template' in (processor := self._read(PROCESSOR)):
            del processor['chat_template']
            kept[PROCESSOR] = (json.dumps(processor, indent=2) + '\n').encode()
        named = {f'{TEMPLATES}/{name}.jinja': x.encode() for name, x in (others or {}).items()}
        return replace(self, files={**kept, TEMPLATE: text.encode(), **named})

    def with_chat_time(self, now: datetime | None) -> 'Companions':
        """Return these files with a fixed time for chat templates; None removes the fixed time."""
        kept = {name: content for name, content in self.files.items() if name != CHAT_TIME}
        return replace(self, files=kept | ({CHAT_TIME: now.isoformat().encode()} if now else {}))

    def write(self, folder: Path) -> None:
        """Make these the files in the subfolder of a run or a checkpoint, and delete any others.

        An old template that stayed there would be read with the new one, or instead of it.
        """
        for name, content in self.files.items():
            path = folder / FOLDER / name
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, content)
        for name in _found(folder / FOLDER, (*COMPANIONS, *OURS)):
            if name not in self.files:
                (folder / FOLDER / name).unlink()

    def _read(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file, or {} if there is no such file."""
        try:
            keys = json.loads(self.files.get(name, b'{}'))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{name}: not JSON: {shorten(str(error), 200)}') from error
        if not isinstance(keys, dict):
            raise ConfigError(f'{name}: not a JSON object')
        return keys


def read_companions(folder: Path) -> Companions:
    """Return the companions of a run or a checkpoint, which may be empty."""
    return Companions(_contents(folder / FOLDER, (*COMPANIONS, *OURS)))


def companions_of_model(
    folder: Path, config: Mapping[str, Any], vocab_size: int, *, sees: bool = False
) -> Companions:
    """Return the companions of a Hugging Face directory, whose config.json is `config`.

    `sees` is whether the model has an encoder. Ids outside the vocabulary are left out;
    transformers' defaults can be such ids. Raises ConfigError for a file that cannot be used.
    """

    def in_vocabulary(value: object) -> bool:
        ids = value if isinstance(value, list) else [value]
        return all(type(i) is int and 0 <= i < vocab_size for i in ids)

    ids = {key: config[key] for key in NAMED if in_vocabulary(config.get(key))}
    files = _contents(folder, [x for x in COMPANIONS if sees or x not in PREPARING])
    companions = Companions(files | {TOKEN_IDS: (json.dumps(ids, indent=2) + '\n').encode()})
    try:
        companions.token_ids, companions.ends, companions.chat_template  # noqa: B018
    except ConfigError as error:
        raise ConfigError(f'{folder}: {error}') from error
    return companions


def _found(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names that exist in a folder, and the names of its templates."""
    templates = sorted(f'{TEMPLATES}/{path.name}' for path in (folder / TEMPLATES).glob('*.jinja'))
    try:
        return [name for name in (*names, *templates) if (folder / name).is_file()]
    except OSError as error:
        raise ConfigError(f'{folder}: cannot be read: {error.strerror}') from error


def _contents(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    contents = {}
    for name in _found(folder, names):
        path = folder / name
        try:
            with path.open('rb') as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f'{path}: cannot be read: {error.strerror}') from error
        if len(content) > MAX_BYTES:
            raise ConfigError(f'{path}: more than {MAX_BYTES:,} bytes')
        contents[name] = content
    return contents
