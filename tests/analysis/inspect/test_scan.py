"""A scan compiles layers in a loop, and says so."""

from types import SimpleNamespace
from typing import Any

import pytest

import megajax
from megajax.analysis import inspect as package
from megajax.analysis.inspect import Inspection, audit, inspect_with_text


@pytest.mark.parametrize(
    ('unroll', 'scan', 'is_quick'),
    [('true', True, True), ('true', False, False), ('false', True, False)],
)
def test_a_scan_is_of_loops_only_where_layers_would_be_unrolled(
    monkeypatch: pytest.MonkeyPatch, unroll: str, scan: bool, is_quick: bool
) -> None:
    compiled = list[Any]()

    def compile_in_child(config: Any, *_: object, **__: object) -> SimpleNamespace:
        compiled.append(config)
        return SimpleNamespace(text='HloModule m')

    monkeypatch.setattr(package, 'compile_in_child', compile_in_child)
    monkeypatch.setattr(audit, 'audit', lambda *_: Inspection.model_construct())
    config = megajax.load('tiny', [f'train.unroll={unroll}'])
    inspection, text = inspect_with_text(config, target='cpu', hosts=None, scan=scan)
    assert text == 'HloModule m'
    assert inspection.scan == is_quick
    assert compiled[0].train.unroll == (unroll == 'true' and not is_quick)
