"""What `scripts/slurm.sbatch` starts, with an `srun` that runs its command or prints it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import exhaustive

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/sh
options=
while [ "$1" != megajax ]; do options="$options $1"; shift; done
if [ "$2" = train ]; then echo "srun$options $@"; else "$@"; fi
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / 'bin'
    programs.mkdir()
    megajax = f'#!/bin/sh\nexec {sys.executable} -m megajax "$@"\n'
    for name, text in {'srun': SRUN, 'megajax': megajax}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    own = {
        'PATH': f'{programs}:{os.environ["PATH"]}',
        'PYTHONPATH': str(ROOT),
        'SLURM_JOB_ID': '7',
    }
    return os.environ | own


def run(folder: Path, environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ['bash', str(ROOT / 'scripts/slurm.sbatch'), *arguments]
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, check=False
    )


def write_config(folder: Path, run_dir: str) -> None:
    tiny = (ROOT / 'configs/tiny.yaml').read_text()
    (folder / 'my.yaml').write_text(f'{tiny}\nrun:\n  dir: {run_dir}\n')


@pytest.mark.parametrize(
    ('arguments', 'variable', 'expected'),
    [
        (['my.yaml'], '', 'runs/a folder'),
        (['my.yaml'], '/shared/run', '/shared/run'),
        (['my.yaml', 'run.dir=runs/b'], '/shared/run', 'runs/b'),
        (['my.yaml', 'run.dir=null'], '', '{here}/runs/megajax-7'),
        exhaustive(['tiny'], '', '{here}/runs/megajax-7'),
        exhaustive(['run.start_from=runs/a'], '', '{here}/runs/megajax-7'),
    ],
)
def test_the_folder_of_a_run_is_that_of_its_config_unless_it_is_given(
    arguments: list[str],
    variable: str,
    expected: str,
    tmp_path: Path,
    environ: dict[str, str],
) -> None:
    write_config(tmp_path, 'runs/a folder')
    done = run(tmp_path, environ | {'RUN_DIR': variable}, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f' run.dir={expected.format(here=tmp_path)}\n')


@pytest.mark.parametrize('run_dir', ['"2024"', f'/shared/{"long name " * 20}x'])
def test_a_folder_that_the_script_could_mistake_is_refused(
    run_dir: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    write_config(tmp_path, run_dir)
    done = run(tmp_path, environ, 'my.yaml')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.endswith(': add run.dir=... to the arguments\n')


def test_a_folder_without_spaces_may_be_long(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = f'/shared/{"folder/" * 20}run'
    write_config(tmp_path, folder)
    assert run(tmp_path, environ, 'my.yaml').stdout.endswith(f' run.dir={folder}\n')


def test_a_config_with_a_mistake_ends_the_job_before_its_tasks(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    done = run(tmp_path, environ, 'tiny', 'train.steps=none')
    assert (done.returncode, done.stdout) == (2, '')
    assert 'train.steps' in done.stderr


def test_a_container_sees_the_run_and_the_corpus(tmp_path: Path, environ: dict[str, str]) -> None:
    write_config(tmp_path, str(tmp_path / 'run'))
    environ |= {'IMAGE': 'image', 'MOUNTS': '/a:/a'}
    said = run(tmp_path, environ, 'my.yaml', 'data.corpus=/shared/web').stdout
    mounts = [tmp_path, tmp_path / 'run', '/a', '/shared']
    assert f'--container-mounts={",".join(f"{x}:{x}" for x in mounts)} ' in said
    assert f'megajax train my.yaml data.corpus=/shared/web run.dir={tmp_path}/run' in said


@pytest.mark.parametrize('container', [{}, {'IMAGE': 'image'}], ids=['host', 'container'])
@pytest.mark.parametrize('place', ['argument', 'variable', 'config'])
def test_the_home_directory_is_that_of_the_host(
    container: dict[str, str], place: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    in_container = '[ -z "$IMAGE" ] || export HOME=/home/of_the_image'
    srun = SRUN.replace('options=\n', f'options=\n{in_container}\n')
    srun = srun.replace('do options', 'do case "$1" in HOME=*) export "$1" ;; esac; options')
    (tmp_path / 'bin/srun').write_text(srun)
    home = tmp_path / 'home'
    write_config(tmp_path, '~/runs/x')
    environ |= container | {'HOME': str(home)} | {'RUN_DIR': '~/runs/x' * (place == 'variable')}
    arguments = ['my.yaml' if place == 'config' else 'tiny', 'data.corpus=~/web']
    arguments += ['run.dir=~/runs/x'] * (place == 'argument')
    done = run(tmp_path, environ, *arguments)
    assert done.returncode == 0, done.stderr
    assert f' data.corpus={home}/web ' in done.stdout
    assert done.stdout.endswith(f' run.dir={home}/runs/x\n')
    mounts = f',{home}/runs/x:{home}/runs/x,{home}:{home} '
    assert (mounts in done.stdout) == bool(container)
    assert not (tmp_path / '~').exists()


def test_a_corpus_that_is_a_folder_is_seen_itself_and_never_the_root_of_the_host(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    environ |= {'IMAGE': 'image', 'RUN_DIR': str(tmp_path / 'run')}
    (tmp_path / 'web').mkdir()
    done = run(tmp_path, environ, 'tiny', f'data.corpus={tmp_path}/web')
    assert f',{tmp_path}/web:{tmp_path}/web ' in done.stdout
    assert f',{tmp_path}:{tmp_path}' not in done.stdout
    assert ',/tmp:/tmp ' in run(tmp_path, environ, 'tiny', 'data.corpus=/tmp').stdout
    done = run(tmp_path, environ, 'tiny', 'data.corpus=/no_such_corpus')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.endswith('move the corpus into a folder\n')


ATTEMPT = """#!/bin/sh
if [ -n "$STEP" ]; then
  mkdir -p "$RUN_DIR/checkpoints/$STEP"
  [ -z "$FINISHED" ] || touch "$RUN_DIR/checkpoints/$STEP/commit_success.txt"
fi
exit "$CODE"
"""


def requeued(
    folder: Path,
    environ: dict[str, str],
    restarts: int,
    step: int | None,
    code: int = 75,
    *,
    finished: bool = True,
) -> tuple[bool, str]:
    """Whether a job is requeued after an attempt that saves `step`, and its errors."""
    for name, text in {'srun': ATTEMPT, 'scontrol': '#!/bin/sh\necho "$@"\n'}.items():
        (folder / 'bin' / name).write_text(text)
        (folder / 'bin' / name).chmod(0o755)
    attempt = {'SLURM_RESTART_COUNT': str(restarts), 'CODE': str(code)}
    attempt |= {'STEP': str(step or ''), 'FINISHED': 'yes' if finished else ''}
    environ = environ | attempt | {'RUN_DIR': f'{folder}/run'}
    done = run(folder, environ, 'tiny')
    assert done.returncode == code
    assert done.stdout in ('', 'requeue 7\n')
    return done.stdout != '', done.stderr


def test_a_job_is_requeued_at_each_time_limit_while_its_run_makes_progress(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    for restarts in range(12):
        step = 100 * (restarts + 1) if restarts % 5 == 0 else None
        assert requeued(tmp_path, environ, restarts, step) == (True, '')


def test_a_save_that_was_cut_off_is_no_progress(tmp_path: Path, environ: dict[str, str]) -> None:
    assert requeued(tmp_path, environ, 0, 100) == (True, '')
    for restarts in range(1, 11):
        step = 1000 + restarts
        assert requeued(tmp_path, environ, restarts, step, finished=False) == (True, '')
    assert not requeued(tmp_path, environ, 11, 2000, finished=False)[0]
    assert requeued(tmp_path, environ, 12, 200) == (True, '')


def test_a_restart_by_slurm_itself_is_no_futile_attempt(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    assert requeued(tmp_path, environ, 20, None) == (True, '')


def test_a_job_whose_attempts_cannot_be_counted_ends(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / 'run').touch()
    is_requeued, said = requeued(tmp_path, environ, 3, None)
    assert not is_requeued
    assert said.endswith(f'not requeued: {tmp_path}/run cannot be written\n')


@pytest.mark.parametrize('has_folder', [True, False])
def test_a_job_is_requeued_ten_times_in_a_row_without_a_new_checkpoint(
    has_folder: bool, tmp_path: Path, environ: dict[str, str]
) -> None:
    if has_folder:
        (tmp_path / 'run/checkpoints/100').mkdir(parents=True)
        (tmp_path / 'run/futile_attempts').write_text('9\n')  # of an earlier job
    for restarts in range(10):
        assert requeued(tmp_path, environ, restarts, None, code=137) == (True, '')
    is_requeued, said = requeued(tmp_path, environ, 10, None)
    assert not is_requeued
    assert said.startswith('not requeued: 11 attempts in a row ended without a new checkpoint in ')


def test_a_job_is_not_requeued_after_an_error_that_would_repeat(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    for code in (0, 2, 124):
        assert requeued(tmp_path, environ, 0, 100, code) == (False, '')
