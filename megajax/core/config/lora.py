"""The section `lora` of a config: low-rank adapters beside frozen weights."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from megajax.core.config.section import Section

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

Target = Literal['qkv', 'out', 'up', 'down']
TARGETS: tuple[Target, ...] = get_args(Target)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, Hu et al., 2021): only they are trained.

    A target's product x W becomes x W + alpha / rank * (x A) B, where A and B are small. All other
    parameters are frozen, and matrices among them are kept in the dtype of the computation.
    """

    rank: Annotated[PositiveInt, Field(le=4096)]
    """Width of the adapters."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapters' scale, alpha / rank."""
    targets: Annotated[tuple[Target, ...], Field(strict=False, min_length=1)] = TARGETS
    """Linear layers of each block that have an adapter: queries, keys and values together (qkv),
    the output projection of attention (out), the MLP's first product (up) and its last (down).
    """

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank


def without_adapters(config: 'Config') -> 'Config':
    """Return the config of the model whose weights have the adapters added to them."""
    return config.model_copy(update={'lora': None})
