"""The chunks of tokens in the loss; only one chunk's logits are in memory at a time."""

# fp32 logits per device. On CPUs, of all limits from 32 to 1000 MB, this one took the least time.
# On GPUs each chunk reads the head and adds to its gradient; with a gibibyte, a step of a 4.5B
# model would be 1% faster, but other models would need up to 13% more memory.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 128 * 2**20, 512 * 2**20
FEW_MORE = 2  # maximum chunks per needed chunk, for a number of chunks that divides the tokens


def chunk_sizes(logit_bytes: int, tokens: int, *, on_gpu: bool) -> tuple[int, int]:
    """Return the number of equal chunks of `tokens` tokens, and the tokens per chunk.

    A chunk's logits take at most the device's limit, or one token more; `logit_bytes` are the bytes
    of all tokens' logits. A number of chunks that divides the tokens is preferred, unless it would
    be much larger; then the last chunk is padded.
    """
    limit = GPU_CHUNK_BYTES if on_gpu else CPU_CHUNK_BYTES
    least = max(1, min(-(-logit_bytes // limit), tokens))
    for count in range(least, min(FEW_MORE * least, tokens) + 1):
        if tokens % count == 0:
            return count, tokens // count
    size = -(-tokens // least)
    return -(-tokens // size), size
