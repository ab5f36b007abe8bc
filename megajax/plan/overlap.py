"""The products that each collective overlaps with in the program that XLA compiles for GPUs.

They are read from `megajax inspect --target h100` with jax 0.10.2. For each site and kind the
tables have the share of the bytes that are on the wire while matrix products run, and which
products these are; the same share of the products runs beside them. Nothing else overlaps, the
gradients over `data` included. The smaller of transfers and products is hidden (`time.py`).

XLA's scheduler decides by the sizes of a model. In 494 compiled steps that fit, the share of the
bytes over `model` that overlaps is 5 points off on average, and within 10 points in 79 %
(`benchmarks/plan_overlap.py`). The share of the seconds that products hide is within 9 points for
GPT-2 345M, and up to 29 points off for the 8.3B model and Llama 3 8B. In a step that does not fit,
nothing overlaps.
"""

from typing import NamedTuple

from megajax.config import Config
from megajax.counts.flops import uses_flash
from megajax.counts.megatron import GATHER, REDUCE, SCATTER, Expected
from megajax.counts.products import Phase


class Beside(NamedTuple):
    """The share of a collective's transfers that can be hidden, and the products beside them.

    The same share of the products hides them.
    """

    share: float
    products: tuple[str, ...]
    phase: Phase | None = None  # phase of the products; None for the phase of the collective


NOTHING = Beside(0.0, ())
_ATTENTION, _MLP = ('qkv weight', 'out weight'), ('up weight', 'down weight')
_BACKWARD = {
    ('head', REDUCE): Beside(1.0, ('head weight',)),
    ('head', SCATTER): Beside(1.0, ('head weight',)),
    ('attention', REDUCE): Beside(1.0, _ATTENTION),
    ('attention', GATHER): Beside(1.0, _ATTENTION),
    ('attention', SCATTER): Beside(1.0, ('out weight',)),
    ('mlp', REDUCE): Beside(1.0, ('attention',)),
    ('mlp', SCATTER): Beside(1.0, ('attention',)),
}
# The halves of a microbatch take turns (train.overlap=batch_split): the last half of a layer has
# nothing beside it.
_BACKWARD_OF_HALVES = _BACKWARD | {
    ('attention', REDUCE): Beside(0.5, (*_ATTENTION, 'attention')),
    ('attention', GATHER): Beside(0.5, _ATTENTION),
    ('mlp', REDUCE): Beside(1.0, _MLP),
    ('mlp', SCATTER): Beside(1.0, _MLP),
    ('mlp', GATHER): Beside(1.0, ('down input', 'attention')),
}
_FORWARD_OF_HALVES = {
    ('attention', REDUCE): Beside(0.5, ('attention', 'out')),
    ('attention', SCATTER): Beside(0.5, ('attention', 'out')),
    ('mlp', REDUCE): Beside(0.5, ('down',)),
    ('mlp', SCATTER): Beside(0.5, ('down',)),
}
_RECOMPUTE_OF_HALVES = _FORWARD_OF_HALVES | {
    ('attention', REDUCE): Beside(1.0, ('attention', 'out', 'up')),
    ('mlp', GATHER): Beside(0.5, ('up',)),
}


def beside(collective: Expected, config: Config) -> Beside:
    """Return the products that a collective of a step of `config` overlaps with."""
    key = collective.site.name, collective.kind
    if config.train.overlap == 'batch_split':
        tables = {
            'forward': _FORWARD_OF_HALVES,
            'recompute': _RECOMPUTE_OF_HALVES,
            'backward': _BACKWARD_OF_HALVES,
        }
        return tables.get(collective.site.phase, {}).get(key, NOTHING)
    if collective.site.phase != 'backward':
        return NOTHING
    if key == ('mlp', REDUCE) and config.train.recompute != 'full':
        return Beside(1.0, _MLP)
    if key == ('mlp', SCATTER) and config.train.recompute == 'full' and not uses_flash(config):
        return NOTHING
    return _BACKWARD.get(key, NOTHING)
