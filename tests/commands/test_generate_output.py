"""Generated texts are lines of JSON, whatever the encoding of standard output."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from megajax.commands.generate_output import print_json

TEXTS = 'caf\xe9', 'smile \U0001f600', 'back\\slash "quoted"\n'


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1', 'cp1252', 'utf-8', 'UTF8'])
def test_each_line_is_json_in_every_encoding_of_the_terminal(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    # As `main` sets it, so that no character ends a run.
    stdout = io.TextIOWrapper(written, encoding=encoding, errors='backslashreplace')
    monkeypatch.setattr(sys, 'stdout', stdout)
    for text in TEXTS:
        print_json(SimpleNamespace(text=text, ids=[1, 2], end='stop'), prompt=text)
    lines = written.getvalue().decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {'prompt': text, 'text': text, 'tokens': 2, 'end': 'stop'} for text in TEXTS
    ]
    assert ('caf\xe9' in lines[0]) == encoding.lower().startswith('utf')
