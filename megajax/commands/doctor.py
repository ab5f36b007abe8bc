"""`megajax doctor`: what a run would meet on this machine, and what is wrong with it, each with its fix.

jax is asked in a process of its own, since a wrong flag or driver ends the one that starts it. A proxy is told by the name of its variable
only: its address may hold a password.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from megajax.hardware.targets import GPUS, has_compiler
from megajax.processes.environment import visible_gpus

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')
HEAD_DIMS = (64, 128)
MARK = 'megajax doctor: '  # before what the other process found, since plugins print too
TIMEOUT = 120.0  # seconds for jax to start; a driver that hangs does so for ever
LITTLE = 2e9  # bytes; a checkpoint has 12 for each parameter
PROXIES = ('grpc_proxy', 'https_proxy', 'http_proxy')


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, and what to do."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f'{self.what}\n  fix: {self.fix}'


@dataclass
class Diagnosis:
    """What there is, line by line, and what is wrong with it."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f'{name:<18}{value}' for name, value in self.facts]
        wrong = '\n'.join(f'{number}. {finding}' for number, finding in enumerate(self.findings, 1))
        return '\n'.join(lines) + f'\n\n{wrong or "nothing is wrong"}'

    def fact(self, name: str, value: str) -> None:
        """One line."""
        self.facts.append((name, value))

    def wrong(self, what: str, fix: str) -> None:
        """One finding."""
        self.findings.append(Finding(what=what, fix=fix))


def diagnose(
    folder: Path, *, environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT
) -> Diagnosis:
    """Look at the packages, jax's devices, the network of this host and the file system of `folder`."""
    found = Diagnosis()
    _packages(found)
    target = _jax(found, environ, timeout)
    _miscompiles(found, target, environ, timeout)
    _network(found, environ)
    _files(found, folder)
    return found


def _packages(found: Diagnosis) -> None:
    found.fact('python', f'{platform.python_version()}, {platform.system()} {platform.machine()}')
    for name in PACKAGES:
        try:
            found.fact(name, version(name))
        except PackageNotFoundError:
            found.fact(name, 'missing')
            found.wrong(
                f'{name} is not installed', 'pip install megajax, in the environment that runs it'
            )
    for name, its in _plugins().items():
        found.fact('plugin', f'{name} {its}')
        jaxlib = dict(found.facts)['jaxlib']
        if 'cuda' in name and its.split('.')[:3] != jaxlib.split('.')[:3]:
            found.wrong(
                f'{name} {its} is not for jaxlib {jaxlib}: jax leaves it out',
                "pip install --upgrade 'megajax[cuda]'",
            )


def _plugins() -> dict[str, str]:
    """The version of each package that gives jax a platform."""
    return {
        plugin.dist.name: plugin.dist.version
        for plugin in entry_points(group='jax_plugins')
        if plugin.dist
    }


def _jax(found: Diagnosis, environ: Mapping[str, str], timeout: float) -> str | None:
    """Tell what jax finds, and return the target that its GPUs are; None for a CPU, or where jax does not start."""
    # A run may be using the GPUs, and jax would take most of what is left of their memory.
    environment = {**environ, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    command = [sys.executable, '-m', 'megajax.commands.doctor']
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found.fact('devices', 'unknown')
        found.wrong(
            f'jax does not start within {timeout:g} s',
            'see whether nvidia-smi answers; with JAX_PLATFORMS=cpu no GPU is asked',
        )
        return None
    answer = next(
        (line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)),
        None,
    )
    if done.returncode or answer is None:
        found.fact('devices', 'unknown')
        _why_jax_fails(found, environ, done)
        return None
    told = json.loads(answer)
    for line in told['devices']:
        found.fact('devices', line)
    found.fact('attention', told['attention'])
    _missing_gpus(found, told['platform'], told['count'], environ)
    _compilation_cache(found, told['platform'], environ)
    return told['target'] if told['target'] in GPUS else None


def _why_jax_fails(
    found: Diagnosis, environ: Mapping[str, str], done: subprocess.CompletedProcess[str]
) -> None:
    if unknown := re.search(r'Unknown flags? in XLA_FLAGS: (.*)', done.stderr):
        flags = ' '.join(flag.partition('=')[0] for flag in unknown[1].split())
        found.wrong(
            f'XLA_FLAGS holds what this jaxlib does not know, and ends every process for: {flags}',
            'remove it from XLA_FLAGS',
        )
        return
    lines = done.stderr.strip().splitlines() or [f'exit code {done.returncode}']
    why = re.sub(r'//[^/\s]*@', '//', lines[-1])  # without the password of an address
    wanted = environ.get('JAX_PLATFORMS', '')
    if not wanted or wanted.startswith('cpu'):
        found.wrong(
            f'jax does not start: {why}',
            f"{sys.executable} -c 'import jax; jax.devices()' shows all of it",
        )
    elif 'cuda' in wanted and not any('cuda' in name for name in _plugins()):
        found.wrong(
            f'JAX_PLATFORMS={wanted}, and jax has no plugin for it',
            "pip install 'megajax[cuda]', or unset JAX_PLATFORMS",
        )
    else:
        found.wrong(
            f'JAX_PLATFORMS={wanted}, and jax does not start: {why}',
            'see that nvidia-smi lists a GPU, or unset JAX_PLATFORMS',
        )


def _missing_gpus(found: Diagnosis, kind: str, count: int, environ: Mapping[str, str]) -> None:
    gpus = visible_gpus(environ)
    if kind == 'cpu' and gpus and not any('cuda' in name for name in _plugins()):
        found.wrong(
            f'{gpus} GPUs are visible, and jax has no plugin for them: runs use the CPU',
            "pip install 'megajax[cuda]'",
        )
    elif kind == 'cpu' and gpus:
        fix = 'update the driver; unset LD_LIBRARY_PATH where it names another CUDA; CUDA_VISIBLE_DEVICES may name GPUs that are not there'
        found.wrong(f'{gpus} GPUs are visible, and jax uses the CPU', fix)
    elif kind != 'cpu' and count < gpus:
        found.wrong(
            f'{gpus} GPUs are visible, and jax uses {count}',
            'unset JAX_LOCAL_DEVICE_IDS, or show only those in CUDA_VISIBLE_DEVICES',
        )


def _compilation_cache(found: Diagnosis, platform: str, environ: Mapping[str, str]) -> None:
    """Tell where jax's cache does not help: on CPUs each process has keys of its own, and jax writes those of the first."""
    if platform == 'cpu' and environ.get('JAX_COMPILATION_CACHE_DIR'):
        found.fact(
            'compilation cache',
            'kept for process 0 alone; others on a CPU compile every time, and it waits for them',
        )


def _miscompiles(
    found: Diagnosis, target: str | None, environ: Mapping[str, str], timeout: float
) -> None:
    """Tell which known miscompiles XLA's GPU compiler has, where it is installed; its answers are kept for the next time."""
    if not has_compiler():
        return
    environment = {
        **environ,
        'JAX_PLATFORMS': 'cpu',
        'TF_CPP_MIN_LOG_LEVEL': '3',
    }  # the GPUs may be in use
    command = [sys.executable, '-m', 'megajax.miscompiles', *([target] if target else [])]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        found.fact('miscompiles', f'unknown: XLA does not compile the repros within {timeout:g} s')
        return
    reason = (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
    for line in [f'unknown: {reason}'] if done.returncode else done.stdout.splitlines():
        found.fact('miscompiles', line)


def _network(found: Diagnosis, environ: Mapping[str, str]) -> None:
    try:
        with (
            socket.create_server(('127.0.0.1', 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            found.fact('loopback', 'a port can be bound and reached')
    except OSError as error:
        found.fact('loopback', f'no: {error.strerror or error}')
        found.wrong(
            'no port of 127.0.0.1 can be bound and reached, so processes cannot meet',
            'allow it in the firewall or the sandbox',
        )
    if proxies := [name for name in PROXIES if environ.get(name)]:
        found.fact('proxy', f'{", ".join(proxies)}; the processes of a run go past it')


def _files(found: Diagnosis, folder: Path) -> None:
    try:
        with _two_handles(folder) as (first, second):
            locks, free = _locks(first, second), shutil.disk_usage(folder).free
    except (FileNotFoundError, NotADirectoryError):
        found.fact('folder', f'{folder}: no folder that can be written')
        found.wrong(
            f'{folder} is no folder that can be written',
            f'mkdir -p {folder}, or choose another --dir',
        )
        return
    except OSError as error:
        found.fact('folder', f'{folder}: {error.strerror}')
        found.wrong(
            f'{folder} cannot be written: {error.strerror}',
            'allow it, or choose another --dir and run.dir',
        )
        return
    found.fact(
        'folder',
        f'{folder.resolve()}: {free / 1e9:.1f} GB free, writable, flock {"works" if locks else "does not work"}',
    )
    if not locks:
        found.wrong(
            f'{folder} has no locks: two runs may write to one run.dir',
            'mount it with locks, or watch over run.dir yourself',
        )
    if free < LITTLE:
        found.wrong(
            f'{folder} has {free / 1e9:.1f} GB free; a checkpoint takes 12 bytes for each parameter',
            'make room, or choose another',
        )


@contextlib.contextmanager
def _two_handles(folder: Path) -> Iterator[tuple[int, int]]:
    """One new file of `folder`, opened twice."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix='.doctor-') as first,
        open(first.name, 'rb') as second,
    ):
        yield first.fileno(), second.fileno()


def _locks(first: int, second: int) -> bool:
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def ask_jax() -> dict[str, Any]:
    """jax's devices by kind, and which attention runs on the first, for `diagnose`."""
    import jax

    from megajax.miscompiles import target_of
    from megajax.model.flash import can_flash

    devices = jax.local_devices()
    kinds = sorted({(one.platform, one.device_kind, _memory(one)) for one in devices})
    lines = [
        f'{sum((d.platform, d.device_kind, _memory(d)) == kind for d in devices)} x {kind[1]} ({kind[0]}{kind[2]})'
        for kind in kinds
    ]
    kind = devices[0].platform
    flash = {
        dtype: all(can_flash(kind, dtype, head_dim) for head_dim in HEAD_DIMS)
        for dtype in ('bfloat16', 'float32')
    }
    attention = ', '.join(
        f'{dtype}: {"cuDNN flash" if can else "XLA"}' for dtype, can in flash.items()
    )
    return {
        'devices': lines,
        'attention': attention,
        'platform': kind,
        'count': len(devices),
        'target': target_of(devices[0]),
    }


def _memory(device: Any) -> str:
    """', 80.0 GB' for a device that tells what it has."""
    if device.platform == 'cpu':
        return (
            f', {os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9:.1f} GB of the host'
        )
    limit = (device.memory_stats() or {}).get('bytes_limit')
    return f', {limit / 1e9:.1f} GB for jax' if limit else ''


if __name__ == '__main__':
    print(f'{MARK}{json.dumps(ask_jax())}')
