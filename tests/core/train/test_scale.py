"""The largest preset of the Megatron paper compiles on a laptop: abstract arguments, eight
simulated devices, nothing allocated.
"""

import time

import pytest

import megajax
from megajax.analysis.inspect.compile import compile_for
from megajax.core.counts.parameters import num_parameters


@pytest.mark.slow
def test_8b_parameters_compile_for_eight_devices() -> None:
    config = megajax.load('megatron_8.3b', ['mesh.data=1', 'mesh.model=8', 'train.batch_size=8'])
    start = time.process_time()
    compiled = compile_for(config, 'cpu', hosts=1)
    assert time.process_time() - start < 30
    parameters_and_adam = 3 * 4 * num_parameters(config.model, padded=True)
    assert compiled.arguments < 1.01 * parameters_and_adam / 8
