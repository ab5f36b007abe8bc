"""Signals as schedulers, terminals and people send them: the work is saved unless somebody insists
on leaving at once.
"""

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from runs import CONFIG, finish, losses, read_until, start, steps, train
from support import write_run

from megajax.runtime.processes.signals import SAME_SECONDS

pytestmark = pytest.mark.faults

# A save that takes long enough for signals to come in the middle of it.
SLOW_SAVE = f"""
from megajax.runtime.run import trainer
def save_now(self, save=trainer.Trainer.save_now):
    print('saving now', flush=True)
    time.sleep({5 * SAME_SECONDS})
    save(self)
trainer.Trainer.save_now = save_now
"""


LONG = 'mesh.model=1', 'train.steps=100000', 'optim.schedule=constant'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG, split='1,0,0')


@pytest.mark.parametrize(
    ('processes', 'pause'),
    [
        (1, 0.005),
        pytest.param(1, 2 * SAME_SECONDS, marks=pytest.mark.exhaustive),
        pytest.param(2, 2 * SAME_SECONDS, marks=pytest.mark.exhaustive),
        pytest.param(2, 0.005, marks=pytest.mark.exhaustive),
    ],
)
def test_a_second_sigterm_is_the_first(folder: Path, processes: int, pause: float) -> None:
    options = f'mesh.data={processes}', 'checkpoint.every=100000'
    process = start(folder, *LONG, *options, processes=processes, fault=SLOW_SAVE)
    read_until(process, 'step 13/')
    process.terminate()
    time.sleep(pause)
    process.terminate()
    code, said = finish(process)
    assert (code, 'stopped by' in said, 'saving now' in said) == (75, True, True), said
    assert len(steps(folder / 'run')) == 1, said
    assert 'The run stopped at step ' in (folder / 'run/report.html').read_text()


def test_the_first_sigint_says_what_is_saved_and_a_later_one_leaves_without_it(
    folder: Path,
) -> None:
    process = start(folder, *LONG, 'mesh.data=1', fault=SLOW_SAVE)
    read_until(process, 'step 13/')
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # the same, passed on by a wrapper
    said = read_until(process, '^saving now')
    told = re.search(
        r'^SIGINT: saving after the current step \((\d+) done\), then exiting; '
        r'a further SIGINT \(Ctrl-C\) exits at once, with only the last checkpoint$',
        said,
        re.MULTILINE,
    )
    assert told, said
    time.sleep(1.5 * SAME_SECONDS)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    code, _ = finish(process)
    assert code == 75
    assert time.monotonic() - sent < 3 * SAME_SECONDS
    newest = steps(folder / 'run')[-1]
    assert newest % 10 == 0
    train(folder, *LONG, 'mesh.data=1', f'train.steps={newest + 5}', 'run.resume=must')
    assert sorted(losses(folder / 'run')) == list(range(1, newest + 6))


@pytest.mark.parametrize(
    ('processes', 'piped'),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.exhaustive),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
        pytest.param(2, True, marks=pytest.mark.exhaustive),
    ],
)
def test_when_its_terminal_is_closed_a_run_saves(folder: Path, processes: int, piped: bool) -> None:
    terminal, end = pty.openpty()
    launched = ['launch', '--processes', '2', '--'] if processes > 1 else []
    command = [
        sys.executable,
        '-m',
        'megajax',
        *launched,
        'train',
        'small.yaml',
        'run.dir=run',
        *LONG,
    ]
    reader = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=end) if piped else None
    process = subprocess.Popen(
        [*command, f'mesh.data={processes}'],
        cwd=folder, stdin=end, stdout=reader.stdin if reader else end, stderr=end,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(end)
    if reader:
        assert reader.stdin is not None
        reader.stdin.close()
    while not re.search(rb'step.*1\d/100000', os.read(terminal, 100_000)):
        pass
    os.close(terminal)
    if reader:
        reader.kill()
        reader.wait()
    assert process.wait(timeout=100) == 75
    assert steps(folder / 'run')[-1] >= 10


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    'command', [['train', 'tiny'], ['launch', '--processes', '2', '--', 'train', 'tiny']]
)
def test_while_a_process_still_imports_a_signal_means_start_again(
    number: signal.Signals, command: list[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, '-X', 'importtime', '-m', 'megajax', *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if 'pydantic_core' in line:  # half-way to the command line
            break
    process.send_signal(number)
    process.stderr.read()
    assert process.wait() == 75
