"""What all processes of a run would log is logged once, and what one process knows is not lost."""

import logging
from collections.abc import Iterator

import jax
import pytest

from megajax.runtime.data import text_tokens
from megajax.runtime.processes import log_once, peers
from megajax.runtime.processes.log_once import logged_once

logger = logging.getLogger('megajax.of_a_run')


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[object]:
    """Runs a block as one process of three; the first one sends what the others compare with."""
    caplog.set_level('INFO', 'megajax')
    sent = list[str]()

    def run(process: int, *warnings: str, then: Exception | None = None) -> list[str]:
        def text_from_first(text: str) -> str:
            if process == 0:
                sent.append(text)
            return sent[-1]

        caplog.clear()
        monkeypatch.setattr(jax, 'process_count', lambda: 3)
        monkeypatch.setattr(jax, 'process_index', lambda: process)
        monkeypatch.setattr(log_once, 'text_from_first', text_from_first)
        with logged_once():
            for warning in warnings:
                logger.warning('%s', warning)
            if then is not None:
                raise then
        return caplog.messages

    yield run
    assert not logging.getLogger('megajax').handlers
    assert logging.getLogger('megajax').propagate


def test_a_warning_of_all_processes_is_logged_by_the_first(runs) -> None:
    assert runs(0, 'a', 'b') == ['a', 'b']
    assert runs(1, 'a', 'b') == []
    assert runs(2, 'b', 'a', 'a') == []


def test_a_warning_that_the_first_process_does_not_have_is_logged_where_it_is(runs) -> None:
    assert runs(0, 'only here', 'a') == ['only here', 'a']
    assert runs(1, 'a', 'jax 0.9') == ['jax 0.9']
    assert runs(2) == []
    assert runs(0) == []
    assert runs(1, 'a') == ['a']


def test_a_block_that_fails_loses_no_warning(runs, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match='disk'):
        runs(1, 'a', then=OSError('disk'))
    assert caplog.messages == ['a']


@pytest.mark.parametrize(
    ('name', 'level', 'is_held'),
    [
        ('megajax.of_a_run', logging.WARNING, True),
        ('megajax.of_a_run', logging.ERROR, False),
        ('megajax.of_a_run', logging.INFO, False),
        ('megajax.runtime.data.sources.remote_file', logging.WARNING, False),
        (text_tokens.logger.name, logging.WARNING, False),
        (peers.logger.name, logging.WARNING, False),
    ],
)
def test_what_may_say_why_a_process_hangs_is_logged_at_once(
    name: str,
    level: int,
    is_held: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level('INFO', 'megajax')
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    monkeypatch.setattr(log_once, 'text_from_first', lambda text: '[]')
    with logged_once():
        logging.getLogger(name).log(level, 'a line')
        assert caplog.messages == ([] if is_held else ['a line'])
    assert caplog.messages == ['a line']
