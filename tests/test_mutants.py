"""Random changes of code: one place at a time, the same from the same seed, and no text."""

import ast
import itertools
from collections import Counter

import pytest
from support import ROOT, load_script

code = load_script('code_changes')

SOURCE = '''"""1 < 2"""
LIMIT = 3

@cache(size=4)
def f(x: Annotated[int, 5 < 6], y=7) -> Literal[8]:
    """9 + 10"""
    count: Annotated[int, 11] = 12
    if x < y and not y:
        raise ValueError(f'{x + 13} is not {y}', x + 14)
    assert x + 15 < 16
    logger.info('%d', x + 17)
    print(x,
          y, sep=f'{x * 18}')  # a comment
    return g(x, count, key=-y)
'''


def changes() -> list[object]:
    return [
        change
        for change in code.changes_of('megajax/a/b.py', SOURCE)
        if code.is_valid(change, SOURCE)
    ]


def test_each_change_is_one_place_inside_a_function_and_no_text_or_annotation():
    assert {(change.kind, change.text) for change in changes()} == {
        ('constant', '12 -> 13'),
        ('operator', 'x < y and (not y) -> x < y or not y'),
        ('negated condition', 'x < y and (not y) -> not (x < y and (not y))'),
        ('comparison', 'x < y -> x <= y'),
        ('negated condition', 'not y -> y'),
        ('removed statement', "raise ValueError(f'{x + 13} is not {y}', x + 14) -> pass"),
        ('removed statement', "print(x, y, sep=f'{x * 18}') -> pass"),
        ('swapped arguments', "print(x, y, sep=f'{x * 18}') -> print(y, x, sep=f'{x * 18}')"),
        ('dropped argument', "print(x, y, sep=f'{x * 18}') -> print(x, y)"),
        ('swapped arguments', 'g(x, count, key=-y) -> g(count, x, key=-y)'),
        ('dropped argument', 'g(x, count, key=-y) -> g(x, count)'),
        ('operator', '-y -> y'),
    }


def test_a_change_keeps_the_other_lines_where_they_are():
    for change in changes():
        changed = change.apply(SOURCE)
        assert len(changed.splitlines()) == len(SOURCE.splitlines())
        assert changed.splitlines()[: change.line - 1] == SOURCE.splitlines()[: change.line - 1]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_a_change_names_the_outermost_function():
    source = (
        'class A:\n    def f(self):\n        def inner():\n            return 1\n'
        '        return inner\n'
    )
    assert [change.function for change in code.changes_of('megajax/a/b.py', source)] == ['A.f']


@pytest.fixture(scope='module')
def files() -> list[str]:
    return [
        f'megajax/{name}.py'
        for name in (
            'core/parallel/layout',
            'core/parallel/mesh',
            'base/render/console',
            'core/train/guard',
            '__main__',
        )
    ]


def test_packages_take_turns_and_leaving_one_out_changes_nothing_in_the_others(files):
    drawn = [*itertools.islice(code.sample(ROOT, files, seed=1), 40)]
    assert len(set(drawn)) == 40
    counts = Counter(code.room_of(change.file) for change in drawn)
    assert counts.keys() == {'core/parallel', 'base/render', 'core/train', 'megajax'}
    assert max(counts.values()) - min(counts['core/parallel'], counts['core/train']) <= 1
    alone = code.sample(ROOT, files, seed=1, packages=['core/train'])
    assert [*itertools.islice(alone, 5)] == [
        change for change in drawn if code.room_of(change.file) == 'core/train'
    ][:5]
    assert [*itertools.islice(code.sample(ROOT, files, seed=2), 40)] != drawn


def test_a_test_that_reads_what_another_of_its_file_made_can_notice_too():
    """As from a fixture of the module or a cached function, after the tests that call it."""
    mutants = load_script('mutants')
    change = code.changes_of('megajax/base/errors.py', SOURCE)[0]

    def test(name: str, *calls: str) -> object:
        called = frozenset(f'megajax/base/errors.py:{call}' for call in calls)
        return mutants.Test(name=name, seconds=1.0, calls=called)

    tests = [
        test('tests/a.py::other', 'g'),
        test('tests/b.py::reader'),
        test('tests/b.py::maker', 'f', 'g'),
        test('tests/base/c.py::maker', 'f'),
    ]
    able = mutants.able_to_notice(tests, change)
    assert [one.name for one in able] == [
        'tests/base/c.py::maker', 'tests/b.py::maker', 'tests/b.py::reader'
    ]  # fmt: skip
