"""Where process 0 waits for the others."""

import pytest

from megajax.config import ConfigError
from megajax.processes.environment import Start
from megajax.processes.rendezvous import _listen


def start(bind: str | None) -> Start:
    return Start(index=0, count=2, host='127.0.0.1', port=0, bind=bind, timeout=1)


@pytest.mark.parametrize(
    ('bind', 'interfaces'),
    [('127.0.0.1', {'127.0.0.1'}), ('::1', {'::1'}), (None, {'::', '0.0.0.0'})],
)
def test_it_listens_on_the_interface_that_it_is_given_and_on_no_other(
    bind: str | None, interfaces: set[str]
) -> None:
    with _listen(start(bind), 0) as server:
        assert server.getsockname()[0] in interfaces


def test_an_interface_that_this_host_has_not_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ConfigError,
        match=r'^process 0 cannot listen on 192\.0\.2\.1, port 0 \(.+\): choose another port in ',
    ):
        _listen(start('192.0.2.1'), 0)
