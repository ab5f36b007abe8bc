"""A job of Slurm that got no GPU is known as such, and one that wants none is not."""

import pytest

from megajax.core.hardware import visible
from megajax.core.hardware.visible import lacks_gpus_of_slurm

TASK = {'SLURM_JOB_ID': '7', 'CUDA_VISIBLE_DEVICES': ''}


@pytest.mark.parametrize(
    ('environ', 'plugin', 'lacks'),
    [
        (TASK, True, True),
        (TASK | {'CUDA_VISIBLE_DEVICES': 'NoDevFiles'}, True, True),
        (TASK, False, False),
        ({'CUDA_VISIBLE_DEVICES': ''}, True, False),
        (TASK | {'JAX_PLATFORMS': 'cpu'}, True, False),
        (TASK | {'CUDA_VISIBLE_DEVICES': '0,1'}, True, False),
    ],
)
def test_a_task_lacks_gpus_that_its_installation_could_use(
    environ: dict[str, str], plugin: bool, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, 'has_cuda_plugin', lambda: plugin)
    assert lacks_gpus_of_slurm(environ) == lacks
