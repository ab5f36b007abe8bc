"""Eight simulated CPU devices for every test, made before jax is first used."""

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator

# On a busy machine a simulated device may be late to a collective, and XLA's default ends the
# process then.
FLAGS = {'--xla_cpu_collective_call_terminate_timeout_seconds': '600'}
if importlib.metadata.version('jax').startswith('0.10.'):  # later ones have no such flag
    FLAGS['--xla_cpu_use_fusion_emitters'] = 'false'  # they take twice as long to compile
for flag, value in FLAGS.items():
    if flag not in os.environ.get('XLA_FLAGS', ''):
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}={value}'.strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
# The tests, and the processes that they start, compile far more than they run. This halves the
# time; the SPMD partitioner works all the same. What one of them has compiled the others read.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = 'true'
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix='megajax-compiled-')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = compiled.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# No property is about time, and a busy machine may be late.
hypothesis.settings.register_profile('without a deadline', deadline=None)
hypothesis.settings.load_profile('without a deadline')


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    """A run that a failed test has left would slow all others."""
    yield
    if 'runs' in sys.modules:
        for process in sys.modules['runs'].STARTED:
            process.kill()
        sys.modules['runs'].STARTED.clear()
