"""The steps of a sublayer (`core/model/sublayer.py`), and their gradients, for some sequences.

`interleave.py` decides when each step runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megajax.core.counts.declaration import Parameter
from megajax.core.counts.layers import SUBLAYERS
from megajax.core.model import fp8
from megajax.core.model.adapter_matmuls import ColumnParallel, RowParallel, like
from megajax.core.model.attention import attention_core
from megajax.core.model.fp8 import Operand, Quantized, value
from megajax.core.model.linear import Linear
from megajax.core.model.overlap.matrices import Matrix
from megajax.core.model.overlap.split_tokens import join_tokens, split_tokens
from megajax.core.model.parameters import map_parameters
from megajax.core.model.product import (
    input_gradient,
    partial_gradient,
    partial_sums,
    product,
    sum_over_shards,
    weight_gradient,
)
from megajax.core.model.row_major import row_major
from megajax.core.model.rows import Rows
from megajax.core.model.sublayer import Sublayer
from megajax.core.parallel.layout import Layout

Pair = tuple[jax.Array, jax.Array]  # A and B of an adapter, or their gradients


@dataclasses.dataclass(frozen=True)
class SublayerSteps:
    """The steps of a sublayer of one layer, for some sequences.

    Steps that are differentiated take `vectors` as an argument.
    """

    place: int  # index of the sublayer among the sublayers of all layers
    index: int  # the index of the layer
    scope: str
    vectors: Sublayer  # norms, biases and adapters, with None in place of matrices
    matrices: Sublayer  # the matrices of all layers, with None in place of vectors
    totals: Sublayer | None  # the gradients of earlier microbatches in place of matrices
    rows: Rows
    layout: Layout
    dtype: DTypeLike
    recompute: bool  # whether to recompute the values that attention would save
    scales: tuple[jax.Array, jax.Array] | None  # scales [operand] of the two matmuls in fp8
    keeps_output: bool = False  # whether the gradient of `leave` needs the second matmul's result

    def enter(self, x_BTD: jax.Array) -> tuple[Operand, Any]:
        """Return the normed residual stream, and its VJP, which holds the saved statistics."""

        def normed(vectors: Sublayer, x_BTD: jax.Array) -> jax.Array:
            return self._complete(vectors).enter(row_major(x_BTD))

        h_BTD, pull = jax.vjp(normed, self._differentiated, x_BTD)
        return self._operand('first', fp8.X, h_BTD), pull

    def gather(self, h_BTD: Operand) -> Operand:
        """Gather the sequence of an input (forward) or of a gradient (backward)."""
        gathered = jax.reshard(value(h_BTD), self.layout('BSD'))
        return h_BTD._replace(value=gathered) if isinstance(h_BTD, Quantized) else gathered

    def first(self, weight: jax.Array, h_BSD: Operand) -> jax.Array:
        """Multiply by the column-parallel matrix."""
        equation = self._linear('first').equation
        y = product(equation, value(h_BSD), weight, self.layout, self.dtype)
        return self._adapted('first', self._unscaled('first', y, fp8.X, fp8.W), value(h_BSD))

    def middle(self, vectors: Sublayer, y: jax.Array) -> jax.Array:
        """Compute the second matmul's input from the first matmul's result."""
        core = None
        if self.mixes_tokens:
            core = attention_core(vectors.config, self.layout, self.rows, recompute=self.recompute)
        z: jax.Array = vectors.middle(y, core, self.rows)[0]
        return z

    def middle_and_pull(self, *ys: jax.Array) -> Sequence[Any]:
        """Compute `middle` for parts of the tokens; return the results and the transpose."""

        def of_parts(vectors: Sublayer, *ys: jax.Array) -> tuple[jax.Array, ...]:
            vectors = self._complete(vectors)
            if len(ys) == 1:
                return (self.middle(vectors, *ys),)
            y = join_tokens(ys, 'BS' + self.matrices.first.outputs, self.layout)
            z = self.middle(vectors, y)
            dims = 'BS' + self.matrices.second.inputs
            return tuple(split_tokens(z, dims, len(ys), self.layout))

        zs, pull = jax.vjp(of_parts, self._differentiated, *ys)
        return *(self._operand('second', fp8.X, z) for z in zs), pull

    def pull_middle(self, pull: Any, *dzs: jax.Array) -> Sequence[Any]:
        """Return the gradients of the results of the parts' first matmuls, and of the vectors."""
        vectors, *d_first = pull(dzs)
        return *(self._operand('first', fp8.DY, d) for d in d_first), vectors

    def second(self, weight: jax.Array, z: Operand) -> jax.Array:
        """Multiply by the row-parallel matrix, without the sum over its shards."""
        equation = self._linear('second').equation
        sums = partial_sums(equation, value(z), weight, self.layout, self.dtype)
        return self._adapted('second', self._unscaled('second', sums, fp8.X, fp8.W), value(z))

    def sum(self, partial: jax.Array) -> jax.Array:
        """Add partial sums, of the second matmul (forward) or an input's gradient (backward)."""
        return sum_over_shards(partial, 'BTD', self.layout, self.dtype)

    def leave(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Add the second matmul's result to the residual stream."""
        return x_BTD + self._added(self._differentiated, y_BTD)

    def _added(self, vectors: Sublayer, y_BTD: jax.Array) -> jax.Array:
        return self._complete(vectors).added(y_BTD, self.rows.key_B)

    def gradient_of_leave(
        self, dx_BTD: jax.Array, y_BTD: jax.Array | None = None
    ) -> tuple[Operand, Sublayer]:
        """Return the gradients of the second matmul's result and of the vectors.

        They depend on the result, `y_BTD`, only if the sublayer `keeps_output`.
        """
        y_BTD = jnp.zeros_like(dx_BTD) if y_BTD is None else y_BTD
        _, pull = jax.vjp(self._added, self._differentiated, y_BTD)
        vectors, dy_BTD = pull(dx_BTD)
        return self._operand('second', fp8.DY, dy_BTD), vectors

    def gradient_of_second(self, weight: jax.Array, dy_BSD: Operand) -> jax.Array:
        """Return the gradient of the result of `middle`."""
        equation = self._linear('second').equation
        dz = input_gradient(equation, value(dy_BSD), weight, self.layout, self.dtype)
        dz = self._unscaled('second', dz, fp8.DY, fp8.W)
        return self._adapted_back('second', dz, value(dy_BSD))

    def gradient_of_first(self, weight: jax.Array, dy: Operand) -> jax.Array:
        """Return the gradient of the result of `gather`, without the sum over the shards."""
        equation = self._linear('first').equation
        sums = partial_gradient(equation, value(dy), weight, self.layout, self.dtype)
        sums = self._unscaled('first', sums, fp8.DY, fp8.W)
        return self._adapted_back('first', sums, value(dy))

    def is_frozen(self, linear: str) -> bool:
        """Return whether the `first` or the `second` matrix has no gradient."""
        return self._linear(linear).weight.declared.is_frozen

    def has_adapter(self, linear: str) -> bool:
        """Return whether the `first` or the `second` matrix has an adapter."""
        return self._linear(linear).adapter is not None

    def gradient_of_adapter(
        self, linear: str, x: Operand, dy: Operand, before: Pair | None = None
    ) -> Pair:
        """Add the gradients of an adapter's A and B to `before`, those from the other parts."""
        how, a, b = self._adapter(linear)
        dh, h = how.hidden_gradient(value(dy), b), how.hidden(value(x), a)
        da, db = like((how.of_a(value(x), dh), a), (how.of_b(h, value(dy)), b))
        return (da, db) if before is None else (before[0] + da, before[1] + db)

    def gradient_of_weight(
        self, linear: str, x: Operand, dy: Operand, before: jax.Array | None = None
    ) -> jax.Array:
        """Add the gradient of the `first` or the `second` matrix to the other parts' gradient."""
        equation = self._linear(linear).equation
        gradient = weight_gradient(equation, value(x), value(dy), self.layout)
        gradient = self._unscaled(linear, gradient, fp8.X, fp8.DY)
        return gradient if before is None else before + gradient

    def total(self, linear: str) -> jax.Array | None:
        """Return earlier microbatches' gradient of the `first` or the `second` matrix."""
        if self.totals is None:
            return None
        total: jax.Array = _linear_of(self.totals, linear).weight.get_value()[self.index]
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
        vectors: Sublayer,
        matrices: Sequence[Any],
        adapters: Sequence[Pair | None],
        counts: Sequence[jax.Array] | None,
    ) -> Sublayer:
        """Return the sublayer with gradients in place of its parameters, None for frozen ones.

        For the first and the second matmul, `matrices` has the gradient of the weight, `adapters`
        has the gradients of its adapter and, with fp8, `counts` has the exponent counts.
        """
        gradients: Sublayer = jax.tree.map(lambda x: x, vectors)
        for index, name in enumerate(('first', 'second')):
            linear = _linear_of(gradients, name)
            linear.weight.set_value(matrices[index])
            if linear.adapter is not None and (pair := adapters[index]) is not None:
                linear.adapter.A.set_value(pair[0])
                linear.adapter.B.set_value(pair[1])
            if counts is not None and linear.scales is not None:
                linear.scales.set_value(counts[index])
        return gradients

    def with_vectors(self, vectors: Sublayer) -> 'SublayerSteps':
        """Return the same steps with other vectors."""
        return dataclasses.replace(self, vectors=vectors)

    @property
    def again(self) -> 'SublayerSteps':
        """The same steps for full recomputation, under jax's scope of recomputation."""
        return dataclasses.replace(self, scope=f'rematted_computation/{self.scope}')

    @property
    def is_scattered(self) -> bool:
        """Whether the residual stream is sharded over the sequence."""
        return self.layout.num_shards('T') > 1

    @property
    def mixes_tokens(self) -> bool:
        """Whether the result of a token depends on other tokens."""
        return self.matrices.MIXES_TOKENS

    @property
    def offset(self) -> int:
        """The index of this sublayer among the sublayers of its layer."""
        return self.place % len(SUBLAYERS)

    @property
    def _differentiated(self) -> Sublayer:
        """The vectors that steps are differentiated for, and None in place of the others."""

        def choose(declared: Parameter, x: jax.Array) -> jax.Array | None:
            return None if declared.is_frozen or declared.is_adapter else x

        return map_parameters(choose, self.vectors)

    def _complete(self, differentiated: Sublayer) -> Sublayer:
        """Return differentiated vectors together with those that are not differentiated."""
        return map_parameters(
            lambda _, own, x: own if x is None else x, self.vectors, differentiated
        )

    def _adapted(self, linear: str, y: jax.Array, x: jax.Array) -> jax.Array:
        """Add the result of the adapter of a matmul, if there is one."""
        if not self.has_adapter(linear):
            return y
        how, a, b = self._adapter(linear)
        return y + how.outputs(how.hidden(x, a), b)

    def _adapted_back(self, linear: str, dx: jax.Array, dy: jax.Array) -> jax.Array:
        """Add the gradient of the input of a matmul's adapter, if there is one."""
        if not self.has_adapter(linear):
            return dx
        how, a, b = self._adapter(linear)
        return dx + how.inputs(how.hidden_gradient(dy, b), a)

    def _adapter(self, linear: str) -> tuple[ColumnParallel | RowParallel, jax.Array, jax.Array]:
        """Return the matmuls of an adapter, and its A and B."""
        layer = _linear_of(self.vectors, linear)
        kind = ColumnParallel if linear == 'first' else RowParallel
        assert layer.adapter is not None
        adapter = layer.adapter
        return kind(layer.equation, self.layout, adapter.scale), adapter.A[...], adapter.B[...]

    def _operand(self, linear: str, operand: int, x: jax.Array) -> Operand:
        """Return an operand of the `first` or the `second` matmul, quantized with fp8."""
        if self.scales is None:
            return x
        scale, form = self._scale(linear)[operand], fp8.FORMATS[operand]
        narrow = fp8.quantize(x, scale, form)
        return Quantized(narrow, fp8.count(narrow, scale, self.layout))

    def _unscaled(self, linear: str, y: jax.Array, *operands: int) -> jax.Array:
        """Divide a matmul's result by the scales of its operands."""
        if self.scales is None:
            return y
        one, other = (self._scale(linear)[operand] for operand in operands)
        return fp8.divided(y, one * other)

    def _scale(self, linear: str) -> jax.Array:
        assert self.scales is not None
        return self.scales[linear == 'second']

    def _linear(self, linear: str) -> Linear:
        return _linear_of(self.matrices, linear)


def _linear_of(sublayer: Sublayer, linear: str) -> Linear:
    return sublayer.first if linear == 'first' else sublayer.second


def select(sublayer: Sublayer, *, matrices: bool) -> Sublayer:
    """Return a sublayer that has only its matrices, or only its vectors."""
    return map_parameters(
        lambda declared, x: x if declared.is_matrix is matrices else None, sublayer
    )
