"""The command that installs an extra names where megajax came from."""

import json
import shlex

import pytest

from megajax.core.config import extras


@pytest.mark.parametrize(
    ('origin', 'command'),
    [
        (None, "pip install -e '/path/to/megajax[plot]'"),
        (
            {'url': 'file:///home/ada/my%20code', 'dir_info': {'editable': True}},
            "pip install -e '/home/ada/my code[plot]'",
        ),
        (
            {'url': 'file:///home/ada/code', 'dir_info': {}},
            "pip install 'megajax[plot] @ file:///home/ada/code'",
        ),
        (
            {'url': 'file:///tmp/megajax-0.1.0-py3-none-any.whl', 'archive_info': {}},
            "pip install 'megajax[plot] @ file:///tmp/megajax-0.1.0-py3-none-any.whl'",
        ),
        (
            {'url': 'https://host/megajax', 'vcs_info': {'vcs': 'git', 'commit_id': 'c0ffee'}},
            "pip install 'megajax[plot] @ git+https://host/megajax@c0ffee'",
        ),
    ],
)
def test_an_extra_comes_from_where_megajax_came(
    monkeypatch: pytest.MonkeyPatch, origin: dict | None, command: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == 'direct_url.json'
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(extras, 'distribution', lambda name: Installed())
    assert extras.install('plot') == command
    assert shlex.split(extras.install()) == shlex.split(command.replace('[plot]', ''))


def test_a_copy_that_pip_does_not_know_is_installed_from_a_clone(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, 'distribution', missing)
    command = "pip install --upgrade -e '/path/to/megajax[cuda]'"
    assert extras.install('cuda', upgrade=True) == command
