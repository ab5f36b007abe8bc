"""The file of a report appears at once, and replaces nothing but a report."""

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from support import disk_full_at
from typer.testing import CliRunner

from megajax.analysis.report import write_at_end, write_report
from megajax.commands.main import app


def command(*arguments: object) -> tuple[int, str]:
    """The exit code of `megajax report`, and what it says."""
    result = CliRunner().invoke(app, ['report', *map(str, arguments)])
    return getattr(result.exception, 'exit_code', result.exit_code), (
        f'{result.output}{result.exception or ""}'
    )


@pytest.fixture(autouse=True)
def same_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command chooses a platform for its own process."""
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')


def test_a_run_has_its_report_when_it_ends(finished_run: Path) -> None:
    page = (finished_run / 'report.html').read_text()
    assert 'step 6 of 6' in page
    assert 'still going on' not in page  # although its own lock is still held


def test_a_report_replaces_a_report(copied_run: Path) -> None:
    file = copied_run / 'report.html'
    before = file.read_bytes()
    assert command(copied_run) == (0, f'report     {file}\n')
    assert file.read_bytes() != before  # the time at its end
    assert not [*copied_run.glob('*.new')]


def test_on_a_full_disk_the_last_report_stays(copied_run: Path) -> None:
    file = copied_run / 'report.html'
    before = file.read_bytes()
    with disk_full_at(1000):
        code, said = command(copied_run)
    assert (code, file.read_bytes()) == (2, before)
    assert f'{file} cannot be written: File too large; free some space' in said


def test_several_runs_have_theirs_in_the_current_folder(
    finished_run: Path, copied_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(finished_run, copied_run) == (0, 'report     report.html\n')
    assert (tmp_path / 'report.html').is_file()


@contextmanager
def standard_output(file: BinaryIO, *, is_pipe: bool) -> Iterator[None]:
    """Let this process have the file, or a pipe into it, as its standard output."""
    with subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=file) as reader:
        assert reader.stdin is not None
        before = os.dup(1)
        os.dup2((reader.stdin if is_pipe else file).fileno(), 1)
        try:
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)
            reader.stdin.close()


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='there is no /proc')
@pytest.mark.parametrize('is_pipe', [True, False])
def test_a_report_on_standard_output_replaces_no_device(
    is_pipe: bool, finished_run: Path, tmp_path: Path
) -> None:
    device, file = tmp_path / 'stdout', tmp_path / 'page.html'
    device.symlink_to('/proc/self/fd/1')  # as /dev/stdout, which root can replace
    with file.open('wb') as stdout, standard_output(stdout, is_pipe=is_pipe):
        code, said = command(finished_run, '--out', device)
    assert (code, said == '') == (0, is_pipe)  # a pipe gets only the report
    page = file.read_bytes()
    assert page.startswith(b'<!doctype html>')
    assert page.rstrip().endswith(b'</html>')
    assert device.is_symlink()


@pytest.mark.parametrize('content', ['my thesis', '<!doctype html>\n<html><body>by hand</body>'])
def test_a_file_that_is_no_report_is_kept(finished_run: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / 'page.html'
    file.write_text(content)
    code, said = command(finished_run, '--out', file)
    assert code == 2
    assert (
        f'{file} exists and is not a megajax report: delete it, or give a different --out' in said
    )
    assert file.read_text() == content


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['{folder}/nothing'], '{folder}/nothing is not a run directory (no config.yaml): '),
        (
            ['{run}/..'],
            '{run}/.. is not a run directory (no config.yaml): give the runs in it: {run}/../',
        ),
        (['{run}', '--out', '/dev/null/page.html'], '/dev/null is a file, not a folder: choose an'),
        (['{run}', '--out', '{folder}'], '{folder} is a folder: give the name of a file in it'),
        (['{run}', '{run}'], 'is given twice: remove one'),
        (['{run}', '--gpu', 'h101'], 'GPU h101: choose among '),
    ],
)
def test_a_mistake_says_how_to_mend_it(
    finished_run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {'run': finished_run, 'folder': tmp_path}
    code, said = command(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert message.format(**places) in said


def test_a_report_that_cannot_be_written_is_a_warning_at_the_end_of_a_run(
    copied_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copied_run / 'report.html').write_text('mine')
    with caplog.at_level(logging.WARNING):
        assert write_at_end(copied_run) is None
    assert 'report.html cannot be written: ' in caplog.text
    assert (copied_run / 'report.html').read_text() == 'mine'


def test_the_folder_of_a_report_is_created(finished_run: Path, tmp_path: Path) -> None:
    file = tmp_path / 'no/such/page.html'
    assert command(finished_run, '--out', file) == (0, f'report     {file}\n')
    assert file.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_run_that_may_only_be_read_is_a_mistake_with_a_fix(copied_run: Path) -> None:
    (copied_run / 'report.html').unlink()
    copied_run.chmod(0o555)
    code, said = command(copied_run)
    assert code == 2
    assert 'choose another file' in said


def test_a_large_program_is_left_to_the_command(copied_run: Path) -> None:
    file = write_report(str(copied_run), max_program=1000)
    assert file == copied_run / 'report.html'
    assert f'run megajax report {copied_run}' in file.read_text()
