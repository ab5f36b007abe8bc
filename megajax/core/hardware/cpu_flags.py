"""The time that XLA lets simulated CPU devices wait for each other. Imports no jax."""

LIMIT = '--xla_cpu_collective_call_terminate_timeout_seconds'
SECONDS = 600


def with_collective_limit(flags: str) -> str:
    """Return XLA_FLAGS that let a collective of CPU devices take SECONDS, unless they set a limit.

    Simulated devices wait for each other at each collective. On a busy machine one may be late, and
    XLA would end the process after 40 s.
    """
    return flags if LIMIT in flags else f'{flags} {LIMIT}={SECONDS}'.strip()
