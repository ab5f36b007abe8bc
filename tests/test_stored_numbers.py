"""Tables and outputs in the README and the pages are those of the stored files, and these keep
their promises.
"""

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import exhaustive, load_script, slow
from typer.testing import CliRunner

from megajax.analysis.plan import overlap as plan_overlap
from megajax.analysis.plan.advice import advice
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.published.tables import OF_2026
from megajax.analysis.plan.time import step_time
from megajax.commands.main import app
from megajax.core.config import ConfigError, load
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import hardware

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md')])
INSPECT = (ROOT / 'docs/inspect.md').read_text()
BENCHMARKS = (ROOT / 'docs/results.md').read_text()
VERIFY = (ROOT / 'docs/verify.md').read_text()
PLAN = ' '.join((ROOT / 'docs/plan.md').read_text().split())
PARALLELISM = (ROOT / 'docs/parallelism.md').read_text()
README = ' '.join((ROOT / 'README.md').read_text().split())
MARK = re.compile(
    r'^<!-- lines of (\S+) -->\n(```\n.*?^```$|(?:\|[^\n]*\n)+)', re.DOTALL | re.MULTILINE
)


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline='') as file:
        return list(csv.DictReader(file))


ROWS = read('2026-11-22_collectives.csv')
OVERLAP = read('2026-11-25_overlap.csv')
MEMORY = read('2026-11-29_plan_memory.csv')


def quoted() -> Iterator[tuple[Path, str, str]]:
    """Each table or output under a mark, with its page and its file."""
    for page in PAGES:
        for file, text in MARK.findall(page.read_text()):
            yield page, file, text


@pytest.mark.parametrize(
    ('file', 'text'), [(file, text) for _, file, text in quoted()],
    ids=[f'{page.stem}-{number}' for number, (page, _, _) in enumerate(quoted())],
)  # fmt: skip
def test_what_a_page_quotes_is_in_its_file(file: str, text: str) -> None:
    lines = [line.rstrip() for line in (ROOT / file).read_text().splitlines()]
    shown = [line.rstrip() for line in text.splitlines() if not line.startswith('```')]
    at = 0
    for line in shown:
        if line == '...':
            continue
        start = line.removesuffix(' ...')
        found = [
            i
            for i, one in enumerate(lines)
            if one == line or (start != line and one.startswith(start))
        ]
        later = [i for i in found if i >= at]
        assert later, line
        at = later[0]


def test_every_mark_has_something_under_it() -> None:
    marks = sum(len(re.findall(r'(?<!```\n)<!-- lines of ', page.read_text())) for page in PAGES)
    assert len([*quoted()]) == marks


def test_the_table_of_scripts_has_each_file_that_a_page_quotes() -> None:
    table = BENCHMARKS.split('## Which script makes which number')[1]
    for page, file, _ in quoted():
        assert f'{Path(file).name}`' in table, page.name


def test_each_stored_result_is_named() -> None:
    """By a page, a test, a script or a notebook, or by a report that one of them names."""
    files = [*PAGES, *(ROOT / 'notebooks').glob('*.ipynb')]
    files += [path for folder in ('tests', 'benchmarks') for path in (ROOT / folder).rglob('*.py')]
    named = '\n'.join(path.read_text() for path in files)
    stored = {path.name: path for path in RESULTS.iterdir() if path.is_file()}
    named += '\n'.join(path.read_text() for name, path in stored.items() if name in named)
    # A page names a report "and `.csv`".
    lost = {one for one, path in stored.items() if f'{path.stem}.md' not in named}
    assert not {one for one in lost if one not in named}


@pytest.mark.parametrize('name', ['kernels', 'layouts', 'overlap', 'stages'])
def test_each_compiled_step_on_a_page_is_one_that_its_script_compiles(name: str) -> None:
    names = dict(load_script('compiled_rows').steps_of(load_script(name).STEPS))
    file = rf'2026-\d\d-\d\d_{name}(_stages)?\.md'
    tables = [text for _, path, text in quoted() if re.fullmatch(file, Path(path).name)]
    shown = {line.split('|')[1].strip() for text in tables for line in text.splitlines()[2:]}
    assert shown
    assert not shown - {*names}


def test_a_window_sends_its_formula_and_a_twentieth_of_a_ring_or_less() -> None:
    file = RESULTS / '2026-11-28_context_windows.md'
    lines = [line.strip('| ').split(' | ') for line in file.read_text().splitlines()]
    found = {cells[0]: cells for cells in lines if len(cells) == 8 and cells[1] != 'jax'}
    assert all(sent == formula for _, _, sent, formula, *_ in found.values())
    assert float(found['window of 1,024'][4]) >= 20
    assert {cells[-1] for cells in found.values()} == {'0'}


def test_an_exchange_of_heads_sends_its_formula_and_a_third_of_a_ring_or_less() -> None:
    file = RESULTS / '2026-11-28_context_exchange.md'
    lines = [line.strip('| ').split(' | ') for line in file.read_text().splitlines()]
    found = {(*cells[:2],): cells for cells in lines if len(cells) == 9 and cells[2] != 'jax'}
    assert len(found) == 6
    assert all(cells[3] == cells[4] and cells[-1] == '0' for cells in found.values())
    for heads in ('8', '32'):
        by_heads, ring = (found[heads, name] for name in ('all_to_all', 'ring'))
        assert float(by_heads[3]) <= float(ring[3]) / 3
        assert float(by_heads[3]) < float(by_heads[5])  # TransformerEngine's


def test_no_step_sends_more_than_megatron() -> None:
    for row in [*ROWS, *read('2026-11-30_collectives.csv')]:
        ratios = [float(ratio) for ratio in (row['model_ratio'], row['data_ratio']) if ratio]
        assert max(ratios) <= 1, row
        assert not row['more'], row
        assert not row['errors'], row


def test_the_page_says_how_many_steps_were_compiled() -> None:
    assert f'all {len(ROWS)} steps' in ' '.join(BENCHMARKS.split())
    assert f'In {len(ROWS)} compiled steps' in INSPECT


@pytest.mark.parametrize('preset', sorted({row['preset'] for row in ROWS}))
def test_the_page_has_the_largest_ratios(preset: str) -> None:
    rows = [row for row in ROWS if row['preset'] == preset]

    def largest(key: str, *layouts: str) -> str:
        known = [row for row in rows if row['sequence_parallel'] in layouts and row[key]]
        return f'{max(float(row[key]) for row in known):.3f}'

    model = largest('model_ratio', 'False'), largest('model_ratio', 'True')
    columns = *model, largest('data_ratio', 'False', 'True')
    row = f'| {preset} | {len(rows)} | {" | ".join(columns)} | 0 |'
    assert row in BENCHMARKS
    assert row in INSPECT or f'| {preset} |' not in INSPECT


def overlap(*words: str) -> list[dict[str, str]]:
    """The stored steps in the overlap schedule whose name has all words, on both versions of
    jax."""
    return [
        row
        for row in OVERLAP
        if row['unrolled'] == 'True'
        and 'options' not in row['name']
        and all(word in row['name'] for word in words)
    ]


def test_of_the_seconds_over_model_two_rows_hide_83_percent_and_one_row_67() -> None:
    for rows, least in (('two rows', 0.83), ('one row', 0.67)):
        steps = overlap(rows)
        assert {row['jax'] for row in steps} == {'0.10.2', '0.12.0.1'}
        assert all(float(row['hidden_model']) > least for row in steps)
        whole = [row for row in steps if '32 layers' in row['name'] and 'full' not in row['name']]
        assert all(float(row['hidden_model']) > least + 0.05 for row in whole)


def test_of_the_seconds_over_data_every_rung_hides_88_percent() -> None:
    for mesh in ('8x1', '4x2'):
        for rung in ('weights', 'gradients', 'optimizer'):
            found = overlap(mesh, rung)
            assert found
            assert all(float(row['hidden_data']) > 0.88 for row in found)


def test_a_step_of_eight_layers_takes_as_long_as_the_page_says() -> None:
    for name, rows, most in (('8 layers, one row', 1, 35), ('8 layers, two rows', 2, 32)):
        steps = [row for row in OVERLAP if row['name'] == name]
        assert len(steps) == 2
        for row in steps:
            assert (float(row['compute_ms']) + float(row['exposed_ms'])) / rows <= most


def test_an_order_of_ours_sends_no_more_and_its_other_kernels_move_no_more() -> None:
    by_name = {(row['name'], row['jax']): row for row in OVERLAP}
    for (name, jax), row in by_name.items():
        for axis in ('data', 'model'):
            assert not row[f'of_megatron_{axis}'] or float(row[f'of_megatron_{axis}']) <= 1
        assert row['findings'] == '0'
        if plain := by_name.get((f'{name}, plain', jax)):
            assert int(row['moved']) <= 1.1 * int(plain['moved'])
            assert int(row['temporaries']) < int(plain['temporaries'])


def test_products_hide_no_more_than_what_they_run_beside() -> None:
    for row in OVERLAP:
        for axis in ('data', 'model'):
            if row[f'hidden_{axis}']:
                assert float(row[f'hidden_{axis}']) <= float(row[f'share_{axis}']) + 1e-4


def test_the_page_has_the_errors_of_right_steps() -> None:
    text = (RESULTS / '2026-11-30_rounding.md').read_text()
    rows = re.findall(r'^\| `mesh.* \| ([\d.e+-]+) \| ([\d.]+) \|$', text, re.MULTILINE)
    # Half of a limit is the rounding error, except for the least limit.
    times = [2 * float(share) for limit, share in rows if float(limit) > 1e-2]
    assert len(times) == len(rows) - 1 == 8
    said = f'errors of {min(times):.1f} to {max(times):.1f} times the rounding error'
    assert said in ' '.join(VERIFY.split())


def test_every_random_step_is_right() -> None:
    rows = read('2026-11-22_random_steps.csv')
    for jax in ('0.10.2', '0.12.0.1'):
        assert [row['verdict'] for row in rows if row['jax'] == jax] == 200 * ['right']
        assert jax in VERIFY


def test_the_table_of_random_steps_is_that_of_the_stored_steps() -> None:
    script = load_script('fuzz_table', 'benchmarks')
    files = '2026-11-29_fuzz', '2026-12-01_fuzz'
    stored = [script.read(RESULTS / f'{file}.jsonl') for file in files]
    assert script.table([case for cases in stored for case in cases]) in VERIFY
    assert script.table(stored[1]) in (RESULTS / '2026-12-01_fuzz.md').read_text()
    assert f'All {sum(map(len, stored))} steps so far agree' in VERIFY


def test_the_tables_of_random_compositions_are_those_of_the_stored_rows() -> None:
    lines = (RESULTS / '2026-11-29_combinations.jsonl').read_text().splitlines()
    page = (RESULTS / '2026-11-29_combinations.md').read_text()
    table = load_script('random_compositions', 'benchmarks').table
    assert table([json.loads(line) for line in lines]) in page


def test_the_page_has_the_error_of_the_counted_memory() -> None:
    errors = [abs(float(row['ratio']) - 1) for row in MEMORY]
    large = [row for row in MEMORY if float(row['compiled_bytes']) > 100e6]
    beyond = max(1 / float(row['ratio']) - 1 for row in large)
    mean = f'{100 * sum(errors) / len(errors):.1f}%'
    assert f'off by {mean} on average over {len(MEMORY)} steps that XLA compiled' in PLAN
    assert f'at most {100 * beyond:.1f}% too low for steps above 100 MB' in PLAN


def test_the_readme_has_the_error_of_the_predicted_rates() -> None:
    text = (RESULTS / '2026-11-30_plan_tables.md').read_text()
    held_out = re.findall(r'^(\d+) rows held out', text, flags=re.MULTILINE)
    mean, largest = re.search(
        r'^\| all \|\s*\| \d+ \| ([\d.]+)% \| ([\d.]+)%', text, flags=re.MULTILINE
    ).groups()
    assert f'On {sum(map(int, held_out))} training throughputs held out' in README
    assert f'off by {mean}% on average and {largest}% at worst' in README


def test_the_readme_has_the_measured_rates_of_training() -> None:
    table = (ROOT / 'README.md').read_text().split('| step | tokens/s |')[1].split('\n\n')[0]
    rows = [[cell.strip() for cell in line.split('|')[2:5]] for line in table.splitlines()[2:]]
    text = (RESULTS / '2026-11-26_gpu.md').read_text()
    measured = re.findall(r'\| ([\d,]+) \| \d+ \| ([\d.]+) % \| ([\d.]+) % \|', text)
    assert len(rows) == 5
    for tokens, *shares in rows:
        assert (tokens, *(share.removesuffix('%') for share in shares)) in measured


def test_the_page_has_the_error_of_the_older_rates() -> None:
    text = (RESULTS / '2026-11-30_plan_tables.md').read_text()
    tables = re.split(r'^## ', text, flags=re.MULTILINE)[1:]
    older = [one for one in tables if one.splitlines()[0] not in OF_2026]
    count = sum(map(int, re.findall(r'^(\d+) rows? held out', '\n'.join(older), re.MULTILINE)))
    (mean,) = re.findall(r'^\| before 2026 \|\s*\| \d+ \| ([\d.]+)%', text, re.MULTILINE)
    said = f'On the {count} held-out rows that were published before 2026, the prediction is off by'
    assert f'{said} {mean}% on average' in PLAN


def test_the_page_names_the_held_out_rates_that_are_far_off() -> None:
    text = (RESULTS / '2026-11-30_plan_tables.md').read_text()
    errors = re.findall(r'\| ([+-][\d.]+)% \| held out \|', text)
    assert sum(abs(float(error)) > 20 for error in errors) == 5
    assert 'Five held-out rows are off by more than 20%' in PLAN


def test_the_page_has_the_ranks_of_the_published_meshes() -> None:
    text = (RESULTS / '2026-11-30_plan_ranks.md').read_text()
    row = r'^\| [^|]+ \| \d+ \| ([^|]+) \| ([^|]+) \| ([\d.]+)% \| (?:yes)? *\|$'
    ranked = re.findall(row, text, flags=re.MULTILINE)
    first = sum(published == fastest for published, fastest, _ in ranked)
    said = f'Of {len(ranked)} published runs, the published mesh is the fastest in {first}'
    assert said in PLAN
    others = (float(share) for published, fastest, share in ranked if published != fastest)
    slower = ' and '.join(f'{share:g}%' for share in others)
    assert f'it is {slower} slower than the fastest' in PLAN
    near = sum(float(share) <= 3 for _, _, share in ranked)
    assert f'{near} of {len(ranked)} are first or within 3% of the first' in PLAN


def test_the_page_has_the_sizes_of_the_searches() -> None:
    names = '2026-11-29_plan_pipelines.md', '2026-11-30_claims.md', '2026-11-30_plan_cpu.md'
    pipelines, claims, cpu = ((RESULTS / name).read_text() for name in names)
    of_pipelines = re.search(r'of ([\d,]+) layouts fit', pipelines.split('--gpus 3072`')[1])[1]
    assert f'the fastest of {of_pipelines} layouts' in PLAN
    command = claims.split('`megajax plan llama3_8b --gpu h100 --gpus 64`')[1]
    searched = re.search(r'of ([\d,]+) layouts fit', command)[1]
    seconds = rf'^{searched} layouts .*: ([\d.]+) CPU seconds \(median; ([\d.]+) to ([\d.]+)\)'
    median, least, most = map(float, re.search(seconds, cpu, re.MULTILINE).groups())
    said = f'{median:.1f} CPU seconds (median of 20 searches; {least:.1f} to {most:.1f})'
    assert f'{said} for the {searched} layouts of `llama3_8b` on 64 GPUs, on an AMD EPYC' in PLAN
    took = r'a search of ([\d,]+) layouts took ([\d.]+) and ([\d.]+)\ss on an idle Xeon'
    before, *idle = re.search(took, cpu).groups()
    first, second = (f'{float(seconds):.1f}' for seconds in idle)
    assert f'of {before} layouts took {first} and {second} CPU seconds on an idle Xeon' in PLAN


@pytest.mark.slow
def test_the_notebook_has_the_plan_of_this_version() -> None:
    path = ROOT / 'notebooks/03_is_tensor_parallelism_worth_it.ipynb'
    (cell,) = (
        cell
        for cell in json.loads(path.read_text())['cells']
        if ''.join(cell['source']) == "megajax.plan(megajax.load('llama3_8b'), gpu='h100', gpus=32)"
    )
    stored = ''.join(cell['outputs'][0]['data']['text/html'])
    assert stored == plan(load('llama3_8b'), gpu='h100', gpus=32)._repr_html_()


def test_the_page_has_the_time_of_a_step_without_nvlink() -> None:
    config = load('llama3_8b', ['mesh.data=1', 'mesh.model=8'])
    nvlink, pcie = (
        step_time(resolved(config, on_gpu=True), Cluster.of(hardware('h100', link), 8))
        for link in (None, 'pcie')
    )
    exposed = sum(pcie.share(axis) for axis in {*config.mesh.sizes, *pcie.axes})
    said = f'takes {pcie.total / nvlink.total:.2f}x as long, and {exposed:.0%} of the step is'
    assert f'{said} exposed communication' in PLAN


def test_the_page_has_the_plan_that_a_run_prints() -> None:
    mesh = 'mesh.data=8', 'mesh.model=8', 'train.recompute=full', 'optim.shard=none'
    *_, line = advice(load('llama3_8b', mesh), hardware('h100'))
    assert f'```\nplan       {line}\n```' in (ROOT / 'docs/monitor.md').read_text()


def test_the_pages_have_the_error_of_overlap_over_model() -> None:
    text = max(RESULTS.glob('*_plan_overlap.md')).read_text()
    count, error = re.search(r'^\| all \| (\d+) .* \| ([\d.]+) points', text, re.MULTILINE).groups()
    held, of_held = re.search(r'^(\d+) held-out .* by ([\d.]+) points', text, re.MULTILINE).groups()
    results, docstring = (' '.join(one.split()) for one in (BENCHMARKS, plan_overlap.__doc__))
    assert f'off by {error} points on average over {count} such steps' in PLAN
    assert f'off by {error} percentage points on average. The predictions' in results
    assert f'means of the {count} steps' in results
    assert f'means of {count} compiled steps' in docstring
    assert f'off by {error} points on average, and within' in docstring
    for page in (PLAN, results, docstring):
        assert re.search(rf'In {held} held-out steps .* by {of_held} points on average', page)


def test_the_pages_name_the_step_of_which_the_plan_of_overlap_is_farthest_off() -> None:
    script = load_script('plan_overlap')
    worst = max(script.steps(), key=lambda step: step.error)
    assert worst.kind == 'TP, recompute=none'
    lines = read(max(RESULTS.glob('*_collectives.csv')).name)
    (line,) = [one for one in lines if one['model_overlap'] == f'{worst.compiled:.4f}']
    assert (line['preset'], line['data'], line['model']) == ('llama3_8b', '8', '8')
    assert f'by {100 * worst.error:.0f} at worst (Llama 3 8B, 8x8, without' in PLAN
    found = f'predicted {worst.planned:.0%}, compiled {worst.compiled:.0%}'
    for page in (PLAN, ' '.join(BENCHMARKS.split())):
        assert found in page
    said = f'overlaps {worst.compiled:.0%}, and the plan says {worst.planned:.0%}'
    assert said in ' '.join(plan_overlap.__doc__.split())


def test_the_page_has_the_share_of_rates_within_their_bands() -> None:
    text = (RESULTS / '2026-11-30_plan_tables.md').read_text()
    within, of, share = re.findall(r'^(\d+) of (\d+) held-out rows \((\d+%)\)', text, re.MULTILINE)[
        0
    ]
    assert f'Of the {of} held-out rows, {within} ({share}) are within their bands' in PLAN


def test_the_page_has_the_bytes_of_zero_1() -> None:
    text = (RESULTS / '2026-11-27_readme.md').read_text()
    step = 'megajax inspect megatron_8.3b mesh.data=8 train.batch_size=64 --target h100'
    whole, sharded = (
        text.split(f'`{step}{extra}`')[1].split('```')[1]
        for extra in ('', ' optim.shard=optimizer')
    )
    for found, shown in ((whole, 'none'), (sharded, 'optimizer')):
        state, temporaries = re.search(
            r'per device  ([\d.]+ GB) .*? \+ ([\d.]+ GB) temp', found
        ).groups()
        assert f'| {shown} | {state} | {temporaries} |' in PARALLELISM
    (reduced,) = re.findall(r'^gradients .* ([\d.]+ GB)  1 AR', whole, flags=re.MULTILINE)
    (gathered,) = re.findall(r'1 AG bf16\[6400,3072\] +([\d.]+ GB)', sharded)
    (scattered,) = re.findall(r'([\d.]+ GB)  1 RS', sharded)
    assert f'all-reduce fp32, {reduced} |' in PARALLELISM
    assert f'all-gather bf16 {gathered}, reduce-scatter fp32 {scattered} |' in PARALLELISM


def test_the_readme_says_how_many_cases_of_faults_there_are() -> None:
    page = (ROOT / 'docs/failure_cases.md').read_text()
    cases = re.findall(r'^\| \d\d (?:\| [^|]+ ){3}\|$', page, flags=re.MULTILINE)
    assert f'lists {len(cases)} failures' in README


@pytest.mark.parametrize(
    ('file', 'named'),
    [
        ('2026-11-29_plan.md', ''),
        slow('2026-11-29_plan_pipelines.md', ''),
        slow('2026-11-30_plan_images.md', ''),
        slow('2026-11-29_plan_what_if.md', ''),
        slow('2026-11-30_claims.md', 'mesh'),  # which rank no layouts
        exhaustive('2026-11-30_claims.md', ''),
    ],
)
def test_plan_prints_what_is_stored(file: str, named: str) -> None:
    commands = r'^`megajax (plan [^`]+)`.*?\n\n```\n(.*?)^```$'
    stored = re.findall(commands, (RESULTS / file).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert stored
    for command, text in ((command, text) for command, text in stored if named in command):
        done = CliRunner().invoke(app, shlex.split(command), env={'COLUMNS': '140'})
        problems = done.exception.problems if isinstance(done.exception, ConfigError) else ()
        lines = [*done.output.splitlines(), *(f'error: {problem}' for problem in problems)]
        assert [line.rstrip() for line in lines if line] == text.splitlines(), command
