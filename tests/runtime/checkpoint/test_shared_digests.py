"""Two real processes verify a checkpoint together: each file is hashed once, and both learn of a
fault in any file.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.runtime.checkpoint.digests import COMMIT, write_sums

pytestmark = pytest.mark.faults

FILES = {
    'record.json': b'{"step": 7}',
    'state/_METADATA': b'{}',
    'state/d/0': b'0123456789' * 100,
    'state/d/1': b'0123456789' * 50,
    'state/manifest': b'm',
}

PROGRAM = """
import logging, sys
from pathlib import Path
import jax
from megajax.runtime.checkpoint import digests
from megajax.runtime.checkpoint.step_folders import StepFolders
from megajax.runtime.processes.consensus import from_first
from megajax.runtime.processes.distributed import processes

folder, *names = sys.argv[1:]
hashed = []

def digest(path, own=digests._digest):
    hashed.append(path.name)
    return own(path)

def flip(name):
    if name and jax.process_index() == 0:
        path = Path(folder, '7', name)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    from_first(0)

logging.basicConfig(format='%(message)s', stream=sys.stdout)
digests._digest = digest
with processes():
    for name in ['', *names]:
        flip(name)
        folders = StepFolders(Path(folder))
        print('refused', folders.refuses(7))
        if not name:
            print('hashed', sorted(hashed))
        flip(name)
"""


def test_a_fault_in_any_file_is_known_to_both_processes_and_each_file_is_hashed_once(
    tmp_path: Path,
) -> None:
    for name, content in FILES.items():
        path = tmp_path / '7' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_sums(tmp_path / '7')
    (tmp_path / '7' / COMMIT).write_text('done')
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
        'MEGAJAX_PROCESSES': '2',
        'JAX_PLATFORMS': 'cpu',
    }
    command = [sys.executable, '-c', PROGRAM, str(tmp_path), *FILES]
    started = [
        subprocess.Popen(
            command,
            env=environment | {'MEGAJAX_PROCESS': str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    for output in outputs:
        refused = re.findall(r'^refused (.*)$', output, re.MULTILINE)
        assert refused == ['False', *['True'] * len(FILES)], output
    hashed = [re.findall(r'^hashed (.*)$', output, re.MULTILINE) for output in outputs]
    assert hashed == [["['0', 'manifest', 'record.json']"], ["['1', '_METADATA']"]]
    said = re.findall(r'is rejected: (.*)$', outputs[0], re.MULTILINE)
    assert said == [f'{name} differs from what was written' for name in FILES]
