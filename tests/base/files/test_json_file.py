"""Whatever a file holds is a value or one kind of error."""

import pytest

from megajax.base.files.json_file import parse_json


def test_a_value_comes_back() -> None:
    assert parse_json('{"a": [1, null]}') == parse_json(b'{"a": [1, null]}') == {'a': [1, None]}


@pytest.mark.parametrize(
    'text',
    ['', '{', '[' * 100_000, '{"a":' * 100_000, '9' * 5_000, b'\xff', b'\x80abc'],
    ids=['empty', 'cut short', 'lists', 'objects', 'digits', 'no encoding', 'no UTF-8'],
)
def test_anything_else_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r'.'):
        parse_json(text)
