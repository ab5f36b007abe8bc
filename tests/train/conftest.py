"""What runs in processes of their own share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope='module')
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes share what they compile; that takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path_factory.mktemp('compiled')))
        patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
        yield
