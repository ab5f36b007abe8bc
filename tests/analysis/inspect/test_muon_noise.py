"""Muon's update of a gradient of rounding errors is not compared; any other one is."""

from typing import Any

import numpy as np
import pytest
from support import make_config

from megajax.analysis.inspect import emulated_step
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.muon_noise import Noise, noise_of, orthogonalized
from megajax.core.counts.parameters import dim_sizes, shape_of
from megajax.core.hardware.targets import has_compiler

MUON = make_config('llama', 1, 1, optim={'kind': 'muon'})
QKV = orthogonalized(MUON)['layers.attention.qkv.weight']
LAYERS, QUERIES = MUON.model.num_layers, slice(MUON.model.num_heads // MUON.model.num_kv_heads)
LIMITS = 1e-6, 1e-6


def gradient(queries: float, layers: slice = slice(None)) -> np.ndarray:
    """A gradient whose queries are multiplied by a number in these layers."""
    x = np.random.default_rng(0).normal(size=shape_of(QKV.dims, dim_sizes(MUON.model)))
    parts = {'L': layers, 'C': QUERIES}
    x[tuple(parts.get(dim, slice(None)) for dim in QKV.dims)] *= queries
    return x


def noise(executed: np.ndarray, expected: np.ndarray, exact: np.ndarray) -> Noise:
    return noise_of(MUON, QKV, [((), executed)], expected, exact, LIMITS)


def test_the_update_of_a_gradient_of_rounding_errors_is_undetermined() -> None:
    zero, rounded = gradient(0), gradient(1e-9)
    found = noise(rounded, zero, zero)
    assert found.mask is not None
    assert (found.mask == (zero == 0)).all()
    assert found.note.startswith(f'undetermined in {LAYERS} matrices')
    norm = np.linalg.norm(rounded[zero == 0])
    assert f'(norm 0.0e+00 on one device, {norm:.1e} executed)' in found.note
    lost = np.full(zero.shape, np.nan)
    assert (found.without(np.ones(zero.shape)) == (zero != 0)).all()
    assert np.isnan(found.without(lost)).all()


def test_each_matrix_is_undetermined_by_itself() -> None:
    first = slice(0, 1)
    found = noise(gradient(1e-9, first), gradient(0, first), gradient(0, first))
    assert found.mask is not None
    assert (found.mask == (gradient(0, first) == 0)).all()


@pytest.mark.parametrize(
    ('executed', 'expected', 'exact'),
    [(0.1, 0, 0), (1e-9, 0.1, 0.1), (0, 0, 0), (np.nan, 0, 0), (1, 1, 1)],
    ids=['wrong', 'lost', 'zero', 'no number', 'usual'],
)
def test_any_other_update_is_compared(executed: float, expected: float, exact: float) -> None:
    found = noise(gradient(executed), gradient(expected), gradient(exact))
    assert found == Noise()
    x = np.ones(3)
    assert found.without(x) is x


def test_only_matrices_that_muon_orthogonalizes_can_be_undetermined() -> None:
    assert not orthogonalized(make_config('llama', 1, 1))
    assert 'embedding.table' not in orthogonalized(MUON)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler")
def test_with_a_window_of_one_token_only_a_wrong_gradient_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token then attends to itself alone. In 16 bits, attention is a kernel with rounding."""
    model = {'num_layers': 1, 'head_dim': 64, 'window': 1}
    sections = {'train': {'dtype': 'bfloat16'}, 'optim': {'kind': 'muon'}}
    step = EmulatedStep(make_config('llama', 1, 2, model=model, **sections), 'h100')
    results = {each.name: each for each in step.results(exact=True)}
    assert all(each.ok for each in results.values())
    assert [name for name, each in results.items() if each.note] == [
        'layers.attention.qkv.weight after the step'
    ]
    by_name = emulated_step.compared_of

    def with_wrong_queries(*compared: Any) -> dict[str, Any]:
        found = by_name(*compared)
        name = 'gradient of layers.attention.qkv.weight'
        if isinstance(found[name], list):  # the executed program's
            found[name] = [(place, piece + 1e-2) for place, piece in found[name]]
        return found

    monkeypatch.setattr(emulated_step, 'compared_of', with_wrong_queries)
    wrong = {each.name: each for each in step.results(exact=True) if not each.ok}
    assert {*wrong} == {
        'gradient of layers.attention.qkv.weight', 'layers.attention.qkv.weight after the step'
    }  # fmt: skip
    assert not any(each.note for each in wrong.values())
