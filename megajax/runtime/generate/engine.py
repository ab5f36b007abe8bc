"""The compiled functions of generation: prefill and decoding.

Decoding generates several tokens per dispatch. If there are several batches with images, a third
function encodes the images of the first batch; the images of each later batch are encoded during
the prefill of the batch before it.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.config import Config
from megajax.core.model.attention import Core
from megajax.core.model.cross_attention import Seen
from megajax.core.model.dropout import random_key
from megajax.core.model.rows import Rows
from megajax.core.model.stack import add_deep
from megajax.core.model.transformer import LanguageModel
from megajax.core.parallel.layout import Layout
from megajax.runtime.generate.cache import KeysValues, decode, prefill, write
from megajax.runtime.generate.prompt_images import PromptBatch, SeenPrompts, look
from megajax.runtime.generate.sampling import Sampling, choose, head_logits, row_keys
from megajax.runtime.generate.weights import LayerWeights, graphs, inference_config
from megajax.xla.miscompiles import mesh_target, workarounds

NO_TOKEN = -1


class DecodeState(NamedTuple):
    """The state of generation, which each token changes.

    The position of a sequence's token is its slot, an index into the cache, minus `origin_B`.
    `origin_B` is `first_B`, except for a sequence with images, because images have fewer positions
    than tokens.
    """

    caches: tuple[KeysValues, ...]  # one cache per layer
    token_B: jax.Array  # the last token generated, which is not in the cache yet
    slot: jax.Array  # the slot that `token_B` will be written to
    first_B: jax.Array  # the slot of each sequence's first token
    origin_B: jax.Array
    is_empty_BY: jax.Array | None  # image slots that relevance has left empty
    tokens_BIR: jax.Array | None  # number of tokens of each region, replicated
    left_B: jax.Array  # number of tokens still wanted; 0 for a sequence that has ended
    number_B: jax.Array  # the prompt's number, from which its random keys follow
    seen: Seen | None = None  # keys and values of images, and which of them new tokens attend to


# Prompts before the first layer, and the differences between the slots and the positions of new
# tokens [B].
Start = tuple[SeenPrompts, jax.Array]
# The state, new tokens [B, S], their number, and whether any sequence continues.
Carry = tuple[DecodeState, jax.Array, jax.Array, jax.Array]


class Engine:
    """The compiled functions for a config and a target, for any prompts and any mesh.

    Each shape is compiled once.
    """

    def __init__(self, config: Config, target: str):
        self.config = config = inference_config(config)
        self._layout = Layout.of(config)
        self._graphs = graphs(config)
        model = config.model
        self._layers = model.layer_configs
        options = workarounds(target)
        self.look = jax.jit(self._look, compiler_options=options)
        self.read = jax.jit(
            self._read, static_argnames=('num_slots', 'sampling'), compiler_options=options
        )
        self.make = jax.jit(
            self._make,
            static_argnames=('num_tokens', 'sampling'),
            donate_argnames=('rows',),
            compiler_options=options,
        )

    def _look(self, weights: LayerWeights, batch: PromptBatch, *, is_beside: bool = False) -> Start:
        """Embed the prompts and encode their images: all work before the first layer.

        It runs in a program of its own, or inside the prefill of the previous batch (`is_beside`).
        """
        decoder = nnx.merge(self._graphs.decoder, weights.rest)
        if decoder.vision is not None:
            decoder.vision.is_unrolled = is_beside
        return look(decoder, batch, self.config.train.compute_dtype, self._layout)

    def _read(
        self,
        weights: LayerWeights,
        batch: PromptBatch,
        left_B: jax.Array,
        number_B: jax.Array,
        seed: jax.Array,
        end_ids: jax.Array,
        start: Start | None = None,
        following: PromptBatch | None = None,
        *,
        num_slots: int,
        sampling: Sampling,
    ) -> tuple[DecodeState, jax.Array, Start | None]:
        """Prefill the cache with prompts and generate their first tokens [B, 1].

        `start` is the result of `look` for these prompts. With a `following` batch, the last result
        is that batch's start: it does not depend on these prompts, so XLA encodes its images while
        the layers' all-reduces are in flight. The images of these prompts are encoded before their
        own layers.
        """
        layout = self._layout
        left_B, number_B = (jax.reshard(x, layout('B')) for x in (left_B, number_B))
        prompts, origin_B = self._look(weights, batch) if start is None else start
        after = None if following is None else self._look(weights, following, is_beside=True)
        decoder = nnx.merge(self._graphs.decoder, weights.rest)
        token_BS = jax.reshard(batch.token_BS, layout('BS'))
        first_B = token_BS.shape[1] - jax.reshard(batch.length_B, layout('B'))
        x_BSD, position_BS, segment_BS, deep_BSAD, seen, is_empty_BS, tokens_BIR = prompts
        cores = (prefill(layer, layout, segment_BS, num_slots) for layer in self._layers)
        beside = Rows(position_BS, deep_BTAD=deep_BSAD)
        x_BSD, caches = self._run_layers(weights, x_BSD, cores, beside, seen)
        rows = DecodeState(
            caches,
            token_BS[:, -1],
            jnp.int32(token_BS.shape[1] - 1),
            first_B,
            origin_B,
            None if is_empty_BS is None else _in_slots(is_empty_BS, num_slots),
            tokens_BIR,
            left_B,
            number_B,
            # New tokens attend to the images that the prompt's last token attends to.
            None if seen is None else seen._replace(seen_BSY=seen.seen_BSY[:, -1:]),
        )
        rows, token_B = self._sample(decoder, x_BSD[:, -1:], rows, seed, end_ids, sampling)
        return rows, jax.reshard(token_B[:, None], layout('--')), after

    def _make(
        self,
        weights: LayerWeights,
        rows: DecodeState,
        wanted_B: jax.Array,
        seed: jax.Array,
        end_ids: jax.Array,
        *,
        num_tokens: int,
        sampling: Sampling,
    ) -> tuple[DecodeState, jax.Array]:
        """Generate up to `num_tokens` more tokens [B, S] for the sequences that are still wanted.

        After the end of a sequence, its tokens are NO_TOKEN.
        """
        rows = rows._replace(
            left_B=jnp.where(jax.reshard(wanted_B, self._layout('B')), rows.left_B, 0)
        )
        new_BS = jnp.full(
            (len(wanted_B), num_tokens), NO_TOKEN, jnp.int32, out_sharding=self._layout('B-')
        )

        def go_on(carry: Carry) -> jax.Array:
            _, _, count, is_wanted = carry
            return (count < num_tokens) & is_wanted

        def make_one(carry: Carry) -> Carry:
            rows, new_BS, count, _ = carry
            rows, token_B = self._make_one(weights, rows, seed, end_ids, sampling)
            new_BS = lax.dynamic_update_slice_in_dim(new_BS, token_B[:, None], count, axis=1)
            return rows, new_BS, count + 1, _any_left(rows)

        rows, new_BS, _, _ = lax.while_loop(
            go_on, make_one, (rows, new_BS, jnp.int32(0), _any_left(rows))
        )
        return rows, jax.reshard(new_BS, self._layout('--'))

    def _make_one(
        self,
        weights: LayerWeights,
        rows: DecodeState,
        seed: jax.Array,
        end_ids: jax.Array,
        sampling: Sampling,
    ) -> tuple[DecodeState, jax.Array]:
        """Generate one more token [B] for each sequence."""
        decoder = nnx.merge(self._graphs.decoder, weights.rest)
        position_B1 = (rows.slot - rows.origin_B)[:, None]
        dtype, beside = self.config.train.compute_dtype, Rows(position_B1)
        x_B1D = decoder.embed(rows.token_B[:, None], dtype, beside)  # all-reduce
        cores = (
            decode(layer, self._layout, cache, rows.slot, rows.first_B, rows.is_empty_BY)
            for layer, cache in zip(self._layers, rows.caches, strict=True)
        )
        x_B1D, owns = self._run_layers(weights, x_B1D, cores, beside, rows.seen)
        new, token_B = self._sample(decoder, x_B1D, rows, seed, end_ids, sampling)
        # Make the write slot depend on a result of this step, so that XLA updates the caches in
        # place instead of copying them. If no sequence continues, any slot is correct.
        slot = jnp.where(_any_left(new), rows.slot, 0)
        caches = tuple(
            write(layer, cache, own, slot)
            for layer, cache, own in zip(self._layers, rows.caches, owns, strict=True)
        )
        return new._replace(caches=caches), token_B

    def _run_layers(
        self,
        weights: LayerWeights,
        x_BSD: jax.Array,
        cores: Iterable[Core[KeysValues]],
        rows: Rows,
        seen: Seen | None,
    ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """Return the residual stream after all layers, and each layer's keys and values."""
        kept = list[KeysValues]()
        for index, (layer, core) in enumerate(zip(weights.layers, cores, strict=True)):
            block = nnx.merge(self._graphs.blocks[index], layer)
            x_BSD, own = block(x_BSD, core, rows)
            if rows.deep_BTAD is not None:
                x_BSD = add_deep(x_BSD, rows.deep_BTAD, index)
            x_BSD = self._attend_to_images(weights, x_BSD, index, seen)
            kept.append(own)
        return x_BSD, tuple(kept)

    def _attend_to_images(
        self, weights: LayerWeights, x_BSD: jax.Array, index: int, seen: Seen | None
    ) -> jax.Array:
        """Apply the cross-attention layer after the layer with this index, if there is one."""
        if seen is None:
            return x_BSD
        assert self.config.vision is not None
        assert self._graphs.cross is not None
        at, rest = divmod(index + 1, self.config.vision.cross_every)
        if rest:
            return x_BSD
        block = nnx.merge(self._graphs.cross, weights.cross[at - 1])
        return block(x_BSD, seen.k_JBYNH[at - 1], seen.v_JBYNH[at - 1], seen.seen_BSY)

    def _sample(
        self,
        decoder: LanguageModel,
        x_B1D: jax.Array,
        rows: DecodeState,
        seed: jax.Array,
        end_ids: jax.Array,
        sampling: Sampling,
    ) -> tuple[DecodeState, jax.Array]:
        """Choose the token after `rows.slot`, or NO_TOKEN for a sequence that has ended.

        x_B1D is the last layer's output for the token at `rows.slot`.
        """
        with jax.named_scope('head'):
            logits_BV = head_logits(decoder.norm(x_B1D)[:, 0], decoder.head_Vd, self._layout)
        with jax.named_scope('sample'):
            slot = rows.slot + 1
            key_B = row_keys(random_key(seed), rows.number_B, slot - rows.first_B)
            token_B = choose(logits_BV, key_B, sampling, self.config.model.vocab_size, self._layout)
            ended_B = rows.left_B == 0
            is_end_B = (token_B[:, None] == end_ids[None]).any(axis=1)
            left_B = jnp.where(ended_B | is_end_B, 0, rows.left_B - 1)
            return rows._replace(token_B=token_B, slot=slot, left_B=left_B), jnp.where(
                ended_B, NO_TOKEN, token_B
            )


def _in_slots(is_empty_BS: jax.Array, num_slots: int) -> jax.Array:
    return jnp.pad(is_empty_BS, ((0, 0), (0, num_slots - is_empty_BS.shape[1])))


def _any_left(rows: DecodeState) -> jax.Array:
    return (rows.left_B > 0).any()


def engine(config: Config) -> Engine:
    """Return the engine of a config for the devices of the current mesh.

    The engine is cached, together with the functions that it has compiled.
    """
    return _engine(config, mesh_target())


@functools.cache
def _engine(config: Config, target: str) -> Engine:
    return Engine(config, target)
