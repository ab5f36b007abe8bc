"""The rules of megajax's text: its words, docstrings, short functions, short files."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megajax

PACKAGE = Path(megajax.__file__).parent
ROOT = PACKAGE.parent
# A docstring that begins so, without a main clause, continues the name above it.
VERB = r'(?!.* (is|are|was|were|has|have|must|can|may|does|do) \S)'
FRAGMENTS = re.compile(rf'(Of|Those|That of) |As (?!.*,)|Its {VERB}|That (?!is |are )|What {VERB}')
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 350
# The beginning of a command, up to a word that is not a number.
COMMAND = re.compile(
    r'\b(megajax (train|data|checkpoint|report|import|export|generate|eval|launch|profile) '
    r"|hf download |jq -c |iconv |pdftotext )[^;:,'(]*(?<!--processes )$"
)
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str], Iterator[tuple[int, str]]]
Place = tuple[str, int]  # its file and line


# For one rule after another.
tree_of = functools.lru_cache(maxsize=1)(ast.parse)
nodes_of = functools.lru_cache(maxsize=1)(lambda text: [*ast.walk(tree_of(text))])


def documented(text: str) -> Iterator[tuple[int, str, Documented]]:
    """Everything that can have a docstring: its line, its name and its node."""
    yield 1, 'module', tree_of(text)
    for node in nodes_of(text):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, node


def first_sentence(docstring: str) -> str:
    """The text up to the first full stop or question mark that ends a sentence."""
    words = docstring.split('\n\n')[0].split()
    ends = (place for place, word in enumerate(words, 1) if word.rstrip('\'")')[-1:] in ('.', '?'))
    return ' '.join(words[: next(ends, len(words))])


def fragments(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings whose first sentence cannot be understood alone."""
    for line, name, node in documented(text):
        sentence = first_sentence(ast.get_docstring(node) or '')
        if FRAGMENTS.match(sentence) and not sentence.endswith('?'):
            yield line, f'{name}: "{sentence}" is not a sentence or noun phrase'


def missing_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The module, public classes and public functions of the module without a docstring."""
    tree = tree_of(text)
    at_top = [node for node in tree.body if isinstance(node, (ast.ClassDef, *FUNCTIONS))]
    public = [node for node in at_top if not node.name.startswith('_')]
    for line, name, node in documented(text):
        if (node is tree or node in public) and not ast.get_docstring(node):
            yield line, f'{name} has no docstring'


def long_functions(text: str) -> Iterator[tuple[int, str]]:
    """Functions of too many lines, from `def` or the first decorator to the end."""
    for node in nodes_of(text):
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
    for node in nodes_of(text):
        before = ''
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif COMMAND.search(before):
                shown = ast.unparse(part)
                if not re.search(r'\btyped(_override)?\(|\.join\(|^{[A-Z_]+}$', shown):
                    yield part.lineno, f'{shown} is in a command: write typed(...)'


RULES = [fragments, missing_docstrings, long_functions, long_file, untyped_words]


@functools.cache
def of_package() -> tuple[dict[Rule, list[str]], list[tuple[str, Place, str]]]:
    """What each rule finds in the modules of the package, and the texts of these."""
    violations: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    texts = []
    for path in sorted(PACKAGE.rglob('*.py')):
        text, place = path.read_text(), path.relative_to(ROOT).as_posix()
        for rule in RULES:
            violations[rule] += [f'{place}:{line}: {problem}' for line, problem in rule(text)]
        texts += [(area, (place, line), words) for area, line, words in texts_of_code(text)]
    return violations, texts


@pytest.mark.parametrize('rule', RULES)
def test_every_module_of_the_package_keeps_the_rule(rule: Rule) -> None:
    found = of_package()[0][rule]
    assert not found, f'{len(found)} violations:\n' + '\n'.join(found)


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
        'That of a shard is its own.',
    ],
)
def test_a_docstring_that_is_the_rest_of_a_sentence_is_a_violation(docstring: str) -> None:
    assert [line for line, _ in fragments(f'"""{docstring}"""')] == [1]
    assert len([*fragments(f'class A:\n    def f(self):\n        """{docstring}"""')]) == 1


@pytest.mark.parametrize(
    'docstring',
    [
        'Return what x is.',
        'Offsets of the tokens.',
        'Whether x is y.',
        'What to do\nnow? This.',
        'Its shards are gathered before use.',
        'As long as x is y, return z.',
        'What XLA returns is a shard.',
        '',
    ],
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


TABLE = Path(__file__).with_name('words.txt')
AREAS = 'pages', 'messages', 'code'
STRING_OR_COMMENT = re.compile(
    r'''("""|\'\'\')(?:\\.|.)*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*''', re.S
)


def words() -> Iterator[tuple[re.Pattern[str], str, tuple[int, ...]]]:
    """Each avoided word: its pattern, what to write instead, and its count by area."""
    for line in TABLE.read_text().splitlines():
        if not line.startswith('#'):
            counts, pattern, instead = re.split('  +', line)
            yield re.compile(pattern, re.I), instead, tuple(map(int, counts.split()))


def prose(page: str) -> str:
    """The page without code, quoted output and comments, on the same lines."""
    hidden = re.compile(r'^(```+).*?^\1 *$|<!--.*?-->|`[^`\n]+`', re.M | re.S)
    return hidden.sub(lambda match: re.sub('.+', '`', match[0]), page)


def texts_of_code(text: str) -> Iterator[tuple[str, int, str]]:
    """Each docstring, comment and string literal of a module: its area, line and text."""
    nodes = nodes_of(text)
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else '{}' for part in node.values)
            yield 'messages', node.lineno, ''.join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in alone:
                yield 'code', node.lineno, node.value
            elif id(node) not in inner and ' ' in node.value.strip():  # others are names
                yield 'messages', node.lineno, node.value
    line, place = 1, 0
    for token in STRING_OR_COMMENT.finditer(text):
        line, place = line + text.count('\n', place, token.start()), token.start()
        if token[0].startswith('#'):
            yield 'code', line, token[0]


@functools.cache
def texts() -> list[tuple[str, Place, str]]:
    """Each text of the pages and the package: its area, place and words, on one line."""
    names = 'README', 'CONTRIBUTING', 'SECURITY', 'CHANGELOG'
    found = []
    for path in (*(ROOT / f'{name}.md' for name in names), *sorted(ROOT.glob('docs/*.md'))):
        if path.name == 'cli.md':  # its text is counted in the commands
            continue
        line = 1
        for paragraph in re.split(r'(\n\s*\n)', prose(path.read_text())):
            found.append(('pages', (path.relative_to(ROOT).as_posix(), line), paragraph))
            line += paragraph.count('\n')
    found += of_package()[1]
    return [(area, place, ' '.join(text.split())) for area, place, text in found]


@functools.cache
def uses(word: re.Pattern[str]) -> list[tuple[str, Place]]:
    """Every place that has a word, with its area."""
    return [(area, place) for area, place, text in texts() for _ in word.finditer(text)]


@pytest.mark.parametrize(('word', 'instead', 'counts'), [*words()], ids=lambda part: '')
def test_no_area_has_more_of_an_avoided_word(
    word: re.Pattern[str], instead: str, counts: tuple[int, ...]
) -> None:
    found = uses(word)
    for area, count in zip(AREAS, counts, strict=True):
        places = [place for where, place in found if where == area]
        listed = '\n'.join(f'{path}:{line}' for path, line in places)
        assert len(places) <= count, (
            f'{word.pattern} is {len(places)} times in {area}, {count} allowed: write {instead!r}\n'
            f'{listed}'
        )


def test_a_count_that_can_be_lowered_is_printed() -> None:
    for word, instead, counts in words():
        left = Counter(area for area, _ in uses(word))
        new = tuple(left[area] for area in AREAS)
        if new != counts:
            print(*new, f' {word.pattern}  {instead}')


def test_the_lint_reads_prose_messages_and_docstrings_but_no_code() -> None:
    page = 'A `rung`.\n```\na rung\n```\nTwo <!-- rung --> b\n'
    assert 'rung' not in prose(page)
    assert prose(page).count('\n') == page.count('\n')
    module = '"""A rung."""\nx = 1  # rung\ny = "rung"\nz = "a rung"\nw = f"the {x} rung"\n'
    found = [(area, line) for area, line, text in texts_of_code(module) if 'rung' in text]
    assert sorted(found) == [('code', 1), ('code', 2), ('messages', 4), ('messages', 5)]
