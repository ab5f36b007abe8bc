"""The token of a run: a secret that its processes share, and by which they know each other.

Each side sends a fresh nonce and signs its message with HMAC-SHA256 over both nonces, so that the
token itself is never sent and what was overheard cannot be used again. Both sides prove that they
know it: process 0 hears nobody else, and no process follows another's process 0. Messages are not
encrypted, and nothing is signed once the processes have met. Imports no jax.
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
    """Make a number that is used once, of 128 bits."""
    return secrets.token_hex(16)


def sign(token: str | None, message: Message, *nonces: str) -> Message:
    """Add a `proof` that the sender knows the token; without a token it is empty."""
    return {**message, 'proof': _proof(token, message, nonces)}


def is_signed(token: str | None, message: Message, *nonces: str) -> bool:
    """Whether the sender of the message knows this token or, if it is None, has none either."""
    unsigned = {name: value for name, value in message.items() if name != 'proof'}
    given = message.get('proof', '')
    try:
        expected = _proof(token, unsigned, nonces)
    except RecursionError:  # lists in lists, as deep as can just be read
        return False
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(expected, given)


def _proof(token: str | None, message: Message, nonces: tuple[str, ...]) -> str:
    if token is None:
        return ''
    signed = json.dumps([message, *nonces], sort_keys=True).encode()
    return hmac.new(os.fsencode(token), signed, hashlib.sha256).hexdigest()
