"""List the ports of a multi-host run and who may connect to them, for `megajax doctor`."""

from collections.abc import Mapping

from megajax.base.errors import ConfigError
from megajax.commands.diagnosis import Diagnosis
from megajax.runtime.processes.certificates import CERTIFICATES, check_certificates
from megajax.runtime.processes.environment import COORDINATOR, TOKEN

NAME = 'between hosts'


def look_at_ports(
    diagnosis: Diagnosis, environ: Mapping[str, str], *, jax: str, has_mutual_tls: bool
) -> None:
    """Add a line for each kind of port, and a problem if a run would reject the certificates.

    `has_mutual_tls` says whether the release `jax` of jax supports mutual TLS for its coordinator.
    """
    open_to = f'any client, because {TOKEN} is not set'
    token = f'clients that authenticate with {TOKEN}' if environ.get(TOKEN) else open_to
    diagnosis.fact(NAME, f'rendezvous, process 0, the port in {COORDINATOR}: {token}')
    diagnosis.fact(
        NAME,
        f"jax's coordinator, process 0, a free port: {_coordinator(environ, jax, has_mutual_tls)}",
    )
    diagnosis.fact(NAME, 'Gloo and NCCL, each process, free ports: any client, unencrypted')
    try:
        check_certificates(environ, jax=jax, has_mutual_tls=has_mutual_tls)
    except ConfigError as error:
        what, _, fix = str(error).rpartition(': ')
        diagnosis.wrong(what, fix)


def _coordinator(environ: Mapping[str, str], jax: str, has_mutual_tls: bool) -> str:
    if not has_mutual_tls:
        return f'any client, unencrypted: jax {jax} has no TLS for it; jax 0.12 has it'
    if all(environ.get(name) for name in CERTIFICATES):
        return f'clients with a certificate from {CERTIFICATES[2]} (mutual TLS)'
    return f'any client, unencrypted, because {CERTIFICATES[0]} is not set (mutual TLS)'
