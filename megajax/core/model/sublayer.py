"""A sublayer of a transformer layer: x + added(second(middle(first(enter(x))))).

Attention, the feed-forward network, and any other layer that adds to the residual stream have this
form. `first` is column-parallel, `second` is row-parallel, and nothing between them communicates:
the sequence is gathered before `first` (Megatron's f), and the partial sums are reduced after
`second` (its g). The loop over layers, the overlap schedule (`megajax.core.model.overlap`) and
generation with a cache run these steps, so a layer is written once.
"""

from typing import Any, ClassVar

import jax
from flax import nnx

from megajax.core.config import ModelConfig
from megajax.core.model.dropout import dropout, fold_in
from megajax.core.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.core.model.norm import make_norm
from megajax.core.model.parameters import Parameters
from megajax.core.model.rows import NO_ROWS, Rows


class Sublayer(nnx.Module):
    """The norm and the two linear layers of a sublayer, and its steps.

    A subclass defines the operations between the linear layers (`middle`). All its parameters are
    read in `enter`, `first`, `middle`, `second` or `added`.
    """

    SCOPE: ClassVar[str]  # name of its operations in a compiled program
    LINEARS: ClassVar[tuple[str, str]]  # the names of `first` and `second`
    KEY: ClassVar[int]  # number folded into the layer's key for dropout; attention's core uses 0
    MIXES_TOKENS: ClassVar[bool]  # whether a token's result depends on other tokens

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.config, self.layout = config, parameters.layout
        first, second = self.LINEARS
        first_key, second_key = jax.random.split(key)
        self.norm = make_norm(config, parameters['norm'])
        has_both = 'output_norm' in parameters
        self.output_norm = make_norm(config, parameters['output_norm']) if has_both else None
        setattr(self, first, ColumnParallelLinear(parameters[first], key=first_key))
        setattr(self, second, RowParallelLinear(parameters[second], key=second_key))

    def __call__(
        self, x_BTD: jax.Array, core: Any = None, rows: Rows = NO_ROWS
    ) -> tuple[jax.Array, Any]:
        """Return the residual stream after this sublayer, and the second result of `core`."""
        with jax.named_scope(self.SCOPE):
            h_BTD, kept = self.update(x_BTD, core, rows)
            return x_BTD + h_BTD, kept

    def update(
        self, x_BTD: jax.Array, core: Any = None, rows: Rows = NO_ROWS
    ) -> tuple[jax.Array, Any]:
        """Return the sublayer's addition to the residual stream, and the second result of `core`.

        Without sequence parallelism, T is S and `gather` does nothing; the backward pass of the
        first matmul then runs f's all-reduce.
        """
        # f: SP: all-gather forward, reduce-scatter backward
        h_BSD = self.first.gather(self.enter(x_BTD))
        # column-parallel: no communication (2-D: reduce-scatter over `row`, forward)
        z, kept = self.middle(self.first.product(h_BSD), core, rows)
        # row-parallel, g: all-reduce forward (SP: reduce-scatter)
        return self.added(self.second.reduced(z), rows.key_B), kept

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Return the input of `first`: the residual stream, normed if the model norms inputs."""
        return self.norm(x_BTD) if self.config.norms_inputs else x_BTD

    def middle(self, y: jax.Array, core: Any, rows: Rows) -> tuple[jax.Array, Any]:
        """Return the input of `second`, from `first`'s result, and the second result of `core`.

        The bias of `first` is added here.
        """
        raise NotImplementedError

    def added(self, y_BTD: jax.Array, key_B: jax.Array | None) -> jax.Array:
        """Return the sublayer's addition to the residual stream, from the result of `second`."""
        return self.finished(self.second.with_bias(y_BTD), key_B)

    def finished(self, h_BTD: jax.Array, key_B: jax.Array | None) -> jax.Array:
        """Return the sublayer's addition, from its complete result, after the norm and dropout."""
        if self.config.norms_outputs:
            h_BTD = (self.output_norm or self.norm)(h_BTD)
        return dropout(h_BTD, self.config.dropout, fold_in(key_B, self.KEY), self.layout('TD'))

    @property
    def first(self) -> ColumnParallelLinear:
        """The column-parallel linear layer."""
        linear: ColumnParallelLinear = getattr(self, self.LINEARS[0])
        return linear

    @property
    def second(self) -> RowParallelLinear:
        """The row-parallel linear layer."""
        linear: RowParallelLinear = getattr(self, self.LINEARS[1])
        return linear
