"""Certificates for jax's coordinator, which jax reads from the environment. Imports no jax."""

import os
from collections.abc import Mapping

from megajax.base.errors import ConfigError

# Variables for the certificates by which jax's coordinator and its clients authenticate each other,
# from jax 0.12 on; jax reads them.
CERTIFICATES = 'JAX_MTLS_CERT_FILE', 'JAX_MTLS_KEY_FILE', 'JAX_MTLS_CA_FILE'
# an option that exists only if jax's coordinator supports mutual TLS
JAX_OPTION = 'jax_mtls_cert_file'


def check_certificates(environ: Mapping[str, str], *, jax: str, has_mutual_tls: bool) -> None:
    """Raise ConfigError for certificates that jax, release `jax`, would ignore or cannot read."""
    given = [name for name in CERTIFICATES if environ.get(name)]
    if given and not has_mutual_tls:
        raise ConfigError(
            f'{given[0]} is set, and jax {jax} would ignore it, because its coordinator has no '
            'mutual TLS: install jax 0.12 or later, or unset it'
        )
    if given and (missing := [name for name in CERTIFICATES if name not in given]):
        raise ConfigError(f'{given[0]} without {" and ".join(missing)}: set all three, or none')
    for name in given:
        if not os.access(environ[name], os.R_OK):
            raise ConfigError(
                f'{name}={environ[name]} is not a file that can be read: name one, or unset it'
            )
