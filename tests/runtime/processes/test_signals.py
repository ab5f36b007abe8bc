"""What the signals of a run mean, and where its words go when nobody reads them."""

import signal
import subprocess
import sys

import pytest

from megajax.runtime.processes import signals
from megajax.runtime.processes.peers import RETRY
from megajax.runtime.processes.signals import SAME_SECONDS, STOPS, Patience, take_stops


@pytest.fixture
def _own_handlers():
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_only_a_sigint_that_comes_later_insists(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals.time, 'monotonic', lambda: now[0])
    for first in STOPS:
        patience = Patience()
        assert patience.meaning(first) == 'first'
        now[0] += SAME_SECONDS / 2
        assert {patience.meaning(number) for number in STOPS} == {'again'}
        now[0] += SAME_SECONDS
        assert [patience.meaning(number) for number in STOPS] == [
            'insists' if number == signal.SIGINT else 'again' for number in STOPS
        ]


@pytest.mark.usefixtures('_own_handlers')
def test_what_nohup_makes_a_process_ignore_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    taken = take_stops(lambda *_: None)
    assert set(taken) == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize('reads', [False, True])
def test_what_nobody_reads_is_no_error(reads):
    program = (
        'import sys; sys.stdin.read(); '
        'from megajax.runtime.processes.signals import drop_lost_outputs; '
        'drop_lost_outputs(); print("word")'
    )
    process = subprocess.Popen(
        [sys.executable, '-c', program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    if not reads:
        process.stdout.close()
    process.stdin.close()
    said = process.stdout.read() if reads else b''
    assert (process.wait(), said) == (0, b'word\n' if reads else b'')


def test_a_run_that_is_stopped_while_it_imports_is_to_be_started_again(tmp_path):
    command = [sys.executable, '-X', 'importtime', '-m', 'megajax', 'train', 'tiny']
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.endswith(' typer\n'):  # long before jax
                process.send_signal(signal.SIGTERM)
                break
        process.stderr.read()
        assert process.wait(60) == RETRY
