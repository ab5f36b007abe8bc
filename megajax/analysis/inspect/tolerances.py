"""Tolerances for the difference between an executed step and the step on one device."""

from collections.abc import Callable, Iterable

from megajax.analysis.inspect.result import Compared
from megajax.core.config import Config
from megajax.xla.emulate.compare import (
    LIMIT,
    LIMIT_8_BITS,
    LIMIT_16_BITS,
    LIMIT_EXACT,
    Difference,
)

# Relative to the largest element of a gradient, and to the loss. bf16 has 8 bits of precision and
# FP8 4: if FP8 programs differ by bf16 rounding, gradients of a small model differ by up to 0.25.
# Executed in fp32 instead, they agree as well as bf16 programs do.
LIMITS = {
    'float32': (LIMIT, 1e-5),
    'exact': (LIMIT_EXACT, 1e-5),
    '16 bits': (LIMIT_16_BITS, 1e-3),
    '8 bits': (LIMIT_8_BITS, 1e-3),
}
# The loss is a mean over tokens, each with its own rounding error. On one device, rounding changed
# the loss of 42 random models by at most half of this, divided by the root of the number of tokens.
NOISE_OF_LOSS = {'16 bits': 0.03, '8 bits': 0.05}
LOSSES = 'loss', 'nll'
Say = Callable[[str], None]


def has_16_bits(config: Config) -> bool:
    """Return whether a step computes, or sums gradients, in 16 bits or fewer."""
    return not config.train.dtype == config.optim.reduce_dtype == 'float32'


def limits(config: Config, *, exact: bool) -> tuple[float, float]:
    """Return the limits on a gradient and on the loss."""
    return _limits(config, _kind(config, exact=exact))


def forward_limits(config: Config) -> tuple[float, float]:
    """Return the limits on a result of a forward pass, which sums no gradient, and on the loss."""
    is_fp32 = config.train.dtype == 'float32'
    return _limits(config, 'float32' if is_fp32 else _kind(config, exact=False))


def _limits(config: Config, kind: str) -> tuple[float, float]:
    of_arrays, of_loss = LIMITS[kind]
    tokens = config.train.batch_size * config.train.seq_len
    return of_arrays, max(of_loss, NOISE_OF_LOSS.get(kind, 0) / tokens**0.5)


def _kind(config: Config, *, exact: bool) -> str:
    if not has_16_bits(config):
        return 'float32'
    return 'exact' if exact else '8 bits' if config.train.dtype == 'fp8' else '16 bits'


def judged(differences: Iterable[Difference], config: Config, *, exact: bool) -> list[Compared]:
    """Pair each difference with its own limit, or with the dtype's; the worst comes first."""
    gradient, loss = limits(config, exact=exact)
    results = [
        Compared(
            name=name,
            error=error,
            limit=own or (loss if name in LOSSES else gradient),
            note=note,
        )
        for name, error, own, note in differences
    ]
    return sorted(results, key=lambda result: -result.error / result.limit)
