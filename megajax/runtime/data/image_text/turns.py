"""Split a rendered conversation into pieces, and find the pieces that the model writes."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from megajax.base.errors import mistake
from megajax.runtime.data.image_text.chat import Chat, Message, Rendering, Request, are_parts
from megajax.runtime.data.sources.commands import jq
from megajax.runtime.data.sources.image_keys import MARKER
from megajax.runtime.data.text.pieces import GUARDS, Piece

VISION = '<|vision_start|>', '<|vision_end|>'  # put around an image if a tokenizer has them
ASSISTANT = 'assistant'
# names of the assistant in other datasets
OTHER_NAMES = 'gpt', 'chatgpt', 'bot', 'chatbot', 'model', 'ai', 'function_call'
# The jq program that joins the parts of each message.
JOIN = '.messages[].content |= (if type == "array" then map(.text) | join("") else . end)'


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The special tokens of a tokenizer by name, and the image placeholder token."""

    special: dict[str, int]
    image_token: int  # negative for a text-only model

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        return self.image_token >= 0

    @property
    def image(self) -> str:
        """The text that stands for an image in a chat."""
        name = next((name for name, i in self.special.items() if i == self.image_token), MARKER)
        return name.join(VISION) if set(VISION) <= self.special.keys() else name

    def pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches special tokens and images, the longest first."""
        names = {*self.special, self.image} if self.sees else self.special.keys()
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')


@dataclass(frozen=True)
class Guard:
    """A character that breaks up special tokens spelled in a message, so that they stay text."""

    mark: str
    pattern: re.Pattern[str]

    def put(self, value: Any) -> Any:
        """Return a value with the guard in all of its strings, including keys."""
        if isinstance(value, str):
            return self.pattern.sub(lambda m: m.group()[0] + self.mark + m.group()[1:], value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(x) for key, x in value.items()}
        return [self.put(x) for x in value] if isinstance(value, list) else value

    def take(self, text: str) -> str:
        """Return a text without the guard, even where a template has escaped it as JSON."""
        return text.replace(self.mark, '').replace(_escaped(self.mark), '')


def pieces_of_chat(
    request: Request, names: Sequence[str], vocabulary: Vocabulary, chat: Chat, place: str
) -> list[Piece]:
    """Return the pieces of messages; `names` are the images that they show, in order.

    Raises ConfigError if the template does not read a key, or if it is not clear which part of the
    text the assistant writes.
    """
    guard, guarded, rendering = _render(request, vocabulary, chat, place)
    text, spans = rendering.text, rendering.marked
    _check_no_list_is_printed(guarded.messages, text, place)
    if spans is None:
        spans = _assistant_spans(guarded, text, chat, guard, place)
    if not spans:
        refuse(
            place,
            "the chat template marks nothing in this line as the assistant's, so nothing can be "
            'learned',
        )
    pieces = _split(text, _cuts(len(text), spans), names, vocabulary, guard, place)
    _check_all_is_read(rendering, place)
    return pieces


def pieces_of_prompt(
    messages: Sequence[Message],
    vocabulary: Vocabulary,
    chat: Chat,
    place: str,
    names: Sequence[str] = (),
) -> list[Piece]:
    """Return the pieces of messages up to the beginning of the assistant's turn.

    `names` are the images that they show, in order. Raises ConfigError if the template treats a
    text differently when it spells a special token.
    """
    request = Request(messages=messages, begins=True)
    guard, _, rendering = _render(request, vocabulary, chat, place)
    whole = [(0, len(rendering.text), False)]
    return _split(rendering.text, whole, names, vocabulary, guard, place)


def _split(
    text: str,
    cuts: Iterable[tuple[int, int, bool]],
    names: Sequence[str],
    vocabulary: Vocabulary,
    guard: Guard,
    place: str,
) -> list[Piece]:
    """Return the pieces of the parts of a text, each of which is answered or not."""
    rest = list(reversed(names))
    pieces = []
    for start, stop, answered in cuts:
        last = start
        for match in [*guard.pattern.finditer(text, start, stop), None]:
            end = match.start() if match else stop
            if end > last:
                pieces.append(Piece(text=guard.take(text[last:end]), answered=answered))
            if not match:
                break
            last, name = match.end(), match.group()
            inner = name.removeprefix(VISION[0]).removesuffix(VISION[1])
            is_image = vocabulary.special.get(inner) == vocabulary.image_token
            if is_image or (vocabulary.sees and name == vocabulary.image):
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


def end_of_turn(
    vocabulary: Vocabulary, chat: Chat, place: str, before: Sequence[Message] = ()
) -> int | None:
    """Return the special token that a template writes after an answer, or None if there is none.

    Raises ConfigError if it cannot render the messages `before`, a text and an answer.
    """
    answer = GUARDS[0]
    turns = [*before, {'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': answer}]
    (rendering,) = chat.render([Request(messages=turns)], place=place)
    _, found, after = rendering.text.rpartition(answer)
    match = vocabulary.pattern().match(after.lstrip()) if found else None
    return vocabulary.special.get(match.group()) if match else None


def _unused_guard(request: Request, vocabulary: Vocabulary, place: str) -> Guard:
    written = json.dumps([request.messages, request.variables], ensure_ascii=False)
    mark = next((x for x in GUARDS if x not in written and _escaped(x) not in written), '')
    if not mark:
        refuse(place, 'holds all noncharacters from U+FDD0 to U+FDEE')
    return Guard(mark, vocabulary.pattern())


def _escaped(mark: str) -> str:
    return f'\\u{ord(mark):04x}'


def _render(
    request: Request, vocabulary: Vocabulary, chat: Chat, place: str
) -> tuple[Guard, Request, Rendering]:
    """Return the output of a template for a request with a guard in its texts.

    Raises ConfigError if the output differs when a special token is spelled.
    """
    guard = _unused_guard(request, vocabulary, place)
    messages = [guard.put(message) for message in request.messages]
    guarded = replace(request, messages=messages, variables=guard.put(request.variables))
    (rendering,) = chat.render([guarded], place=place)
    if guarded != request and guard.take(rendering.text) != _text(request, chat, place):
        _refuse_read_token(request, guard, place)
    return guard, guarded, rendering


def _refuse_read_token(request: Request, guard: Guard, place: str) -> NoReturn:
    written = json.dumps([request.messages, request.variables], ensure_ascii=False)
    found = ', '.join(sorted(set(guard.pattern.findall(written))))
    refuse(
        place,
        f'spells special tokens ({short(found)}): the chat template then writes a different text, '
        'but megajax reads them as ordinary text',
        'give what they enclose its own key, such as "reasoning_content", or set "special" to '
        'false for these tokens in tokenizer.json',
    )


def _check_all_is_read(rendering: Rendering, place: str) -> None:
    if not rendering.unread:
        return
    names = [
        f'"{key}" of message {number}' if number else f'"{key}"' for number, key in rendering.unread
    ]
    keys = ','.join(dict.fromkeys(key for _, key in rendering.unread))
    refuse(
        place,
        f'{short(", ".join(names), 200)}: the chat template does not read this, so it would be '
        'lost',
        f'remove it, set data.chat_template to one that reads it, or data.ignored_keys=[{keys}]',
        'data.chat_template',
        'data.ignored_keys',
    )


def _assistant_spans(
    request: Request, text: str, chat: Chat, guard: Guard, place: str
) -> list[tuple[int, int]]:
    """Return the places of the assistant's turns in the text of all messages.

    A turn is the text that the template adds for an assistant message after the generation prompt,
    so that training sees the same text as generation. Special tokens that the template writes once,
    after all turns, belong to the last message.
    """
    messages = request.messages
    _check_assistants_name(messages, place)
    numbers = [i for i, message in enumerate(messages) if message['role'] == ASSISTANT]
    if not numbers:
        refuse(place, 'no message has the role "assistant", so nothing can be learned')
    spans = []
    last = 0
    for i in numbers:
        # the limits of a template hold for what is rendered together
        asked = [_up_to(request, i, guard), replace(request, messages=messages[: i + 1])]
        before, after = (rendering.text for rendering in chat.render(asked, place=place))
        start = len(before)
        if not text.startswith(before):
            start = _shared(before, text, guard.pattern)
            earlier = replace(request, messages=messages[:i])
            if i and start < _shared(before, _text(earlier, chat, place), guard.pattern):
                _rewritten(i, place)
        stop = _shared(after, text, guard.pattern)
        if guard.pattern.sub('', after[stop:]).strip():
            _rewritten(i, place)
        last, start = max(last, stop), max(last, start)
        spans.append((start, last))
    return spans


def _check_assistants_name(messages: Sequence[Message], place: str) -> None:
    """Raise ConfigError for a role that means the assistant but would not count in the loss."""
    for number, message in enumerate(messages, 1):
        role = message['role']
        name = role.strip().lower()
        if role != ASSISTANT and (
            name in OTHER_NAMES or get_close_matches(name, [ASSISTANT], 1, 0.8)
        ):
            refuse(
                place,
                f'message {number} has the role "{role}", whose turns do not count in the loss',
                f'write "{ASSISTANT}" if it is an answer of the model',
            )


def _check_no_list_is_printed(messages: Sequence[Message], text: str, place: str) -> None:
    """Raise ConfigError if a text-only template writes a list of parts as Python code."""
    for number, message in enumerate(messages, 1):
        content = message.get('content')
        if content and are_parts(content) and str(content) in text:
            fault = f'the chat template writes the parts of message {number} as {short(content)}'
            refuse(place, fault, f'make the content one text: {jq(JOIN, place)}')


def _up_to(request: Request, i: int, guard: Guard) -> Request:
    """Return the text before the assistant's message `i`, up to its content.

    Templates may need at least one message, so the first message gets a placeholder as its content.
    """
    if i:
        return replace(request, messages=request.messages[:i], begins=True)
    probe = {'role': 'assistant', 'content': guard.mark}
    return replace(request, messages=[probe, *request.messages[1:]])


def _text(request: Request, chat: Chat, place: str) -> str:
    (rendering,) = chat.render([request], place=place)
    return rendering.text


def _shared(a: str, b: str, pattern: re.Pattern[str]) -> int:
    """Return the length of the common prefix of two texts, without a partial token."""
    if b.startswith(a):
        return len(a)
    shorter = min(len(a), len(b))
    length = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    for text in (a, b):
        for match in pattern.finditer(text):
            if match.start() < length < match.end():
                length = match.start()
    return length


def _rewritten(i: int, place: str) -> NoReturn:
    refuse(
        place,
        f'the chat template writes message {i + 1} differently if more messages follow (Qwen3 '
        'drops earlier reasoning), so training would not match generation',
        "use a template with {% generation %} around the assistant's turns, or lines with one "
        'assistant message',
    )


def _cuts(length: int, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    last = 0
    for start, stop in spans:
        yield last, start, False
        yield start, stop, True
        last = stop
    yield last, length, False


def _unmatched(text: str, names: Sequence[str], place: str) -> NoReturn:
    refuse(
        place,
        f'the chat template does not write each of the {len(names)} images once: {short(text)}',
        'use a template that supports images, or remove them',
    )


def refuse(place: str, fault: str, fix: str = 'correct the line', *others: str) -> NoReturn:
    """Raise ConfigError for a fault of a line."""
    raise mistake(place, f'{fault}; {fix}', *others)


def short(value: object, most: int = 60) -> str:
    """Return the beginning of a value as text, for messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f'{text[:most]}...'
