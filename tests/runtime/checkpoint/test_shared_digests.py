"""Two real processes verify a checkpoint together: each file is hashed once, and both learn of a
fault in any file. A file that only one of them cannot read is no fault.
"""

import re
from pathlib import Path

import pytest
from runs import in_two_processes

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
from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint import digests
from megajax.runtime.checkpoint.step_folders import StepFolders
from megajax.runtime.processes.consensus import from_first
from megajax.runtime.processes.distributed import processes

folder, *names = sys.argv[1:]
hashed = []

def digest(path, own=digests._digest):
    hashed.append(path.name)
    return own(path)

def fail(path):
    raise FileNotFoundError(2, 'No such file or directory')

def flip(name):
    if name and jax.process_index() == 0:
        path = Path(folder, '7', name)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    from_first(0)

def told(verify):
    folders = StepFolders(Path(folder))
    try:
        verify(folders)
    except CheckpointError as error:
        print('unreadable', error)
    assert not folders.is_junk(7)

logging.basicConfig(format='%(message)s', stream=sys.stdout)
digests._digest = digest
with processes():
    for name in ['', *names]:
        flip(name)
        folders = StepFolders(Path(folder))
        print('refused', folders.refuses(7))
        assert folders.is_junk(7) == bool(name)
        if not name:
            print('hashed', *hashed)
        flip(name)
    sums, aside = Path(folder, '7', digests.SUMS), Path(folder, 'aside')
    if jax.process_index() == 0:
        sums.rename(aside)
        sums.mkdir()
    from_first(0)
    folders = StepFolders(Path(folder))
    print('lost', folders.refuses(7), folders.is_junk(7))
    from_first(0)
    if jax.process_index() == 0:
        sums.rmdir()
        aside.rename(sums)
    from_first(0)
    for unreadable in range(2):
        digests._digest = digest if jax.process_index() != unreadable else fail
        told(StepFolders.find_newest)
        told(lambda folders: folders.refuses(7))
    digests._digest = fail
    folders = StepFolders(Path(folder))
    print('lost', folders.refuses(7), folders.is_junk(7))
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
    outputs = in_two_processes(PROGRAM, str(tmp_path), *FILES)
    for output in outputs:
        refused = re.findall(r'^refused (.*)$', output, re.MULTILINE)
        assert refused == ['False', *['True'] * len(FILES)], output
    first, second = (
        re.findall(r'^hashed (.*)$', output, re.MULTILINE)[0].split() for output in outputs
    )
    assert sorted(first + second) == sorted(Path(name).name for name in FILES)
    assert len(first) == len(second) + 1
    said = re.findall(r'is rejected: (.*)$', outputs[0], re.MULTILINE)
    assert said[: len(FILES)] == [f'{name} differs from what was written' for name in FILES]
    lost = said[len(FILES) :]
    assert lost[0].startswith('SHA256SUMS cannot be read: ')
    assert lost[1].startswith('record.json cannot be read: ')
    assert len(lost) == 2
    for output in outputs:
        assert re.findall(r'^lost (.*)$', output, re.MULTILINE) == ['True True'] * 2, output
        told = re.findall(rf'^unreadable {tmp_path}/7/(.*)$', output, re.MULTILINE)
        assert len(told) == 4
        for index, message in enumerate(told):
            where = rf'cannot be read: .* \(process {index // 2} on (\S+)\), .*; mount .* on \1 '
            assert re.search(where, message), message
