"""The section `mesh` of a config."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from megajax.core.config.section import Devices, Layers, Section


class MeshConfig(Section):
    """The number of devices along each mesh axis, and sequence parallelism.

    A tensor-parallel group has `model_rows` x `model` devices.
    """

    stages: Devices = 1
    """Pipeline-parallel degree: number of stages, each with an equal share of the layers."""
    virtual_stages: Layers = 1
    """Chunks of layers per stage (interleaved schedule, Narayanan et al., 2021); more chunks
    shorten the pipeline bubble.
    """
    data: Devices = 1
    """Data-parallel degree: number of shards of the batch (all replicas together)."""
    replicas: Devices = 1
    """Groups of data shards, each with a complete copy of the state (HSDP). ZeRO shards the state
    over the data / replicas shards of a group; one all-reduce per step crosses the groups. Without
    ZeRO, each data shard has a complete copy, and groups have no effect.
    """
    experts: Devices = 1
    """Expert-parallel degree: data shards of a replica that share the experts of each layer
    (model.experts). An all-to-all sends each token to its experts' devices, and another one returns
    the results.
    """
    context: Devices = 1
    """Context-parallel degree: number of shards of each sequence. Attention exchanges keys and
    values between them.
    """
    context_exchange: Literal['gather', 'ring', 'all_to_all'] = 'gather'
    """How context shards exchange keys and values: all at once (all-gather), shard by shard (ring),
    or by heads (all_to_all, Ulysses), where each shard attends with a part of the heads.
    """
    model_rows: Devices = 1
    """Rows of the 2-D tensor-parallel grid; they shard hidden_size. 1: ordinary 1-D tensor
    parallelism.
    """
    model: Devices = 1
    """Tensor-parallel degree; with model_rows, the columns of the 2-D grid."""
    sequence_parallel: bool = False
    """Whether activations outside the matmuls are sharded over `model` along the sequence."""
    allow_model_across_hosts: bool = False
    """Whether tensor parallelism may span hosts; each layer then waits for the network."""

    @property
    def is_grid(self) -> bool:
        """Whether tensor parallelism is 2-D."""
        return self.model_rows > 1

    @property
    def parts_of_sequence(self) -> int:
        """Consecutive parts that a sequence is cut into: two for each of several context shards."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def exchanges_heads(self) -> bool:
        """Whether context shards exchange tokens for heads (Ulysses)."""
        return self.context > 1 and self.context_exchange == 'all_to_all'

    @property
    def is_one_dimensional(self) -> bool:
        """Whether the mesh has no parallelism but data, expert and 1-D tensor parallelism."""
        return self.stages == self.context == self.model_rows == 1

    @property
    def tensor_parallel(self) -> int:
        """Number of devices in a tensor-parallel group."""
        return self.model_rows * self.model

    @property
    def data_shards(self) -> int:
        """Number of data shards in a replica group, along the mesh axes `data` and `expert`."""
        return self.data // self.replicas

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return self.stages * self.data * self.context * self.tensor_parallel

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """The axes of the mesh and their sizes, outermost first.

        The mesh leaves out axes of one device, except `data` and `model`.
        """
        sizes = {
            'replica': self.replicas,
            'stage': self.stages,
            'data': self.data_shards // self.experts,
            'expert': self.experts,
            'context': self.context,
            'row': self.model_rows,
            'model': self.model,
        }
        return MappingProxyType(
            {axis: size for axis, size in sizes.items() if size > 1 or axis in ('data', 'model')}
        )
