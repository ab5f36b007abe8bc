"""Compare two recordings, site by site."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from megajax.analysis.compare.recording import Arrays, Recording
from megajax.analysis.inspect.emulated_step import ROUNDING
from megajax.analysis.inspect.tolerances import forward_limits, limits
from megajax.base.result import Result
from megajax.core.config import Config, ConfigError
from megajax.core.config.differences import differences
from megajax.core.config.load import reload

FORWARD, GRADIENT = 'forward', 'gradient'
LOSS = 'loss'


class Site(Result):
    """One result of a pass in both recordings."""

    name: str
    phase: str = Field(description='forward or gradient')
    error: float = Field(
        description='the largest difference over the largest absolute value in A, or in B if A is '
        'zero; infinite if only one of the two is finite, or has this site'
    )
    limit: float
    place: list[int] = Field(description='the index of the largest difference')
    a: float | None = Field(description='the value at that place in A')
    b: float | None = Field(description='the value at that place in B')
    same_bits: bool
    both_not_finite: bool = Field(
        default=False, description='whether a number is NaN or infinite on both sides'
    )
    note: str = Field(default='', description='the reason if the two cannot be compared')

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit."""
        return self.error <= self.limit


class Side(Result):
    """One side of a comparison."""

    source: str
    config: dict[str, dict[str, Any]] = Field(description='the config that was executed')
    executed_with: str
    megajax: str
    platform: str


class Comparison(Result):
    """The differences of two passes, site by site, in the order of computation."""

    a: Side
    b: Side
    keys: list[tuple[str, str, str]] = Field(
        description='differences in config and environment, with both values'
    )
    weights: int = Field(description='number of parameters')
    different_weights: list[str] = Field(
        description='parameters that are not bit-identical, in forward order'
    )
    sites: list[Site]
    merged: list[str] = Field(
        default=[], description='the sides whose adapters were merged into their weights'
    )

    @property
    def first(self) -> Site | None:
        """The first site that differs by more than its limit."""
        return next((site for site in self.sites if not site.ok), None)

    @property
    def same_bits(self) -> bool:
        """Whether all sites are bit for bit the same."""
        return all(site.same_bits for site in self.sites)


def compare_recordings(
    a: Recording, b: Recording, *, tolerance: float | None = None, merged: Sequence[str] = ()
) -> Comparison:
    """Compare two passes over the same batch.

    The limit is `tolerance`, or the limit of `inspect --run` for the less precise of the two dtypes
    (`analysis/inspect/tolerances.py`); the dtype of the sums of gradients counts for gradients
    alone. `merged` lists the sides, a or b, whose adapters were merged
    into their weights. Raises ConfigError if the batches differ.
    """
    if not _same_batch(a.batch, b.batch):
        raise ConfigError(
            f'{a.about.source} and {b.about.source} have different batches: use --data for both or '
            'for neither, and the same train.batch_size, train.seq_len and model.vocab_size'
        )
    configs = config_of(a), config_of(b)
    of_forward, of_loss, of_gradient = (
        [tolerance] * 3 if tolerance is not None else _limits(configs)
    )
    largest = max(map(_largest, [*a.gradients.values(), *b.gradients.values()]), default=0.0)
    sites = [
        *_sites(FORWARD, a.forward, b.forward, of_forward, of_loss, 0.0),
        *_sites(GRADIENT, a.gradients, b.gradients, of_gradient, of_loss, largest),
    ]
    before, after = a.about.weights, b.about.weights
    forward = reversed(dict.fromkeys([*before, *after]))  # gradients are in backward order
    return Comparison(
        a=_side(a),
        b=_side(b),
        keys=_keys(a, b, *configs),
        weights=len(before),
        different_weights=[name for name in forward if before.get(name) != after.get(name)],
        sites=sites,
        merged=[*merged],
    )


def _limits(configs: Sequence[Config]) -> list[float]:
    """Return the largest limits on a forward site, the loss and a gradient."""
    each = [(*forward_limits(config), limits(config, exact=False)[0]) for config in configs]
    return [max(of_sides) for of_sides in zip(*each, strict=True)]


def config_of(recording: Recording) -> Config:
    """Return the config that was executed."""
    place = f'the config in {recording.about.source}'
    return reload(recording.about.config, place=place)


def _side(recording: Recording) -> Side:
    return Side(**recording.about.model_dump(exclude={'weights'}))


def _same_batch(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _keys(a: Recording, b: Recording, before: Config, after: Config) -> list[tuple[str, str, str]]:
    abouts = [each.about.model_dump() for each in (a, b)]
    rows = [
        (name.replace('_', ' '), *(each[name] for each in abouts))
        for name in ('executed_with', 'megajax', 'platform')
        if abouts[0][name] != abouts[1][name]
    ]
    sections = [each.model_dump(mode='json') for each in (before, after)]
    for key, values in differences(*sections).items():
        if not key.startswith(('run.', 'checkpoint.', 'data.')):
            rows.append((key, *map(str, values)))
    return rows


def _sites(
    phase: str, a: Arrays, b: Arrays, limit: float, of_loss: float, scale: float
) -> Iterator[Site]:
    for name in dict.fromkeys([*a, *b]):
        yield _site(
            name, phase, a.get(name), b.get(name), of_loss if name == LOSS else limit, scale
        )


def _site(
    name: str,
    phase: str,
    a: np.ndarray | None,
    b: np.ndarray | None,
    limit: float,
    scale: float,
) -> Site:
    if a is None or b is None or a.shape != b.shape:
        note = (
            f'only in {"B" if a is None else "A"}'
            if a is None or b is None
            else f'{list(a.shape)} in A, {list(b.shape)} in B'
        )
        return Site(
            name=name,
            phase=phase,
            error=np.inf,
            limit=limit,
            place=[],
            a=None,
            b=None,
            same_bits=False,
            note=note,
        )
    apart = _apart(a, b)
    place = np.unravel_index(int(apart.argmax()), apart.shape) if apart.size else ()
    own, other = _largest(a), _largest(b)
    # The exact gradient of a bias of keys is zero: the computed one is only rounding error.
    is_rounding = max(own, other) <= ROUNDING * limit * scale
    scale = scale if is_rounding else own or other
    worst = float(apart.max(initial=0))
    return Site(
        name=name,
        phase=phase,
        error=worst / scale if scale and worst else worst,
        limit=limit,
        place=[int(index) for index in place],
        a=float(a[place]) if a.size else None,
        b=float(b[place]) if b.size else None,
        same_bits=np.array_equal(a.view(np.uint32), b.view(np.uint32)),
        both_not_finite=not (np.isfinite(a) | np.isfinite(b)).all(),
    )


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences: zero where both are NaN or the same infinity."""
    with np.errstate(invalid='ignore', over='ignore'):
        apart = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0, np.where(np.isnan(apart), np.inf, apart))


def _largest(x: np.ndarray) -> float:
    """Return the largest absolute value among the finite ones."""
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=0))
