"""Certificates for jax's coordinator, which jax itself reads from the environment. No jax here."""

import os
from collections.abc import Mapping

from megajax.base.errors import ConfigError

# By which jax's coordinator and its clients know each other, from jax 0.12 on; read by jax.
CERTIFICATES = 'JAX_MTLS_CERT_FILE', 'JAX_MTLS_KEY_FILE', 'JAX_MTLS_CA_FILE'
JAX_OPTION = 'jax_mtls_cert_file'  # the option of a jax whose coordinator takes mutual TLS


def check_certificates(environ: Mapping[str, str], *, jax: str, has_mutual_tls: bool) -> None:
    """Raise ConfigError for certificates that jax, of release `jax`, would ignore or not read."""
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
