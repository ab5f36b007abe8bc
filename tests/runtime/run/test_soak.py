"""The soak measures a run to its end, and notices memory, descriptors and threads that stay."""

import subprocess
from pathlib import Path

import pytest
from support import load_script

soak = load_script('soak', 'tests/runtime/run')

PROCESS = """
import sys, threading
held = []
for line in sys.stdin:
    held += [{leak} for _ in range(10)]
    print(flush=True)
"""


def growth_of(leak: str) -> object:
    """What a process is measured to hold more of, after it has done this twenty times ten times."""
    process = subprocess.Popen(
        ['python3', '-c', PROCESS.format(leak=leak)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    tenths = []
    with process:
        for _ in range(20):
            process.stdin.write('\n')
            process.stdin.flush()
            process.stdout.readline()
            tenths.append(soak.use_of(process.pid))
    return soak.growth(tenths)


@pytest.mark.parametrize(
    ('leak', 'field'),
    [
        ('bytearray(10**6)', 'mib'),
        ('open("/dev/null")', 'descriptors'),
        ('threading.Thread(target=threading.Event().wait, daemon=True).start()', 'threads'),
    ],
)
def test_what_stays_is_noticed(leak: str, field: str) -> None:
    grown = growth_of(leak)
    assert not soak.is_flat(grown)
    assert getattr(grown, field) > getattr(soak.LIMITS, field)


def test_what_is_let_go_is_not() -> None:
    assert soak.is_flat(growth_of('len(bytearray(10**6))'))


def test_a_tenth_that_returns_memory_hides_no_leak() -> None:
    tenths = [soak.Use(mib, 10, 30) for mib in (900, 900, 900, 700, 705, 710, 715, 720, 725, 730)]
    assert not soak.is_flat(soak.growth(tenths))


LEAKS = """
from megajax.runtime.run import trainer
def take_step(loop, take=trainer.Trainer._take_step, held=[], **options):
    held += [open('/dev/null') for _ in range(10)]
    return take(loop, **options)
trainer.Trainer._take_step = take_step
"""


@pytest.mark.faults
def test_a_run_is_measured_to_its_end_and_is_not_flat_if_each_step_keeps_files_open(
    tmp_path: Path,
) -> None:
    tenths = soak.soak(tmp_path, 20, fault=LEAKS)
    assert len(tenths) == 10
    assert all(use.mib > 50 and use.descriptors > 3 and use.threads > 1 for use in tenths)
    grown = soak.growth(tenths)
    assert grown.descriptors > 50
    assert not soak.is_flat(grown)
