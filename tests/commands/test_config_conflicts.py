"""The page of all combinations is what the table of conflicts says."""

from support import ROOT
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config.conflicts import CONFLICTS, FEATURES
from megajax.core.config.pairs import pairs

COMMAND = 'config', 'conflicts', '--markdown'


def test_the_page_is_what_the_table_says() -> None:
    page = (ROOT / 'docs/conflicts.md').read_text()
    written = CliRunner().invoke(app, COMMAND).output
    assert page == written, f'megajax {" ".join(COMMAND)} > docs/conflicts.md'


def test_each_pair_is_in_the_page_as_allowed_or_rejected() -> None:
    page = (ROOT / 'docs/conflicts.md').read_text()
    rejected, allowed = page.split('## Rejected')[1].split('## Allowed')
    assert rejected.count('\n| `') == len(CONFLICTS)
    rows = dict(line.strip('| ').split(' | ') for line in allowed.splitlines() if '| `' in line)
    assert [*rows] == [f'`{feature}`' for feature in FEATURES]
    for pair in pairs():
        is_listed = f'`{pair.other}`' in rows[f'`{pair.one}`'].split(', ')
        assert is_listed is not bool(pair.conflicts)
