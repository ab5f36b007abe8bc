"""`megajax generate --chat`: chat on a terminal, or answer the lines of a pipe."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megajax.base.render.text import visible
from megajax.commands.generate_output import note
from megajax.core.config import ConfigError, mistake

if TYPE_CHECKING:
    from megajax.runtime.checkpoint.open import Opened
    from megajax.runtime.generate import Request
    from megajax.runtime.generate.conversation import Conversation

KEY = 'data.chat_template'
PROMPT = '> '


def check_chat(is_chat: bool, system: str | None, others: Mapping[str, object]) -> None:
    """Raise ConfigError for options that conflict, before jax is imported."""
    if is_chat and (given := [name for name, value in others.items() if value]):
        raise ConfigError(f'--chat takes its turns from --prompt or input: remove {given[0]}')
    if system is not None and not is_chat:
        raise ConfigError('--system needs a chat: add --chat')


def check_unicode(where: str, texts: Sequence[str]) -> None:
    """Raise ConfigError for a text that is not UTF-8, or that was not decoded as UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f'{text!r} is not UTF-8 at character {error.start}: write it in UTF-8'
            with suppress(UnicodeError):
                problem = (
                    f'{os.fsencode(text).decode()!r} is UTF-8, but with this locale Python decodes '
                    f'it as {sys.getfilesystemencoding()}: set PYTHONUTF8=1 or LC_ALL=C.UTF-8'
                )
            raise ConfigError(f'{where}: {problem}') from error


def converse(
    run: Path,
    opened: 'Opened',
    overrides: Sequence[str],
    request: 'Request',
    *,
    system: str | None,
    said: Sequence[str] | None,
    images: Sequence[Path] = (),
) -> None:
    """Answer the texts in `said`, or the lines of standard input if it is None.

    Each <image> in a text stands for the next of `images`. Raises ConfigError if the run has no
    chat template, or if a text cannot be answered. On a terminal, the chat continues after a text
    that cannot be answered.
    """
    import jax

    from megajax.runtime.data.image_text.load import open_chat
    from megajax.runtime.data.synthetic_corpus import NO_TOKEN
    from megajax.runtime.generate import Generator
    from megajax.runtime.generate.conversation import Conversation

    tokenizer, vision = opened.tokenizer, opened.config.vision
    if tokenizer is None:
        raise ConfigError(f'{run} has no tokenizer, so it cannot chat')
    if images and vision is None:
        raise ConfigError('this is a text-only model: give no images, or train with vision')
    template = opened.chat_template(run, overrides)
    if template is None:
        message = f'{run} has no chat template: add {KEY}=FILE, a Hugging Face chat template'
        raise mistake(KEY, message)
    with (
        open_chat(tokenizer, vision.image_token if vision else NO_TOKEN, template) as chat,
        jax.set_mesh(opened.mesh),
    ):
        generator = Generator(opened.config, opened.params, tokenizer, donate=True)
        conversation = Conversation(generator, chat, request, system, images)
        is_asked = said is None and sys.stdin.isatty()
        for turn in _lines(is_asked) if said is None else said:
            try:
                _answer(conversation, turn)
            except ConfigError as error:
                if not is_asked:
                    raise
                note(str(error))


def _lines(is_asked: bool) -> Iterator[str]:
    """Yield the non-blank lines of standard input; Ctrl-C discards the line being typed.

    The prompt is written to the terminal: a file or a pipe gets only the answers.
    """
    terminal = sys.stdout if sys.stdout.isatty() else sys.stderr
    if is_asked:
        import readline  # noqa: F401 (input() edits lines with it)
    while True:
        try:
            line = _typed_line() if is_asked else sys.stdin.readline()
        except KeyboardInterrupt:
            print(file=terminal)
            continue
        except EOFError:  # Ctrl-D
            print(file=terminal)
            return
        except UnicodeDecodeError as error:
            raise ConfigError(f'standard input is not UTF-8: {error.reason}') from error
        if not is_asked and not line:
            return
        if line.strip():
            yield line.removesuffix('\n')


def _typed_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    print(PROMPT, end='', file=sys.stderr, flush=True)
    return input()


def _answer(conversation: 'Conversation', turn: str) -> None:
    """Print the answer while it is generated; Ctrl-C ends it."""
    check_unicode('input', [turn])
    dropped, shown, end = conversation.dropped, 0, None
    with _interrupts() as interrupted, closing(conversation.answer(turn)) as answer:
        for row in answer:
            if conversation.dropped > dropped:
                number, dropped = conversation.dropped - dropped, conversation.dropped
                note(f'dropped the oldest turns, which no longer fit: {number}')
            new, shown, end = row.text[shown:], len(row.text), row.end
            # Control characters are escaped on a terminal, but unchanged in a pipe.
            sys.stdout.write(visible(new) if sys.stdout.isatty() else new)
            sys.stdout.flush()
            if interrupted:
                break
    sys.stdout.write('\n')
    sys.stdout.flush()
    if end == 'length':
        note('the answer was cut at --max-tokens or model.max_seq_len')


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that gets an entry at Ctrl-C; a second Ctrl-C raises KeyboardInterrupt."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
