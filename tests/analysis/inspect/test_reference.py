"""The step on one device has the same results however it is compiled, apart from rounding."""

import jax
import numpy as np
import pytest
from support import make_config

from megajax.analysis.inspect.one_device import on_one_device
from megajax.analysis.inspect.reference import recompiled, reference


@pytest.mark.slow
def test_another_compilation_differs_by_rounding_alone():
    config = on_one_device(make_config('llama', 1, 1), exact=True)
    one, other = reference(config, None).results, recompiled(config, None)
    assert one.keys() == other.keys()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one, other)
    assert any(np.any(one[name] != other[name]) for name in one)
