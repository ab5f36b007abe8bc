"""How the loss cuts a microbatch's tokens in chunks, so that the logits of one chunk at a time are in memory."""

CHUNK_BYTES = 128 * 2**20  # of fp32 logits on a device; the least CPU time of 32 to 1000 MB in benchmarks/cpu.py


def num_chunks(logit_bytes: int, tokens: int) -> int:
    """The fewest equal parts of `tokens` tokens, at least one token each, whose logits take CHUNK_BYTES at most of `logit_bytes`."""
    return next(n for n in range(1, tokens + 1) if tokens % n == 0 and (n == tokens or logit_bytes <= n * CHUNK_BYTES))
