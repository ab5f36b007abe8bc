"""The chunks of a microbatch's tokens in the loss, which has the logits of one chunk in memory."""

CHUNK_BYTES = 128 * 2**20  # fp32 logits per device; the least CPU time of 32 to 1000 MB
FEW_MORE = 2  # maximum chunks per needed chunk, for a number of chunks that divides the tokens


def chunk_sizes(logit_bytes: int, tokens: int) -> tuple[int, int]:
    """Return the number of equal chunks of `tokens` tokens, and the tokens per chunk.

    A chunk has at most CHUNK_BYTES of `logit_bytes`, or one token more. A number of chunks that
    divides the tokens is preferred; if it would be much larger, the last chunk is padded.
    """
    least = max(1, min(-(-logit_bytes // CHUNK_BYTES), tokens))
    for count in range(least, min(FEW_MORE * least, tokens) + 1):
        if tokens % count == 0:
            return count, tokens // count
    size = -(-tokens // least)
    return -(-tokens // size), size
