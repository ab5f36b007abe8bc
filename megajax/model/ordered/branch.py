"""The two branches of a block, cut into steps.

A branch is x + leave(second(middle(first(enter(x))))), where `first` and `second` are the products
with its column-parallel and its row-parallel matrix. `megajax.model.ordered` chooses when each step
runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megajax.config import ModelConfig
from megajax.model import fp8
from megajax.model.attention import Attention, attention_core
from megajax.model.block import Block
from megajax.model.dropout import dropout, fold_in
from megajax.model.fp8 import Operand, Quantized, value
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.mlp import MLP
from megajax.model.norm import Norm
from megajax.model.ordered.matrices import Matrix
from megajax.model.ordered.token_parts import join_tokens, split_tokens
from megajax.model.parameters import map_parameters
from megajax.model.product import (
    input_gradient,
    partial_gradient,
    partial_sums,
    product,
    sum_over_shards,
    weight_gradient,
)
from megajax.model.row_major import row_major
from megajax.parallel.layout import Layout


class RowArrays(NamedTuple):
    """Arrays beside the tokens of some rows, or None; `key_B` is that of a layer's dropout."""

    position_BS: jax.Array | None
    segment_BS: jax.Array | None
    key_B: jax.Array | None


class Modules(NamedTuple):
    """The modules of a branch, with some of their parameters, or with gradients in their place."""

    norm: Norm
    layer: Attention | MLP

    @property
    def first(self) -> ColumnParallelLinear:
        """The first of the two linear layers."""
        return self.layer.up if isinstance(self.layer, MLP) else self.layer.qkv

    @property
    def second(self) -> RowParallelLinear:
        """The second of the two linear layers."""
        return self.layer.down if isinstance(self.layer, MLP) else self.layer.out


@dataclasses.dataclass(frozen=True)
class Branch:
    """One of the two branches of a block, for some rows.

    Steps that are differentiated take the `vectors` as an argument.
    """

    place: int  # among the branches of all layers
    index: int  # of the layer
    scope: str
    vectors: Modules  # norms and biases
    matrices: Modules  # those of all layers
    totals: Modules | None  # the gradients of earlier microbatches in the place of the matrices
    rows: RowArrays
    config: ModelConfig
    layout: Layout
    dtype: DTypeLike
    recompute: bool  # what attention would save
    scales: tuple[jax.Array, jax.Array] | None  # [operand] of the two products, in fp8

    def enter(self, x_BTD: jax.Array) -> tuple[Operand, Any]:
        """Return the normed residual stream and the transpose, which keeps the statistics."""

        def normed(vectors: Modules, x_BTD: jax.Array) -> jax.Array:
            return vectors.norm(row_major(x_BTD))

        h_BTD, pull = jax.vjp(normed, self.vectors, x_BTD)
        return self._operand('first', fp8.X, h_BTD), pull

    def gather(self, h_BTD: Operand) -> Operand:
        """Gather the sequence: of an input forward, of a gradient backward."""
        gathered = jax.reshard(value(h_BTD), self.layout('BSD'))
        return h_BTD._replace(value=gathered) if isinstance(h_BTD, Quantized) else gathered

    def first(self, weight: jax.Array, h_BSD: Operand) -> jax.Array:
        """Multiply by the column-parallel matrix."""
        y = product(self.matrices.first.equation, value(h_BSD), weight, self.layout, self.dtype)
        return self._unscaled('first', y, fp8.X, fp8.W)

    def middle(self, vectors: Modules, y: jax.Array) -> jax.Array:
        """Compute attention, or the activation, from the first product."""
        position_BS, segment_BS, key_B = self.rows
        if isinstance(vectors.layer, MLP):
            return vectors.layer.activate(y)
        y = vectors.first.with_bias(y)
        core = attention_core(
            self.config,
            self.layout,
            recompute=self.recompute,
            segment_BS=segment_BS,
            key_B=fold_in(key_B, 0),
        )
        return vectors.layer.attend(y, position_BS, core)[0]

    def middle_and_pull(self, *ys: jax.Array) -> Sequence[Any]:
        """Do what `middle` does, for parts of the tokens; return the results and the transpose."""

        def of_parts(vectors: Modules, *ys: jax.Array) -> tuple[jax.Array, ...]:
            if len(ys) == 1:
                return (self.middle(vectors, *ys),)
            y = join_tokens(ys, 'BS' + self.matrices.first.outputs, self.layout)
            z = self.middle(vectors, y)
            dims = 'BS' + self.matrices.second.inputs
            return tuple(split_tokens(z, dims, len(ys), self.layout))

        zs, pull = jax.vjp(of_parts, self.vectors, *ys)
        return *(self._operand('second', fp8.X, z) for z in zs), pull

    def pull_middle(self, pull: Any, *dzs: jax.Array) -> Sequence[Any]:
        """Return the gradients of the first products of parts of the tokens, and of the vectors."""
        vectors, *d_first = pull(dzs)
        return *(self._operand('first', fp8.DY, d) for d in d_first), vectors

    def second(self, weight: jax.Array, z: Operand) -> jax.Array:
        """Multiply by the row-parallel matrix, up to the sum over its shards."""
        equation = self.matrices.second.equation
        sums = partial_sums(equation, value(z), weight, self.layout, self.dtype)
        return self._unscaled('second', sums, fp8.X, fp8.W)

    def sum(self, partial: jax.Array) -> jax.Array:
        """Add partial sums: of the second product forward, of an input's gradient backward."""
        return sum_over_shards(partial, 'BTD', self.layout, self.dtype)

    def leave(self, vectors: Modules, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Add the second product to the residual stream."""
        keys = fold_in(self.rows.key_B, 2 if self.is_mlp else 1)
        h_BTD = vectors.second.with_bias(y_BTD)
        return x_BTD + dropout(h_BTD, self.config.dropout, keys, self.layout('TD'))

    def gradient_of_leave(self, dx_BTD: jax.Array) -> tuple[Operand, Modules]:
        """Return the gradients of the second product and of the vectors."""
        zeros = jnp.zeros_like(dx_BTD)  # `leave` is linear: the gradients do not depend on x and y
        _, pull = jax.vjp(lambda *given: self.leave(given[0], zeros, given[1]), self.vectors, zeros)
        vectors, dy_BTD = pull(dx_BTD)
        return self._operand('second', fp8.DY, dy_BTD), vectors

    def gradient_of_second(self, weight: jax.Array, dy_BSD: Operand) -> jax.Array:
        """Return the gradient of what `middle` returned."""
        equation = self.matrices.second.equation
        dz = input_gradient(equation, value(dy_BSD), weight, self.layout, self.dtype)
        return self._unscaled('second', dz, fp8.DY, fp8.W)

    def gradient_of_first(self, weight: jax.Array, dy: Operand) -> jax.Array:
        """Return the gradient of what `gather` returned, up to the sum over the shards."""
        equation = self.matrices.first.equation
        sums = partial_gradient(equation, value(dy), weight, self.layout, self.dtype)
        return self._unscaled('first', sums, fp8.DY, fp8.W)

    def gradient_of_weight(
        self, linear: str, x: Operand, dy: Operand, before: jax.Array | None = None
    ) -> jax.Array:
        """Add the gradient of the `first` or the `second` matrix to that of other parts."""
        equation = self._linear(linear).equation
        gradient = weight_gradient(equation, value(x), value(dy), self.layout)
        gradient = self._unscaled(linear, gradient, fp8.X, fp8.DY)
        return gradient if before is None else before + gradient

    def total(self, linear: str) -> jax.Array | None:
        """Return the gradient of the `first` or the `second` matrix in earlier microbatches."""
        if self.totals is None:
            return None
        total: jax.Array = getattr(self.totals, linear).weight.get_value()[self.index]
        return total

    def matrix(self, linear: str) -> Matrix:
        """Return the `first` or the `second` matrix."""
        weight = self._linear(linear).weight
        return Matrix(
            key=(self.place, linear),
            scope=self.scope,
            stored=weight.get_value(),
            index=self.index,
            dims=weight.declared.dims_of_layer,
            layout=self.layout,
            dtype=self.dtype,
        )

    def gradients(
        self,
        vectors: Modules,
        first: jax.Array,
        second: jax.Array,
        counts: Sequence[jax.Array] | None,
    ) -> Modules:
        """Return the modules with gradients in the place of their parameters.

        `counts` are those of the two products in fp8.
        """
        modules = jax.tree.map(lambda x: x, self.matrices)
        if counts is not None:
            for linear, of_linear in zip(('first', 'second'), counts, strict=True):
                scales = getattr(vectors, linear).scales
                scales.set_value(of_linear)
        modules.first.weight.set_value(first)
        modules.second.weight.set_value(second)
        return map_parameters(
            lambda declared, x, y: x if declared.is_matrix else y, modules, vectors
        )

    @property
    def again(self) -> 'Branch':
        """The same branch for full recomputation, under the name that jax gives it."""
        return dataclasses.replace(self, scope=f'rematted_computation/{self.scope}')

    @property
    def is_scattered(self) -> bool:
        """Whether the residual stream is sharded over the sequence."""
        return self.layout.num_shards('T') > 1

    @property
    def is_mlp(self) -> bool:
        """Whether it is the feed-forward branch, in which tokens do not meet."""
        return isinstance(self.vectors.layer, MLP)

    def _operand(self, linear: str, operand: int, x: jax.Array) -> Operand:
        """Return an operand of the `first` or the `second` matrix's product, rounded in fp8."""
        if self.scales is None:
            return x
        scale, form = self._scale(linear)[operand], fp8.FORMATS[operand]
        narrow = fp8.quantize(x, scale, form)
        return Quantized(narrow, fp8.count(narrow, scale, self.layout))

    def _unscaled(self, linear: str, y: jax.Array, *operands: int) -> jax.Array:
        """Divide a product by the scales of its operands."""
        if self.scales is None:
            return y
        one, other = (self._scale(linear)[operand] for operand in operands)
        return fp8.divided(y, one * other)

    def _scale(self, linear: str) -> jax.Array:
        assert self.scales is not None
        return self.scales[linear == 'second']

    def _linear(self, linear: str) -> ColumnParallelLinear | RowParallelLinear:
        return self.matrices.first if linear == 'first' else self.matrices.second


def modules_of(block: Block, name: str) -> Modules:
    """Return the modules of the branch `attention` or `mlp` of a block."""
    return Modules(getattr(block, f'{name}_norm'), getattr(block, name))


def select(modules: Modules, *, matrices: bool) -> Modules:
    """Return modules that have only their matrices, or only their vectors."""
    return map_parameters(
        lambda declared, x: x if declared.is_matrix is matrices else None, modules
    )


def replaced(block: Block, attention: Modules, mlp: Modules) -> Block:
    """Return a copy of a block with these modules."""
    block = jax.tree.map(lambda x: x, block)
    for name, modules in (('attention', attention), ('mlp', mlp)):
        setattr(block, f'{name}_norm', modules.norm)
        setattr(block, name, modules.layer)
    return block
