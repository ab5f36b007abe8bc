"""Embed prompts and encode their images, before the first layer of a model."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.model.arr_coc.budget import num_tokens
from megajax.core.model.arr_coc.detail import detail_of
from megajax.core.model.cross_attention import Seen
from megajax.core.model.images import Images, merge_images_of_shards, of_shards
from megajax.core.model.rows import Rows
from megajax.core.model.transformer import LanguageModel
from megajax.core.parallel.layout import Layout


class PromptBatch(NamedTuple):
    """Prompts, each of which is the last `length_B` tokens of its row, and their images."""

    token_BS: jax.Array | np.ndarray
    length_B: jax.Array | np.ndarray
    images: Images | None = None
    # Positions of the tokens if there are images: [B, S] or [B, S, 3].
    position_BS: jax.Array | np.ndarray | None = None


class SeenPrompts(NamedTuple):
    """Prompts before the first layer, and the arrays that images add to the layers."""

    x_BSD: jax.Array
    position_BS: jax.Array
    segment_BS: jax.Array
    deep_BSAD: jax.Array | None = None
    seen: Seen | None = None  # image vectors for the cross-attention layers
    is_empty_BS: jax.Array | None = None  # image tokens that relevance has left empty
    tokens_BIR: jax.Array | None = None  # number of tokens of each region, replicated

    @property
    def rows(self) -> Rows:
        """The arrays that the layers get in addition to the tokens."""
        return Rows(self.position_BS, self.segment_BS, deep_BTAD=self.deep_BSAD)


def see(
    decoder: LanguageModel, prompts: SeenPrompts, images: Images, layout: Layout
) -> SeenPrompts:
    """Return the prompts with their images.

    If `images` does not say which tokens are the question for relevance, the whole text of the
    prompt is the question.
    """
    assert decoder.vision is not None
    x_BSD, segment_BS = prompts.x_BSD, prompts.segment_BS
    if images.is_question_BS is None:
        is_text_BS = jax.reshard(images.index_BS, layout('BS')) < 0
        images = images._replace(is_question_BS=(segment_BS > 0) & is_text_BS)
    detail = tokens_BIR = None
    if decoder.relevance is not None:
        of_shard = partial(
            detail_of, decoder.relevance, decoder.vision.config, layout=layout.per_shard
        )
        detail = of_shards(of_shard, layout, x_BSD, images)
        tokens_BIR = jax.reshard(num_tokens(detail.level), layout('---'))
    if decoder.cross is not None:
        dtype = str(x_BSD.dtype)
        seen = decoder.cross.see_of_shards(decoder.vision, images, segment_BS, dtype, detail)
        return prompts._replace(seen=seen, tokens_BIR=tokens_BIR)
    merged = merge_images_of_shards(decoder.vision, x_BSD, images, layout, detail)
    rows = merged.rows(prompts.rows)
    assert rows.position_BS is not None
    assert rows.segment_BS is not None
    return SeenPrompts(
        merged.x_BTD,
        rows.position_BS,
        rows.segment_BS,
        rows.deep_BTAD,
        None,
        merged.is_empty_BS,
        tokens_BIR,
    )


def look(
    decoder: LanguageModel, batch: PromptBatch, dtype: str, layout: Layout
) -> tuple[SeenPrompts, jax.Array]:
    """Return prompts before the first layer, and the slot minus the position of new tokens [B].

    This is all work before the layers: the embedding and, for images, relevance and the encoder,
    which communicate little.
    """
    token_BS = jax.reshard(batch.token_BS, layout('BS'))
    position_BS, segment_BS, origin_B = _places(batch, layout)
    x_BSD = decoder.embed(token_BS, dtype, Rows(position_BS))  # all-reduce
    prompts = SeenPrompts(x_BSD, position_BS, segment_BS)
    if batch.images is not None:
        prompts = see(decoder, prompts, batch.images, layout)
    return prompts, origin_B


def _places(batch: PromptBatch, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return positions and segments of prompts, and the slot minus the position of new tokens.

    Padding is a separate document.
    """
    length = batch.token_BS.shape[1]
    first_B = length - jax.reshard(batch.length_B, layout('B'))
    position_BS = jnp.arange(length)[None] - first_B[:, None]
    segment_BS = (position_BS >= 0).astype(jnp.int32)
    if batch.position_BS is None:
        return jnp.maximum(position_BS, 0), segment_BS, first_B
    position_BS = jax.reshard(batch.position_BS, layout('BS'))
    last_B = position_BS.max(range(1, position_BS.ndim))
    return position_BS, segment_BS, length - 1 - last_B
