"""How the loss cuts a microbatch's tokens in chunks, with the logits of one chunk in memory."""

CHUNK_BYTES = 128 * 2**20  # of fp32 logits on a device; of 32 to 1000 MB the least CPU time
FEW_MORE = 2  # up to so many times as many chunks as needed are taken where they divide the tokens


def chunk_sizes(logit_bytes: int, tokens: int) -> tuple[int, int]:
    """Return into how many equal chunks `tokens` tokens are cut, and the tokens of one.

    Of `logit_bytes` a chunk takes CHUNK_BYTES at most, or one token more. Chunks that divide the tokens
    are preferred; where these would be many more, the last chunk is filled up with padding.
    """
    least = max(1, min(-(-logit_bytes // CHUNK_BYTES), tokens))
    for count in range(least, min(FEW_MORE * least, tokens) + 1):
        if tokens % count == 0:
            return count, tokens // count
    size = -(-tokens // least)
    return -(-tokens // size), size
