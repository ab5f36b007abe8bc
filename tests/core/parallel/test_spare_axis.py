"""A strategy is a changed mapping: F over one more axis of the mesh, and everything follows."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import gather, make_batch, make_config, relative_error

from megajax.analysis.inspect.compile import CompiledStep, compile_step
from megajax.analysis.inspect.products import count_products
from megajax.analysis.inspect.sites import site_of
from megajax.analysis.plan.memory import memory
from megajax.core.config import Config
from megajax.core.counts.parameters import own_counts
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

CONFIG = make_config('llama', 2, 2, sequence_parallel=True)
MEGATRON = Layout.of


def with_spare(config: Config) -> Layout:
    """Megatron's layout, but for F, which lies over the axis `spare` too."""
    layout = MEGATRON(config)
    axes = dict(layout.axes) | {'F': ('spare', 'model')}
    sizes = (*layout.sizes, ('spare', 2))
    return dataclasses.replace(layout, axes=tuple(axes.items()), sizes=sizes)


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, 'of', with_spare)


@functools.cache
def compiled() -> CompiledStep:
    mesh = make_mesh(2, 2, spare=2)
    with jax.set_mesh(mesh):
        return compile_step(CONFIG, mesh, 8)


def loss_and_gradients(config: Config, **axes: int) -> tuple[float, dict[str, np.ndarray]]:
    with jax.set_mesh(make_mesh(config.mesh.data, config.mesh.model, **axes)):
        batch = place_batch(make_batch(config))
        function = jax.jit(make_loss_and_gradients(config))
        (loss, _), gradients = function(init_state(config).params, batch, jax.random.key(0))
        return float(loss), gather(gradients)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected_loss, expected = loss_and_gradients(make_config('llama'))
    monkeypatch.setattr(Layout, 'of', with_spare)
    loss, gradients = loss_and_gradients(CONFIG, spare=2)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


@pytest.mark.usefixtures('spare')
def test_the_counts_are_those_of_the_arrays_and_of_the_compiled_step() -> None:
    step = compiled()
    held = sum(placement.bytes_per_device for placement in step.parameters)
    assert own_counts(CONFIG).all * 4 == held == memory(CONFIG).parameters
    products = count_products(CONFIG, Program(step.text), 'cpu')
    # XLA shares out one of the products that every device along `spare` would repeat.
    assert products.expected * 0.99 < products.compiled <= products.expected


@pytest.mark.usefixtures('spare')
def test_inspect_names_the_axes_that_the_mlp_is_reduced_over() -> None:
    step = compiled()
    axes = dict[str, set[str]]()
    for one in collectives(Program(step.text), step.mesh):
        if not one.is_scalar and site_of(one, CONFIG).phase == 'backward':
            axes.setdefault(site_of(one, CONFIG).name, set()).update(one.axes)
    assert axes['attention'] == {'model'}
    assert axes['mlp'] == {'spare', 'model'}
