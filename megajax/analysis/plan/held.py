"""The bytes of one moment of a training step, by what they are for."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a step holds at one moment, beside state and batch."""

    weights: int = 0  # ZeRO: weights that are gathered; else each product casts its own (buffers)
    gradients: int = 0  # gradients in fp32; with several microbatches also their sum
    activations: int = 0  # arrays that the forward pass keeps for the backward pass
    logits: int = 0  # logits of one chunk of tokens, and their gradient
    buffers: int = 0  # arrays of the current layer, and copies in another dtype or layout

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return self.weights + self.gradients + self.activations + self.logits + self.buffers
