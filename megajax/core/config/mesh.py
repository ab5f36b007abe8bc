"""The section `mesh` of a config."""

from typing import Literal

from megajax.core.config.section import Devices, Layers, Section


class MeshConfig(Section):
    """The number of devices along each mesh axis, and sequence parallelism.

    `sequence_parallel` shards the sequence outside the matrix products. A tensor-parallel group has
    `model_rows` x `model` devices.
    """

    stages: Devices = 1
    """Stages of the pipeline; each has a part of the layers."""
    virtual_stages: Layers = 1
    """Chunks of layers a stage (Narayanan et al., 2021): they shorten the pipeline's bubble."""
    data: Devices = 1
    """Shards of the batch in all."""
    replicas: Devices = 1
    """Groups of data shards, each with a complete copy of the state (HSDP): ZeRO shards it over the
    data / replicas shards of a group, and one all-reduce a step crosses the groups.
    """
    context: Devices = 1
    """Shards of each sequence; attention exchanges keys and values."""
    context_exchange: Literal['gather', 'ring'] = 'gather'
    """Exchange of keys and values between context shards: all at once, or one shard at a time."""
    model_rows: Devices = 1
    """Rows of a 2-D tensor-parallel grid, which shard hidden_size."""
    model: Devices = 1
    """Tensor-parallel size; with model_rows, the columns of the grid."""
    sequence_parallel: bool = False
    """Whether the sequence is sharded over model outside the matrix products."""
    allow_model_across_hosts: bool = False
    """Whether model may cross hosts; then each layer waits for the network between them."""

    @property
    def is_grid(self) -> bool:
        """Whether tensor parallelism is two-dimensional."""
        return self.model_rows > 1

    @property
    def is_one_dimensional(self) -> bool:
        """Whether the mesh shards rows over `data` and a model over `model`, and nothing else."""
        return self.stages == self.context == self.model_rows == 1

    @property
    def tensor_parallel(self) -> int:
        """Number of devices of a tensor-parallel group."""
        return self.model_rows * self.model

    @property
    def data_shards(self) -> int:
        """Number of data shards of a group of `replicas`: the size of the mesh axis `data`."""
        return self.data // self.replicas

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.stages * self.data * self.context * self.tensor_parallel

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the mesh and their sizes, outermost first.

        An axis of one device is not in the mesh, `data` and `model` apart.
        """
        sizes = {
            'replica': self.replicas,
            'stage': self.stages,
            'data': self.data_shards,
            'context': self.context,
            'row': self.model_rows,
            'model': self.model,
        }
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ('data', 'model')}
