"""The sizes of relevance's computation: regions at their levels, and small networks.

The slots of scorers are sharded over `model`, and everything else is replicated on every device of
a tensor-parallel group.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.config.vision import FINEST, TEXTURE_CHANNELS, RelevanceConfig
from megajax.core.counts.vision_parameters import (
    RELEVANCE_HIDDEN,
    SCORER_FEATURES,
    SCORERS,
    SUMMARIES,
)

# number of cells along each side of a region at the coarsest level, and at the next one
FEWEST, NEXT = 8, 10
Sizes = tuple[int, int, int]  # m, n and k of a matmul


def has_choice(relevance: RelevanceConfig) -> bool:
    """Return whether relevance decides which regions of an image get more tokens than others.

    If not, all regions have the same level, and at the coarsest level relevance has no gradient.
    """
    regions, total = relevance.num_regions, relevance.total_tokens
    with_one_raised = regions * FEWEST**2 + NEXT**2 - FEWEST**2
    return regions > 1 and with_one_raised <= total < regions * FINEST**2


def num_slots(config: Config, shards: int) -> int:
    """Return the number of slots of scorers on all devices, including slots that stay empty."""
    assert config.relevance is not None
    return -(-SCORERS * config.relevance.scorer_shards // shards) * shards


def level_products(config: Config, images: int) -> Iterator[tuple[int, Sizes]]:
    """Yield the number and sizes of the matmuls that resize `images` to their levels.

    The matmuls compute means of rows and then of columns, at the region's level and at the coarsest
    one (`core/model/arr_coc/levels.py`), and have no gradient.
    """
    relevance, vision = config.relevance, config.vision
    assert relevance is not None
    assert vision is not None
    pixels, few = (n * vision.patch_size * vision.merge_size for n in (FINEST, FEWEST))
    regions = images * relevance.num_regions
    yield 4 * regions, (pixels, pixels * vision.num_channels, pixels)
    yield regions, (pixels, pixels, few)


def network_products(
    config: Config, images: int, shards: int
) -> Iterator[tuple[str, int, int, int, bool]]:
    """Yield the name, m, n and k of each matmul of the networks, and if its input has a gradient.

    Textures and questions have none.
    """
    relevance, size = config.relevance, config.model.hidden_size
    assert relevance is not None
    regions, hidden = images * relevance.num_regions, RELEVANCE_HIDDEN
    own = num_slots(config, shards) // shards
    units = own * relevance.scorer_size // relevance.scorer_shards
    yield 'coupling texture', regions, hidden, TEXTURE_CHANNELS, False
    yield 'coupling out', regions, size, hidden, True
    yield 'scorers features', regions, units, SCORER_FEATURES, False
    yield 'scorers query', images, units, size, False
    yield 'scorers out', regions, 1, units, True
    yield 'balance summary', images, hidden, SUMMARIES, True
    yield 'balance query', images, hidden, size, False
    yield 'balance out', images, SCORERS, hidden, True
