"""The documents of context shards, against the numbers of each token's document."""

import jax
import numpy as np
import pytest
from support import make_batch, make_config, on_mesh, pack_at_random

from megajax.core.config import ConfigError
from megajax.core.model.documents import first_tokens, of_all_shards, shared
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.zigzag import position_at
from megajax.core.train.feed import place_batch

CONFIG = make_config('llama', mesh={'data': 2, 'context': 4, 'model': 1}, train={'seq_len': 32})


def test_each_token_gets_the_position_of_the_first_token_of_its_document() -> None:
    batch = pack_at_random(make_batch(CONFIG))
    first_BS = np.arange(32) - batch['positions']
    with on_mesh(CONFIG):
        layout = Layout.of(CONFIG)
        placed = place_batch({'segment_ids': batch['segment_ids']})['segment_ids']
        found = jax.jit(lambda x: first_tokens(x, layout))(placed)
    assert found.sharding.spec == layout('BS')
    np.testing.assert_array_equal(found, first_BS[:, position_at(np.arange(32), 32, 4)])


@pytest.mark.parametrize('ordered', [False, True])
def test_each_shard_gets_the_documents_of_all_tokens(ordered: bool) -> None:
    batch = pack_at_random(make_batch(CONFIG))
    ids = batch['segment_ids']
    with on_mesh(CONFIG):
        layout = Layout.of(CONFIG)
        placed = place_batch({'segment_ids': ids})['segment_ids']
        found = jax.jit(lambda x: of_all_shards(x, layout, ordered=ordered))(placed)
    assert found.sharding.spec == layout('BS')
    expected = ids if ordered else ids[:, position_at(np.arange(32), 32, 4)]
    np.testing.assert_array_equal(found, np.tile(expected, (1, 4)))


def test_an_array_of_rows_is_on_all_context_shards() -> None:
    with on_mesh(CONFIG):
        rows = place_batch({'swapped': np.arange(8, dtype=np.int32)[:, None]})['swapped']
    assert rows.sharding.spec == Layout.of(CONFIG)('B-')


def test_a_block_shares_with_earlier_keys_what_their_document_has_on_both_sides() -> None:
    batch = pack_at_random(make_batch(CONFIG))
    document_BS, first_BS = batch['segment_ids'], np.arange(32) - batch['positions']
    for start, stop in ((16, 16), (20, 12), (24, 8)):  # of eight queries and of eight keys
        queries = slice(start, start + 8)
        same = document_BS[:, queries, None] == document_BS[:, None, stop - 8 : stop]
        found = shared(first_BS[:, queries], np.full(len(first_BS), stop), 8)
        np.testing.assert_array_equal(found[0], same.any(2).sum(1))
        np.testing.assert_array_equal(found[1], same.any(1).sum(1))
        assert same.sum() == (found[0] * found[1]).sum()


@pytest.mark.parametrize('dtype', [np.int32, np.uint32])
def test_a_document_in_several_parts_is_rejected_on_context_shards_alone(dtype: type) -> None:
    ids = np.zeros((8, 32), dtype)
    ids[:, 8:16] = 5
    with on_mesh(CONFIG):
        message = r"segment_ids'\]: row 0 has a document in several parts.* use mesh.context=1"
        with pytest.raises(ConfigError, match=message):
            place_batch({'segment_ids': ids})
        ids[:, 16:] = 1
        place_batch({'segment_ids': ids})
