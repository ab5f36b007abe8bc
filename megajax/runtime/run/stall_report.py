"""A helper process for each process of a run, which reports when that process stalls.

It runs only this file, which imports nothing but the standard library, so it does not depend on the
run. It reads a shared page of memory into which the run writes its phase. When half of a phase's
limit has passed, the helper of each process writes a line to the shared `watchdog.log`. From these
lines, the first process's helper can name the process that is behind and that the others wait for.
At the limit, the run's stacks arrive through a pipe and are logged.
"""

import contextlib
import mmap
import os
import platform
import re
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass

# size of the page in bytes; its text is limit, beat, time of the beat, index and number of
# processes, phase
PAGE = 512
QUIET = 1.0  # the stacks are complete after this many seconds without a further line
MAX_SLEEP = 10.0  # maximum seconds between two reads of the page
# Number of bytes in which to look for lines about a stall, before and after the size that the log
# had at half of the limit. At the limit, the stacks of all processes follow.
NEAR = 1 << 20
MAX_NAMES = 3  # maximum number of processes behind that a line names
NO_PROGRESS = 'watchdog: no progress for'  # the start of the line that precedes the stacks
HINT = 'run.watchdog_seconds sets the limit of a step, null turns the watchdog off'
# This process must live as long as the run.
IGNORED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
HALF = re.compile(
    r'^watchdog: \S+ process (\d+) of \d+ \((pid \d+ on host \S+)\) '
    r"has been in phase '([^'\n]*)'.* \[beat (\d+)\]$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Place:
    """The phase that a process of the run is in."""

    limit: float  # time limit of the phase in seconds
    beat: int  # number of phases begun so far; all processes of a run begin the same phases
    since: float  # start of the phase in seconds of the host's monotonic clock
    index: int  # index of this process
    count: int  # number of processes
    phase: str  # name of the phase

    def encode(self) -> bytes:
        """Return the page that encodes this phase."""
        text = '\t'.join(
            map(str, (self.limit, self.beat, self.since, self.index, self.count, self.phase))
        )
        return text.encode()[:PAGE].ljust(PAGE, b'\0')


def decode(page: bytes) -> Place:
    """Return the phase that a page encodes."""
    limit, beat, since, index, count, phase = (
        page.rstrip(b'\0').decode(errors='replace').split('\t', 5)
    )
    return Place(float(limit), int(beat), float(since), int(index), int(count), phase)


def report(shared: int, stacks: int, pid: int, log: str) -> None:
    """Warn when half of a phase's limit has passed; log the stacks of `pid` when they arrive."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    who, told = f'pid {pid} on host {platform.node()}', -1
    start = _size(log)  # this run's lines begin here
    near = [start]  # the byte at which to look for lines about the newest stall is the last one

    def tell_half(place: Place) -> None:
        near.append(max(_size(log) - NEAR, start))
        _tell_half(shared, place, who, log, near[-1])

    while not select.select([stacks], [], [], _until_half(place := _place(shared), told))[0]:
        if place == _place(shared) and place.beat != told and _age(place) >= place.limit / 2:
            told = place.beat
            threading.Thread(target=tell_half, args=(place,), daemon=True).start()
    text = os.read(stacks, mmap.PAGESIZE)
    if not text:
        return
    place = _place(shared)
    while select.select([stacks], [], [], QUIET)[0] and (more := os.read(stacks, mmap.PAGESIZE)):
        text += more
    line = f'{NO_PROGRESS} {place.limit:g} s in phase {place.phase!r}: {who} exits at {_now()}'
    found = ['']
    # In a thread, because the run may be waiting for the file system of the log.
    search = threading.Thread(
        target=lambda: found.append(_waited_for(place, log, near[-1])), daemon=True
    )
    search.start()
    search.join(QUIET)
    waited = found[-1]
    head = [line + (f'; {waited}' if waited else '') + '; its stacks:', HINT]
    text = '\n'.join(head).encode() + b'\n' + text
    # In parallel, because the run may be waiting for the file system or for the reader of stderr.
    for write in (lambda: _say(text), lambda: _append(log, text)):
        threading.Thread(target=write).start()


def _until_half(place: Place, told: int) -> float:
    if place.beat == told:
        return min(MAX_SLEEP, place.limit / 10)
    return min(MAX_SLEEP, place.limit / 10, max(place.limit / 2 - _age(place), 0.01))


def _tell_half(shared: int, place: Place, who: str, log: str, near: int) -> None:
    """Warn in the log; the first process also warns on the terminal, after the others."""
    line = f'process {place.index} of {place.count} ({who}) has been in phase {place.phase!r}'
    line += f' for {place.limit / 2:g} s and ends at {place.limit:g} s'
    _append(log, f'watchdog: {_now()} {line} [beat {place.beat}]\n'.encode())
    if place.index == 0:
        time.sleep(min(place.limit / 10, MAX_SLEEP) if place.count > 1 else 0)
        if place == _place(shared):
            waited = _waited_for(place, log, near)
            _say(f'watchdog: {line}{f"; {waited}" if waited else ""}\n'.encode())


def _waited_for(place: Place, log: str, near: int) -> str:
    """Return the processes that are behind, by the log from byte `near` on; '' if none is.

    The times in the log are not compared, because a host's clock may be wrong.
    """
    try:
        with open(log, 'rb') as file:
            file.seek(near)
            text = file.read(2 * NEAR).decode(errors='replace')
    except OSError:
        return ''
    latest = {
        int(index): (int(beat), f"process {index} ({who}), which is in phase '{phase}'")
        for index, who, phase, beat in HALF.findall(text)
    }
    latest.setdefault(place.index, (place.beat, ''))
    behind = min(beat for beat, _ in latest.values())
    if behind == max(beat for beat, _ in latest.values()):
        return ''
    names = [name for beat, name in latest.values() if beat == behind and name]
    more = f', and {len(names) - MAX_NAMES} others' if len(names) > MAX_NAMES else ''
    return f'the others wait for {", ".join(names[:MAX_NAMES])}{more}' if names else ''


def _place(shared: int) -> Place:
    page = os.pread(shared, PAGE, 0)
    while page != (page := os.pread(shared, PAGE, 0)):  # the run was writing the page
        pass
    return decode(page)


def _size(log: str) -> int:
    return os.path.getsize(log) if os.path.exists(log) else 0


def _age(place: Place) -> float:
    return time.monotonic() - place.since


def _now() -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())


def _append(path: str, text: bytes) -> None:
    if not path:  # a run that is starting has no folder yet
        return
    try:
        _write(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640), text)
    except OSError as error:
        _say(f'watchdog: {path} cannot be written: {error.strerror}\n'.encode())


def _say(text: bytes) -> None:
    with contextlib.suppress(OSError):  # the terminal may have been closed
        _write(2, text)


def _write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


if __name__ == '__main__':
    _shared, _stacks, _pid, _log = sys.argv[1:]
    report(int(_shared), int(_stacks), int(_pid), _log)
