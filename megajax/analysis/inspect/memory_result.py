"""The memory of a device, in the result of an inspection."""

from typing import Literal

from pydantic import Field

from megajax.base.result import Result

Use = Literal[
    'parameters',
    'optimizer state',
    'batch and counters',
    'weight copies',
    'activations',
    'loss and head',
    'forward',
    'recompute',
    'backward',
    'gradients',
    'optimizer',
    'outputs',
    'unused',
]


class HeldArrays(Result):
    """Similar arrays in the memory of one device at the peak of a step."""

    use: Use = Field(
        description=(
            'what they are for. Throughout the step: parameters, optimizer state, batch and '
            'counters. During the step: weight copies (parameters gathered, or in a different '
            'dtype or layout), activations (saved for the backward pass), loss and head, temporary '
            'arrays of the forward pass, of recomputation and of the backward pass, gradients of '
            'parameters, and the optimizer; unused is memory that XLA reserved and does not '
            'use at that moment'
        )
    )
    site: str = Field(description='the part of the step that makes them')
    array: str = Field(description='dtype and per-device shape')
    count: int
    bytes: int = Field(description='total of all of them')
    source: str = Field(
        description='Python frames, innermost first, or the name of a parameter of the step'
    )


class Memory(Result):
    """The compiler's memory plan, in bytes on one device."""

    arguments: int
    temporaries: int
    outputs: int = Field(description='outputs that do not reuse the memory of arguments')
    device: int | None = Field(description='memory of the device; None for a CPU')
    at_peak: list[HeldArrays] = Field(
        default=[],
        description='the use of all of it at the peak, largest first',
    )
    remedy: str = Field(
        default='',
        description='the key that is predicted to make the step fit, if it does not fit',
    )
    largest_replicated: list[tuple[str, int]] = Field(
        description='the largest parameters that are replicated over `model`, with their bytes'
    )

    @property
    def needed(self) -> int:
        """Return the total bytes."""
        return self.arguments + self.temporaries + self.outputs
