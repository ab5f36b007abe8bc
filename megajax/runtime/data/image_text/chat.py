"""Convert messages to text, with a chat template or in a plain form."""

import json
import signal
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypeGuard

from megajax.base.errors import ConfigError, mistake
from megajax.core.config.extras import install

# maximum CPU time for rendering a document, or for both renderings that find one of its answers
MAX_SECONDS = 2.0
MAX_CHARACTERS = 1 << 22  # maximum number of characters of a rendering
MAX_BYTES = 1 << 30  # maximum address space of the process that renders
DEFAULT, TOOL_USE = 'default', 'tool_use'  # names of templates between which transformers chooses
CLOCK = 'strftime_now'  # the function with which a template asks for the time
# the names of a message's reasoning; transformers passes it under the first two as well
REASONING = 'reasoning_content', 'thinking', 'reasoning'
LINKS = 'tool_call_id', 'name'  # keys that only link a tool's response to its call

Message = Mapping[str, Any]  # 'role', and the other keys in the line


@dataclass(frozen=True, kw_only=True)
class Request:
    """Messages to convert to text."""

    messages: Sequence[Message]
    begins: bool = False  # whether the text ends with the beginning of an assistant's turn
    # variables such as tools and documents
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Messages as text."""

    text: str
    # where the template's generation marks are; None if the template has none at all
    marked: Sequence[tuple[int, int]] | None = None
    # unread keys of the line (0) or of a message, by its number
    unread: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Template:
    """A Hugging Face chat template, or several by name."""

    name: str  # name in error messages: the file, or its run
    texts: Mapping[str, str]
    # the time that the template gets; by default, the time of first use
    now: datetime | None = None

    @property
    def asks_for_time(self) -> bool:
        """Whether the template's output may depend on the time."""
        return any(CLOCK in text for text in self.texts.values())


def read_template(path: str | Path, now: datetime | None = None) -> Template:
    """Return the chat template of a Jinja file, or of a JSON file's key `chat_template`.

    If the key has several, these are the ones between which transformers chooses. Raises
    ConfigError if the file cannot be read, or if it is JSON without a default template.
    """
    try:
        text: Any = Path(path).expanduser().read_text('utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        message = f'cannot be read ({error}); give a template in UTF-8'
        raise mistake(path, message) from error
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            text = found.get('chat_template')
    named = named_templates(text)
    if DEFAULT not in named:
        message = 'is JSON without a text or a template "default" in "chat_template"; add one'
        raise mistake(path, message)
    texts = {name: named[name] for name in (DEFAULT, TOOL_USE) if name in named}
    return Template(name=str(path), texts=texts, now=now)


def named_templates(templates: object) -> dict[str, str]:
    """Return the templates of a key `chat_template`, one or several, by name."""
    if isinstance(templates, list):
        listed = [each for each in templates if isinstance(each, dict)]
        templates = {each.get('name'): each.get('template') for each in listed}
    named = templates if isinstance(templates, dict) else {DEFAULT: templates}
    return {
        name: text
        for name, text in named.items()
        if isinstance(name, str) and isinstance(text, str)
    }


class Chat(Protocol):
    """An object that converts messages to text."""

    begins_texts: bool  # whether its texts include the beginning of a document, such as Llama's BOS

    def render(self, requests: Sequence[Request], *, place: str) -> list[Rendering]:
        """Return the text of each request; `place` is the line with the messages."""
        ...


class PlainChat:
    """Writes turns as ChatML if the tokenizer has ChatML's tokens, else as "role: text" lines.

    Without ChatML, `eod` ends the assistant's turns, and a line break ends all other turns.
    """

    begins_texts = False

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        *,
        image: str,
        eod: str,
        ignored: Container[str] = (),
    ):
        self._image, self._eod, self._ignored = image, eod, ignored
        self._is_chatml = {'<|im_start|>', '<|im_end|>'} <= special_tokens.keys()

    def render(self, requests: Sequence[Request], *, place: str) -> list[Rendering]:
        """Return the text of each request; raises ConfigError for a message without content."""
        return [
            Rendering(
                text=''.join(self._turn(message, place) for message in request.messages)
                + (self._begin('assistant') if request.begins else ''),
                unread=_unread(
                    request,
                    request.variables,
                    [{*message, *REASONING} - {'role', 'content'} for message in request.messages],
                    self._ignored,
                ),
            )
            for request in requests
        ]

    def _begin(self, role: str) -> str:
        return f'<|im_start|>{role}\n' if self._is_chatml else f'{role}: '

    def _turn(self, message: Message, place: str) -> str:
        content = message.get('content')
        if not isinstance(content, str) and not are_parts(content):
            problem = (
                f'a message with the role "{message["role"]}" has no text in "content", which is '
                'needed without a chat template; set data.chat_template, or correct the line'
            )
            raise mistake(place, problem, 'data.chat_template')
        if not isinstance(content, str):
            content = ''.join(
                part['text'] if part['type'] == 'text' else self._image for part in content
            )
        end = self._eod if message['role'] == 'assistant' else '\n'
        return self._begin(message['role']) + content + ('<|im_end|>\n' if self._is_chatml else end)


class TemplateChat:
    """A chat template as transformers renders it, in a process limited in time and memory.

    `named_tokens` are the tokens that the template can name, such as bos_token. The template may
    leave keys in `ignored` unread. Raises ConfigError if jinja2 is not installed.
    """

    begins_texts = True

    def __init__(
        self,
        template: Template,
        named_tokens: Mapping[str, str] | None = None,
        *,
        ignored: Container[str] = (),
    ):
        self._template, self._tokens, self._ignored = template, named_tokens or {}, ignored
        self._now = (template.now or datetime.now()).isoformat()
        self._process: subprocess.Popen[str] | None = None
        self._templates: dict[str, dict[str, Any]] = {}  # what is known of each template, by name
        if find_spec('jinja2') is None:
            raise self._problem(f'needs jinja2; install it with: {install("chat")}', '')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render(self, requests: Sequence[Request], *, place: str) -> list[Rendering]:
        """Return the text of each request.

        Raises ConfigError if rendering exceeds a limit or the template fails.
        """
        if self._process is None:
            self._start()
        names = [self._name(request, place) for request in requests]
        messages = [list(map(_as_transformers_gives, request.messages)) for request in requests]
        asked = [
            [
                name,
                {
                    'tools': None,
                    'documents': None,
                    **self._tokens,
                    **request.variables,
                    'messages': given,
                    'add_generation_prompt': request.begins,
                },
            ]
            for name, request, given in zip(names, requests, messages, strict=True)
        ]
        answers = self._ask(asked, place)['renderings']
        renderings = []
        for name, request, answer in zip(names, requests, answers, strict=True):
            about = self._templates[name]
            unread = request.variables.keys() - about['reads']
            renderings.append(
                Rendering(
                    text=answer['text'],
                    marked=list(map(tuple, answer['marked'])) if about['has_marks'] else None,
                    unread=_unread(request, unread, answer['unread'], self._ignored),
                )
            )
        return renderings

    def _start(self) -> None:
        """Start the process if it has not been started yet, or has ended with an error."""
        worker = Path(__file__).with_name('render_worker.py')
        self._process = subprocess.Popen(
            [sys.executable, '-P', str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding='utf-8',
            process_group=0,  # so that a Ctrl-C on the terminal does not end it
        )
        settings = {
            'templates': dict(self._template.texts),
            'now': self._now,
            'max_seconds': MAX_SECONDS,
            'max_characters': MAX_CHARACTERS,
            'max_bytes': MAX_BYTES,
        }
        self._templates = self._ask(settings, '')['templates']

    def _name(self, request: Request, place: str) -> str:
        """Return the name of the template that transformers chooses."""
        if request.variables.get('tools') is not None and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT not in self._templates:
            names = ', '.join(self._templates)
            raise self._problem(
                f'has templates named {names}, and none named default; set data.chat_template',
                place,
            )
        return DEFAULT

    def _ask(self, question: object, place: str) -> dict[str, Any]:
        assert self._process is not None, 'the process has ended'
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ''
        try:
            self._process.stdin.write(json.dumps(question) + '\n')
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass  # the process has ended; its exit code tells why
        if not line.endswith('\n'):
            raise self._ended(place)
        answer: dict[str, Any] = json.loads(line)
        if 'error' in answer:
            raise self._problem(
                f'cannot be rendered: {answer["error"]}; correct the template or the messages',
                place,
            )
        return answer

    def _ended(self, place: str) -> ConfigError:
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            message = f'takes more than {MAX_SECONDS:g} s; does it loop? correct it'
        else:
            message = f'ended its process with code {code}; correct the template'
        return self._problem(message, place)

    def _problem(self, message: str, place: str) -> ConfigError:
        self.close()
        return mistake(self._template.name, message, place=place)


def _as_transformers_gives(message: Message) -> dict[str, Any]:
    """Return a message as `apply_chat_template` passes it on.

    Keys whose value is null are dropped, and all names that templates use for reasoning are filled.
    """
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {'thinking': reasoning, **given, 'reasoning_content': reasoning}


def _unread(
    request: Request,
    variables: Container[str],
    messages: Sequence[Container[str]],
    ignored: Container[str],
) -> list[tuple[int, str]]:
    """Return the unread keys that carry information.

    Reasoning counts as read under any of its names. The ids that link tool responses to calls do
    not count, because the order of messages links them, too.
    """

    def counts(key: str, value: object, unread: Container[str]) -> bool:
        names = {key, *REASONING[:2]} if key in REASONING else {key}
        return (
            all(name in unread for name in names)
            and value not in (None, '', [], {})
            and key != 'role'
            and key not in ignored
        )

    of_line = [(0, key) for key, x in request.variables.items() if counts(key, x, variables)]
    return of_line + [
        (number, key)
        for number, (message, unread) in enumerate(zip(request.messages, messages, strict=True), 1)
        for key, x in message.items()
        if counts(key, x, unread) and not (message['role'] == 'tool' and key in LINKS)
    ]


def are_parts(content: object) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a message's content is a list of texts and images, not the response of a tool."""
    return isinstance(content, list) and all(isinstance(x, dict) and 'type' in x for x in content)
