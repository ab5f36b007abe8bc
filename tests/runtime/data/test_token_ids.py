"""Every id of a file of tokens is looked at."""

import numpy as np
import pytest

from megajax.runtime.data.tokens import token_ids


@pytest.mark.parametrize('chunk', [1, 2, 3, 100])
@pytest.mark.parametrize('place', range(5))
def test_the_range_is_that_of_all_tokens_wherever_they_stand(
    place: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, 'CHUNK', chunk)
    tokens = np.full(5, 7)
    for extreme, found in ((9, (7, 9)), (-1, (-1, 7))):
        tokens[place] = extreme
        assert token_ids._read_range(tokens, 0, 1) == found


@pytest.mark.parametrize('count', [1, 2, 3, 7])
def test_the_processes_read_every_chunk_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, 'CHUNK', 2)

    class Read(np.ndarray):
        def __getitem__(self, part: slice) -> np.ndarray:
            read.append(part.start)
            return np.asarray(self)[part]

    read: list[int] = []
    tokens = np.array([5, 3, 9, 1, 4, 2, 6]).view(Read)
    shares = [token_ids._read_range(tokens, share, count) for share in range(count)]
    assert sorted(read) == [0, 2, 4, 6]
    assert max(high for _, high in shares) == 9
    assert min(low for low, high in shares if high >= 0) == 1
