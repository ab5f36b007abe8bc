"""Two inspections compared, of steps compiled for CPUs and of kernels made here."""

import json
import re
from pathlib import Path

import pytest
from support import megajax as run_here
from typer.testing import CliRunner

import megajax
from megajax.analysis.inspect import Inspection
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.budget import Budget, over_budget
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.diff import Change, difference
from megajax.analysis.inspect.diff_markdown import MOST, to_markdown
from megajax.analysis.inspect.diff_report import to_tables
from megajax.analysis.inspect.products import products_run_twice
from megajax.analysis.inspect.result import Compared, Finding, Kernel, Products, StepRun
from megajax.base.render.console import as_text
from megajax.commands.main import app
from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles import Sighting
from megajax.xla.miscompiles.double_matmul import DOUBLE_MATMUL

SMALL = 'model.num_layers=1', 'model.vocab_size=300', 'train.batch_size=8', 'mesh.data=1'
DIFF = 'inspect', 'diff'
EMPTY = Program('ENTRY %main () -> () {\n  ROOT %nothing = () tuple()\n}')


def inspect(*overrides: str) -> Inspection:
    config = megajax.load('tiny', [*SMALL, *overrides])
    return audit(config, compile_for(config, 'cpu', 1, buffers=True), 'cpu')


@pytest.fixture(scope='module')
def one() -> Inspection:
    return inspect('mesh.model=1')


@pytest.fixture(scope='module')
def two() -> Inspection:
    return inspect('mesh.model=2')


def kernel(kind: str, milliseconds: float) -> Kernel:
    return Kernel(
        instruction='k',
        computation='main',
        kind=kind,
        site='mlp',
        phase='forward',
        times=1,
        bytes=10**9,
        flops=0,
        seconds=milliseconds / 1e3,
        source='',
    )


def with_kernels(inspection: Inspection, **milliseconds: float) -> Inspection:
    kernels = [kernel(kind, each) for kind, each in milliseconds.items()]
    return inspection.model_copy(
        update={
            'kernels': kernels,
            'compute_seconds': sum(each.seconds for each in kernels),
            'exposed_seconds': 0.0,
        }
    )


def test_a_finding_whose_line_moved_is_neither_new_nor_gone(one) -> None:
    def found(*lines: int, size: int = 8) -> Inspection:
        message = 'all-reduce of f32[{}] at jit(step)/mlp (core/model/mlp.py:{} < step.py:9)'
        findings = [
            Finding(level='error', rule='fp32 communication', message=message.format(size, line))
            for line in lines
        ]
        return one.model_copy(update={'findings': findings})

    moved = difference(found(26), found(27))
    assert not moved.new
    assert not moved.gone
    # One of two lines is that of before.
    twice = difference(found(26), found(26, 27))
    assert twice.new == found(27).findings
    other = difference(found(26), found(26, size=16))
    assert (other.new, other.gone) == (found(26, size=16).findings, found(26).findings)


def test_an_old_error_whose_numbers_moved_is_neither_new_nor_gone(one) -> None:
    def found(number: int, *, layer: str = 'mlp') -> Inspection:
        sighting = Sighting(
            entry=DOUBLE_MATMUL,
            instruction=f'fusion.{number}',
            op_name=f'jit(step)/{layer}/dot_general',
            source=f'core/model/mlp.py:{number} < step.py:9',
            detail=f'{number} GFLOP',
        )
        busy = with_kernels(one, matmul=number)
        computed = Products(expected=10**9, compiled=2 * 10**9 + number * 10**8, rematerialized=0)
        rule = f'miscompiled: {sighting.entry.name}'
        findings = [
            Finding(level='error', rule=rule, message=f'{sighting}'),
            *over_budget(busy, Budget(milliseconds=1, launches=0)),
            *products_run_twice(megajax.load('tiny'), EMPTY, computed),
        ]
        assert len(findings) == 4
        return one.model_copy(update={'findings': findings})

    moved = difference(found(26), found(25))
    assert (moved.new, moved.gone) == ([], [])
    other = difference(found(26), found(26, layer='attention'))
    assert [len(other.new), len(other.gone)] == [1, 1]
    few = found(26).model_copy(update={'findings': found(26).findings[:2]})
    assert difference(few, found(25)).new == found(25).findings[2:]


def test_an_infinite_or_undefined_error_of_a_run_is_read_as_it_was_written(one, tmp_path) -> None:
    results = [
        Compared(name=name, error=float(error), limit=1e-5)
        for name, error in (('loss', 'inf'), ('gradient of norm.weight', 'nan'))
    ]
    run = StepRun(config='', shrunk=[], exact=False, seconds=1.0, results=results)
    file = tmp_path / 'wrong.json'
    file.write_text(one.model_copy(update={'runs': [run]}).model_dump_json())
    json.loads(file.read_text(), parse_constant=pytest.fail)
    read = Inspection.model_validate_json(file.read_text())
    assert [str(each.error) for each in read.runs[0].results] == ['inf', 'nan']
    assert CliRunner().invoke(app, [*DIFF, str(file), str(file)]).exit_code == 0


def test_a_step_does_not_differ_from_itself(one) -> None:
    found = difference(one, one)
    assert not any([found.keys, found.parts, found.arrays, found.new, found.gone])
    assert {change.text for change in (*found.totals, *found.memory)} == {'same'}
    assert re.fullmatch(r'\*\*Same bytes\*\*: .* nothing else differs\.\n', to_markdown(found))


def test_keys_bytes_and_memory_are_beside_each_other(one, two) -> None:
    found = difference(one, two)
    assert ('mesh.model', '1', '2') in found.keys
    sent = {change.name: change for change in found.parts}['attention forward over model']
    assert (sent.before, sent.text) == (0, 'new')
    row = next(row for row in two.rows if (row.site, row.phase) == ('attention', 'forward'))
    assert sent.after == pytest.approx(row.wire_bytes)
    state = {change.name: change for change in found.totals}['state and batch']
    assert state.after == two.memory.arguments


def test_the_first_line_of_markdown_says_whether_more_is_sent(one, two) -> None:
    few, more = sum(row.wire_bytes for row in one.rows), sum(row.wire_bytes for row in two.rows)
    assert few < more
    for before, after, verdict in ((one, two, 'More'), (two, one, 'Fewer')):
        first, *rest = to_markdown(difference(before, after)).splitlines()
        assert first.startswith(f'**{verdict} bytes**: ')
        assert 'matmul work' in first
        assert '`mesh.model` `' in rest[1]


def test_markdown_lists_the_collectives_that_differ_the_largest_change_first(one, two) -> None:
    rows = difference(one, two).rows
    assert [row for row in rows if row.before] == []
    changes = [abs(row.bytes.after - row.bytes.before) for row in rows]
    assert changes == sorted(changes, reverse=True)
    text = to_markdown(difference(one, two))
    assert '| site | phase | axis | base | head | bytes | ratio |' in text
    shown, _, folded = text.partition('more collectives</summary>')
    for row in rows:
        line = f'| {row.site} | {row.phase} | {row.axis} | - |'
        assert (line in shown) == (row in rows[:MOST])
        assert (line in folded) == (row in rows[MOST:])
    gone = to_markdown(difference(two, one))
    assert re.search(r'\| attention \| forward \| model \| .* \| - \| .* \| gone \|', gone)


def test_a_row_that_sends_more_than_megatron_is_an_error_and_marked_in_markdown(two) -> None:
    row, *rest = two.rows
    twice = [x.model_copy(update={'times': 2 * x.times}) for x in row.placed]
    update = {'verdict': 'MORE', 'placed': twice, 'wire_bytes': 2 * row.wire_bytes}
    worse = two.model_copy(update={'rows': [row.model_copy(update=update), *rest]})
    found = difference(two, worse)
    text = to_markdown(found)
    assert f'| {row.site} | {row.phase} | {row.axis} |' in text
    assert '| 2.000, MORE than Megatron |' in text
    place = f'{row.site} {row.phase} over {row.axis}'
    error = Finding(level='error', rule='MORE than Megatron', message=place)
    assert found.new == difference(worse, two).gone == [error]
    assert not difference(worse, worse).new


def executed(*errors: float) -> list[StepRun]:
    modes = zip(errors, (False, True), strict=False)
    return [
        StepRun(
            config='',
            shrunk=[],
            exact=exact,
            seconds=1.0,
            results=[Compared(name='loss', error=error, limit=0.1)],
        )
        for error, exact in modes
    ]


@pytest.mark.parametrize(
    ('before', 'after', 'new', 'gone', 'not_compared'),
    [
        ((0.0, 0.0), (0.0, 0.2), 1, 0, 0),
        ((0.2, 0.0), (0.3, 0.0), 0, 0, 0),
        ((0.2, 0.2), (0.0, 0.0), 0, 2, 0),
        ((), (0.2, 0.0), 1, 0, 2),
        ((0.2, 0.2), (), 0, 0, 2),
        ((0.0, 0.2), (0.0,), 0, 0, 1),
    ],
)
def test_a_wrong_result_of_an_execution_is_an_error_that_only_an_execution_resolves(
    one, before, after, new, gone, not_compared
) -> None:
    sides = (one.model_copy(update={'runs': executed(*errors)}) for errors in (before, after))
    found = difference(*sides)
    assert {finding.rule for finding in (*found.new, *found.gone)} <= {'wrong results'}
    assert [len(found.new), len(found.gone)] == [new, gone]
    assert len(found.not_compared) == not_compared
    told = as_text(to_tables(found), width=200)
    for line in found.not_compared:
        assert line in told
        assert line in to_markdown(found)


def test_memory_is_compared_by_use_and_the_arrays_that_differ_by_file(one, two) -> None:
    found = difference(one, two)
    assert sum(change.before for change in found.memory) == one.memory.needed
    assert sum(change.after for change in found.memory) == two.memory.needed
    changes = {change.name: change for change in found.arrays}
    half = changes['parameters layers.mlp.up.weight']
    assert half.after == half.before / 2
    assert any(name.startswith('activations mlp core/model/') for name in changes)
    assert not any(':' in name for name in changes)
    text = to_markdown(found)
    assert f'| {half.name} |' in text.partition('<summary>memory at its peak</summary>')[2]


def test_kernels_are_compared_by_kind_and_place_and_small_changes_left_out(one) -> None:
    before = with_kernels(one, matmul=10.0, cast=1.0, copy=1.0)
    after = with_kernels(one, matmul=10.001, cast=2.5, fill=0.5)
    changes = {change.name: change.text for change in difference(before, after).parts}
    assert changes == {
        'cast mlp forward': '+150.0%',
        'copy mlp forward': 'gone',
        'fill mlp forward': 'new',
    }


def test_a_large_ratio_is_no_percentage() -> None:
    assert Change('x', 'ms', 1, 1.5).text == '+50.0%'
    assert Change('x', 'ms', 1, 40).text == 'x 40'
    assert Change('x', 'ms', 1, 1 + 1e-9).text == 'same'


def test_findings_come_and_go_and_markdown_escapes_them(one) -> None:
    error = Finding(level='error', rule='matmuls run twice', message='a|b <c>')
    found = difference(one, one.model_copy(update={'findings': [*one.findings, error]}))
    assert (found.new, found.gone) == ([error], [])
    assert '- new error: matmuls run twice: a\\|b &lt;c>' in to_markdown(found)


def test_the_command_reads_files_and_exits_with_1_where_an_error_is_new(
    one, two, tmp_path: Path
) -> None:
    error = Finding(level='error', rule='r', message='m')
    worse = two.model_copy(update={'findings': [error]})
    wrong = two.model_copy(update={'runs': executed(1.0)})
    for name, inspection in {'one': one, 'two': two, 'worse': worse, 'wrong': wrong}.items():
        (tmp_path / f'{name}.json').write_text(inspection.model_dump_json())
    done = CliRunner().invoke(app, [*DIFF, f'{tmp_path}/one.json', f'{tmp_path}/two.json'])
    assert (done.exit_code, done.stderr) == (0, '')
    assert re.search(r'^mesh.model +1 +2$', done.stdout, re.MULTILINE)
    files = f'{tmp_path}/two.json', f'{tmp_path}/worse.json'
    worse_than_two = CliRunner().invoke(app, [*DIFF, *files, '--markdown'])
    assert worse_than_two.exit_code == 1
    as_option = CliRunner().invoke(app, ['inspect', '--diff', *files, '--markdown'])
    assert (as_option.exit_code, as_option.stdout) == (1, worse_than_two.stdout)
    assert '- new error: r: m' in worse_than_two.stdout
    done = CliRunner().invoke(app, [*DIFF, f'{tmp_path}/two.json', f'{tmp_path}/wrong.json'])
    assert done.exit_code == 1
    assert 'new error: wrong results: executed as compiled' in done.stdout


def test_a_file_of_schema_version_1_is_read_as_one_of_today(two) -> None:
    row = two.rows[0].model_copy(update={'verdict': 'expected', 'expected_sources': ['ticks']})
    today = with_kernels(two, matmul=2).model_copy(update={'rows': [row]})
    old = json.loads(today.model_dump_json())
    old['rows'] = json.loads(json.dumps(old['rows']).replace('expected', 'stated'))
    old['kernels'][0]['kind'] = 'product'
    for arrays in old['memory']['at_peak']:
        arrays['use'] = {'weight copies': 'weights', 'unused': 'not in use'}.get(
            arrays['use'], arrays['use']
        )
    assert old['rows'][0]['stated_sources'] == ['ticks']
    assert Inspection.model_validate_json(json.dumps(old | {'schema_version': 1})) == today


@pytest.mark.parametrize(
    ('text', 'said'),
    [(None, 'cannot be read: No such file'), ('{}', 'write it again'), ('[', 'write it again')],
)
def test_a_file_that_is_no_inspection_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / 'it.json'
    if text is not None:
        file.write_text(text)
    done = run_here(*DIFF, file, file)
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: {file}')
    assert said in done.stderr
    assert 'Traceback' not in done.stderr
