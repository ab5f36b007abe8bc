"""The section `lora` of a config: low-rank adapters for frozen weights."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from megajax.core.config.section import Section

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

Target = Literal['qkv', 'out', 'up', 'down']
TARGETS: tuple[Target, ...] = get_args(Target)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, Hu et al., 2021), the only parameters that are trained.

    A target's matmul x W becomes x W + alpha / rank * (x A) B, where A and B are small. All other
    parameters are frozen, including a vision encoder; matrices among them are stored in the compute
    dtype.
    """

    rank: Annotated[PositiveInt, Field(le=4096)]
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapters' scale, alpha / rank."""
    targets: Annotated[tuple[Target, ...], Field(strict=False, min_length=1)] = TARGETS
    """Linear layers of each block that get an adapter: the fused query, key and value projection
    (qkv), the output projection of attention (out), and the MLP's up- and down-projections. Layers
    that attend to images count as blocks. Experts get none.
    """

    @property
    def scale(self) -> float:
        """The factor by which an adapter's output is multiplied."""
        return self.alpha / self.rank


def without_adapters(config: 'Config') -> 'Config':
    """Return the config of the model after the adapters have been merged into its weights."""
    return config.model_copy(update={'lora': None})
