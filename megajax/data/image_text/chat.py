"""Messages as text: by a chat template, or in the plain form for a model without one."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megajax.config.errors import ConfigError, Problem
from megajax.config.extras import install

MAX_SECONDS = 2.0  # processor time for the renderings of one document
MAX_CHARACTERS = 1 << 22  # of a rendering
MAX_BYTES = 1 << 30  # address space of the process that renders

Message = dict[str, Any]  # 'role', and 'content': a text or a list of parts
Request = tuple[Sequence[Message], bool]  # messages, and whether the assistant's turn begins


class Chat(Protocol):
    """Makes texts of messages."""

    def render(self, requests: Sequence[Request], *, place: str) -> list[str]:
        """Return the text of each request; `place` is the line that holds the messages."""
        ...


class PlainChat:
    """Turns of ChatML where the tokenizer has its special tokens, else 'role: text' in lines.

    Without ChatML, `eod` ends the assistant's turn, and a new line that of any other.
    """

    def __init__(self, special_tokens: dict[str, int], *, image: str, eod: str):
        self._image, self._eod = image, eod
        self._is_chatml = {'<|im_start|>', '<|im_end|>'} <= special_tokens.keys()

    def render(self, requests: Sequence[Request], *, place: str) -> list[str]:
        """Return the text of each request."""
        return [
            ''.join(map(self._turn, messages)) + (self._begin('assistant') if begins else '')
            for messages, begins in requests
        ]

    def _begin(self, role: str) -> str:
        return f'<|im_start|>{role}\n' if self._is_chatml else f'{role}: '

    def _turn(self, message: Message) -> str:
        content = message['content']
        if not isinstance(content, str):
            content = ''.join(
                part['text'] if part['type'] == 'text' else self._image for part in content
            )
        end = self._eod if message['role'] == 'assistant' else '\n'
        return self._begin(message['role']) + content + ('<|im_end|>\n' if self._is_chatml else end)


class TemplateChat:
    """A chat template of Hugging Face, rendered in a process of its own, bounded in time and size.

    The template is `text`, or what is in the file `path`. Raises ConfigError if jinja2 is not
    installed or the template cannot be compiled.
    """

    def __init__(self, path: str | Path, *, bos: str = '', eos: str = '', text: str | None = None):
        self._path, self._variables = str(path), {'bos_token': bos, 'eos_token': eos}
        self._process: subprocess.Popen[str] | None = None
        if find_spec('jinja2') is None:
            raise self._problem(f'needs jinja2; install it with: {install("chat")}', '')
        try:
            template = Path(path).read_text('utf-8') if text is None else text
        except (OSError, UnicodeDecodeError) as error:
            raise self._problem(
                f'cannot be read ({error}); give a template in UTF-8', ''
            ) from error
        worker = Path(__file__).with_name('render_worker.py')
        self._process = subprocess.Popen(
            [sys.executable, '-P', str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding='utf-8',
            process_group=0,  # a Ctrl-C on the terminal is not meant for it
        )
        limits = {
            'template': template,
            'max_seconds': MAX_SECONDS,
            'max_characters': MAX_CHARACTERS,
            'max_bytes': MAX_BYTES,
        }
        self._ask(limits, '')

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render(self, requests: Sequence[Request], *, place: str) -> list[str]:
        """Return the text of each request; raises ConfigError at a limit or a template's error."""
        variables = [
            {'messages': messages, 'add_generation_prompt': begins, **self._variables}
            for messages, begins in requests
        ]
        texts: list[str] = self._ask(variables, place)['texts']
        return texts

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
            pass  # it has ended; its exit code tells why
        if not line.endswith('\n'):
            raise self._ended(place)
        answer: dict[str, Any] = json.loads(line)
        if 'error' in answer:
            raise self._problem(
                f'cannot be rendered within {MAX_SECONDS:g} s, {MAX_CHARACTERS:,} characters '
                f'and {MAX_BYTES >> 20} MiB: {answer["error"]}; correct the template or the '
                'messages',
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
        return ConfigError(Problem(path=self._path, message=message, place=place))
