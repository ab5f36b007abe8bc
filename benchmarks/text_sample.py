"""A random sample of the project's text, to be rated: `python benchmarks/text_sample.py SEED`.

Draws paragraphs and list items of the pages that people write, docstrings of the package (module,
class, function and field), comment blocks, and strings of five words or more that users see. Prints
them as CSV. `tests/test_language.py` is where pages are stripped and strings are found.
"""

import argparse
import ast
import csv
import io
import random
import re
import runpy
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LANGUAGE = runpy.run_path(str(ROOT / 'tests' / 'test_language.py'))
COUNTS = {'page': 120, 'docstring': 120, 'comment': 60, 'message': 97}
GENERATED = 'cli.md', 'failure_cases.md'
PAGES = [ROOT / f'{name}.md' for name in ('README', 'CONTRIBUTING', 'SECURITY', 'CHANGELOG')]
ITEM = re.compile(r'\s*([-*]|\d+\.) ')
MARKUP = '#', '|', '<', '![', ':::', 'options:'
FEWEST_WORDS = 5
NO_PROSE = re.compile(r'\\[.w]|(\w+_\w+ ){3}')  # patterns, and lists of names
TOOLS = re.compile(r'# (type: ignore|noqa|ruff:|fmt:|pragma:)')


class Item(NamedTuple):
    """A text and where it begins."""

    kind: str
    file: str
    line: int
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('seed', type=int)
    chooser = random.Random(parser.parse_args().seed)
    modules = sorted((ROOT / 'megajax').rglob('*.py'))
    pages = PAGES + [p for p in sorted(ROOT.glob('docs/*.md')) if p.name not in GENERATED]
    items = [item for path in pages for item in paragraphs(path)]
    items += [item for path in modules for item in texts_of_module(path)]
    table = csv.writer(sys.stdout, lineterminator='\n')
    table.writerow(Item._fields)
    for kind, count in COUNTS.items():
        found = [item for item in items if item.kind == kind]
        table.writerows(sorted(chooser.sample(found, count)))


def paragraphs(path: Path) -> Iterator[Item]:
    """Yield the paragraphs and list items of a page: no headings, tables, code or markup."""
    lines, shown = path.read_text().splitlines(), LANGUAGE['prose'](path.read_text()).splitlines()
    block: list[str] = []
    for number, (line, stripped) in enumerate(zip([*lines, ''], [*shown, ''], strict=True), 1):
        text = line.strip()
        other = not text or text.startswith(MARKUP) or stripped == '`' != text
        if block and (other or ITEM.match(line)):
            yield item('page', path, number - len(block), block)
            block = []
        if not other:
            block.append(text)


def texts_of_module(path: Path) -> Iterator[Item]:
    """Yield a module's docstrings, comment blocks and long strings."""
    text = path.read_text()
    for area, line, found in LANGUAGE['texts_of_code'](text):
        long = len(re.findall(r'[A-Za-z]{2,}', found)) >= FEWEST_WORDS
        if area == 'messages' and long and not NO_PROSE.search(found):
            yield item('message', path, line, [found])
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield item('docstring', path, node.lineno, [value.value])
    yield from comments(path, text)


def comments(path: Path, text: str) -> Iterator[Item]:
    """Yield each run of whole-line comments, and each comment beside code, as one block."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or TOOLS.match(token.string):
            continue
        alone, number = token.line.lstrip().startswith('#'), token.start[0]
        if block and not (alone and number == last + 1):
            yield item('comment', path, last - len(block) + 1, block)
            block = []
        block.append(token.string)
        last = number
    if block:
        yield item('comment', path, last - len(block) + 1, block)


def item(kind: str, path: Path, line: int, lines: list[str]) -> Item:
    """Return the text on one line, with its place."""
    return Item(kind, path.relative_to(ROOT).as_posix(), line, ' '.join(' '.join(lines).split()))


if __name__ == '__main__':
    main()
