"""Memory that a training step uses at one moment, by kind."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a step needs at one moment, in addition to state and batch."""

    # 0 without ZeRO, where each matmul casts its own weights (workspace).
    gathered_weights: int = 0
    gradients: int = 0  # in fp32, including the sum over several microbatches
    activations: int = 0  # saved by the forward pass for the backward pass
    logits: int = 0  # for one chunk of tokens, with their gradient
    workspace: int = 0  # arrays of the current layer, copies in a different dtype or layout

    @property
    def total(self) -> int:
        """Return the sum of all fields."""
        return sum(vars(self).values())
