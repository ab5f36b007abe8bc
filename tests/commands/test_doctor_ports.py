"""`megajax doctor` tells what listens between hosts, and who may speak there."""

import pytest

from megajax.commands.diagnosis import Diagnosis
from megajax.commands.doctor_ports import NAME, look_at_ports
from megajax.runtime.processes.certificates import CERTIFICATES

READABLE = dict.fromkeys(CERTIFICATES, __file__)


def lines(environ: dict[str, str], *, has_mutual_tls: bool) -> tuple[Diagnosis, list[str]]:
    diagnosis = Diagnosis()
    look_at_ports(diagnosis, environ, jax='0.1', has_mutual_tls=has_mutual_tls)
    assert {name for name, _ in diagnosis.facts} == {NAME}
    return diagnosis, [value for _, value in diagnosis.facts]


@pytest.mark.parametrize(
    ('environ', 'has_mutual_tls', 'who'),
    [
        ({}, False, 'any client, unencrypted: jax 0.1 has no TLS for it; jax 0.12 has it'),
        ({}, True, 'any client, unencrypted, because JAX_MTLS_CERT_FILE is not set (mutual TLS)'),
        (READABLE, True, 'clients with a certificate from JAX_MTLS_CA_FILE (mutual TLS)'),
    ],
)
def test_the_coordinator_is_as_open_as_jax_leaves_it(
    environ: dict[str, str], has_mutual_tls: bool, who: str
) -> None:
    diagnosis, (_, coordinator, _) = lines(environ, has_mutual_tls=has_mutual_tls)
    assert coordinator == f"jax's coordinator, process 0, a free port: {who}"
    assert diagnosis.findings == []


@pytest.mark.parametrize(
    ('environ', 'who'),
    [
        ({}, 'any client, because MEGAJAX_TOKEN is not set'),
        ({'MEGAJAX_TOKEN': 'a secret of a run'}, 'clients that authenticate with MEGAJAX_TOKEN'),
    ],
)
def test_the_rendezvous_is_as_open_as_its_token_leaves_it(
    environ: dict[str, str], who: str
) -> None:
    _, (rendezvous, _, collectives) = lines(environ, has_mutual_tls=True)
    assert rendezvous == f'rendezvous, process 0, the port in MEGAJAX_COORDINATOR: {who}'
    assert collectives.endswith('any client, unencrypted')


def test_certificates_that_a_run_would_refuse_are_a_problem() -> None:
    diagnosis, _ = lines(READABLE, has_mutual_tls=False)
    (finding,) = diagnosis.findings
    assert finding.what == (
        'JAX_MTLS_CERT_FILE is set, and jax 0.1 would ignore it, because its coordinator has no '
        'mutual TLS'
    )
    assert finding.fix == 'install jax 0.12 or later, or unset it'
    gone = READABLE | {'JAX_MTLS_KEY_FILE': '/no/such/file'}
    diagnosis, _ = lines(gone, has_mutual_tls=True)
    assert diagnosis.findings[0].what.startswith('JAX_MTLS_KEY_FILE=/no/such/file is not a file')
