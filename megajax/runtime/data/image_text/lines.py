"""Split JSON lines with messages or images into pieces, which count in the loss or not.

A line is {"text": "...<image>...", "images": ["a.png"]} or {"messages": [{"role": ..., "content":
...}], "images": [...]}; "content" is a text, or a list of {"type": "text", "text": ...} and
{"type": "image", "image": "a.png"}, as Hugging Face writes it. If a model reads images, each
<image> stands for the next one of "images". The other keys of a line with messages, such as
"tools", are for its chat template. Pieces that count are a "text" except its images, and the
assistant's turns of "messages". Messages, tools and documents may also be a string that contains
JSON, as in tables, whose lists cannot have entries of different types.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megajax.runtime.data.image_text.chat import Chat, Message, Request, are_parts
from megajax.runtime.data.image_text.turns import (
    VISION,
    Vocabulary,
    pieces_of_chat,
    refuse,
    short,
)
from megajax.runtime.data.sources.commands import images_to_files
from megajax.runtime.data.sources.image_keys import (
    MARKER,
    as_images,
    contains_images,
    has_files,
    image_keys,
)
from megajax.runtime.data.sources.shapes import OBJECTS, as_messages
from megajax.runtime.data.text.pieces import Piece

LISTS = 'messages', *OBJECTS
INSIDE = 'contains the image itself, and images are read from files'  # a fault of a key
KWARGS = 'chat_template_kwargs'  # trl's key for other variables of a template


def spelled(line: dict[str, Any]) -> str:
    """Return the texts of a line, for training a tokenizer.

    The line may break the rules.
    """
    texts = [line.get('text')]
    messages = _parsed(line.get('messages'))
    for message in messages if isinstance(messages, list) else ():
        content = message.get('content') if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{'text': content}]
        texts += [part.get('text') for part in parts if isinstance(part, dict)]
    return '\n'.join(text for text in texts if isinstance(text, str)).replace(MARKER, '')


def pieces_of(line: dict[str, Any], vocabulary: Vocabulary, chat: Chat, place: str) -> list[Piece]:
    """Return the pieces of a line.

    Raises ConfigError with the line's place if the line breaks a rule.
    """
    given = {key: value for key, value in line.items() if value is not None}
    given |= {key: _parsed(given[key]) for key in LISTS if key in given}
    if ('text' in given) == ('messages' in given):
        keys = ', '.join(map(str, line)) or 'none'
        fault = f'needs either "text" or "messages" (its keys: {short(keys)})'
        refuse(place, fault, as_messages(line, place) or 'correct the line')
    if 'text' in given:
        return pieces_of_text(given, vocabulary, place)
    _check(given, place)
    images = _images(given, vocabulary, place)
    messages, names = _messages(given['messages'], images, vocabulary, place)
    variables = _with_texts(_variables(given, place))
    request = Request(messages=_with_texts(messages), variables=variables)
    return pieces_of_chat(request, names, vocabulary, chat, place)


def pieces_of_text(line: dict[str, Any], vocabulary: Vocabulary, place: str) -> list[Piece]:
    """Return the pieces of a line with a "text", as `pieces_of` does."""
    text, images = line['text'], _images(line, vocabulary, place)
    if not isinstance(text, str):
        refuse(place, f'"text" is {short(text)}, not a text')
    _check(text, place)
    keys = unread_images(line) if vocabulary.sees else []
    if keys and (MARKER in text or has_files(line, keys, Path(place).parent)):
        fault = f'names images under {short(", ".join(keys))}, which is not read'
        fix = 'give "images": [] to train on the text alone, or ' if MARKER not in text else ''
        refuse(place, fault, fix + as_images(line, keys, place))
    texts = text.split(MARKER) if vocabulary.sees else [text]
    if len(texts) - 1 != len(images):
        _unequal(len(texts) - 1, images, place)
    pieces = [Piece(text=texts[0], answered=True)]
    for name, after in zip(images, texts[1:], strict=True):
        around = [Piece(token=vocabulary.special[token]) for token in _around(vocabulary)]
        pieces += [*around[:1], Piece(image=name), *around[1:], Piece(text=after, answered=True)]
    return pieces


def unread_images(line: dict[str, Any]) -> list[str]:
    """Return the keys under which a line with a "text" and no "images" names images."""
    is_text = line.get('text') is not None and line.get('images') is None
    return image_keys(line) if is_text else []


def _parsed(value: object) -> Any:
    """Return the list that a string contains as JSON; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list) else value


def _with_texts(value: Any) -> Any:
    """Return a value with text in place of everything that JSON does not support, such as times.

    It is the text that a template would write.
    """
    if isinstance(value, dict):
        return {key: _with_texts(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(x) for x in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _variables(line: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the variables of a line for its template, except the messages."""
    for key in OBJECTS:
        value = line.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            refuse(place, f'"{key}" is {short(value)}, not a list of objects')
    others = line.get(KWARGS, {})
    if not isinstance(others, dict):
        refuse(place, f'"{KWARGS}" is {short(others)}, not an object')
    variables = {key: x for key, x in line.items() if key not in ('messages', 'images', KWARGS)}
    if twice := sorted({*variables, 'messages', 'add_generation_prompt'} & others.keys()):
        refuse(place, f'"{KWARGS}" has {", ".join(twice)}, which it must not set')
    if 'add_generation_prompt' in variables:
        refuse(place, '"add_generation_prompt" is for what generates; remove it')
    return variables | others


def _images(line: dict[str, Any], vocabulary: Vocabulary, place: str) -> list[str]:
    images = line.get('images', [])
    if not vocabulary.sees and isinstance(images, list):
        _check_blind(len(images), place)
    if contains_images({'images': images}):
        refuse(place, f'"images" {INSIDE}', images_to_files(place))
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        refuse(place, f'"images" is {short(images)}, not a list of file names')
    return images


def _around(vocabulary: Vocabulary) -> Sequence[str]:
    return VISION if set(VISION) <= vocabulary.special.keys() else ()


def _messages(
    messages: object, images: Sequence[str], vocabulary: Vocabulary, place: str
) -> tuple[list[Message], list[str]]:
    """Return the messages with images as parts, and the names of the images in order."""
    if not isinstance(messages, list) or not messages:
        refuse(place, f'"messages" is {short(messages)}, not a list of messages')
    rest = list(reversed(images))
    names: list[str] = []
    normalized: list[Message] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get('role'), str):
            refuse(place, f'a message is {short(message)}, not an object with a "role"')
        content = message.get('content')
        if message['role'] != 'tool' or are_parts(content) or isinstance(content, str):
            content = content_of(content, vocabulary, place)
        parts = content if are_parts(content) else []
        for part in parts:
            if part['type'] == 'image':
                name = part.get('image')
                if name is None:
                    name = rest.pop() if rest else _unequal(len(names) + 1, images, place)
                if contains_images({'image': name}):
                    refuse(place, f'"image" {INSIDE}', images_to_files(place))
                if not isinstance(name, str):
                    refuse(place, f'"image" is {short(name)}, not a file name')
                names.append(name)
        normalized.append(message if content is None else {**message, 'content': content})
    if rest:
        _unequal(len(names), images, place)
    return normalized, names


def content_of(
    content: object, vocabulary: Vocabulary, place: str
) -> str | list[dict[str, Any]] | None:
    """Return the content of a message; a text with image placeholders becomes a list of parts."""
    if content is None:
        return None
    if isinstance(content, str):
        if not vocabulary.sees or MARKER not in content:
            return content
        first, *others = content.split(MARKER)
        parts: list[dict[str, Any]] = [{'type': 'text', 'text': first}]
        for text in others:
            parts += [{'type': 'image'}, {'type': 'text', 'text': text}]
        return [part for part in parts if part.get('text') != '']
    if not isinstance(content, list):
        refuse(place, f'a "content" is {short(content)}, neither a text nor a list of parts')
    for part in content:
        kind = part.get('type') if isinstance(part, dict) else None
        if kind != 'image' and not (kind == 'text' and isinstance(part.get('text'), str)):
            refuse(place, f'a part is {short(part)}, neither a text nor an image')
    if not vocabulary.sees:
        _check_blind(sum(part['type'] == 'image' for part in content), place)
    # Tables give every part all keys, and templates ask whether a part has a key.
    return [{key: x for key, x in part.items() if x is not None} for part in content]


def _check_blind(pictures: int, place: str) -> None:
    if pictures:
        fault = f'has {pictures} images, but this is a text-only model'
        refuse(place, fault, 'remove them')


def _unequal(places: int, images: Sequence[str], place: str) -> NoReturn:
    refuse(place, f'has {places} image placeholders, but {len(images)} files in "images"')


def _check(value: object, place: str) -> None:
    """Raise ConfigError if a text in a value cannot be written in UTF-8."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            refuse(place, f'has an unpaired surrogate at character {error.start} of a text')
    elif isinstance(value, dict):
        _check([*value, *value.values()], place)
    elif isinstance(value, list):
        for each in value:
            _check(each, place)
