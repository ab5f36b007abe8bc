"""How far an executed step may be from that of one device."""

from collections.abc import Callable, Iterable

from megajax.config import Config
from megajax.emulate.compare import LIMIT, LIMIT_16_BITS, LIMIT_EXACT, Difference
from megajax.inspect.result import Compared

# Of the largest element of a gradient, and of the loss; bf16 as it is carries 8 bits of a number.
LIMITS = {'float32': (LIMIT, 1e-5), 'exact': (LIMIT_EXACT, 1e-5), '16 bits': (LIMIT_16_BITS, 1e-3)}
LOSSES = 'loss', 'nll'
Say = Callable[[str], None]


def limits(config: Config, *, exact: bool) -> tuple[float, float]:
    """Those of a gradient and of the loss."""
    return LIMITS['float32' if config.train.dtype == 'float32' else 'exact' if exact else '16 bits']


def judged(differences: Iterable[Difference], config: Config, *, exact: bool) -> list[Compared]:
    """Each difference with its limit."""
    gradient, loss = limits(config, exact=exact)
    return [
        Compared(name=name, error=error, limit=loss if name in LOSSES else gradient)
        for name, error in differences
    ]
