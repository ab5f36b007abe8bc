"""The loss's chunks hold every token, are few, and no chunk is too large."""

import pytest

from megajax.counts.chunks import CHUNK_BYTES, FEW_MORE, chunk_sizes


@pytest.mark.parametrize('tokens', [1, 61, 1021, 1024, 2048, 2 * 1021, 8191, 8192])
@pytest.mark.parametrize('share', [0.01, 1, 1.5, 3, 11.7, 1e6])
def test_chunks_hold_every_token_once_and_at_most_a_token_beyond_chunk_bytes(
    tokens: int, share: float
) -> None:
    logit_bytes = int(share * CHUNK_BYTES)
    count, size = chunk_sizes(logit_bytes, tokens)
    assert tokens <= count * size < tokens + size
    assert logit_bytes * (size - 1) / tokens <= CHUNK_BYTES
    least = min(-(-logit_bytes // CHUNK_BYTES), tokens)
    assert count <= FEW_MORE * max(least, 1)


def test_a_prime_number_of_tokens_is_padded_and_a_divisible_one_is_not() -> None:
    assert chunk_sizes(3 * CHUNK_BYTES, 1021) == (3, 341)
    assert chunk_sizes(3 * CHUNK_BYTES, 1024) == (4, 256)
