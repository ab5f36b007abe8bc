"""Two H100 programs of one step, stored, run where no GPU compiler is: one is right, and one loses
a gradient.
"""

import lzma
from typing import Any

from megajax.analysis.inspect import emulated_step
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.reference import SECOND

from .make_stored import FOLDER, config


def stored(name: str) -> EmulatedStep:
    text = lzma.decompress((FOLDER / f'{name}.txt.xz').read_bytes()).decode()
    return EmulatedStep(config(), 'h100', stored=text)


def differences(name: str) -> dict[str, float]:
    return {one.name: one.error for one in stored(name).differences()}


def test_a_right_program_computes_what_one_device_computes(monkeypatch):
    step, results = stored('right'), []

    def run_once(*arguments: Any, **options: Any) -> Any:
        results[:] = results or [run_on_cpu(*arguments, **options)]
        return results[0]

    monkeypatch.setattr(emulated_step, 'run_on_cpu', run_once)
    assert max(one.error for one in step.differences()) < 1e-5
    monkeypatch.setattr(emulated_step, 'compared_of', with_wrong_moments)
    wrong = [one for one in step.results() if not one.ok]
    assert [(one.name, one.note) for one in wrong] == [
        ('gradient of layers.mlp.up.weight', "of Adam's second moment")
    ]


def with_wrong_moments(*results: Any) -> dict[str, Any]:
    """The results of a program that computes a second moment of one parameter wrongly."""
    found, name = compared_of(*results), f'{SECOND}layers.mlp.up.weight'
    return found | {name: [(place, 1.01 * piece) for place, piece in found[name]]}


compared_of, run_on_cpu = emulated_step.compared_of, emulated_step.run_on_cpu


def test_a_program_that_loses_a_gradient_is_found_by_its_gradients_and_not_by_its_loss():
    errors = differences('broken')
    assert errors['loss'] < 1e-5
    assert errors['gradient of layers.mlp.up.weight'] > 0.1
    assert errors['grad_norm'] > 0.01
