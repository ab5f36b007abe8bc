"""Count the bytes of the arrays of a layer: with an MLP, or with experts."""

from typing import TYPE_CHECKING

from megajax.analysis.plan.expert_memory import ExpertArrays
from megajax.core.counts.layers import Stack, Sublayer, layers_of, num_in_stack
from megajax.core.counts.parameters import dim_sizes, elements

if TYPE_CHECKING:
    from megajax.analysis.plan.sizes import Sizes

FLOAT32 = 4


class LayerArrays:
    """The bytes of the arrays of a layer on each GPU, and the number of such layers.

    A model whose layers are not all alike has these once for its layers with an MLP, and once for
    its layers with experts.
    """

    def __init__(self, sizes: 'Sizes', stack: Stack):
        self.dim = stack.dim
        self.count = num_in_stack(sizes.model, stack.dim, sizes.chunk_layers)  # in a chunk
        self.experts = None
        if stack.sublayer.name == 'experts':
            self.experts = ExpertArrays.of(
                sizes.config, sizes.layout, sizes.tokens, sizes.itemsize, sizes.capability
            )
        # `up` is the result of the first matmul, `hidden` the input of the second.
        if self.experts is not None:
            self.up, self.hidden = self.experts.up, self.experts.hidden
        else:
            self.up, self.hidden = up_and_hidden(sizes, stack.sublayer)
        self.kept = self._kept(sizes)  # saved by the forward pass without recomputation
        self.in_backward = self._in_backward(sizes)
        # The parameters in the matrices of a layer, in a step.
        of_layer = sizes.at_rest.of_layer
        self.matrices = of_layer['L'] + (of_layer[stack.dim] if stack.dim != 'L' else 0)
        self._sizes = sizes

    @property
    def copied_weights(self) -> int:
        """The bytes of a layer's weights as a loop over periods copies them."""
        sizes = self._sizes
        shard, of_stack = sizes.config.optim.shard, sizes.at_rest.of_stack
        if shard == 'weights':
            dims = {'L', self.dim}
            return sum(FLOAT32 * of_stack[x] // len(layers_of(sizes.model, x)) for x in dims)
        return (FLOAT32 if shard == 'none' else sizes.itemsize) * self.matrices

    def _kept(self, sizes: 'Sizes') -> int:
        if self.experts is None:
            return sizes.kept_around + self.up + self.hidden
        return sizes.kept_around - sizes.whole + sizes.residual + self.experts.kept

    def _in_backward(self, sizes: 'Sizes') -> int:
        """Return the temporary bytes in the backward pass of a layer: of its MLP or its attention.

        XLA computes the weights' gradients last, unless they are reduced over `data` in the layer.
        The unsharded gradients of both sublayers' outputs, and of `up`, therefore live to the end.
        """
        mlp = 2 * self.up + self.hidden + 2 * sizes.whole
        if self.experts is not None:
            mlp = self.experts.in_backward + 2 * sizes.whole
        # Attention's output, its gradient, and the input of the matmul after it.
        outputs = 2 * sizes.queries + sizes.heads
        # Queries, keys and values, their gradients, and these gradients in one array.
        heads = 3 * (sizes.queries + 2 * sizes.keys)
        if sizes.flash:
            scores = 2 * sizes.mask
        else:
            recomputed = sizes.config.train.recompute == 'selective'
            scores = (4 if recomputed else 2) * FLOAT32 * sizes.most_scores
        return max(mlp, self.up + outputs + heads + scores + 3 * sizes.whole)


def up_and_hidden(sizes: 'Sizes', mlp: Sublayer) -> tuple[int, int]:
    """Return the bytes of the result of an MLP's first matmul and of the input of its second."""
    widths, shards = dim_sizes(sizes.model), sizes.layout.shards
    up = sizes.between * elements(mlp.first.outputs, widths, shards)
    return up, sizes.itemsize * sizes.tokens * elements(mlp.second.inputs, widths, shards)
