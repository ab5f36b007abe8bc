"""The lengths to which prompts, scored windows and KV caches are padded. Imports no jax."""

SLOTS = 64  # the cache's length is a multiple of this, so that different lengths rarely recompile
# minimum number of tokens; prompts and windows are padded to this length or a larger power of two
SHORTEST = 16


def padded_length(longest: int, most: int) -> int:
    """Return the length to which prompts are padded, of which the longest has `longest` tokens.

    It is at most `most`, which is `model.max_seq_len`.
    """
    return min(max(SHORTEST, 1 << (longest - 1).bit_length()), most)


def slots_of_cache(tokens: int) -> int:
    """Return the slots of a KV cache for this many tokens of padded prompts and texts."""
    return -(-tokens // SLOTS) * SLOTS
