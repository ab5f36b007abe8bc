"""Locks keep a second process out, and where the kernel has none all goes on with a warning."""

import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.base.files.locks import folder_lock, lock

FLOCK = {'x86_64': 73, 'aarch64': 32}
# What a kernel answers for some network file systems, by a filter of system calls.
WITHOUT_LOCKS = """
import ctypes, errno, struct
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7fff0000, 0x00050000 | errno.ENOLCK
rules = [(LOAD, 0, 0, 0), (IF_EQUAL, 0, 1, {flock}), (RETURN, 0, 0, ERROR), (RETURN, 0, 0, ALLOW)]
program = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *rule) for rule in rules))
class Filter(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('program', ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, SECCOMP, WITH_FILTER = 38, 22, 2
assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
rules = Filter(len(rules), ctypes.addressof(program))
assert libc.prctl(SECCOMP, WITH_FILTER, ctypes.byref(rules), 0, 0) == 0, ctypes.get_errno()
"""
EVERY_LOCK = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from megajax.commands.main import main
from megajax.base.files.locks import folder_lock
from megajax.interop.folder import new_folder
from megajax.runtime.run.lock import run_lock, running_in
with new_folder(Path('model')) as folder:
    (folder / 'weights').write_text('all')
with run_lock(Path('run')):
    pass
for shared in False, True:
    with folder_lock(Path('run'), shared=shared) as is_free:
        assert is_free
assert running_in(Path('run')) is None
sys.argv[1:] = 'data build tokens --input text.txt --tokenizer bytes'.split()
main()
"""


def test_a_second_process_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / 'lock'
    code = 'import sys\nfrom pathlib import Path\nfrom megajax.base.files.locks import lock\n'
    code += f'file = open({str(path)!r}, "w")\nlock(file.fileno(), Path("it"))\n'
    code += 'print("held", flush=True)\nsys.stdin.read()\n'
    with subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == 'held\n'
        with path.open() as file, pytest.raises(BlockingIOError):
            lock(file.fileno(), path)
        holder.kill()
    with path.open() as file:
        lock(file.fileno(), path)


@pytest.mark.skipif(platform.machine() not in FLOCK, reason='the number of flock is not known here')
def test_without_locks_a_run_a_build_and_a_conversion_warn_and_go_on(tmp_path: Path) -> None:
    (tmp_path / 'text.txt').write_text('some text\n' * 100)
    code = WITHOUT_LOCKS.format(flock=FLOCK[platform.machine()]) + EVERY_LOCK
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in 'model.partial', 'run/lock', 'tokens.partial/lock':
        assert f'{name} cannot be locked (No locks available)' in done.stderr, done.stderr
    assert (tmp_path / 'model/weights').exists()
    assert (tmp_path / 'tokens.bin').exists()


def test_a_folder_is_read_by_many_or_deleted_by_one(tmp_path: Path) -> None:
    reader = folder_lock(tmp_path, shared=True)
    with reader as one, folder_lock(tmp_path, shared=True) as other:
        assert (one, other) == (True, True)
        with folder_lock(tmp_path, shared=False) as is_free:
            assert not is_free
    with folder_lock(tmp_path, shared=False) as is_free:
        assert is_free
        with folder_lock(tmp_path, shared=True) as is_there:
            assert not is_there
    with folder_lock(tmp_path / 'gone', shared=True) as is_there:
        assert not is_there
    with folder_lock(tmp_path, shared=False, wait=True) as is_free:
        assert is_free
    (tmp_path / 'file').touch()
    with folder_lock(tmp_path / 'file/below', shared=True) as is_free:
        assert is_free  # what reads it says why it cannot


def test_a_lock_that_is_taken_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), (tmp_path / 'lock').open('w') as file:
        lock(file.fileno(), tmp_path / 'lock')
    assert not caplog.records
