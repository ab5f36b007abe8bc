"""Small changes of Python code, one place at a time, for `benchmarks/mutants.py`.

A change is inside the body of a function. Docstrings, other strings, annotations, decorators,
assertions, and what is said in errors and logs, stay as they are: no test need notice them.
"""

import ast
import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

ADD, SUBTRACT, MULTIPLY, DIVIDE = ast.Add, ast.Sub, ast.Mult, ast.Div
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ADD: SUBTRACT,
    SUBTRACT: ADD,
    MULTIPLY: DIVIDE,
    DIVIDE: MULTIPLY,
    ast.FloorDiv: MULTIPLY,
    ast.Mod: ast.FloorDiv,
    ast.Pow: MULTIPLY,
    ast.MatMult: MULTIPLY,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LOGS = {'debug', 'info', 'warning', 'error', 'exception'}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A place of the code and what stands there instead; both as Python writes them in one line."""

    file: str  # from the root of the repository
    function: str  # the outermost one, with its classes
    kind: str
    start: tuple[int, int]  # line, from 1, and byte in it
    end: tuple[int, int]
    before: str
    after: str

    @property
    def line(self) -> int:
        return self.start[0]

    @property
    def text(self) -> str:
        return f'{self.before} -> {self.after}'

    def apply(self, source: str) -> str:
        """The source with this change; every other line keeps its number."""
        lines = source.encode().splitlines(keepends=True)
        (first, start), (last, end) = self.start, self.end
        lost = b'\n' * (last - first)
        after = (
            self.after.encode()
            if self.kind == 'removed statement'
            else b'(' + self.after.encode() + lost + b')'
        )
        changed = lines[first - 1][:start] + after + lines[last - 1][end:]
        padding = lost if self.kind == 'removed statement' else b''
        return b''.join([*lines[: first - 1], changed, padding, *lines[last:]]).decode()


def room_of(file: str) -> str:
    """The room of the package that holds a file, such as `core/train`; `megajax` for none."""
    return '/'.join(Path(file).parent.parts[1:3]) or 'megajax'


def changes_of(file: str, source: str) -> list[Change]:
    """Every change of a file, and a few that would leave no Python (see `is_valid`)."""
    return [
        _change(file, name, kind, node, changed)
        for function, name in _functions(ast.parse(source).body)
        for node, kind, changed in _changed_nodes(function.body)
    ]


def sample(
    root: Path, files: Sequence[str], *, seed: int, packages: Sequence[str] = ()
) -> Iterator[Change]:
    """Changes, none twice: of each room in turn, first a kind and then a place at random."""
    places: dict[str, dict[str, list[Change]]] = {}
    for file in sorted(files):
        if not packages or room_of(file) in packages:
            for change in changes_of(file, (root / file).read_text()):
                places.setdefault(room_of(file), {}).setdefault(change.kind, []).append(change)
    # A generator of its own for each room: leaving one out changes nothing in the others.
    generators = {room: random.Random(f'{seed} {room}') for room in places}
    while places:
        for room in sorted(places):
            kind = generators[room].choice(sorted(places[room]))
            left = places[room][kind]
            change = left.pop(generators[room].randrange(len(left)))
            if is_valid(change, (root / change.file).read_text()):
                yield change
            places[room] = {kind: changes for kind, changes in places[room].items() if changes}
        places = {room: kinds for room, kinds in places.items() if kinds}


def _functions(body: Sequence[ast.stmt], prefix: str = '') -> Iterator[tuple[Function, str]]:
    for node in body:
        if isinstance(node, Function):
            yield node, prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f'{prefix}{node.name}.')


def _changed_nodes(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """(node, kind of change, changed node) of each place under these statements."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        if _is_left_alone(node):
            continue
        yield from ((node, kind, changed) for kind, changed in _changes_at(node))
        waiting.extend(reversed([*_children(node)]))


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_log(node.value)
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_log(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOGS
    )


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, Function | ast.ClassDef):
        yield from node.body
    elif isinstance(node, ast.Lambda):
        yield node.body
    elif isinstance(node, ast.AnnAssign):
        yield from [] if node.value is None else [node.value]
    elif isinstance(node, ast.Match):
        yield from (part for case in node.cases for part in case.body)
    elif not isinstance(node, ast.Raise):
        yield from ast.iter_child_nodes(node)


def _changes_at(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    yield from _changed_expression(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield from _negated(node)
    if isinstance(node, ast.Call):
        yield from _changed_arguments(node)
    if _can_be_removed(node):
        yield 'removed statement', ast.Pass()


def _can_be_removed(node: ast.AST) -> bool:
    """Whether a statement acts on what is there; without one that makes a name, its uses fail."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(
        node, ast.Raise | ast.AugAssign | ast.Break | ast.Continue | ast.Delete
    )


def _changed_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in OPERATORS
        and not any(_is_text(x) for x in (node.left, node.right))
    ):
        yield 'operator', _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield (
            ('negated condition' if isinstance(node.op, ast.Not) else 'operator'),
            copy.deepcopy(node.operand),
        )
    elif isinstance(node, ast.BoolOp):
        yield 'operator', _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield 'comparison', _with(node, ops=[COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield 'constant', ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield (
            'constant',
            ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0),
        )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _negated(node: ast.If | ast.While | ast.IfExp) -> Iterator[tuple[str, ast.AST]]:
    is_changed_elsewhere = isinstance(node.test, ast.UnaryOp) or (
        isinstance(node.test, ast.Compare)
        and isinstance(
            node.test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        )
    )
    if not is_changed_elsewhere:
        yield 'negated condition', ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))


def _changed_arguments(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield (
                'dropped argument',
                _with(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]]),
            )
    plain = [not isinstance(argument, ast.Starred | ast.GeneratorExp) for argument in node.args]
    for index in range(len(node.args) - 1):
        first, second = node.args[index : index + 2]
        if plain[index] and plain[index + 1] and ast.dump(first) != ast.dump(second):
            yield (
                'swapped arguments',
                _with(node, args=[*node.args[:index], second, first, *node.args[index + 2 :]]),
            )


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _change(file: str, function: str, kind: str, node: ast.AST, changed: ast.AST) -> Change:
    place = (
        node.test
        if kind == 'negated condition' and isinstance(node, ast.If | ast.While | ast.IfExp)
        else node
    )
    assert isinstance(place, ast.expr | ast.stmt)
    assert place.end_lineno is not None
    assert place.end_col_offset is not None
    return Change(
        file=file,
        function=function,
        kind=kind,
        start=(place.lineno, place.col_offset),
        end=(place.end_lineno, place.end_col_offset),
        before=ast.unparse(place),
        after=ast.unparse(changed),
    )


def is_valid(change: Change, source: str) -> bool:
    """Whether the changed source is Python, and another program."""
    try:
        return ast.dump(ast.parse(change.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:  # a negative number as a pattern, or quotes inside an f-string
        return False
