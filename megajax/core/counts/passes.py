"""The ticks of a pipeline's schedule, counted without its tables (`core/counts/schedule.py`)."""


def num_passes(stages: int, chunks: int, microbatches: int) -> int:
    """Return the ticks of a step with a forward pass on some stage."""
    if chunks > 1:  # the groups of microbatches that go through all chunks are filled up
        microbatches = -(-microbatches // stages) * stages
    return chunks * microbatches + stages - 1
