"""The house rules of megajax's text: docstrings that stand alone, short functions, short files."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megajax

PACKAGE = Path(megajax.__file__).parent
# A docstring that begins so is the rest of a sentence whose beginning is the name above it.
FRAGMENTS = ('Of ', 'As ', 'Its ', 'Those ', 'That ')
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 350
# The beginning of a command, up to a word that is not a number.
COMMAND = re.compile(
    r'\b(megajax (train|data|checkpoint|report|import|export|generate|eval|launch|profile) '
    r"|hf download |jq -c |iconv |pdftotext )[^;:,'(]*(?<!--processes )$"
)
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str], Iterator[tuple[int, str]]]


def documented(tree: ast.Module) -> Iterator[tuple[int, str, Documented]]:
    """Everything that can have a docstring: its line, its name and its node."""
    yield 1, 'module', tree
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, node


def first_sentence(docstring: str) -> str:
    """The text up to the first full stop or question mark that ends a sentence."""
    words = docstring.split('\n\n')[0].split()
    ends = (place for place, word in enumerate(words, 1) if word.rstrip('\'")')[-1:] in ('.', '?'))
    return ' '.join(words[: next(ends, len(words))])


def fragments(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings whose first sentence does not stand alone."""
    for line, name, node in documented(ast.parse(text)):
        sentence = first_sentence(ast.get_docstring(node) or '')
        is_statement = sentence.startswith('What') and not sentence.endswith('?')
        if sentence.startswith(FRAGMENTS) or is_statement:
            yield line, f'{name}: "{sentence}" is not a complete sentence or noun phrase'


def missing_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The module, public classes and public functions of the module without a docstring."""
    tree = ast.parse(text)
    at_top = [node for node in tree.body if isinstance(node, (ast.ClassDef, *FUNCTIONS))]
    public = [node for node in at_top if not node.name.startswith('_')]
    for line, name, node in documented(tree):
        if (node is tree or node in public) and not ast.get_docstring(node):
            yield line, f'{name} has no docstring'


def long_functions(text: str) -> Iterator[tuple[int, str]]:
    """Functions of too many lines, from `def` or the first decorator to the end."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            first = min(part.lineno for part in (node, *node.decorator_list))
            count = (node.end_lineno or first) - first + 1
            if count > MAX_FUNCTION_LINES:
                yield first, f'{node.name} has {count} lines, at most {MAX_FUNCTION_LINES}'


def long_file(text: str) -> Iterator[tuple[int, str]]:
    """The file, if it has too many lines."""
    count = len(text.splitlines())
    if count > MAX_FILE_LINES:
        yield count, f'the file has {count} lines, at most {MAX_FILE_LINES}'


def untyped_words(text: str) -> Iterator[tuple[int, str]]:
    """Values in a command of a message that would need quotes in a shell, and may not have them."""
    for node in ast.walk(ast.parse(text)):
        before = ''
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            shown = ast.unparse(part)
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif COMMAND.search(before) and not re.search(r'\btyped\(|\.join\(|^{[A-Z_]+}$', shown):
                yield part.lineno, f'{shown} is in a command: write typed(...)'


RULES = [fragments, missing_docstrings, long_functions, long_file, untyped_words]


@pytest.mark.parametrize('rule', RULES)
def test_every_module_of_the_package_keeps_the_rule(rule: Rule) -> None:
    paths = sorted(PACKAGE.rglob('*.py'))
    violations = [
        f'{path.relative_to(PACKAGE.parent)}:{line}: {problem}'
        for path in paths
        for line, problem in rule(path.read_text())
    ]
    assert not violations, f'{len(violations)} violations:\n' + '\n'.join(violations)


@pytest.mark.parametrize(
    'docstring',
    [
        'Of the mesh.',
        'As the engine has it.',
        'Its name.',
        'Those that are sharded.',
        'That of the loss.',
        'What the step returns.',
        'What the step returns. Is it sharded?',
        "What `a.b` is. It is 'c'?",
    ],
)
def test_a_docstring_that_is_the_rest_of_a_sentence_is_a_violation(docstring: str) -> None:
    assert [line for line, _ in fragments(f'"""{docstring}"""')] == [1]
    assert len([*fragments(f'class A:\n    def f(self):\n        """{docstring}"""')]) == 1


@pytest.mark.parametrize(
    'docstring',
    ['Offsets of the rows.', 'Whether x is y.', 'What to do\nnow? This.', 'Return what x is.', ''],
)
def test_a_docstring_that_stands_alone_is_none(docstring: str) -> None:
    assert not [*fragments(f'"""{docstring}"""')]


def test_a_public_name_without_a_docstring_is_a_violation() -> None:
    text = 'class A:\n    def method(self): ...\ndef f(): ...\ndef _g(): ...\nclass _B: ...'
    names = [problem.split()[0] for _, problem in missing_docstrings(text)]
    assert names == ['module', 'A', 'f']


@pytest.mark.parametrize(('num_lines', 'count'), [(60, 0), (61, 1)])
def test_the_lines_of_a_function_are_counted(num_lines: int, count: int) -> None:
    text = '@decorated\ndef f():' + '\n    pass' * (num_lines - 2)
    assert len([*long_functions(text)]) == count


@pytest.mark.parametrize(('num_lines', 'count'), [(350, 0), (351, 1)])
def test_the_lines_of_a_file_are_counted(num_lines: int, count: int) -> None:
    assert len([*long_file('pass\n' * num_lines)]) == count
