"""JSON lines with pictures as pieces of text and pictures, each answered or not.

A line is {"text": "...<image>...", "images": ["a.png"]} or {"messages": [{"role": ..., "content":
...}], "images": [...]}; a content is a text, or a list of {"type": "text", "text": ...} and
{"type": "image", "image": "a.png"}, as Hugging Face writes it. Each <image> takes the next of
"images". The loss counts all of a "text", and the assistant's turns of "messages".
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megajax.config.errors import ConfigError, Problem
from megajax.data.build.shapes import as_messages
from megajax.data.image_text.chat import Chat, Message
from megajax.data.text.pieces import GUARDS, Piece

MARKER = '<image>'  # a picture's place in a text
VISION = '<|vision_start|>', '<|vision_end|>'  # stand around a picture where a tokenizer has them


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The special tokens of a tokenizer by name, and the one that stands for pictures."""

    special: dict[str, int]
    image_token: int

    @property
    def image(self) -> str:
        """The text of a picture in a chat."""
        name = next((name for name, i in self.special.items() if i == self.image_token), MARKER)
        return name.join(VISION) if set(VISION) <= self.special.keys() else name

    def pattern(self) -> re.Pattern[str]:
        """Return what finds special tokens, the longest first."""
        names = sorted({*self.special, self.image}, key=len, reverse=True)
        return re.compile('|'.join(map(re.escape, names)))


def spelled(line: dict[str, Any]) -> str:
    """Return the texts of a line, which need not keep the rules, to train a tokenizer on."""
    texts = [line.get('text')]
    messages = line.get('messages')
    for message in messages if isinstance(messages, list) else ():
        content = message.get('content') if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{'text': content}]
        texts += [part.get('text') for part in parts if isinstance(part, dict)]
    return '\n'.join(text for text in texts if isinstance(text, str)).replace(MARKER, '')


def pieces_of(line: dict[str, Any], vocabulary: Vocabulary, chat: Chat, place: str) -> list[Piece]:
    """Return the pieces of a line; raises ConfigError with its place if it breaks a rule."""
    if ('text' in line) == ('messages' in line):
        keys = ', '.join(map(str, line)) or 'none'
        mistake = f'needs either "text" or "messages" (its keys: {_short(keys)})'
        _refuse(place, mistake, as_messages(line) or 'correct the line')
    if 'text' in line:
        return pieces_of_text(line, vocabulary, place)
    messages, names = _messages(line['messages'], _images(line, place), place)
    return _pieces_of_chat(messages, names, vocabulary, chat, place)


def pieces_of_text(line: dict[str, Any], vocabulary: Vocabulary, place: str) -> list[Piece]:
    """Return the pieces of a line with a "text", as `pieces_of` does."""
    text, images = line['text'], _images(line, place)
    if not isinstance(text, str):
        _refuse(place, f'"text" is {_short(text)}, not a text')
    texts = _check(text, place).split(MARKER)
    if len(texts) - 1 != len(images):
        _unequal(len(texts) - 1, images, place)
    pieces = [Piece(text=texts[0], answered=True)]
    for name, after in zip(images, texts[1:], strict=True):
        around = [Piece(token=vocabulary.special[token]) for token in _around(vocabulary)]
        pieces += [*around[:1], Piece(image=name), *around[1:], Piece(text=after, answered=True)]
    return pieces


def _images(line: dict[str, Any], place: str) -> list[str]:
    images = line.get('images', [])
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        _refuse(place, f'"images" is {_short(images)}, not a list of file names')
    return images


def _around(vocabulary: Vocabulary) -> Sequence[str]:
    return VISION if set(VISION) <= vocabulary.special.keys() else ()


def _messages(
    messages: object, images: Sequence[str], place: str
) -> tuple[list[Message], list[str]]:
    """Return the messages as a template wants them, and the pictures in their order."""
    if not isinstance(messages, list) or not messages:
        _refuse(place, f'"messages" is {_short(messages)}, not a list of messages')
    rest = list(reversed(images))
    names: list[str] = []
    normalized: list[Message] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get('role'), str):
            _refuse(place, f'a message is {_short(message)}, not an object with a "role"')
        parts = _parts(message.get('content'), place)
        for part in parts:
            if part['type'] == 'image':
                name = part.get('image')
                if name is None:
                    name = rest.pop() if rest else _unequal(len(names) + 1, images, place)
                if not isinstance(name, str):
                    _refuse(place, f'"image" is {_short(name)}, not a file name')
                names.append(name)
        has_images = any(part['type'] == 'image' for part in parts)
        content = parts if has_images else ''.join(part['text'] for part in parts)
        normalized.append({**message, 'content': content})
    if rest:
        _unequal(len(names), images, place)
    if all(message['role'] != 'assistant' for message in normalized):
        _refuse(place, 'no message is of the role "assistant", so nothing can be learned')
    return normalized, names


def _parts(content: object, place: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        first, *others = _check(content, place).split(MARKER)
        parts: list[dict[str, Any]] = [{'type': 'text', 'text': first}]
        for text in others:
            parts += [{'type': 'image'}, {'type': 'text', 'text': text}]
        return [part for part in parts if part.get('text') != '']
    if not isinstance(content, list):
        _refuse(place, f'a "content" is {_short(content)}, neither a text nor a list of parts')
    for part in content:
        kind = part.get('type') if isinstance(part, dict) else None
        if kind == 'text' and isinstance(part.get('text'), str):
            _check(part['text'], place)
        elif kind != 'image':
            _refuse(place, f'a part is {_short(part)}, neither a text nor an image')
    return content


def _pieces_of_chat(
    messages: list[Message], names: Sequence[str], vocabulary: Vocabulary, chat: Chat, place: str
) -> list[Piece]:
    pattern, guard = vocabulary.pattern(), _unused_guard(messages, place)
    guarded = _all_guarded(messages, pattern, guard)
    text, spans = _assistant_spans(guarded, chat, place)
    rest = list(reversed(names))
    pieces = []
    for start, stop, answered in _cuts(len(text), spans):
        last = start
        for match in [*pattern.finditer(text, start, stop), None]:
            end = match.start() if match else stop
            if end > last:
                between = text[last:end].replace(guard, '')
                pieces.append(Piece(text=between, answered=answered))
            if not match:
                break
            last, name = match.end(), match.group()
            inner = name.removeprefix(VISION[0]).removesuffix(VISION[1])
            if vocabulary.special.get(inner) == vocabulary.image_token or name == vocabulary.image:
                around = [] if inner == name else [vocabulary.special[token] for token in VISION]
                image = rest.pop() if rest else _unmatched(text, names, place)
                pieces += [Piece(token=token) for token in around[:1]]
                pieces.append(Piece(image=image))
                pieces += [Piece(token=token) for token in around[1:]]
            else:
                pieces.append(Piece(token=vocabulary.special[name], answered=answered))
    if rest:
        _unmatched(text, names, place)
    return pieces


def pieces_of_prompt(
    messages: list[Message], vocabulary: Vocabulary, chat: Chat, place: str
) -> list[Piece]:
    """Return the pieces of messages without pictures, up to where the assistant's turn begins."""
    pattern, guard = vocabulary.pattern(), _unused_guard(messages, place)
    (text,) = chat.render([(_all_guarded(messages, pattern, guard), True)], place=place)
    pieces, last = [], 0
    for match in pattern.finditer(text):
        token = vocabulary.special.get(match.group())
        if token is not None:
            pieces += [
                Piece(text=text[last : match.start()].replace(guard, '')),
                Piece(token=token),
            ]
            last = match.end()
    return [*pieces, Piece(text=text[last:].replace(guard, ''))]


def end_of_turn(vocabulary: Vocabulary, chat: Chat, place: str) -> int | None:
    """Return the special token that a template writes after an answer, None if there is none."""
    answer = GUARDS[0]
    turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': answer}]
    (text,) = chat.render([(turns, False)], place=place)
    _, found, after = text.rpartition(answer)
    match = vocabulary.pattern().match(after.lstrip()) if found else None
    return vocabulary.special.get(match.group()) if match else None


def _unused_guard(messages: list[Message], place: str) -> str:
    written = json.dumps(messages, ensure_ascii=False)
    guard = next((guard for guard in GUARDS if guard not in written), '')
    if not guard:
        _refuse(place, 'holds all noncharacters from U+FDD0 to U+FDEF')
    return guard


def _all_guarded(messages: list[Message], pattern: re.Pattern[str], guard: str) -> list[Message]:
    return [
        {**message, 'content': _guarded(message['content'], pattern, guard)} for message in messages
    ]


def _guarded(content: object, pattern: re.Pattern[str], guard: str) -> object:
    """Return the content with what spells a special token taken apart: it is text."""
    if isinstance(content, str):
        return pattern.sub(lambda match: match.group()[0] + guard + match.group()[1:], content)
    assert isinstance(content, list)
    return [
        {**part, 'text': _guarded(part['text'], pattern, guard)} if part['type'] == 'text' else part
        for part in content
    ]


def _assistant_spans(
    messages: list[Message], chat: Chat, place: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of all messages, and where in it the assistant's turns are.

    A turn is what the template adds for a message of the assistant after the beginning with which
    it asks for one, so that training sees what generation sees.
    """
    numbers = [i for i, message in enumerate(messages) if message['role'] == 'assistant']
    requests = [(messages, False)]
    for i in numbers:
        requests += [(messages[:i], True), (messages[: i + 1], False)]
    text, *others = chat.render(requests, place=place)
    spans = []
    for i, before, after in zip(numbers, others[::2], others[1::2], strict=True):
        if not after.startswith(before) or not text.startswith(after):
            _refuse(
                place,
                f'the chat template writes message {i + 1} otherwise once more messages follow, so '
                "the assistant's turn cannot be found",
                'split the messages, or change the template',
            )
        spans.append((len(before), len(after)))
    return text, spans


def _cuts(length: int, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    last = 0
    for start, stop in spans:
        yield last, start, False
        yield start, stop, True
        last = stop
    yield last, length, False


def _unmatched(text: str, names: Sequence[str], place: str) -> NoReturn:
    _refuse(
        place,
        f'the chat template does not write each of the {len(names)} pictures once: {_short(text)}',
        'use a template that knows pictures, or leave them out',
    )


def _unequal(places: int, images: Sequence[str], place: str) -> NoReturn:
    _refuse(place, f'has {places} places for pictures, and {len(images)} in "images"')


def _check(text: str, place: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(place, f'has an unpaired surrogate at character {error.start} of a text')
    return text


def _refuse(place: str, mistake: str, fix: str = 'correct the line') -> NoReturn:
    raise ConfigError(Problem(path=place, message=f'{mistake}; {fix}'))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'
