"""jax's coordinator with mutual TLS, by real certificates, from jax 0.12 on."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from megajax.core.config import ConfigError
from megajax.runtime.processes.certificates import CERTIFICATES, JAX_OPTION, check_certificates

HAS_MUTUAL_TLS = hasattr(jax.config, JAX_OPTION)

ROOT = Path(__file__).parents[3]
MEET = """
import jax
from megajax.runtime.processes.distributed import processes
with processes():
    print('met', jax.process_count(), len(jax.devices()))
"""


def make_certificates(folder: Path) -> dict[str, str]:
    """Make an authority and a certificate of 127.0.0.1; return jax's variables for them."""
    (folder / 'names').write_text('subjectAltName=IP:127.0.0.1\n')
    key = '-newkey rsa:2048 -nodes'
    for command in (
        f'req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=authority',
        f'req {key} -keyout own.key -out own.csr -subj /CN=process',
        'x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out own.pem '
        '-extfile names',
    ):
        subprocess.run(['openssl', *command.split()], cwd=folder, check=True, capture_output=True)
    files = [str(folder / name) for name in ('own.pem', 'own.key', 'ca.pem')]
    return dict(zip(CERTIFICATES, files, strict=True))


def start(index: int, port: int, certificates: dict[str, str]) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': '1',
        'PYTHONPATH': str(ROOT),
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
        'MEGAJAX_PROCESSES': '2',
        'MEGAJAX_PROCESS': f'{index}',
        'MEGAJAX_START_TIMEOUT': '5',
    }
    return subprocess.Popen(
        [sys.executable, '-c', MEET],
        env=environ | certificates,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize('has_mutual_tls', [True, False])
@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (CERTIFICATES[:1], f'without {CERTIFICATES[1]} and {CERTIFICATES[2]}: set all three'),
        (CERTIFICATES, 'not a file that can be read'),
    ],
)
def test_certificates_that_jax_could_not_use_are_refused(
    names: tuple[str, ...], message: str, has_mutual_tls: bool
) -> None:
    expected = message if has_mutual_tls else 'jax 0.1 would ignore it, .* has no mutual TLS'
    environ = dict.fromkeys(names, '/nowhere')
    with pytest.raises(ConfigError, match=expected):
        check_certificates(environ, jax='0.1', has_mutual_tls=has_mutual_tls)
    check_certificates({}, jax='0.1', has_mutual_tls=has_mutual_tls)


@pytest.mark.faults
@pytest.mark.skipif(HAS_MUTUAL_TLS, reason='this jax has mutual TLS')
def test_a_jax_without_mutual_tls_ends_a_run_with_certificates_before_it_listens() -> None:
    alone = start(0, 1, dict.fromkeys(CERTIFICATES, '/nowhere'))
    assert f'jax {jax.__version__} would ignore it' in alone.communicate(timeout=60)[0]
    assert alone.returncode != 0


@pytest.mark.faults
@pytest.mark.skipif(not HAS_MUTUAL_TLS, reason='this jax has no mutual TLS')
@pytest.mark.skipif(shutil.which('openssl') is None, reason='openssl makes the certificates')
@pytest.mark.parametrize('has_own', [True, False])
def test_with_certificates_jax_admits_only_processes_that_have_one(
    has_own: bool, tmp_path: Path
) -> None:
    certificates = make_certificates(tmp_path)
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    both = [start(0, port, certificates), start(1, port, certificates if has_own else {})]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode == 0 for process in both] == [has_own] * 2, said
    assert ['met 2 2' in text for text in said] == [has_own] * 2
