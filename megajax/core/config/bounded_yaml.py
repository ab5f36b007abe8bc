"""Parse YAML with limits, so that any file is read or rejected within a second.

This is YAML 1.2: `3e-4` is a number, `off` and `2026-01-01` are text. Each alias counts with all
its nodes, so that a few lines cannot expand to gigabytes.
"""

from collections.abc import Iterator
from functools import lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from megajax.base.errors import MAX_REASON_CHARACTERS
from megajax.base.render.text import shorten

MAX_BYTES = 100_000  # the longest preset has 1,047
MAX_NODES = 5_000  # keys and values, including those in aliases
MAX_DEPTH = 20  # nested groups and lists; a config has three
MAX_DIGITS = 100  # characters of a number
STRING = 'tag:yaml.org,2002:str'
INTEGER, FLOAT = 'tag:yaml.org,2002:int', 'tag:yaml.org,2002:float'


class Yaml(YAML):
    """A YAML without plug-ins; ruamel's looks for them in its folder whenever it is created."""

    def official_plug_ins(self) -> Any:
        """Return no plug-ins."""
        return []


class LimitError(MarkedYAMLError):
    """A document that may be YAML, but exceeds a limit for configs."""


class _Constructor(SafeConstructor):
    """A constructor that reads as text what YAML 1.2 does, but ruamel takes for something else.

    These are dates, and numbers without digits, such as `-_`, `0x_` and `._`.
    """

    def number(self, node: ScalarNode) -> int | float | str:
        """Return the number of a node; its text if it has no digits."""
        is_float = str(node.tag) == FLOAT
        try:
            return self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
        except ValueError:
            return str(self.construct_yaml_str(node))


_Constructor.add_constructor('tag:yaml.org,2002:timestamp', SafeConstructor.construct_yaml_str)
for _tag in (INTEGER, FLOAT):
    _Constructor.add_constructor(_tag, _Constructor.number)


class _Composer(Composer):
    """A composer that rejects a document as soon as it exceeds a limit."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self.warn_double_anchors = False  # YAML 1.2 allows an anchor to be defined twice
        self._depth = self._nodes = 0
        self._sizes = dict[Node, int]()  # number of nodes in each subtree

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; raise LimitError if the document exceeds a limit."""
        event, before = self.parser.peek_event(), self._nodes
        is_alias = isinstance(event, AliasEvent)
        if getattr(event, 'tag', None):
            problem = 'tags such as !!int are not supported; remove it'
            raise ComposerError(None, None, problem, event.start_mark)
        if self._depth == MAX_DEPTH:
            self._reject(f'more than {MAX_DEPTH} nested groups and lists', event)
        self._depth += 1
        self._nodes += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            if node not in self._sizes:
                self._reject(f'the alias *{event.anchor} contains itself', event)
            self._nodes = before + self._sizes[node]
        if self._nodes > MAX_NODES:
            self._reject(f'more than {MAX_NODES:,} keys and values; a config has about 100', event)
        self._check(node)
        self._sizes[node] = self._nodes - before
        return node

    def _check(self, node: Node) -> None:
        if isinstance(node, ScalarNode):
            if str(node.tag) != STRING and len(node.value) > MAX_DIGITS:
                self._reject(f'a number with {len(node.value):,} digits', node)
            if any('\ud800' <= x <= '\udfff' for x in node.value):
                self._reject('an unpaired surrogate, which is not text', node)
        if isinstance(node, MappingNode):
            for key, _ in node.value:
                if not isinstance(key, ScalarNode):
                    self._reject('a key that is a group or a list', key)

    def _reject(self, problem: str, where: Any) -> None:
        raise LimitError(None, None, problem, where.start_mark)


def read_text(file: Path | Traversable) -> str:
    """Return a file's text; raise YAMLError if it is longer than any config or not UTF-8."""
    with file.open('rb') as opened:
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise LimitError(problem=f'more than {MAX_BYTES:,} bytes; a config has about 1,000')
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise YAMLError(str(error)) from error


@lru_cache(maxsize=64)
def compose(text: str) -> Node | None:
    """Return the root of a document, or None if it is empty; raise YAMLError if it is not YAML.

    Texts that were read lately are not parsed again: a process may load many configs of a preset.
    """
    try:
        return _yaml().compose(text)
    # ruamel raises these for some directives and escapes.
    except (ValueError, ArithmeticError, AssertionError) as error:
        raise YAMLError(str(error)) from error


def construct(node: Node) -> Any:
    """Return the value of a node; raise YAMLError if the node has none."""
    return _yaml().constructor.construct_document(node)


def parse(text: str) -> Any:
    """Return the value of a document; raise YAMLError as `compose` and `construct` do."""
    node = compose(text)
    return None if node is None else construct(node)


def has_comment(text: str) -> bool:
    """Return whether a document, which must be valid YAML, has a comment."""
    root = compose(text)
    spans = [(node.start_mark.index, node.end_mark.index) for node in _scalars(root)]
    signs = (place for place, sign in enumerate(text) if sign == '#')
    return any(not any(start <= place < end for start, end in spans) for place in signs)


def _scalars(node: Node | None) -> Iterator[Node]:
    if isinstance(node, ScalarNode):
        yield node
    elif node is not None:
        pairs = isinstance(node, MappingNode)
        for part in (x for pair in node.value for x in pair) if pairs else node.value:
            yield from _scalars(part)


def explain(error: YAMLError) -> str:
    """Return the error as one line of bounded length."""
    reason = getattr(error, 'problem', None) or str(error).splitlines()[0]
    reason = shorten(reason, MAX_REASON_CHARACTERS)
    return reason if isinstance(error, LimitError) else f'not valid YAML: {reason}'


def _yaml() -> Any:
    yaml: Any = Yaml(typ='safe', pure=True)
    yaml.Composer, yaml.Constructor = _Composer, _Constructor
    return yaml
