"""The efficiencies of a die, which several GPUs share.

GPUs with the same die differ in memory, power limit and links. In large matmuls, the power limit
determines the clock: power grows with the cube of the clock, because the voltage grows with the
clock.
"""

import functools
import math
from importlib import resources
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from megajax.base.errors import ConfigError
from megajax.core.config.records import read_record
from megajax.core.config.section import Section

Share = Annotated[float, Field(gt=0, le=1)]
# The efficiency of FP8 matmuls relative to 16-bit matmuls. It is an assumption, not a measurement,
# and makes FP8 matmuls 1.54x as fast.
FP8_SHARE = 0.77


class Reference(Section):
    """The shares of the peaks that the fastest kernels reach on their own.

    These are the rates of a roofline, with which `inspect` compares transfers.
    """

    matmul: Share
    flash: Share | None = None
    memory: Share


class Seen(Section):
    """The published rates of one program that the efficiencies were fitted to."""

    rows: PositiveInt
    band: NonNegativeFloat  # as in `Fit`
    gpus: PositiveInt  # number of GPUs in the largest run
    dtypes: Annotated[tuple[str, ...], Field(strict=False)]


class Fit(Section):
    """The errors of the efficiencies in predicting the published rates that they were fitted to."""

    rows: PositiveInt
    mean: Share  # mean error
    band: Share  # error that 90% of the rates that were not fitted should not exceed
    # the fitted rates, by the name of the program
    programs: dict[str, Seen] = Field(default_factory=dict)


class Efficiency(Section):
    """The shares of the peaks that training reaches.

    A matmul [m, k] x [k, n] reaches `matmul` of the peak rate, times d / (d + half_size) for each d
    of m, n and k. Attention in one kernel reaches `flash` of the peak rate, times S / (S +
    half_length) for S tokens, if the kernel is cuDNN's, and `flash_2` if it is FlashAttention-2
    (Dao, 2023). Only the FLOPs that the causal mask leaves count. Memory-bound operations reach
    `memory` of the memory bandwidth. An FP8 matmul reaches `fp8` times the share of a 16-bit
    matmul, relative to the peak in FP8.
    """

    matmul: Share
    half_size: NonNegativeFloat
    flash: Share | None = None  # null if there is no such kernel
    flash_2: Share | None = None
    half_length: NonNegativeFloat = 0.0
    memory: Share
    fp8: PositiveFloat = FP8_SHARE

    def of_attention(self, kernel: Literal['flash', 'flash_2'], length: int) -> float | None:
        """Return the share of the peak that attention in one kernel reaches; None if not given.

        If only the other kernel's share is given, it counts.
        """
        if self.flash_2 and (kernel == 'flash_2' or not self.flash):
            return self.flash_2
        return self.flash and self.flash * length / (length + self.half_length)

    def of_product(self, *sizes: int) -> float:
        """Return the share of the peak that a matmul of these sizes reaches."""
        share = self.matmul
        for size in sizes:
            share *= size / (size + self.half_size)
        return share

    def at_clock(self, clock: float) -> Self:
        """Return the efficiencies at a clock, relative to the clock at which they were measured."""
        shares = {name: getattr(self, name) for name in ('matmul', 'flash', 'flash_2')}
        return self.model_copy(
            update={name: share and share * clock for name, share in shares.items()}
        )


class Die(Section):
    """The efficiencies of a die, as measured on GPUs that run it at `watts_per_tflops`."""

    efficiency: Efficiency
    fit: Fit | None = None
    reference: Reference
    # The power limit of the measured GPUs divided by their peak in bf16 TFLOP/s.
    watts_per_tflops: PositiveFloat
    sources: dict[str, str]

    def clock(self, power: float, peak: float) -> float:
        """Return the clock under a power limit, relative to the measured GPUs, at most 1.

        `power` is in watts, `peak` in bf16 FLOP/s.
        """
        return min(1.0, (power / (peak / 1e12) / self.watts_per_tflops) ** (1 / 3))


@functools.cache
def die(name: str) -> Die:
    """Read the record of a die, which several GPUs can share."""
    return read_record(resources.files('megajax.core.hardware') / 'dies' / f'{name}.yaml', Die)


def with_die(record: Any) -> Any:
    """Return a GPU's record with the efficiencies of its die, if it names one.

    Raises ConfigError for figures from which the clock does not follow, and for efficiencies that
    are not the die's.
    """
    if not isinstance(record, dict) or not isinstance(name := record.get('die'), str):
        return record
    shared = die(name)
    peaks = record.get('peak_flops')
    peak = _figure('peak_flops.bfloat16', peaks.get('bfloat16') if isinstance(peaks, dict) else 0)
    clock = shared.clock(_figure('power', record.get('power')), peak)
    of_die: dict[str, Section | None] = {
        'efficiency': shared.efficiency.at_clock(clock),
        'reference': shared.reference,
        'fit': shared.fit,
    }
    for key, values in of_die.items():
        if key in record and not _is_same(record[key], values):
            raise ConfigError(
                f'{key}: differs from the values of die: {name}; leave out {key} to use these, or '
                'leave out die and give efficiency, reference and their sources'
            )
    sources = record.get('sources')
    return record | {
        **{key: values and values.model_dump() for key, values in of_die.items()},
        'sources': shared.sources | sources if isinstance(sources, dict) else sources,
    }


def _figure(key: str, value: Any) -> float:
    """Return a figure of a record that names a die; raise ConfigError if it is not positive."""
    if isinstance(value, int | float) and 0 < value < math.inf:
        return float(value)
    raise ConfigError(
        f'{key}: the clock of a die follows from it; give a positive number, or leave out die and '
        'give efficiency, reference and their sources'
    )


def _is_same(given: Any, own: Section | None) -> bool:
    """Return whether a section that a record gives has the values of its die."""
    if given is None or own is None:
        return given is own
    try:
        return type(own).model_validate(given) == own
    except ValidationError:
        return False
