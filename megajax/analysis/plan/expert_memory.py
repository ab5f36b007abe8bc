"""Count the bytes of the arrays that a layer of experts needs on each GPU.

The arrays are those in `core/model/expert_passes.py`.

Without a capacity, the array of rows that a device receives, and the buffer that it sends, have
room for 1.25 times a balanced load (`core/counts/expert_rows.py`).
"""

from typing import NamedTuple, Self

from megajax.core.config import Config
from megajax.core.counts.expert_kernels import smallest_block
from megajax.core.counts.expert_rows import rows_sent, rows_with_unused
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.hardware.records import Capability
from megajax.core.parallel.layout import Layout

FLOAT32 = INT32 = 4


class ExpertArrays(NamedTuple):
    """The bytes of the arrays of a layer of experts, for the tokens of a microbatch."""

    rows: int  # rows that the device's experts receive
    sent: int  # the buffer of an all-to-all; 0 without expert parallelism
    up: int  # results of the experts' first matmul
    hidden: int  # inputs of their second matmul
    results: int  # results of each token's experts, on the token's device
    routing: int  # the router's logits and the chosen experts
    of_tokens: int  # results of the shared experts' first matmul
    # fp32 gradients of a layer's weights, unless these are frozen: of the first matmuls' weights
    first_gradient: int
    gradients: int  # of all weights of a layer

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        tokens: int,
        itemsize: int,
        capability: Capability | None,
        *,
        in_buffers: bool = True,
    ) -> Self | None:
        """Return the arrays for the `tokens` of a data shard; None for a model without experts.

        The GPU's `capability` decides the fewest rows of a block. Without `in_buffers`, the arrays
        have room for exactly a balanced load.
        """
        model, experts, shards = config.model, config.model.experts, layout.shards
        if experts is None:
            return None
        sizes, assignments = dim_sizes(model), tokens * experts.active
        devices = shards.get('X', 1)
        if experts.capacity is None and not in_buffers:
            rows = slots = assignments
        else:
            rows = slots = rows_sent(config, tokens, devices)
        if experts.capacity is None and in_buffers:
            rows = rows_with_unused(config, tokens, shards, smallest_block(capability))
        up = hidden = of_tokens = first = gradients = 0
        for name, weight in parameters(model):
            if not name.startswith('layers.experts.') or not weight.is_matrix:
                continue
            outputs = elements(weight.outputs.replace('X', ''), sizes, shards)
            count = 0 if weight.is_frozen else elements(weight.dims_of_layer, sizes, shards)
            gradients += FLOAT32 * count
            if weight.inputs != 'D':
                hidden += rows * elements(weight.inputs, sizes, shards) * weight.is_of_experts
            elif weight.is_of_experts:
                up, first = up + rows * outputs, first + FLOAT32 * count
            else:
                of_tokens += tokens * outputs
        each = itemsize * model.hidden_size
        return cls(
            rows=rows * each,
            sent=slots * each if devices > 1 else 0,
            up=itemsize * up,
            hidden=itemsize * hidden,
            results=assignments * each,
            routing=FLOAT32 * tokens * experts.count + INT32 * assignments,
            of_tokens=itemsize * of_tokens,
            first_gradient=first,
            gradients=gradients,
        )

    @property
    def kept(self) -> int:
        """The bytes that the forward pass saves in addition to the layer's input."""
        received = self.rows if self.sent else 0
        return received + self.up + self.results + self.routing + self.of_tokens

    @property
    def in_backward(self) -> int:
        """The temporary bytes in the backward pass: gradients, and buffers that are sent.

        The gradients belong to the rows before and after the matmuls, the first matmul's results
        and the second matmul's inputs. The buffers belong to two all-to-alls.
        """
        return 2 * self.rows + 2 * self.sent + self.up + self.hidden
