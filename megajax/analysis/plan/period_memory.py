"""Count the memory of a loop over the periods of a pattern of layers."""

from megajax.analysis.plan.sizes import FLOAT32, Sizes


def loops_over_periods(sizes: Sizes) -> bool:
    """Return whether the layers of a chunk are a loop over periods; XLA unrolls a single period."""
    length = len(sizes.model.pattern)
    periods = (sizes.chunk_layers - sizes.model.first_dense) // length
    return not sizes.is_ordered and length > 1 and periods > 1


def of_period(sizes: Sizes) -> int:
    """Return the bytes that a loop over periods of a pattern needs beyond a loop over layers.

    Without full recomputation, the gradients of all outputs of a period exist at once. With it, the
    gradients of two more layers do (twice the mean of a period); ZeRO-3 has the gradients and the
    gathered weights of a period, and the gradients of the layers left over. A loop reads a copy of
    its weights if there are layers outside it. `stage_memory.py` counts what a pipeline needs to
    recompute a loop.
    """
    if not loops_over_periods(sizes):
        return 0
    model, train = sizes.model, sizes.config.train
    first, length = model.first_dense, len(model.pattern)
    periods, left_over = divmod(sizes.chunk_layers - first, length)
    kinds = [sizes.kinds[-1 if layer.experts else 0] for layer in model.pattern]
    period = [*kinds[first % length :], *kinds[: first % length]]
    is_copied = first or left_over
    copied = periods * sum(kind.copied_weights for kind in period) if is_copied else 0
    if train.recompute != 'full':
        of_all = sizes.queries + 2 * sizes.keys + 2 * FLOAT32 * sizes.whole // sizes.itemsize
        return copied + sum(kind.up + of_all for kind in period[1:])
    if sizes.config.mesh.stages > 1:
        return 0
    if sizes.config.optim.shard == 'weights':
        gathered = sum((FLOAT32 + sizes.itemsize) * kind.matrices for kind in period[1:])
        return copied + gathered + FLOAT32 * sum(kind.matrices for kind in period[:left_over])
    return copied + 2 * FLOAT32 * sum(kind.matrices for kind in period) // length
