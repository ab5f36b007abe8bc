"""`megajax doctor`: check the environment of a run on this machine, and suggest fixes.

jax is started in a separate process (`ask_jax.py`), because a wrong flag or driver ends the
process that starts it. A proxy is reported only by the name of its variable, because its address
may contain a password.
"""

import contextlib
import fcntl
import importlib.util
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
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from megajax.base.errors import ConfigError
from megajax.base.files.locks import TAKEN
from megajax.base.render.text import typed
from megajax.commands.ask_jax import MARK
from megajax.commands.diagnosis import Diagnosis
from megajax.commands.doctor_links import look_at_nccl
from megajax.commands.doctor_ports import look_at_ports
from megajax.core.config.extras import install
from megajax.core.hardware.targets import GPUS, has_compiler
from megajax.core.hardware.visible import visible_gpus
from megajax.runtime.processes.environment import check_host_name

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')
TIMEOUT = 120.0  # most seconds for jax to start, because a driver that hangs never returns
LITTLE = 2e9  # minimum free space in bytes; a checkpoint has 12 bytes per parameter
PROXIES = ('grpc_proxy', 'https_proxy', 'http_proxy')


def diagnose(
    folder: Path, *, environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT
) -> Diagnosis:
    """Examine packages, jax's devices, the network of this host and the file system of `folder`."""
    diagnosis = Diagnosis()
    _packages(diagnosis)
    _bytecode(diagnosis, environ)
    report = _jax(diagnosis, environ, timeout)
    target = report['target'] if report and report['target'] in GPUS else None
    _miscompiles(diagnosis, target, environ, timeout)
    look_at_nccl(diagnosis, visible_gpus(environ), environ)
    _network(diagnosis, environ)
    if report:
        look_at_ports(
            diagnosis, environ, jax=version('jax'), has_mutual_tls=report['has_mutual_tls']
        )
    _files(diagnosis, folder)
    return diagnosis


def _packages(diagnosis: Diagnosis) -> None:
    diagnosis.fact(
        'python', f'{platform.python_version()}, {platform.system()} {platform.machine()}'
    )
    for name in PACKAGES:
        try:
            diagnosis.fact(name, version(name))
        except PackageNotFoundError:
            diagnosis.fact(name, 'missing')
            diagnosis.wrong(
                f'{name} is not installed', f'{install()}, in the environment that runs it'
            )
    for name, release in _plugins().items():
        diagnosis.fact('plugin', f'{name} {release}')
        jaxlib = dict(diagnosis.facts)['jaxlib']
        if 'cuda' in name and release.split('.')[:3] != jaxlib.split('.')[:3]:
            diagnosis.wrong(
                f'{name} {release} does not match jaxlib {jaxlib}, so jax ignores it',
                install('cuda13' if 'cuda13' in name else 'cuda', upgrade=True),
            )


def _bytecode(diagnosis: Diagnosis, environ: Mapping[str, str]) -> None:
    """Add a line if each process will compile jax from its source again."""
    jax = importlib.util.find_spec('jax')
    if jax is None or jax.origin is None or not environ.get('PYTHONDONTWRITEBYTECODE'):
        return
    if not Path(importlib.util.cache_from_source(jax.origin)).exists():
        packages = str(Path(jax.origin).parents[1])
        diagnosis.fact(
            'bytecode',
            'none for jax, and PYTHONDONTWRITEBYTECODE keeps Python from writing it, which adds '
            f'about 3 s to each start: {sys.executable} -m compileall -q {typed(packages)}',
        )


def _plugins() -> dict[str, str]:
    """Return the version of each package that is a jax plugin."""
    return {
        plugin.dist.name: plugin.dist.version
        for plugin in entry_points(group='jax_plugins')
        if plugin.dist
    }


def _jax(diagnosis: Diagnosis, environ: Mapping[str, str], timeout: float) -> dict[str, Any] | None:
    """Add the devices that jax finds, and return its report; None if jax does not start."""
    # A run may be using the GPUs, and jax would preallocate most of their free memory.
    environment = {**environ, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    command = [sys.executable, '-m', 'megajax.commands.ask_jax']
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
        diagnosis.fact('devices', 'unknown')
        diagnosis.wrong(
            f'jax does not start within {timeout:g} s',
            'check that nvidia-smi answers, or set JAX_PLATFORMS=cpu to use no GPU',
        )
        return None
    answer = next(
        (line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)),
        None,
    )
    if done.returncode or answer is None:
        diagnosis.fact('devices', 'unknown')
        _why_jax_fails(diagnosis, environ, done)
        return None
    report: dict[str, Any] = json.loads(answer)
    for line in report['devices']:
        diagnosis.fact('devices', line)
    diagnosis.fact('attention', report['attention'])
    diagnosis.fact('experts', report['experts'])
    _missing_gpus(diagnosis, report['platform'], report['count'], environ)
    _compilation_cache(diagnosis, report['platform'], environ)
    return report


def _why_jax_fails(
    diagnosis: Diagnosis, environ: Mapping[str, str], done: subprocess.CompletedProcess[str]
) -> None:
    if unknown := re.search(r'Unknown flags? in XLA_FLAGS: (.*)', done.stderr):
        flags = ' '.join(flag.partition('=')[0] for flag in unknown[1].split())
        diagnosis.wrong(
            f'XLA_FLAGS has flags that this jaxlib does not know, so every process aborts: {flags}',
            'remove it from XLA_FLAGS',
        )
        return
    lines = done.stderr.strip().splitlines() or [f'exit code {done.returncode}']
    why = re.sub(r'//[^/\s]*@', '//', lines[-1])  # removes a password from an address
    wanted = environ.get('JAX_PLATFORMS', '')
    if not wanted or wanted.startswith('cpu'):
        diagnosis.wrong(
            f'jax fails to start: {why}',
            f"{sys.executable} -c 'import jax; jax.devices()' shows the full error",
        )
    elif 'cuda' in wanted and not any('cuda' in name for name in _plugins()):
        diagnosis.wrong(
            f'JAX_PLATFORMS={wanted}, but jax has no plugin for it',
            f'{install("cuda")}, or unset JAX_PLATFORMS',
        )
    else:
        diagnosis.wrong(
            f'JAX_PLATFORMS={wanted}, but jax fails to start: {why}',
            'check that nvidia-smi lists a GPU, or unset JAX_PLATFORMS',
        )


def _missing_gpus(diagnosis: Diagnosis, kind: str, count: int, environ: Mapping[str, str]) -> None:
    gpus = visible_gpus(environ)
    visible = f'{gpus} GPU{" is" if gpus == 1 else "s are"} visible'
    if kind == 'cpu' and gpus and not any('cuda' in name for name in _plugins()):
        diagnosis.wrong(
            f'{visible}, but jax has no plugin for them: runs exit with code 2',
            install('cuda'),
        )
    elif kind == 'cpu' and gpus:
        fix = (
            'update the driver; unset LD_LIBRARY_PATH if it contains a different CUDA; '
            'CUDA_VISIBLE_DEVICES may name GPUs that do not exist'
        )
        diagnosis.wrong(f'{visible}, but jax uses the CPU', fix)
    elif kind != 'cpu' and count < gpus:
        diagnosis.wrong(
            f'{visible}, but jax uses {count}',
            'unset JAX_LOCAL_DEVICE_IDS, or list only those GPUs in CUDA_VISIBLE_DEVICES',
        )


def _compilation_cache(diagnosis: Diagnosis, platform: str, environ: Mapping[str, str]) -> None:
    """Add a line if jax's compilation cache is set for CPUs, where it may do harm.

    `megajax.runtime.run.compile_cache` says why.
    """
    if platform == 'cpu' and environ.get('JAX_COMPILATION_CACHE_DIR'):
        diagnosis.fact(
            'compilation cache',
            'used by process 0 only, and a cached program may hang on several CPU devices; '
            'unset JAX_COMPILATION_CACHE_DIR',
        )


def _miscompiles(
    diagnosis: Diagnosis, target: str | None, environ: Mapping[str, str], timeout: float
) -> None:
    """Add the known miscompiles of the installed XLA GPU compiler, if there is one.

    The results are cached.
    """
    if not has_compiler():
        return
    # The check does not start jax on the GPUs, because they may be in use.
    environment = {**environ, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    command = [sys.executable, '-m', 'megajax.xla.miscompiles', *([target] if target else [])]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        diagnosis.fact(
            'miscompiles', f'unknown: compiling the repros took longer than {timeout:g} s'
        )
        return
    reason = (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
    for line in [f'unknown: {reason}'] if done.returncode else done.stdout.splitlines():
        diagnosis.fact('miscompiles', line)


def _network(diagnosis: Diagnosis, environ: Mapping[str, str]) -> None:
    try:
        with (
            socket.create_server(('127.0.0.1', 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            diagnosis.fact('loopback', 'a port can be bound and reached')
    except OSError as error:
        diagnosis.fact('loopback', f'no: {error.strerror or error}')
        diagnosis.wrong(
            'no port of 127.0.0.1 can be bound and reached, so the processes cannot connect',
            'allow it in the firewall or the sandbox',
        )
    try:
        check_host_name()
    except ConfigError as error:
        diagnosis.wrong(*str(error).split(': ', maxsplit=1))
    if proxies := [name for name in PROXIES if environ.get(name)]:
        diagnosis.fact('proxy', f'{", ".join(proxies)}; the processes of a run bypass it')


def _files(diagnosis: Diagnosis, folder: Path) -> None:
    try:
        with _two_handles(folder) as (first, second):
            locks, free = _locks(first, second), shutil.disk_usage(folder).free
    except (FileNotFoundError, NotADirectoryError):
        diagnosis.fact('folder', f'{folder}: not a writable folder')
        diagnosis.wrong(
            f'{folder} is not a writable folder',
            f'mkdir -p {folder}, or choose another --dir',
        )
        return
    except OSError as error:
        diagnosis.fact('folder', f'{folder}: {error.strerror}')
        diagnosis.wrong(
            f'{folder} cannot be written: {error.strerror}',
            'allow it, or choose another --dir and run.dir',
        )
        return
    diagnosis.fact(
        'folder',
        f'{folder.resolve()}: {free / 1e9:.1f} GB free, writable, '
        f'flock {"works" if locks else "does not work"}',
    )
    if not locks:
        diagnosis.wrong(
            f'{folder} does not support file locks: two runs could write to the same run.dir',
            'mount it with file locking, or give each run its own run.dir',
        )
    if free < LITTLE:
        diagnosis.wrong(
            f'{folder} has {free / 1e9:.1f} GB free; a checkpoint takes 12 bytes per parameter',
            'free some space, or choose another folder',
        )


@contextlib.contextmanager
def _two_handles(folder: Path) -> Iterator[tuple[int, int]]:
    """Create a temporary file in `folder` and open it twice to write, as NFS's locks require."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix='.doctor-') as first,
        open(first.name, 'r+b') as second,
    ):
        yield first.fileno(), second.fileno()


def _locks(first: int, second: int) -> bool:
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in TAKEN
    return False
