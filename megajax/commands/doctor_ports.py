"""The ports of a run over several hosts, and who may speak there, in `megajax doctor`."""

from collections.abc import Mapping

from megajax.base.errors import ConfigError
from megajax.commands.diagnosis import Diagnosis
from megajax.runtime.processes.certificates import CERTIFICATES, check_certificates
from megajax.runtime.processes.environment import COORDINATOR, TOKEN

NAME = 'between hosts'


def look_at_ports(
    diagnosis: Diagnosis, environ: Mapping[str, str], *, jax: str, has_mutual_tls: bool
) -> None:
    """Add a line for each kind of port, and the certificates that a run would refuse.

    `has_mutual_tls` says whether jax, of release `jax`, has it for its coordinator.
    """
    token = f'who proves {TOKEN}' if environ.get(TOKEN) else f'anyone, as {TOKEN} is not set'
    diagnosis.fact(NAME, f'rendezvous, process 0, the port in {COORDINATOR}: {token}')
    diagnosis.fact(
        NAME,
        f"jax's coordinator, process 0, a free port: {_coordinator(environ, jax, has_mutual_tls)}",
    )
    diagnosis.fact(NAME, 'Gloo and NCCL, each process, free ports: anyone, and not encrypted')
    try:
        check_certificates(environ, jax=jax, has_mutual_tls=has_mutual_tls)
    except ConfigError as error:
        what, _, fix = str(error).rpartition(': ')
        diagnosis.wrong(what, fix)


def _coordinator(environ: Mapping[str, str], jax: str, has_mutual_tls: bool) -> str:
    if not has_mutual_tls:
        return f'anyone, and not encrypted, as jax {jax} has no TLS for it; jax 0.12 has'
    if all(environ.get(name) for name in CERTIFICATES):
        return f'who has a certificate of {CERTIFICATES[2]} (mutual TLS)'
    return f'anyone, and not encrypted, as {CERTIFICATES[0]} is not set (mutual TLS)'
