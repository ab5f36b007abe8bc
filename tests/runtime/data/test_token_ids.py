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
        assert token_ids._read_range(tokens) == found
