"""Eight simulated CPU devices for every test, made before jax is first used."""

import os
from collections.abc import Iterator

# On a busy machine a simulated device may be late to a collective, and XLA's default ends the process then.
PATIENCE = '--xla_cpu_collective_call_terminate_timeout_seconds'
if PATIENCE not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {PATIENCE}=600'.strip()
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# The tests compile far more than they run, and this halves the time; the SPMD partitioner works all the same.
jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture(scope='session')
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes that tests start share what they compile, which takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path_factory.mktemp('compiled')))
        patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
        yield
