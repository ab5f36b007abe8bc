"""The limit of open files, which is raised as far as the system allows."""

import resource
from collections.abc import Iterator

import pytest

from megajax.base.files.open_files import allow_open_files


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(('soft', 'expected'), [(256, 1034), (1024, 1034), (2000, 2010)])
def test_each_call_allows_as_many_files_more(
    soft: int, expected: int, limits: tuple[int, int]
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    for calls in (0, 1):
        allow_open_files(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected + 10 * calls, limits[1])


def test_the_hard_limit_stays(limits: tuple[int, int]) -> None:
    allow_open_files(2**40)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
