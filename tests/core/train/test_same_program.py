"""Every process of a run traces the same program, whatever order its sets have."""

import os
import subprocess
import sys

import pytest
from support import ROOT

PROGRAM = """
import hashlib
import conftest, jax
from steps import Setting, batch_of, init_loss_scale, make_loss_and_gradients, on_mesh
from support import random_params

for setting in (
    Setting('bert', 2, 2, context=2, num_layers=1),
    Setting('experts', 2, 2, 'weights', experts=2, num_layers=1),
):
    config = setting.config
    with on_mesh(config):
        given = random_params(config, std=0.05), batch_of(setting), jax.random.key(0)
        step = jax.jit(make_loss_and_gradients(config)).lower(*given, init_loss_scale(config))
    print(setting, hashlib.sha256(step.as_text().encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_program_does_not_depend_on_the_process() -> None:
    def traced(seed: str) -> str:
        return subprocess.run(
            [sys.executable, '-c', PROGRAM],
            env=os.environ | {'PYTHONHASHSEED': seed, 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}'},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    # A set of two axes of the mesh has the opposite order in these, whichever the two are.
    assert traced('1') == traced('250')
