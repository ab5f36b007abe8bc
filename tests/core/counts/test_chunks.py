"""The loss's chunks hold every token, are few, and no chunk is too large."""

import pytest

from megajax.core.counts.chunks import CPU_CHUNK_BYTES, FEW_MORE, GPU_CHUNK_BYTES, chunk_sizes


@pytest.mark.parametrize('tokens', [1, 61, 1021, 1024, 2048, 2 * 1021, 8191, 8192])
@pytest.mark.parametrize('share', [0.01, 1, 1.5, 3, 11.7, 1e6])
@pytest.mark.parametrize('on_gpu', [False, True])
def test_chunks_hold_every_token_once_and_at_most_a_token_beyond_the_limit_of_the_device(
    tokens: int, share: float, on_gpu: bool
) -> None:
    limit = GPU_CHUNK_BYTES if on_gpu else CPU_CHUNK_BYTES
    logit_bytes = int(share * limit)
    count, size = chunk_sizes(logit_bytes, tokens, on_gpu=on_gpu)
    assert tokens <= count * size < tokens + size
    assert logit_bytes * (size - 1) / tokens <= limit
    least = min(-(-logit_bytes // limit), tokens)
    assert count <= FEW_MORE * max(least, 1)


def test_a_prime_number_of_tokens_is_padded_and_a_divisible_one_is_not() -> None:
    assert chunk_sizes(3 * CPU_CHUNK_BYTES, 1021, on_gpu=False) == (3, 341)
    assert chunk_sizes(3 * CPU_CHUNK_BYTES, 1024, on_gpu=False) == (4, 256)
