"""Two H100 programs of one step, stored, run where no GPU compiler is: one is right, and one loses
a gradient.
"""

import lzma

from megajax.analysis.inspect.emulated_step import EmulatedStep

from .make_stored import FOLDER, config


def differences(name: str) -> dict[str, float]:
    text = lzma.decompress((FOLDER / f'{name}.txt.xz').read_bytes()).decode()
    return {
        one.name: one.error for one in EmulatedStep(config(), 'h100', stored=text).differences()
    }


def test_a_right_program_computes_what_one_device_computes():
    assert max(differences('right').values()) < 1e-5


def test_a_program_that_loses_a_gradient_is_found_by_its_gradients_and_not_by_its_loss():
    errors = differences('broken')
    assert errors['loss'] < 1e-5
    assert errors['gradient of layers.mlp.up.weight'] > 0.1
    assert errors['grad_norm'] > 0.01
