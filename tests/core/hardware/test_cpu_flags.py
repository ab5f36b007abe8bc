"""The settings with which XLA simulates CPU devices."""

import os

import pytest

from megajax.base.cores import usable_cores
from megajax.core.hardware.cpu_flags import two_threads_each


def test_threads_are_set_in_the_block_alone_and_what_a_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv('NPROC', raising=False)
    with two_threads_each(1000):
        assert os.environ['NPROC'] == '2000'
    assert 'NPROC' not in os.environ
    with two_threads_each(1):  # not less than XLA's own number
        assert int(os.environ['NPROC']) == max(2, usable_cores())
    monkeypatch.setenv('NPROC', '3')
    with two_threads_each(1000):
        assert os.environ['NPROC'] == '3'
    assert os.environ['NPROC'] == '3'
