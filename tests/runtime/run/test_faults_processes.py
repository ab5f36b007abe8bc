"""What befalls one process of a run befalls all, and the run goes on: real processes, launched as a
user does.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from runs import (
    HASH_STATES,
    children,
    finish,
    gone,
    hashes,
    losses,
    read_until,
    start,
    steps,
    stop,
    train,
)
from support import write_run

from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.processes.distributed import HEARTBEAT_TIMEOUT
from megajax.runtime.run.watchdog import GRACE, LOG, STALLED

pytestmark = pytest.mark.faults

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: 60, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 25, eval_batches: 2, \
log_every: 1}
checkpoint: {every: 25}
optim: {lr: 1e-2, shard: weights}
"""
SECONDS = 10  # for what takes one; the machine may be busy
WATCHDOG = 15  # seconds without a step

ON_1 = "if os.environ['MEGAJAX_PROCESS'] == '1':\n"
# Before the others can commit the step: they wait at the barrier.
SAVE = """
    from megajax.runtime.checkpoint.checkpoints import Checkpoints
    from megajax.runtime.processes.consensus import SaveBarrier
    def save(self, state, step, save=Checkpoints.save, **options):
        if step == 50:
            self.wait()
            SaveBarrier.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        save(self, state, step, **options)
    Checkpoints.save = save
"""
AT_33 = """
    import ctypes
    from megajax.runtime.run import trainer
    def take_step(loop, take=trainer.Trainer._take_step, **options):
        if loop.step == 33:
            {fault}
        return take(loop, **options)
    trainer.Trainer._take_step = take_step
"""
HOLD_THE_GIL = AT_33.format(fault='ctypes.PyDLL(None).sleep(1000)')
# A run that has time to agree on a signal: jax needs half a second, and far more on a busy machine.
SLOW = """
from megajax.runtime.run import trainer
def take_step(loop, take=trainer.Trainer._take_step, **options):
    time.sleep(0.3 if loop.step >= 25 else 0)
    return take(loop, **options)
trainer.Trainer._take_step = take_step
"""
# Versions that differ from those of the checkpoint: one in all processes, one only in process 1.
VERSIONS = """
from megajax.runtime.checkpoint import compare
def differences(there, here):
    own = {'orbax': ('1', '2')} if os.environ['MEGAJAX_PROCESS'] == '1' else {}
    return {'jax': ('1', '2'), **own}
compare.version_differences = differences
"""
ROWS = """
    from megajax.runtime.data import Batches
    def rows(self, step, start, stop, rows=Batches.rows):
        batch = rows(self, step, start, stop)
        if step == 33 and len(self) > 1000:  # training, which has no end
            {fault}
        return batch
    Batches.rows = rows
"""
HANGS = {
    'checkpoint': HOLD_THE_GIL,
    'data': ROWS.format(fault='time.sleep(1000)'),
}  # by the phase that hangs
A_STAGE_EACH = 'mesh.stages=2', 'mesh.data=1', 'train.microbatches=2', 'optim.shard=optimizer'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG, split='1,0,0')


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with all devices, undisturbed."""
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG, split='1,0,0')
    train(folder, 'checkpoint.every=33', fault=HASH_STATES)
    return folder


def assert_goes_on_as_if_nothing_had_been(folder: Path, straight: Path) -> None:
    """On one process with all devices."""
    train(folder, 'run.resume=must', fault=HASH_STATES)
    assert losses(folder / 'run') == losses(straight / 'run')
    assert hashes(folder)['saved 60'] == hashes(straight)['saved 60']


@pytest.mark.parametrize('victim', [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_killed_while_saving_none_has_saved_and_a_signal_to_one_process_stops_all(
    folder: Path, straight: Path, victim: int
) -> None:
    fault = HASH_STATES + ON_1.replace("'1'", f"'{victim}'") + SAVE
    code, said = finish(start(folder, processes=2, fault=fault))
    assert code == 75, said
    assert f'launch: process {victim} of 2 failed with signal SIGKILL (137)' in said
    assert find_steps(folder / 'run/checkpoints') == [25]

    process = start(
        folder, 'train.eval_batches=1', processes=2, fault=HASH_STATES + SLOW + VERSIONS
    )
    said = read_until(process, r'step 30/60')
    lines = re.findall(r'^\[(\d)\].*resume     (\S+) \S+ -> ', said, re.MULTILINE)
    assert sorted(lines) == [('0', 'jax'), ('0', 'train.eval_batches:'), ('1', 'orbax')]
    assert hashes(folder)['restored 25'] == hashes(folder)['saved 25']
    os.kill(children(process)[1], signal.SIGTERM)
    sent = time.monotonic()
    code, said = finish(process)
    assert (code, 'stopped by' in said) == (75, True), said
    assert time.monotonic() - sent < 2 * SECONDS
    stopped = max(find_steps(folder / 'run/checkpoints'))
    assert 30 < stopped < 60
    assert_goes_on_as_if_nothing_had_been(folder, straight)
    assert hashes(folder)[f'restored {stopped}'] == hashes(folder)[f'saved {stopped}']


@pytest.mark.parametrize('phase', ['step 25  validation', 'compiling'])
@pytest.mark.exhaustive  # one process shows every phase, and any phase in which all agree
def test_a_signal_is_honoured_in_every_phase_by_all_processes(tmp_path: Path, phase: str) -> None:
    folder = write_run(tmp_path, CONFIG)
    code, said, seconds = stop(start(folder, processes=2, fault=SLOW), signal.SIGTERM, phase)
    assert code == 75, said
    assert max(steps(folder / 'run'), default=0) < 60  # none if there was no step yet
    assert seconds < 60  # the rest of a compilation, on a busy machine


@pytest.mark.parametrize(
    ('phase', 'mesh'),
    [
        ('checkpoint', ()),
        pytest.param('data', (), marks=pytest.mark.exhaustive),
        pytest.param('data', A_STAGE_EACH, marks=pytest.mark.exhaustive),
    ],
)
def test_where_one_process_hangs_all_tell_where_they_are_and_end(
    folder: Path, phase: str, mesh: tuple[str, ...]
) -> None:
    limit = f'run.watchdog_seconds={WATCHDOG}'
    process = start(folder, limit, *mesh, processes=2, fault=ON_1 + HANGS[phase])
    read_until(process, r'step 30/60')
    pids = children(process)
    began = time.monotonic()
    code, said = finish(process)
    assert code == STALLED, said
    assert time.monotonic() - began < WATCHDOG + GRACE + SECONDS
    log = (folder / 'run' / LOG).read_text()
    told = {pid: where for where, pid in re.findall(r"in phase '([^']+)': pid (\d+) ", log)}
    assert told.keys() == {str(pid) for pid in pids}, log
    assert told[str(pids[1])] == phase
    named = (
        rf"the others wait for process 1 \(pid {pids[1]} on host \S+\), which is in phase '{phase}'"
    )
    assert re.search(
        rf"^\[0\] watchdog: process 0 of 2 .* has been in phase '.*' for {WATCHDOG / 2:g} s "
        rf'and ends at .*; {named}$',
        said,
        re.MULTILINE,
    )
    assert len(re.findall(named, log)) == 2  # at the end both say it
    assert all(gone(pid) for pid in pids)


def test_a_number_that_is_not_finite_in_one_process_skips_the_step_in_all_and_frozen_it_is_found(
    folder: Path,
) -> None:
    # The clock of that process is wrong too; what depends on the time is decided by the first.
    skew = (
        '    clocks = time.time, time.monotonic\n    time.time, '
        'time.monotonic = [lambda clock=clock: clock() + 1e6 for clock in clocks]\n'
    )
    fault = ON_1 + skew + ROWS.format(fault="batch['loss_mask'][0, 0] = float('nan')")
    process = start(
        folder,
        'run.dir=null',
        'checkpoint.minutes=60',
        'train.steps=1000',
        processes=2,
        fault=fault,
    )
    said = read_until(process, r'step 55/1000')
    assert 'step 34 is skipped' in said
    (run,) = (folder / 'runs').iterdir()
    assert steps(run) == [25, 50]
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    assert {line['step'] for line in lines if line.get('loss', 0) is None} == {34}
    done = [line['step'] for line in lines if 'loss' in line]
    assert done == list(range(1, len(done) + 1))

    pids = children(process)
    os.kill(pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    read_until(process, r'^\[0\].* process 1 on .* has been silent for \d+ s')
    # A process beats twice within jax's limit, so jax may end the run this soon after the freeze.
    assert time.monotonic() - stopped < HEARTBEAT_TIMEOUT / 2
    code, said = finish(process)
    assert (code, 'launch: process 1 of 2 was stopped' in said) == (75, True), said
    assert time.monotonic() - stopped < HEARTBEAT_TIMEOUT + SECONDS
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    'where',
    [
        'megajax.runtime.run.run.read_corpus',
        pytest.param(
            'megajax.runtime.run.compile_step.make_train_step', marks=pytest.mark.exhaustive
        ),
    ],
)
def test_an_error_in_one_process_before_the_first_step_ends_all_and_is_shown(
    folder: Path, where: str
) -> None:
    module, _, name = where.rpartition('.')
    fault = (
        f'    import {module} as module\n    def fails(*_): raise MemoryError("of this process")\n'
        f'    module.{name} = fails\n'
    )
    process = start(folder, processes=2, fault=ON_1 + fault)
    read_until(process, r'^\[0\] reading')
    began = time.monotonic()
    code, said = finish(process)
    assert code == 1, said
    assert time.monotonic() - began < 60
    assert re.search(
        r'launch: process 1 of 2 failed with exit code 1; its last lines:\n.*MemoryError: '
        r'of this process\n$',
        said,
        re.DOTALL,
    )
    assert re.search(
        r'^\[0\] error: process 1 on \S+ failed \(MemoryError: of this process\)',
        said,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ('kind', 'told', 'codes'),
    [
        ('ConfigError', 'error: corpus.bin: at byte 7', {2}),
        pytest.param(
            'MemoryError',
            'MemoryError: corpus.bin: at byte 7',
            {1, 2},  # process 1's or process 0's, whichever ends first
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_rows_that_one_process_cannot_read_end_all_with_the_state_before_them(
    folder: Path, straight: Path, kind: str, told: str, codes: set[int]
) -> None:
    fault = (
        HASH_STATES
        + ON_1
        + '    from megajax.core.config import ConfigError\n'
        + ROWS.format(fault=f"raise {kind}('corpus.bin: at byte 7')")
    )
    code, said = finish(start(folder, processes=2, fault=fault))
    assert code in codes, said
    assert f'[1] {told}' in said
    assert '[0] error: process 1 could not read its part of a batch: see its output' in said
    assert max(find_steps(folder / 'run/checkpoints')) == 33
    assert hashes(folder)['saved 33'] == hashes(straight)['saved 33']
    whole = losses(straight / 'run')
    assert losses(folder / 'run') == {step: whole[step] for step in range(1, 34)}


@pytest.mark.exhaustive  # `test_trainer.py` shows both outcomes in one process
def test_a_process_that_fails_alone_while_the_others_train_does_not_wait_for_them(
    folder: Path, straight: Path
) -> None:
    code, said = finish(
        start(
            folder,
            processes=2,
            fault=ON_1 + AT_33.format(fault="raise MemoryError('of this process')"),
        )
    )
    assert (
        code,
        'step 33 is not saved: the other processes did not fail with this one' in said,
    ) == (1, True), said
    assert 'MemoryError: of this process' in said
    assert max(steps(folder / 'run')) == 25
    assert_goes_on_as_if_nothing_had_been(folder, straight)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which('mount'), reason='mounting needs root')
def test_a_run_directory_that_cannot_be_written_is_refused_before_anything_compiles(
    folder: Path,
) -> None:
    (folder / 'run').mkdir()
    if subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', folder / 'run'],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip('mounting is not allowed here')
    try:
        for processes in (1, 2):
            code, said = finish(start(folder, processes=processes))
            assert code == 2, said
            assert (
                'run/lock cannot be written: Read-only file system; allow it, '
                'or choose another run directory'
            ) in said
            assert 'compiling' not in said
    finally:
        subprocess.run(['umount', folder / 'run'], check=True)


def test_a_folder_that_the_processes_do_not_share_is_refused_by_all(folder: Path) -> None:
    shutil.copytree(folder, other := folder / 'other')
    fault = f"""
{ON_1}    os.chdir({str(other)!r})
from megajax.runtime.run import shared_folder
shared_folder.SECONDS = 1.0
"""
    code, said = finish(start(folder, processes=2, fault=fault))
    assert code == 2, said
    host = re.escape(socket.gethostname())
    refusals = re.findall(
        r'error: run.dir: (\S+/run) is not the same directory in all processes: '
        rf'process 1 on {host} did not find the file that process 0 on {host} wrote there; '
        r'use a directory on a file system',
        said,
    )
    assert set(refusals) == {f'{folder}/run', f'{other}/run'}
    assert 'compiling' not in said
    assert not [*folder.rglob('.shared-*')]


TOKENS = """
import hashlib
from megajax.runtime.data import Batches
def rows(self, step, start, stop, rows=Batches.rows):
    batch = rows(self, step, start, stop)
    if len(self) > 1000:
        for number, row in enumerate(batch['tokens'], start):
            with open('tokens', 'a') as file:
                file.write(f'{step} {number} {hashlib.sha256(row.tobytes()).hexdigest()}\\n')
    return batch
Batches.rows = rows
"""


def tokens(folder: Path) -> dict[tuple[int, int], set[str]]:
    """A hash of what every row of every step was in any process, by step and row."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in (folder / 'tokens').read_text().splitlines():
        step, row, digest = line.split()
        found.setdefault((int(step), int(row)), set()).add(digest)
    return found


# `test_faults_resume.py` shows the tokens, `test_unpadded.py` the states of other layouts.
@pytest.mark.exhaustive
def test_four_processes_lose_one_and_two_or_one_go_on_with_the_same_state_and_tokens(
    folder: Path,
) -> None:
    eight, fault = ('mesh.data=4', 'mesh.model=2'), TOKENS + HASH_STATES
    process = start(folder, *eight, processes=4, fault=fault)
    read_until(process, r'step 35/60')
    pids = children(process)
    os.kill(pids[2], signal.SIGKILL)
    killed = time.monotonic()
    code, said = finish(process)
    assert (code, 'launch: process 2 of 4 failed with signal SIGKILL (137)' in said) == (
        75,
        True,
    ), said
    assert time.monotonic() - killed < SECONDS
    assert all(gone(pid) for pid in pids)
    seen = [tokens(folder)]
    newest = find_steps(folder / 'run/checkpoints')[-1]
    found = []
    for count in (2, 1):
        shutil.copytree(
            folder, there := folder / f'on_{count}', ignore=shutil.ignore_patterns('on_*', 'tokens')
        )
        said = train(there, *eight, 'run.resume=must', processes=count, fault=fault)
        assert re.search(rf'resume .*/run/checkpoints, step {newest}$', said, re.MULTILINE), said
        assert hashes(there)[f'restored {newest}'] == hashes(folder)[f'saved {newest}']
        seen.append(tokens(there))
        found.append(losses(there / 'run'))
    assert (
        seen[1].keys()
        == seen[2].keys()
        == {(step, row) for step in range(newest, 60) for row in range(4)}
    )
    for place in (place for places in seen for place in places):
        assert len(set.union(*(places.get(place, set()) for places in seen))) == 1, place
    np.testing.assert_allclose(
        [found[0][step] for step in sorted(found[0])],
        [found[1][step] for step in sorted(found[1])],
        rtol=1e-5,
    )
    assert sorted(found[0]) == list(range(1, 61))
