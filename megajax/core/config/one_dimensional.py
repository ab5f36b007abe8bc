"""The config of a model that is not trained, on the mesh axes `data` and `model`."""

from megajax.core.config.rules import incompatibilities
from megajax.core.config.schema import Config


def one_dimensional(config: Config) -> Config:
    """Return the config with only the mesh axes `data` and `model`, and without ZeRO.

    A model that is not trained needs no other axes. The rows of 2-D tensor parallelism become
    columns or, if these would not divide the model, data shards, like stages and context shards.
    The number of devices stays the same; if it does not divide the batch, a microbatch has one
    sequence per data shard.
    """
    mesh, train = config.mesh, config.train
    data = mesh.data * mesh.stages * mesh.context
    plain = {'replicas': 1, 'model_rows': 1, 'stages': 1, 'virtual_stages': 1, 'context': 1}
    optim = config.optim.model_copy(update={'shard': 'none'})

    def on(data: int, model: int) -> Config:
        rows = data * train.microbatches
        rows = rows if train.batch_size % rows else train.batch_size
        sections = {
            'mesh': mesh.model_copy(update=plain | {'data': data, 'model': model}),
            'train': train.model_copy(
                update={'batch_size': rows, 'schedule': '1f1b', 'overlap': 'auto'}
            ),
        }
        return config.model_copy(update={'optim': optim, **sections})

    candidates = on(data, mesh.tensor_parallel), on(data * mesh.model_rows, mesh.model)
    return next(candidate for candidate in candidates if not incompatibilities(candidate))
