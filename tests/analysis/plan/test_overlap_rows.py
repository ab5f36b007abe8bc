"""On Megatron-Core's published rows without a pipeline, megajax's step is predicted to keep up.

What our step hides is what its programs for these rows hide (`test_overlap.py`).

Megatron's program and the GPU's record are frozen: what is compared with must not move.
"""

import ast
import hashlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import resources

import pytest
from support import ROOT

from megajax.analysis.plan import programs
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, MEGATRON, Software
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.analysis.plan.published.tables import rows
from megajax.analysis.plan.search import usable_memory
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config
from megajax.core.config.overlap_rules import resolved
from megajax.core.config.rules import incompatibilities
from megajax.core.hardware.records import hardware

ROWS = [row for row in rows('core') if row.config.mesh.stages == 1]
FROZEN = {
    'megatron': '1b89cac7e9ce41cb',
    'h100': '572746b218c8c4d4',
}


def digest(*texts: str) -> str:
    return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]


def code(function: Callable[..., object]) -> str:
    """The code of a function without its docstring, its comments and its format."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.body = tree.body[ast.get_docstring(tree) is not None :]
    return ast.unparse(tree)


def test_what_is_compared_with_is_frozen() -> None:
    parts = [getattr(MEGATRON, part) for part in ('in_passes', 'over_data', 'hidden_by')]
    megatron = digest(*map(code, [*parts, programs._hidden_by_everything]))
    folder = resources.files('megajax.core.hardware')
    files = 'gpus/h100.yaml', 'dies/hopper.yaml'
    record = ''.join((folder / file).read_text() for file in files)
    record = re.sub(r'^ *#.*\n', '', record, flags=re.MULTILINE)  # comments change no time
    record = record.replace(', fp8: 1978.9e12', '')  # which no row computes in
    record = re.sub(r'^( *)pcie:.*\n(\1 +.*\n)*', '', record, flags=re.MULTILINE)  # nor sends over
    record = re.sub(r', band: [\d.]+', '', record)  # the errors of the rows, which change no time
    assert {'megatron': megatron, 'h100': digest(record)} == FROZEN


def steps(config: Config, overlaps: tuple[str, ...]) -> Iterator[Config]:
    """The steps on the row's mesh with each number of microbatches, recomputation and overlap."""
    config = changed(config, train__unroll='auto' if 'none' not in overlaps else False)
    counts = range(1, config.microbatch_rows * config.train.microbatches + 1)
    settings = itertools.product(counts, ('none', 'selective', 'full'), overlaps)
    for count, recompute, overlap in settings:
        keys = {'train__microbatches': count, 'train__recompute': recompute}
        step = resolved(changed(config, **keys, train__overlap=overlap), on_gpu=True)
        if not incompatibilities(step):
            yield step


def fastest(row: PublishedRate, program: Software, *overlaps: str) -> float:
    """Seconds of the fastest step that fits."""
    cluster = Cluster.of(hardware('h100'), row.config.mesh.num_devices)
    limit = usable_memory(cluster)
    return min(
        step_time(step, cluster, program).total
        for step in steps(row.config, overlaps)
        if memory(step, capacity_bytes=limit).total <= limit
    )


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)
def test_a_step_takes_no_more_than_a_20th_longer_than_megatrons(row: PublishedRate) -> None:
    ours = fastest(row, MEGAJAX, 'batch_split', 'sequence_split')
    megatrons = fastest(row, MEGATRON, 'none')
    assert megatrons >= 0.95 * ours
    rates = (f'{row.flops / one / row.num_gpus / 1e12:.0f}' for one in (ours, megatrons))
    mesh = f'{row.config.mesh.data}x{row.config.mesh.model}'
    cells = mesh, *rates, f'{megatrons / ours:.3f}', f'{row.published}'
    assert f'| {" | ".join(cells)} |' in (ROOT / 'docs/results.md').read_text()


@pytest.mark.parametrize('page', ['overlap', 'results'])
def test_a_page_states_the_extremes_of_the_table(page: str) -> None:
    table = (ROOT / 'docs/results.md').read_text()
    ratios = [float(x) for x in re.findall(r'^\| \d+x\d+ \|.* (\d\.\d{3}) \|', table, re.MULTILINE)]
    assert len(ratios) == len(ROWS)
    extremes = f'between {1 - min(ratios):.1%} slower and {max(ratios) - 1:.1%} faster'
    assert extremes in ' '.join((ROOT / f'docs/{page}.md').read_text().split())


def test_there_are_four_rows_with_1_to_8_gpus_a_group() -> None:
    assert [row.config.mesh.model for row in ROWS] == [1, 2, 4, 8]
