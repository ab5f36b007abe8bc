"""`megajax doctor`: whatever is wrong with a machine, it says so with a fix, and does not fail
itself.
"""

import errno
import fcntl
import functools
import os
import py_compile
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice
from support import megajax
from typer.testing import CliRunner

from megajax.commands import ask_jax, doctor
from megajax.commands.ask_jax import kernel_of, matmuls_of_experts
from megajax.commands.diagnosis import Diagnosis
from megajax.commands.doctor import diagnose
from megajax.commands.main import app
from megajax.core.config.extras import install
from megajax.core.hardware.targets import has_compiler
from megajax.runtime.processes.certificates import JAX_OPTION

CPU = {
    name: value
    for name, value in os.environ.items()
    if name not in ('XLA_FLAGS', 'CUDA_VISIBLE_DEVICES')
} | {'JAX_PLATFORMS': 'cpu'}

RUN = subprocess.run


@pytest.mark.parametrize(
    ('kind', 'dtype', 'kernel'),
    [
        ('NVIDIA H200', 'bfloat16', 'cuDNN flash up to head dim 256, any window'),
        ('NVIDIA A100-SXM4-80GB', 'bfloat16', 'cuDNN flash up to head dim 128, any window'),
        ('NVIDIA H200', 'float32', 'XLA'),
        ('AMD Instinct MI300X', 'bfloat16', 'XLA'),
    ],
)
def test_it_says_which_heads_take_flash_attention(kind: str, dtype: str, kernel: str) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
    assert kernel_of(device, dtype) == kernel


@pytest.mark.parametrize(
    ('kind', 'kernels'),
    [('NVIDIA H100 80GB HBM3', 'Mosaic GPU kernels'), ('NVIDIA A100-SXM4-80GB', 'loop')],
)
def test_it_says_which_gpus_have_kernels_for_experts(kind: str, kernels: str) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=None, platform='gpu')
    assert kernels in matmuls_of_experts(device, 'bfloat16')


def test_the_memory_of_a_cpu_is_what_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices('cpu')[0]
    for limit, memory in ((16e9, ', 16.0 GB of the host'), (None, '')):
        monkeypatch.setattr(ask_jax, 'host_memory', lambda limit=limit: limit)
        assert ask_jax._memory(cpu) == memory


def whats(found: Diagnosis) -> list[str]:
    assert all(finding.fix for finding in found.findings)
    return [finding.what for finding in found.findings]


@functools.cache
def answer(platform: str) -> subprocess.CompletedProcess[str]:
    """What jax says of this machine."""
    command = [sys.executable, '-m', 'megajax.commands.ask_jax']
    environ = CPU | {'JAX_PLATFORMS': platform}
    return RUN(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def jax_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax answers what it has answered, and no GPU compiler is asked."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asks = 'megajax.commands.ask_jax' in command
        return answer(options['env']['JAX_PLATFORMS']) if asks else RUN(command, **options)

    monkeypatch.setattr(doctor.subprocess, 'run', run)
    monkeypatch.setattr(doctor, 'has_compiler', lambda: False)


@pytest.mark.usefixtures('jax_said')
def test_the_command_tells_what_there_is_and_exits_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('XLA_FLAGS')
    done = megajax('doctor', '--dir', tmp_path)
    assert (done.returncode, done.stderr) == (0, ''), done
    assert done.stdout.endswith('\n\nno problems found\n')
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert facts['jax'] == version('jax')
    assert facts['devices'].startswith('1 x cpu (cpu, ')
    assert facts['attention'] == 'bfloat16: XLA, float32: XLA'
    assert facts['experts'] == 'bfloat16: loop, float32: loop'
    assert facts['folder'].startswith(f'{tmp_path}: ')
    assert facts['folder'].endswith('writable, flock works')
    has_tls = hasattr(jax.config, JAX_OPTION)
    assert (f'jax {version("jax")} has no TLS for it' in done.stdout) == (not has_tls)
    assert ('JAX_MTLS_CERT_FILE is not set' in done.stdout) == has_tls
    assert list(tmp_path.iterdir()) == []


def test_every_fact_stands_under_its_name(tmp_path: Path) -> None:
    known = {
        'python',
        *doctor.PACKAGES,
        'plugin',
        'devices',
        'miscompiles',
        'nccl',
        'links',
        'shared memory',
        'variables',
        'loopback',
        'proxy',
        'between hosts',
        'folder',
    }
    proxy = CPU | {'https_proxy': 'http://proxy:80'}
    for folder in (tmp_path, tmp_path / 'gone', Path('/proc')):
        names = {name for name, _ in diagnose(folder, environ=proxy, timeout=0.01).facts}
        assert {'python', 'jax', 'devices', 'loopback', 'proxy', 'folder'} <= names <= known


def test_a_compiler_that_fails_leaves_the_miscompiles_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, 'has_compiler', lambda: True)
    monkeypatch.setattr(doctor.sys, 'executable', '/bin/false')
    found = Diagnosis()
    doctor._miscompiles(found, None, CPU, 10)
    assert found.facts == [('miscompiles', 'unknown: exit code 1')]


def test_a_compiler_that_hangs_leaves_the_miscompiles_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, 'has_compiler', lambda: True)
    facts = dict(diagnose(tmp_path, environ=CPU, timeout=0.01).facts)
    assert facts['miscompiles'] == 'unknown: compiling the repros took longer than 0.01 s'


@pytest.mark.usefixtures('jax_said')
def test_the_command_exits_1_with_what_is_wrong_and_its_fix(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ['doctor', '--dir', str(tmp_path / 'gone')])
    assert done.exit_code == 1
    assert done.stdout.endswith(
        f'\n\n1. {tmp_path}/gone is not a writable folder\n'
        f'  fix: mkdir -p {tmp_path}/gone, or choose another --dir\n'
    )


def test_a_flag_that_xla_does_not_know_is_named_without_its_value(tmp_path: Path) -> None:
    (what,) = whats(diagnose(tmp_path, environ=CPU | {'XLA_FLAGS': '--xla_no_such_flag=value'}))
    assert what.endswith(': --xla_no_such_flag')


@pytest.mark.usefixtures('jax_said')
def test_a_platform_that_is_not_there_is_named(tmp_path: Path) -> None:
    (what,) = whats(diagnose(tmp_path, environ=CPU | {'JAX_PLATFORMS': 'no_such_platform'}))
    assert what.startswith('JAX_PLATFORMS=no_such_platform, but jax fails to start: ')


@pytest.mark.usefixtures('jax_said')
@pytest.mark.parametrize(
    'plugins',
    [{}, {'jax-cuda12-plugin': version('jaxlib')}],
    ids=['without its plugin', 'with it'],
)
def test_a_gpu_that_jax_does_not_use_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str]
) -> None:
    monkeypatch.setattr(doctor, '_plugins', lambda: plugins)
    monkeypatch.setattr(doctor, 'visible_gpus', lambda _: 2)
    (finding,) = diagnose(tmp_path, environ=CPU).findings
    assert finding.what.startswith('2 GPUs are visible, but jax ')
    assert ('[cuda]' in finding.fix) == (not plugins)


@pytest.mark.usefixtures('jax_said')
@pytest.mark.parametrize(
    ('plugin', 'extra'), [('jax-cuda12-pjrt', 'cuda'), ('jax-cuda13-pjrt', 'cuda13')]
)
def test_a_plugin_for_another_jaxlib_is_found(
    plugin: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, '_plugins', lambda: {plugin: '0.1.2'})
    (finding,) = diagnose(tmp_path, environ=CPU).findings
    jaxlib = version('jaxlib')
    assert finding.what == f'{plugin} 0.1.2 does not match jaxlib {jaxlib}, so jax ignores it'
    assert finding.fix == install(extra, upgrade=True)


def test_a_jax_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    (what,) = whats(diagnose(tmp_path, environ=CPU, timeout=0.01))
    assert what == 'jax does not start within 0.01 s'


@pytest.mark.usefixtures('jax_said')
def test_a_package_that_is_missing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, 'PACKAGES', (*doctor.PACKAGES, 'no-such-package'))
    (finding,) = diagnose(tmp_path, environ=CPU).findings
    assert finding.what == 'no-such-package is not installed'
    # An index may have a package of this name that is not megajax.
    assert 'pip install megajax' not in finding.fix


@pytest.mark.usefixtures('jax_said')
def test_no_password_of_the_environment_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        'https_proxy': 'http://user:hunter2@proxy:80',
        'HF_TOKEN': 'hunter2',
        'JAX_PLATFORMS': 'no_such_platform',
    }
    found = str(diagnose(tmp_path, environ=CPU | secrets))
    assert 'https_proxy' in found
    assert 'hunter2' not in found


@pytest.mark.usefixtures('jax_said')
def test_a_file_system_without_locks_or_room_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.fcntl, 'flock', lambda *_: None)  # both hold it
    monkeypatch.setattr(doctor, 'LITTLE', 1e18)
    locks, room = whats(diagnose(tmp_path, environ=CPU))
    assert 'does not support file locks' in locks
    assert 'GB free; a checkpoint takes 12 bytes' in room


@pytest.mark.usefixtures('jax_said')
def test_a_file_system_that_locks_only_files_opened_to_write_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def flock_of_nfs(descriptor: int, operation: int) -> None:
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(errno.EBADF, 'Bad file descriptor')
        flock(descriptor, operation)

    monkeypatch.setattr(doctor.fcntl, 'flock', flock_of_nfs)
    found = diagnose(tmp_path, environ=CPU)
    assert found.findings == []
    assert dict(found.facts)['folder'].endswith('flock works')


@pytest.mark.usefixtures('jax_said')
def test_a_host_without_loopback_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(doctor.socket, 'create_server', refuse)
    (what,) = whats(diagnose(tmp_path, environ=CPU))
    assert what.startswith('no port of 127.0.0.1')


@pytest.mark.usefixtures('jax_said')
def test_a_host_whose_name_has_no_address_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.socket, 'gethostname', lambda: 'nowhere.invalid')
    (what,) = whats(diagnose(tmp_path, environ=CPU))
    assert what.startswith('the name of this host, nowhere.invalid, has no address')


@pytest.mark.usefixtures('jax_said')
def test_a_folder_that_cannot_be_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(doctor.tempfile, 'NamedTemporaryFile', refuse)
    (what,) = whats(diagnose(tmp_path, environ=CPU))
    assert what == f'{tmp_path} cannot be written: Permission denied'


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_known_miscompiles_of_the_compiler_at_hand_are_told_and_are_no_finding(
    tmp_path: Path,
) -> None:
    environ = CPU | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
    first = diagnose(tmp_path, environ=environ)
    lines = [line for name, line in first.facts if name == 'miscompiles']
    assert lines
    assert not any(line.startswith('unknown') for line in lines)
    assert not first.findings
    assert any((tmp_path / 'cache').rglob('*.json'))
    again = diagnose(tmp_path, environ=environ)
    assert [line for name, line in again.facts if name == 'miscompiles'] == lines


@pytest.mark.usefixtures('jax_said')
def test_without_a_gpu_compiler_none_is_asked(tmp_path: Path) -> None:
    assert 'miscompiles' not in dict(diagnose(tmp_path, environ=CPU).facts)


@pytest.mark.usefixtures('jax_said')
def test_a_compilation_cache_on_cpus_is_told(tmp_path: Path) -> None:
    with_cache = diagnose(tmp_path, environ=CPU | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path)})
    assert dict(with_cache.facts)['compilation cache'].startswith('used by process 0 only')
    assert with_cache.findings == []
    for platform, environ in (('cpu', {}), ('gpu', {'JAX_COMPILATION_CACHE_DIR': 'x'})):
        doctor._compilation_cache(without := Diagnosis(), platform, environ)
        assert without.facts == []


def test_imports_that_every_process_compiles_again_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = {'PYTHONDONTWRITEBYTECODE': '1'}
    for prefix, environ, told in ((tmp_path, never, True), (tmp_path, {}, False)):
        monkeypatch.setattr(sys, 'pycache_prefix', str(prefix))
        doctor._bytecode(found := Diagnosis(), environ)
        assert ('bytecode' in dict(found.facts)) == told
        if told:
            # A distribution's Python has its packages outside lib/pythonX.Y/site-packages.
            *_, compiled = shlex.split(dict(found.facts)['bytecode'])
            assert Path(compiled, 'jax/__init__.py').samefile(jax.__file__)
    py_compile.compile(jax.__file__)
    doctor._bytecode(found := Diagnosis(), never)
    assert found.facts == []
