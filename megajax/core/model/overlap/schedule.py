"""The overlap schedule: the layers in an order that overlaps every collective with matmuls.

Two halves of a batch alternate: while one communicates, the other one computes (Domino, Wang et
al., 2024). In the backward pass, no collective waits for the gradients of weights, so they are
computed while the same half communicates. Collectives over `data`, for layers and head, overlap
with the matmuls of the layer before or after. The results are the same as those from the loop over
layers, because both run the steps of `Sublayer`; only the order of the steps and the start of
reductions differ.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from megajax.core.config import ModelConfig
from megajax.core.config.overlap_rules import Overlap
from megajax.core.counts.layers import SUBLAYERS
from megajax.core.model.block import Block, parts_of_rows
from megajax.core.model.computation import Computation
from megajax.core.model.overlap.barriers import Box, Clock, in_turn
from megajax.core.model.overlap.gradients import Gradients
from megajax.core.model.overlap.interleave import Kept, Turns
from megajax.core.model.overlap.matrices import Matrices, Matrix
from megajax.core.model.overlap.per_layer_arrays import holds_totals, of_all, of_layer
from megajax.core.model.overlap.reads import LINEARS, has_value, named, read, reads_output, require
from megajax.core.model.overlap.split_tokens import join_tokens, split_tokens
from megajax.core.model.overlap.sublayer_steps import SublayerSteps, select
from megajax.core.model.parameters import map_parameters
from megajax.core.model.rows import Rows
from megajax.core.model.stack import at_place, run_layers
from megajax.core.model.sublayer import Sublayer
from megajax.core.parallel.layout import Layout

Parts = tuple[jax.Array, ...]  # x_BTD of each part
X = TypeVar('X')


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The overlap schedule over a stack of layers, either unrolled or as a loop."""

    config: ModelConfig
    layout: Layout
    computation: Computation

    def __call__(
        self,
        x_BTD: jax.Array,
        layers: Block,
        weights: Block | None,
        rows: Rows,
        first: jax.Array | int,
        head_Vd: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the residual stream after `layers`, and the head, gathered if ZeRO shards it.

        `weights` and `first` are as in `Transformer.blocks`.
        """
        count = self._overlap.num_parts
        if self._overlap.splits_tokens:
            xs_BTD = tuple(split_tokens(x_BTD, 'BTD', count, self.layout))
            xs_BTD, head_Vd = self._run(xs_BTD, head_Vd, layers, weights, [rows] * count, first)
            return join_tokens(xs_BTD, 'BTD', self.layout), head_Vd
        xs_BTD, of_parts = tuple(parts_of_rows(x_BTD, count)), parts_of_rows(rows, count)
        xs_BTD, head_Vd = self._run(xs_BTD, head_Vd, layers, weights, of_parts, first)
        return jnp.concatenate(xs_BTD), head_Vd

    def _run(
        self,
        xs_BTD: Parts,
        head_Vd: jax.Array | None,
        layers: Block,
        weights: Block | None,
        rows: Sequence[Rows],
        first: jax.Array | int,
    ) -> tuple[Parts, jax.Array | None]:
        @jax.custom_vjp
        def run(xs_BTD: Parts, head_Vd: jax.Array | None, *given: Any) -> Any:
            return forward(xs_BTD, head_Vd, *given)[0]

        def forward(xs_BTD: Parts, head_Vd: jax.Array | None, *given: Any) -> tuple[Any, Any]:
            sublayers = self._sublayers(xs_BTD[0], *given)
            self._require_all_read(given[0], sublayers[0][: len(SUBLAYERS)], xs_BTD[0])
            outputs, kept = self._forward(xs_BTD, sublayers, self._head(head_Vd))
            return outputs, (kept, head_Vd, given)

        def backward(saved: Any, gradients: tuple[Parts, jax.Array | None]) -> tuple[Any, ...]:
            kept, head_Vd, given = saved
            sublayers = self._sublayers(gradients[0][0], *given)
            dxs_BTD, dhead_Vd, of_sublayers = self._backward(
                *gradients, kept, sublayers, self._head(head_Vd)
            )
            blocks = [_block(given[0], each) for each in by_layer(of_sublayers)]
            return dxs_BTD, dhead_Vd, of_all(given[0], blocks), None, None, None

        run.defvjp(forward, backward)
        if self._overlap.unroll:
            return run(xs_BTD, head_Vd, layers, weights, rows, first)

        def layer(block: Block, weight: Block | None, xs_BTD: Parts, index: jax.Array) -> Any:
            one, of_one = jax.tree.map(lambda w: w[None], (block, weight))
            return run(xs_BTD, None, one, of_one, rows, index)[0]

        return run_layers(layer, xs_BTD, layers, weights, first), head_Vd

    def _head(self, head_Vd: jax.Array | None) -> Matrix | None:
        if head_Vd is None:
            return None
        return Matrix(
            (-1, 'head'), 'head', head_Vd, None, 'Vd', self.layout, self.computation.dtype
        )

    def _sublayers(
        self,
        x_BTD: jax.Array,
        layers: Block,
        weights: Block | None,
        rows: Sequence[Rows],
        first: Any,
    ) -> list[list[SublayerSteps]]:
        """Return all layers' sublayers, in order, for each part of the batch.

        `x_BTD` is the residual stream of one part.
        """
        count = len(layers.attention.norm.weight[...])
        blocks = [at_place(of_layer(layers, index), index) for index in range(count)]
        used = weights or layers
        stacked = [select(getattr(used, name), matrices=True) for name in SUBLAYERS]
        has_totals = holds_totals(layers, weights)

        def of_part(rows: Rows) -> Iterator[SublayerSteps]:
            for index, block in enumerate(blocks):
                own = rows.at_layer(first + index)
                for offset, name in enumerate(SUBLAYERS):
                    yield SublayerSteps(
                        place=len(SUBLAYERS) * index + offset,
                        index=index,
                        scope=stacked[offset].SCOPE,
                        vectors=select(getattr(block, name), matrices=False),
                        matrices=stacked[offset],
                        totals=getattr(layers, name) if has_totals else None,
                        rows=own,
                        layout=self.layout,
                        dtype=self.computation.dtype,
                        recompute=self.computation.recompute == 'selective',
                        scales=_scales(getattr(used, name), index),
                    )

        sublayers = [[*of_part(part)] for part in rows]
        keeps = [reads_output(sublayer, x_BTD) for sublayer in sublayers[0][: len(SUBLAYERS)]]
        return [
            [dataclasses.replace(each, keeps_output=keeps[each.offset]) for each in of_part]
            for of_part in sublayers
        ]

    def _require_all_read(
        self, layers: Block, sublayers: Sequence[SublayerSteps], x_BTD: jax.Array
    ) -> None:
        """Raise an AssertionError if the sublayers of a layer do not read all its parameters."""
        num_parts = self._overlap.num_parts if self._overlap.splits_tokens else 1
        found = {
            f'{name}.{parameter}'
            for name, sublayer in zip(SUBLAYERS, sublayers, strict=True)
            for parameter in read(sublayer, x_BTD, num_parts, gathers=self._gathers)
        }
        require(layers, found, 'does not use')

    def _forward(
        self, xs_BTD: Parts, sublayers: Sequence[list[SublayerSteps]], head: Matrix | None
    ) -> tuple[tuple[Parts, jax.Array | None], Any]:
        clock = Clock()
        uses = [sublayer.matrix(linear) for sublayer in sublayers[0] for linear in LINEARS]
        uses += [head] if head else []
        matrices = Matrices(clock, uses, at_rest=self._gathers)
        turns = Turns(clock, matrices, len(xs_BTD), meets=self._overlap.splits_tokens)
        results = in_turn(
            turns.forward(part, Box(x), of_part)
            for part, (x, of_part) in enumerate(zip(xs_BTD, sublayers, strict=True))
        )
        kept = [[Kept(*(box.value for box in each)) for each in kept] for _, kept in results]
        if self.computation.recompute == 'full':
            kept = [[_of_block(each) for each in by_layer(of_part)] for of_part in kept]
        else:  # the transpose of the norm has x
            kept = [[each._replace(x_BTD=None) for each in of_part] for of_part in kept]
        gathered = matrices.values() if self._keeps_matrices else {}
        head_Vd = matrices(head).value.astype(jnp.float32) if head else None
        return (tuple(x.value for x, _ in results), head_Vd), (kept, gathered)

    def _backward(
        self,
        dxs_BTD: Parts,
        dhead_Vd: jax.Array | None,
        saved: tuple[Any, Any],
        sublayers: Sequence[list[SublayerSteps]],
        head: Matrix | None,
    ) -> tuple[Parts, jax.Array | None, list[Sublayer]]:
        """Return the gradients of the residual streams, of the head, and of each sublayer."""
        clock, (kept, gathered) = Clock(), saved
        boxes = [[Kept(*map(Box, each)) for each in of_part] for of_part in kept]
        if self.computation.recompute == 'full':
            in_turn_again = chain(*reversed([*by_layer(sublayers[0])]))
            uses = [sublayer.matrix(linear) for sublayer in in_turn_again for linear in LINEARS]
        else:
            uses = [b.matrix(name) for b in reversed(sublayers[0]) for name in reversed(LINEARS)]
        matrices = Matrices(clock, uses, at_rest=self._gathers, gathered=gathered)
        turns = Turns(clock, matrices, len(dxs_BTD), meets=self._overlap.splits_tokens)
        is_frozen = self.config.is_decoder_frozen
        of_head = (None, None) if is_frozen else (head, dhead_Vd)
        gradients = Gradients(clock, len(dxs_BTD), self._reduce_dtype, of_head)
        results = in_turn(
            turns.backward(part, Box(dx), of_part, of_sublayers, gradients)
            for part, (dx, of_part, of_sublayers) in enumerate(
                zip(dxs_BTD, boxes, sublayers, strict=True)
            )
        )
        dxs_BTD = tuple(dx.value for dx in results)
        return dxs_BTD, gradients.of_head, [*map(gradients.of, sublayers[0])]

    @property
    def _overlap(self) -> Overlap:
        return self.computation.overlap

    @property
    def _gathers(self) -> bool:
        """Whether the layers gather their matrices over `data`."""
        return self._overlap.shard == 'weights' or self._overlap.gathers_ahead

    @property
    def _keeps_matrices(self) -> bool:
        """Whether the backward pass reuses the matrices that the forward pass gathered or cast."""
        # Frozen matrices under adapters are stored in the compute dtype.
        is_wider = self.computation.dtype != 'float32' and self.config.lora is None
        is_cast_here = self._overlap.shard == 'none' and is_wider
        return self._overlap.gathers_ahead or (self._overlap.unroll and is_cast_here)

    @property
    def _reduce_dtype(self) -> str | None:
        """The dtype in which the backward pass sums gradients over `data`, if it does."""
        is_reduced = self._overlap.shard in ('gradients', 'weights')
        return self.computation.reduce_dtype if is_reduced else None


def by_layer(of_sublayers: Sequence[X]) -> Iterator[Sequence[X]]:
    """Yield each layer's entries from a list with one entry per sublayer."""
    count = len(SUBLAYERS)
    return (of_sublayers[first : first + count] for first in range(0, len(of_sublayers), count))


def _scales(sublayer: Sublayer, index: int) -> tuple[jax.Array, jax.Array] | None:
    """Return the scales [operand] of a sublayer's two matmuls for one layer; None without fp8."""
    first, second = sublayer.first.scales, sublayer.second.scales
    if first is None or second is None:
        return None
    return first.get_value()[index], second.get_value()[index]


def _of_block(kept: Sequence[Kept]) -> Kept:
    """Return the values that full recomputation saves for a block."""
    return Kept(kept[0].x_BTD, None, None, None, None, kept[-1].y_BTD)


def _block(layers: Block, gradients: Sequence[Sublayer]) -> Block:
    """Return the gradients of a block from its sublayers' gradients."""
    block: Block = map_parameters(lambda *_: None, layers)
    for name, sublayer in zip(SUBLAYERS, gradients, strict=True):
        sublayer.config = getattr(layers, name).config  # the config of the stack, not of a layer
        setattr(block, name, sublayer)
    found = (name for name, x in named(block) if has_value(x) or x.declared.is_frozen)
    require(block, found, 'has no gradient of')
    return block
