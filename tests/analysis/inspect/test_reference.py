"""The step on one device has the same results however it is compiled, apart from rounding."""

import jax
import numpy as np
import pytest
from support import make_config

from megajax.analysis.inspect.one_device import on_one_device
from megajax.analysis.inspect.reference import first_state, recompiled, reference


def test_the_load_of_experts_differs_among_them_and_is_the_same_in_each_dtype():
    """The gradient of the balance loss is zero where all experts have the same load."""
    loads = [
        first_state(on_one_device(config, exact=exact)).load
        for config in [make_config('experts', train={'dtype': 'bfloat16'})]
        for exact in (False, True)
    ]
    np.testing.assert_array_equal(*loads)
    np.testing.assert_allclose(loads[0].sum(-1), 1, rtol=1e-6)
    assert loads[0].min() > 0
    assert (np.ptp(loads[0], -1) > 0.1 * loads[0].mean()).all()


@pytest.mark.slow
def test_another_compilation_differs_by_rounding_alone():
    config = on_one_device(make_config('llama', 1, 1), exact=True)
    one, other = reference(config, None).results, recompiled(config, None)
    assert one.keys() == other.keys()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one, other)
    assert any(np.any(one[name] != other[name]) for name in one)
