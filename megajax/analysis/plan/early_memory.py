"""Count the bytes of arrays that XLA computes, or allocates, long before a step needs them.

They were read from the buffers of programs that XLA compiled for H100s.
"""

from megajax.analysis.plan.sizes import FLOAT32, Sizes


def embedding_gradient(sizes: Sizes) -> int:
    """Return the bytes of the embedding's gradient, if it has memory from the loss on; else 0.

    It does if the loss has several chunks, the embedding is not tied, and the layers run in a loop
    that XLA schedules. Sequence parallelism prevents it, and so does full recomputation with one
    microbatch, up to ZeRO-1.
    """
    config, is_grid = sizes.config, sizes.layout.num_shards('D') > 1
    chunks, _, _ = sizes.logits
    if chunks == 1 or sizes.is_ordered or sizes.model.tie_embeddings or not sizes.learned_tables:
        return 0
    if sizes.is_scattered and (sizes.sums_early or not is_grid):
        return 0
    is_full = config.train.recompute == 'full' and config.train.microbatches == 1
    if is_full and not sizes.sums_early and config.mesh.context == 1:
        return 0
    return FLOAT32 * sizes.table


def of_last_layer(sizes: Sizes) -> int:
    """Return the bytes of what the overlap schedule computes before the loss for the passes after.

    With full recomputation, it recomputes the attention of the last layer, and also the MLP if the
    microbatch is split. With ZeRO-3, it gathers the weights of this layer. With LoRA, the adapters
    of all layers are cast.
    """
    if not sizes.is_ordered:
        return 0
    config, last = sizes.config, sizes.kinds[-1]
    found = sizes.itemsize * sizes.at_rest.learned if config.lora is not None else 0
    if config.train.recompute != 'full':
        return found
    parts = sizes.overlap.num_parts
    found += sizes.kept_around + ((last.up + last.hidden) // parts if parts > 1 else 0)
    return found + (sizes.itemsize * last.matrices if config.optim.shard == 'weights' else 0)


def copied_weights(sizes: Sizes) -> int:
    """Return the bytes of the copies of stored parameters in the layout of ZeRO-3's gathers.

    XLA copies the row-parallel matrices before the loop over layers and, if there are several
    microbatches, the tables before the loop over microbatches. The overlap schedule casts the
    matrices of all layers in the forward pass and keeps them for the backward pass if there is only
    one microbatch.
    """
    config = sizes.config
    if config.optim.shard != 'weights':
        return 0
    if sizes.is_ordered and config.train.microbatches == 1:
        return sizes.itemsize * sizes.at_rest.layers
    tables = 0 if sizes.is_ordered else sizes.num_tables * sizes.at_rest.table
    count = sizes.at_rest.inputs + (tables if config.train.microbatches > 1 else 0)
    return count * (sizes.itemsize if config.lora else FLOAT32)
