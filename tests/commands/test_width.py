"""The main tables of the command line on a terminal of 80 columns: what matters is never cut."""

import re

import pytest
from rich.console import RenderableType

from megajax import load, plan
from megajax.analysis.inspect import report as inspect_report
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_step
from megajax.analysis.inspect.result import Inspection
from megajax.analysis.plan import report as plan_report
from megajax.analysis.plan.generation import plan_generation
from megajax.analysis.plan.generation_report import generation_table
from megajax.analysis.plan.published.comparison import summary, table_of
from megajax.analysis.plan.published.tables import TABLES
from megajax.analysis.plan.result import Plan
from megajax.base.render.console import as_text
from megajax.base.render.folded import Folded
from megajax.commands import config as commands_config
from megajax.core.config import presets
from megajax.core.parallel.mesh import mesh_for

KEYS = ['mesh.sequence_parallel=true', 'model.num_layers=1', 'model.hidden_size=64']


def shown(what: RenderableType, width: int = 80) -> list[str]:
    lines = as_text(what, width=width).splitlines()
    assert not [line for line in lines if '…' in line or len(line) > width]
    return lines


@pytest.fixture(scope='module')
def inspection() -> Inspection:
    config = load('tiny', KEYS)
    return audit(config, compile_step(config, mesh_for(config), 4), 'cpu')


@pytest.fixture(scope='module')
def planned() -> Plan:
    keys = 'model.dropout=0', 'mesh.data=16', 'train.batch_size=16', 'train.microbatches=1'
    return plan(load('megatron_8.3b', keys), gpu='h100')


def test_inspect_shows_every_site_with_its_verdict(inspection: Inspection) -> None:
    lines = shown(inspect_report.tables(inspection))
    for row in inspection.rows:
        (line,) = [
            line
            for line in lines
            if tuple(line.split()[:3]) == (*row.site.split(), row.phase, row.axis)
        ]
        assert line.split()[-1] == row.verdict
    text = '\n'.join(lines)
    for row in inspection.rows:
        assert all(transfer.array in text for transfer in row.placed[:3])


def test_plan_shows_every_layout_with_its_time_and_the_reason(planned: Plan) -> None:
    text = ' '.join(' '.join(shown(plan_report.tables(planned))).split())
    for layout in plan_report._best_of_each(planned.layouts):
        assert layout.name in text
        if layout.seconds and layout.mfu:
            reason = layout.reason or 'fastest'
            assert f'{1e3 * layout.seconds:,.1f} {layout.mfu:.1%}' in text
            assert reason.split(':')[0] in text


@pytest.mark.parametrize('name', [*TABLES, 'all'])
def test_the_papers_tables_show_their_rows(name: str) -> None:
    lines = shown(Folded(summary() if name == 'all' else table_of(name)))
    assert len(lines) > 3


def test_a_plan_of_generation_is_shown_whole() -> None:
    generation = plan_generation(
        load('llama3_8b'), gpu='h100', gpus=8, prompt=1024, tokens=256, batch=1
    )
    assert any('tokens/s' in line for line in shown(generation_table(generation)))


def test_names_of_presets_can_be_typed_from_any_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('COLUMNS', '40')
    commands_config.list_presets()
    piped = capsys.readouterr().out.splitlines()
    assert all(len(line.split()) == 5 for line in piped)
    monkeypatch.setenv('FORCE_COLOR', '1')  # as on a terminal
    commands_config.list_presets()
    lines = re.sub(r'\x1b\[[\d;]*m', '', capsys.readouterr().out).splitlines()
    assert {*presets()} <= {line.split()[0] for line in lines}
    assert all(len(line) <= 40 and '…' not in line for line in lines)
