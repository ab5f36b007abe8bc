"""Check the token budget, regions and scorers of relevance."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides
from megajax.core.config.vision import FINEST

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

FEWEST, MOST = 64, FINEST**2  # tokens per region


def of_relevance(config: 'Config') -> Iterator[Problem]:
    """Check the section `relevance` against itself and the encoder."""
    relevance, vision = config.relevance, config.vision
    if relevance is None:
        return
    if vision is None:
        message = 'relevance needs a vision encoder; add the section vision'
        yield Problem('relevance.regions', message, others=('vision',))
        return
    if config.lora is not None:
        message = 'relevance is not supported with lora, which would freeze it; remove one of them'
        yield Problem('relevance.regions', message, others=('lora',))
    regions, total = relevance.num_regions, relevance.total_tokens
    fewest, most = FEWEST * regions, MOST * regions
    if not fewest <= total <= most:
        message = (
            f'{total} is not between {fewest} and {most}, {FEWEST} to {MOST} tokens for each of '
            f'{regions} regions; use {min(max(total, fewest), most)}'
        )
        yield Problem('relevance.total_tokens', message, others=('relevance.regions',))
    if not vision.is_crossed and vision.images * total > config.train.seq_len:
        message = (
            f'{total} tokens for each of {vision.images} images exceed '
            f'train.seq_len={config.train.seq_len}; use longer sequences'
        )
        yield Problem(
            'relevance.total_tokens',
            message,
            others=('train.seq_len', 'vision.images', 'vision.fusion'),
        )
    patches = most * vision.unit
    if vision.max_patches != patches:
        message = (
            f'{vision.max_patches} must equal {regions} regions x {FINEST} x {FINEST} units x '
            f'{vision.unit} patches, the size to which every image is scaled; use {patches}'
        )
        yield Problem(
            'vision.max_patches', message, others=('relevance.regions', 'vision.merge_size')
        )
    shards = ('relevance.scorer_shards', relevance.scorer_shards)
    yield from divides('relevance.scorer_size', relevance.scorer_size, *shards)
