"""The memory of a device, in the result of an inspection."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Use = Literal[
    'parameters',
    'optimizer state',
    'batch and counters',
    'weights',
    'activations',
    'loss and head',
    'forward',
    'recompute',
    'backward',
    'gradients',
    'optimizer',
    'outputs',
    'not in use',
]


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra='forbid')


class HeldArrays(_Result):
    """Similar arrays that one device holds when a step needs the most memory."""

    use: Use = Field(
        description=(
            'what they are for. At rest: parameters, optimizer state, batch and counters. In a '
            'step: weights (parameters in another dtype or layout, or gathered), activations (kept '
            'for the backward pass), loss and head, temporary arrays of the forward pass, of what '
            'is recomputed and of the backward pass, gradients of parameters, and the optimizer; '
            'not in use is what XLA reserved and does not use at that moment'
        )
    )
    site: str = Field(description='the part of the step that makes them')
    array: str = Field(description='dtype and per-device shape')
    count: int
    bytes: int = Field(description='of all of them')
    source: str = Field(
        description='Python frames, innermost first, or the name of a parameter of the step'
    )


class Memory(_Result):
    """The compiler's memory plan, in bytes on one device."""

    arguments: int
    temporaries: int
    outputs: int = Field(description='outputs that do not reuse the memory of arguments')
    device: int | None = Field(description='memory of the device; None for a CPU')
    at_peak: list[HeldArrays] = Field(
        default=[],
        description='what all of this is used for when most is in use, largest first',
    )
    remedy: str = Field(
        default='',
        description='if it does not fit the device, the key that would make it fit, as predicted',
    )
    largest_replicated: list[tuple[str, int]] = Field(
        description='the largest parameters that are replicated over `model`, with their bytes'
    )

    @property
    def needed(self) -> int:
        """The bytes of all of it."""
        return self.arguments + self.temporaries + self.outputs
