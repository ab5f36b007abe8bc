"""A process that renders a chat template, run as a script so that it loads nothing but jinja2.

jinja's sandbox keeps a template from the interpreter's internals, but not from looping or from
filling the memory; the system's timers and limits of a process do. It reads a JSON line with the
template and the limits, then one with a list of renderings at a time, and answers each.
"""

import json
import resource
import signal
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = 'chat template'  # its file name in tracebacks
GRACE = 2  # times the limit after which a loop that Python cannot interrupt is killed


class Generation(jinja2.ext.Extension):
    """Transformers' {% generation %}, which marks the assistant's turns: renders its body."""

    tags = {'generation'}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes up to {% endgeneration %}."""
        next(parser.stream)
        return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def make_environment() -> jinja2.Environment:
    """Return the environment in which transformers renders chat templates.

    Constants are not computed in advance, so that their cost counts where a line is rendered.
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
    environment.globals['strftime_now'] = lambda form: datetime.now().strftime(form)
    return environment


def render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """Render a template up to a number of characters; raises ValueError beyond it."""
    chunks, count = [], 0
    for chunk in template.generate(variables):
        count += len(chunk)
        if count > max_characters:
            raise ValueError(f'its text has more than {max_characters:,} characters')
        chunks.append(chunk)
    return ''.join(chunks)


def serve(lines: Iterable[str]) -> None:
    """Answer each line after the first with {'texts': ...} or {'error': ...}."""
    requests = iter(lines)
    settings = json.loads(next(requests))
    with suppress(ValueError, OSError):  # a lower limit may be set, or none possible
        resource.setrlimit(resource.RLIMIT_AS, (settings['max_bytes'],) * 2)
    seconds = settings['max_seconds']
    signal.signal(signal.SIGVTALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_PROF, GRACE * seconds)  # its signal ends the process
    try:
        environment = make_environment()
        code = environment.compile(settings['template'], name=TEMPLATE, filename=TEMPLATE)
        template = environment.template_class.from_code(environment, code, environment.globals)
    except Exception as error:
        _answer({'error': _described(error)})
        return
    _answer({})
    for request in requests:
        signal.setitimer(signal.ITIMER_PROF, GRACE * seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            texts = [
                render(template, variables, settings['max_characters'])
                for variables in json.loads(request)
            ]
            answer: dict[str, Any] = {'texts': texts}
        except Exception as error:  # a template can raise anything
            answer = {'error': _described(error)}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _answer(answer)


def _described(error: Exception) -> str:
    kinds = {MemoryError: 'it fills the memory', TimeoutError: 'it takes too long'}
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


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == '__main__':
    serve(sys.stdin)
