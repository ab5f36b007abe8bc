"""A process that renders a chat template, run as a script so that it loads nothing but jinja2.

jinja's sandbox keeps a template from the interpreter's internals, but not from looping forever or
from filling the memory; the operating system's timers and process limits prevent these. The process
reads one JSON line with the templates and the limits, then a line for each list of renderings, and
answers each line.
"""

import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = 'chat template'  # the file name of a template in tracebacks
# the process is killed after this many times the limit, even in a loop that Python cannot interrupt
GRACE = 2


class Generation(jinja2.ext.Extension):
    """Transformers' {% generation %}: `spans` has the places of the marks in a rendering's text.

    `is_found` says whether any parsed template has the tag.
    """

    tags = {'generation'}  # noqa: RUF012 (as in jinja2)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.is_found = False
        self.count = 0  # characters rendered so far
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the call of `note` for the nodes up to {% endgeneration %}."""
        self.is_found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method('note'), [], [], body).set_lineno(line)

    def note(self, caller: Callable[[], str]) -> str:
        """Return the text inside a mark, and record its place."""
        text = caller()
        self.spans.append((self.count, self.count + len(text)))
        return text


class Message(dict[str, Any]):
    """A message that records which of its keys a template has not read."""

    __module__ = 'builtins'  # so that errors of jinja2 call it a "Message object"
    __slots__ = ('_unread',)

    def __init__(self, keys: dict[str, Any]):
        super().__init__(keys)
        self._unread: set[object] = set(keys)

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._unread.discard(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._unread.clear()
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._unread.clear()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._unread.clear()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._unread.clear()
        return super().items()

    def __repr__(self) -> str:
        self._unread.clear()
        return super().__repr__()

    @classmethod
    def unread(cls, message: 'Message') -> list[str]:
        """Return the keys that were not read.

        It is a class method, because a template could mean a key by the name of an attribute.
        """
        return sorted(map(str, message._unread))


class CheckedNamespace(jinja2.utils.Namespace):
    """A jinja namespace that rejects names with a leading underscore, as in transformers."""

    # no parameter is called self, because a template may use that name
    def __init__(*args: Any, **names: Any) -> None:
        jinja2.utils.Namespace.__init__(*args, **names)
        for name in dict(*args[1:], **names):
            _refuse_underscore(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def make_environment() -> jinja2.Environment:
    """Return the environment in which transformers renders chat templates.

    Constants are not computed in advance, so that the time for them counts when a line is rendered.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.intercepted_binops = frozenset(environment.default_binop_table)
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = _raise
    environment.globals['namespace'] = CheckedNamespace
    return environment


class Templates:
    """Compiled templates by name."""

    def __init__(self, texts: dict[str, str], now: str):
        self._environment = make_environment()
        clock = datetime.fromisoformat(now)
        self._environment.globals['strftime_now'] = lambda form: clock.strftime(form)
        generation = self._environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._generation = generation
        self._templates: dict[str, jinja2.Template] = {}
        # the keys that each template reads, and whether it has marks
        self.about: dict[str, dict[str, Any]] = {}
        for name, text in texts.items():
            generation.is_found = False
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(text))
            self.about[name] = {'reads': sorted(names), 'has_marks': generation.is_found}
            code = self._environment.compile(text, name=TEMPLATE, filename=TEMPLATE)
            self._templates[name] = self._environment.template_class.from_code(
                self._environment, code, self._environment.globals
            )

    def render(self, name: str, variables: dict[str, Any], most: int) -> dict[str, Any]:
        """Render a template to at most `most` characters; raise ValueError if there are more."""
        generation, chunks = self._generation, []
        generation.count, generation.spans = 0, []
        messages = [Message(message) for message in variables['messages']]
        for chunk in self._templates[name].generate({**variables, 'messages': messages}):
            generation.count += len(chunk)
            if generation.count > most:
                raise ValueError(f'its text has more than {most:,} characters')
            chunks.append(chunk)
        return {
            'text': ''.join(chunks),
            'marked': generation.spans,
            'unread': [Message.unread(message) for message in messages],
        }


def serve(lines: Iterable[str]) -> None:
    """Answer the first line with {'templates': ...}, every other line with {'renderings': ...}.

    If a template or rendering fails, its answer is {'error': ...}.
    """
    requests = iter(lines)
    settings = json.loads(next(requests))
    with suppress(ValueError, OSError):  # a lower limit may be set already, or no limit is possible
        resource.setrlimit(resource.RLIMIT_AS, (settings['max_bytes'],) * 2)
    seconds = settings['max_seconds']
    signal.signal(signal.SIGVTALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_PROF, GRACE * seconds)  # the timer's signal ends the process
    try:
        templates = Templates(settings['templates'], settings['now'])
    except Exception as error:
        _answer({'error': _described(error, settings)})
        return
    _answer({'templates': templates.about})
    for request in requests:
        signal.setitimer(signal.ITIMER_PROF, GRACE * seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            renderings = [
                templates.render(name, variables, settings['max_characters'])
                for name, variables in json.loads(request)
            ]
            answer: dict[str, Any] = {'renderings': renderings}
        except Exception as error:  # a template can raise anything
            answer = {'error': _described(error, settings)}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _answer(answer)


def _described(error: Exception, limits: dict[str, Any]) -> str:
    kinds = {
        MemoryError: f'it fills the memory of {limits["max_bytes"] >> 20} MiB',
        TimeoutError: f'it takes more than {limits["max_seconds"]:g} s',
    }
    text = kinds.get(type(error)) or str(error) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == TEMPLATE]
    line = lines[-1] if lines else getattr(error, 'lineno', None)
    return f'{text}, in line {line}' if line else text


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + '\n')
    sys.stdout.flush()


def _time_is_up(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith('_'):
        raise jinja2.exceptions.SecurityError(f'{name!r} begins with an underscore; rename it')


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes; the parameters are the same as in transformers."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == '__main__':
    serve(sys.stdin)
