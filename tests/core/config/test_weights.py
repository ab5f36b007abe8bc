"""A blend of corpora is a value: equal blends are one key of a dict."""

from megajax.core.config import load


def test_equal_blends_in_another_order_have_equal_hashes() -> None:
    one, other = (
        load('tiny', [f'data.blend={{{pairs}}}']).data.blend
        for pairs in ('a: 1, b: 2', 'b: 2, a: 1')
    )
    assert one == other
    assert hash(one) == hash(other)
