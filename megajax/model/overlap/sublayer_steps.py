"""The two branches of a block, cut into steps.

A branch is x + leave(second(middle(first(enter(x))))), where `first` and `second` are the products
with its column-parallel and its row-parallel matrix. `megajax.model.overlap` chooses when each step
runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from megajax.config import ModelConfig
from megajax.model import fp8
from megajax.model.attention import attention_core
from megajax.model.block import Block
from megajax.model.dropout import fold_in
from megajax.model.fp8 import Operand, Quantized, value
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.norm import Norm
from megajax.model.overlap.matrices import Matrix
from megajax.model.overlap.split_tokens import join_tokens, split_tokens
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


@dataclasses.dataclass(frozen=True)
class Branch:
    """One of the two branches of a block, for some rows.

    Steps that are differentiated take the `vectors` as an argument. A `Block` of a branch has None
    in the place of the other parameters.
    """

    place: int  # among the branches of all layers
    index: int  # of the layer
    name: str  # one of BRANCHES
    scope: str
    vectors: Block  # norms and biases
    matrices: Block  # those of all layers
    totals: Block | None  # the gradients of earlier microbatches in the place of the matrices
    rows: RowArrays
    config: ModelConfig
    layout: Layout
    dtype: DTypeLike
    recompute: bool  # what attention would save
    scales: tuple[jax.Array, jax.Array] | None  # [operand] of the two products, in fp8
    keeps_output: bool = False  # for the gradient of `leave`

    def enter(self, x_BTD: jax.Array) -> tuple[Operand, Any]:
        """Return the normed residual stream and the transpose, which keeps the statistics."""

        def normed(vectors: Block, x_BTD: jax.Array) -> jax.Array:
            norm: Norm = getattr(vectors, f'{self.name}_norm')
            return norm(row_major(x_BTD))

        h_BTD, pull = jax.vjp(normed, self.vectors, x_BTD)
        return self._operand('first', fp8.X, h_BTD), pull

    def gather(self, h_BTD: Operand) -> Operand:
        """Gather the sequence: of an input forward, of a gradient backward."""
        gathered = jax.reshard(value(h_BTD), self.layout('BSD'))
        return h_BTD._replace(value=gathered) if isinstance(h_BTD, Quantized) else gathered

    def first(self, weight: jax.Array, h_BSD: Operand) -> jax.Array:
        """Multiply by the column-parallel matrix."""
        equation = self._linear('first').equation
        y = product(equation, value(h_BSD), weight, self.layout, self.dtype)
        return self._unscaled('first', y, fp8.X, fp8.W)

    def middle(self, vectors: Block, y: jax.Array) -> jax.Array:
        """Compute attention, or the activation, from the first product."""
        position_BS, segment_BS, key_B = self.rows
        if self.is_mlp:
            return vectors.mlp.activate(y)
        y = vectors.attention.qkv.with_bias(y)
        core = attention_core(
            self.config,
            self.layout,
            recompute=self.recompute,
            segment_BS=segment_BS,
            key_B=fold_in(key_B, 0),
        )
        return vectors.attention.attend(y, position_BS, core)[0]

    def middle_and_pull(self, *ys: jax.Array) -> Sequence[Any]:
        """Do what `middle` does, for parts of the tokens; return the results and the transpose."""

        def of_parts(vectors: Block, *ys: jax.Array) -> tuple[jax.Array, ...]:
            if len(ys) == 1:
                return (self.middle(vectors, *ys),)
            y = join_tokens(ys, 'BS' + linears(self.matrices, self.name)[0].outputs, self.layout)
            z = self.middle(vectors, y)
            dims = 'BS' + linears(self.matrices, self.name)[1].inputs
            return tuple(split_tokens(z, dims, len(ys), self.layout))

        zs, pull = jax.vjp(of_parts, self.vectors, *ys)
        return *(self._operand('second', fp8.X, z) for z in zs), pull

    def pull_middle(self, pull: Any, *dzs: jax.Array) -> Sequence[Any]:
        """Return the gradients of the first products of parts of the tokens, and of the vectors."""
        vectors, *d_first = pull(dzs)
        return *(self._operand('first', fp8.DY, d) for d in d_first), vectors

    def second(self, weight: jax.Array, z: Operand) -> jax.Array:
        """Multiply by the row-parallel matrix, up to the sum over its shards."""
        equation = self._linear('second').equation
        sums = partial_sums(equation, value(z), weight, self.layout, self.dtype)
        return self._unscaled('second', sums, fp8.X, fp8.W)

    def sum(self, partial: jax.Array) -> jax.Array:
        """Add partial sums: of the second product forward, of an input's gradient backward."""
        return sum_over_shards(partial, 'BTD', self.layout, self.dtype)

    def leave(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Add the second product to the residual stream."""
        return x_BTD + self._added(self.vectors, y_BTD)

    def _added(self, vectors: Block, y_BTD: jax.Array) -> jax.Array:
        h_BTD = linears(vectors, self.name)[1].with_bias(y_BTD)
        return vectors.added(self.name, h_BTD, self.rows.key_B)

    def gradient_of_leave(
        self, dx_BTD: jax.Array, y_BTD: jax.Array | None = None
    ) -> tuple[Operand, Block]:
        """Return the gradients of the second product and of the vectors.

        They depend on the second product `y_BTD` only if the branch `keeps_output`.
        """
        y_BTD = jnp.zeros_like(dx_BTD) if y_BTD is None else y_BTD
        _, pull = jax.vjp(self._added, self.vectors, y_BTD)
        vectors, dy_BTD = pull(dx_BTD)
        return self._operand('second', fp8.DY, dy_BTD), vectors

    def gradient_of_second(self, weight: jax.Array, dy_BSD: Operand) -> jax.Array:
        """Return the gradient of what `middle` returned."""
        equation = self._linear('second').equation
        dz = input_gradient(equation, value(dy_BSD), weight, self.layout, self.dtype)
        return self._unscaled('second', dz, fp8.DY, fp8.W)

    def gradient_of_first(self, weight: jax.Array, dy: Operand) -> jax.Array:
        """Return the gradient of what `gather` returned, up to the sum over the shards."""
        equation = self._linear('first').equation
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
        total: jax.Array = _linear_of(self.totals, self.name, linear).weight.get_value()[self.index]
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
        vectors: Block,
        first: jax.Array,
        second: jax.Array,
        counts: Sequence[jax.Array] | None,
    ) -> Block:
        """Return the block with the gradients of the parameters that the branch computed.

        The others are None. `counts` are those of the two products in fp8.
        """
        gradients: Block = jax.tree.map(lambda x: x, vectors)
        for index, weight in enumerate((first, second)):
            linear = linears(gradients, self.name)[index]
            linear.weight.set_value(weight)
            if counts is not None and linear.scales is not None:
                linear.scales.set_value(counts[index])
        return gradients

    def with_vectors(self, vectors: Block) -> 'Branch':
        """Return the same branch with other vectors."""
        return dataclasses.replace(self, vectors=vectors)

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
        return self.name == 'mlp'

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
        return _linear_of(self.matrices, self.name, linear)


def linears(block: Block, name: str) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Return the two linear layers of the branch `attention` or `mlp`."""
    if name == 'mlp':
        return block.mlp.up, block.mlp.down
    return block.attention.qkv, block.attention.out


def _linear_of(block: Block, name: str, linear: str) -> ColumnParallelLinear | RowParallelLinear:
    return linears(block, name)[linear == 'second']


def names(path: Sequence[Any]) -> list[str]:
    """Return the names on the way to a parameter."""
    return [str(getattr(key, 'name', getattr(key, 'key', key))) for key in path]


def select(block: Block, name: str, *, matrices: bool) -> Block:
    """Return a block that has only the matrices, or only the vectors, of a branch."""

    def own(path: Any, param: nnx.Variable[Any]) -> nnx.Variable[Any]:
        first = names(path)[0]
        is_own = first == name or first.startswith(f'{name}_')
        is_kept = is_own and param.declared.is_matrix is matrices
        return param if is_kept else param.replace(None)

    return jax.tree.map_with_path(own, block, is_leaf=lambda x: isinstance(x, nnx.Variable))
