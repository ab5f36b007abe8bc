"""What is counted in a compiled program is what a CPU executes, by XLA's own log of it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from megajax.xla.hlo.program import DTYPE_BITS

THUNKS = 'all_reduce', 'all_gather', 'reduce_scatter', 'collective_permute', 'all_to_all'
KINDS = {
    'AllReduce': 'all-reduce',
    'AllGather': 'all-gather',
    'ReduceScatter': 'reduce-scatter',
    'CollectivePermute': 'collective-permute',
    'AllToAll': 'all-to-all',
}
# What is not read as it is executed, because XLA's CPU backend cannot say it; see
# megajax/xla/hlo/cpu_collectives.py.
SCATTERED = (
    'partial sums of which each keeps a part',
    'fsdp step with remat in bf16',
    'block on three explicit axes',
)
NARROWED = (
    'fsdp step with remat in bf16',
    'sent in bfloat16',
    'sent in float16',
    'sent in float8_e4m3fn',
)


class Executed(NamedTuple):
    """One collective that the first device ran: its kind, the bytes of its operands and the devices
    of its group, or its pairs.
    """

    kind: str
    bytes: int
    group: tuple


class Log:
    """The lines of one thread up to the one that names the device."""

    def __init__(self) -> None:
        self.kind, self.bytes, self.pairs = '', 0, ()

    def read(self, message: str) -> Executed | None:
        if found := re.match(rf'({"|".join(KINDS)}): #source_buffers=', message):
            self.kind, self.bytes = KINDS[found[1]], 0
        elif found := re.match(r'\s+src: (\w+)\[([\d,]*)\]', message):
            size = DTYPE_BITS[found[1]] // 8
            for dim in filter(None, found[2].split(',')):
                size *= int(dim)
            self.bytes += size
        elif found := re.match(r'\s+rank=(\d+), key=.*global_devices=\[([\d, ]+)\]', message):
            devices = [int(device) for device in found[2].split(',')]
            if devices[int(found[1])] == 0:
                return Executed(
                    self.kind,
                    self.bytes,
                    () if self.kind == 'collective-permute' else tuple(sorted(devices)),
                )
        return None


def executed(stderr: str) -> dict[str, Counter[Executed]]:
    """By program, what the first device ran."""
    programs, counts, threads = (
        dict[str, Counter[Executed]](),
        Counter[Executed](),
        dict[str, Log](),
    )
    for line in stderr.splitlines():
        if line.startswith('RUN '):
            counts = programs[line.removeprefix('RUN ')] = Counter()
        elif found := re.match(r'[IV]\d+ [\d:.]+\s+(\d+) \w+_thunk\.cc:\d+\] (.*)', line):
            one = threads.setdefault(found[1], Log()).read(found[2])
            counts.update([one] if one else [])
    return programs


@pytest.fixture(scope='module')
def both(tmp_path_factory) -> tuple[dict[str, list[dict]], dict[str, Counter[Executed]]]:
    path = tmp_path_factory.mktemp('executed') / 'counts.json'
    levels = ','.join(f'{name}_thunk=3' for name in (*THUNKS, 'collective'))
    environment = os.environ | {
        'TF_CPP_MIN_LOG_LEVEL': '0',
        'TF_CPP_VMODULE': levels,
        'JAX_PLATFORMS': 'cpu',
    }
    environment.pop('JAX_DISABLE_MOST_OPTIMIZATIONS', None)  # as users compile
    script = Path(__file__).with_name('executed_programs.py')
    child = subprocess.run(
        [sys.executable, script, path],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(path.read_text()), executed(child.stderr)


def counted(entries: list[dict]) -> Counter[Executed]:
    counts = Counter()
    for entry in entries:
        group = next((tuple(sorted(group)) for group in entry['groups'] if 0 in group), ())
        kind = entry['opcode'].removesuffix('-start')
        counts[Executed(kind, entry['bytes'], () if kind == 'collective-permute' else group)] += (
            entry['times']
        )
    return +counts


@pytest.mark.slow
def test_what_is_counted_is_what_was_executed(both):
    counts, ran = both
    assert len(counts) >= 20
    assert counts.keys() == ran.keys()
    assert sum(map(bool, ran.values())) >= 20, 'XLA logs collectives in another form: see Log'
    assert {name: counted(entries) for name, entries in counts.items()} == ran


@pytest.mark.slow
def test_only_what_a_cpu_cannot_say_is_read_otherwise(both):
    counts, _ = both
    for name, entries in counts.items():
        kinds = {
            (kind, entry['opcode'])
            for entry in entries
            for kind in entry['kinds']
            if kind != entry['opcode']
        }
        assert kinds <= {('reduce-scatter', 'all-reduce')}, name
        assert not kinds or name in SCATTERED, name
        for entry in entries:
            wide = entry['bytes'] // entry['read bytes'] if entry['read bytes'] else 1
            assert wide == 1 or (wide == 2 and name in NARROWED), name
