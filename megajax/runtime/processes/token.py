"""The token of a run: a secret that its processes share to authenticate each other.

Each side sends a fresh nonce and signs its message with HMAC-SHA256 over both nonces, so that the
token itself is never sent and recorded messages cannot be replayed. Authentication is mutual:
process 0 accepts only processes that know the token, and they accept only a process 0 that knows
it. Messages are not encrypted, and after the handshake they are not signed. Imports no jax.
"""

import hashlib
import hmac
import json
import os
import secrets

from megajax.runtime.processes.peers import Message


def make_token() -> str:
    """Make a random token of 256 bits."""
    return secrets.token_hex(32)


def make_nonce() -> str:
    """Make a random nonce of 128 bits."""
    return secrets.token_hex(16)


def sign(token: str | None, message: Message, *nonces: str) -> Message:
    """Add a `proof` that the sender knows the token; without a token it is empty."""
    return {**message, 'proof': _proof(token, message, nonces)}


def is_signed(token: str | None, message: Message, *nonces: str) -> bool:
    """Whether the sender knows this token or, if the token is None, signed without a token."""
    unsigned = {name: value for name, value in message.items() if name != 'proof'}
    given = message.get('proof', '')
    try:
        expected = _proof(token, unsigned, nonces)
    except RecursionError:  # nested too deeply to be serialized, although it could be parsed
        return False
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(expected, given)


def _proof(token: str | None, message: Message, nonces: tuple[str, ...]) -> str:
    if token is None:
        return ''
    signed = json.dumps([message, *nonces], sort_keys=True).encode()
    return hmac.new(os.fsencode(token), signed, hashlib.sha256).hexdigest()
