"""The arrays next to the tokens of a batch's sequences."""

from typing import NamedTuple, Self

import jax

from megajax.core.model.dropout import fold_in


class Rows(NamedTuple):
    """The arrays next to the tokens [B, S] of some sequences; None if a model does not use one.

    `position_BS` may be [B, S, 3] with images. `segment_BS` numbers the documents within which
    attention stays; on context shards, the number is the position of a document's first token
    (`documents.py`). `type_BS` has BERT's token types, `key_B` turns dropout on, and `deep_BTAD` is
    added to the residual stream after the first layers (DeepStack). `real_BS` is 1 for the tokens
    that a step's routers count, and 0 for padding and empty image tokens.
    """

    position_BS: jax.Array | None = None
    segment_BS: jax.Array | None = None
    type_BS: jax.Array | None = None
    key_B: jax.Array | None = None
    deep_BTAD: jax.Array | None = None
    real_BS: jax.Array | None = None

    def at_layer(self, index: jax.Array | int) -> Self:
        """Return the rows with the dropout keys of a layer."""
        return self._replace(key_B=fold_in(self.key_B, index))


NO_ROWS = Rows()
