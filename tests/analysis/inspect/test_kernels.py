"""The kernels of a step compiled for an H100: nothing is lost among them, a budget limits them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

import megajax
from megajax.analysis.inspect import Inspection, inspect_with_text
from megajax.analysis.inspect.budget import Budget, over_budget
from megajax.analysis.inspect.kernels import total, totals
from megajax.analysis.inspect.report import to_text
from megajax.core.config import ConfigError
from megajax.core.config.records import read_record
from megajax.core.counts.product import Product
from megajax.core.counts.products import products
from megajax.core.hardware.targets import has_compiler
from megajax.core.parallel.mesh import AXES
from megajax.xla.hlo.kernels import kernels
from megajax.xla.hlo.program import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
    ),
]


@pytest.fixture(scope='module')
def inspected() -> tuple[Inspection, str]:
    size = 'model.num_layers=2', 'model.vocab_size=1000', 'model.dropout=0.0', 'mesh.data=1'
    config = megajax.load('tiny', [*size, 'train.dtype=bfloat16', 'train.recompute=none'])
    return inspect_with_text(config, target='h100', hosts=None, scan=False)


def test_they_sum_to_the_programs_bytes_and_to_the_products_of_the_step(inspected) -> None:
    inspection, text = inspected
    program, whole = Program(text), total(inspection.kernels)
    assert whole.bytes == sum(kernel.times * kernel.bytes for kernel in kernels(program))
    assert whole.flops == inspection.products.compiled
    assert whole.seconds == pytest.approx(inspection.compute_seconds)
    by_kind = totals(inspection.kernels, lambda kernel: (kernel.kind,))
    assert sum(group.bytes for group in by_kind.values()) == whole.bytes
    assert {'matmul', 'attention', 'attention gradient', 'elementwise'} <= {k for (k,) in by_kind}


def test_each_names_its_place_and_the_tables_show_it(inspected) -> None:
    inspection, _ = inspected
    slowest = [kernel.seconds for kernel in inspection.kernels]
    assert slowest == sorted(slowest, reverse=True)
    products = [kernel for kernel in inspection.kernels if kernel.kind == 'matmul']
    assert {kernel.site for kernel in products} == {'attention', 'mlp', 'head'}
    assert all('megajax/core/model' in kernel.source for kernel in products)
    shown = to_text(inspection, kernels=True)
    assert 'kernels per step: roofline estimates' in shown
    assert 'core/model/product.py' in shown
    assert 'kernels per step: roofline estimates' not in to_text(inspection)


def limits(inspection: Inspection) -> Iterator[tuple[str, float]]:
    """Every limit of a budget, and what the step takes of it."""
    whole = total(inspection.kernels)
    yield 'gigabytes', whole.bytes / 1e9
    yield 'milliseconds', 1e3 * (inspection.compute_seconds + inspection.exposed_seconds)
    yield 'launches', whole.launches
    yield 'temporaries', inspection.memory.temporaries / 1e9


def test_a_budget_is_exceeded_by_any_more_than_its_limit(inspected) -> None:
    inspection, _ = inspected
    for name, found in limits(inspection):
        assert not [*over_budget(inspection, Budget.model_validate({name: 1.001 * found}))]
        (finding,) = over_budget(inspection, Budget.model_validate({name: 0.999 * found}))
        assert finding.level == 'error'
        assert finding.message.startswith(name)
    by_kind = {'kinds': {'elementwise': 0.0}, 'wire': {'model': 0.0, 'data': 1.0}}
    found = [finding.message for finding in over_budget(inspection, Budget.model_validate(by_kind))]
    assert [message.split()[0] for message in found] == ['kinds.elementwise', 'wire.model']


def test_a_mistake_in_a_budget_is_named(tmp_path: Path) -> None:
    file = tmp_path / 'budget.yaml'
    file.write_text('gigabyte: 3\nkinds: {casts: 1}\nwire: {modle: 2}\n')
    with pytest.raises(ConfigError) as caught:
        read_record(file, Budget)
    assert all(name in str(caught.value) for name in ('gigabyte', 'kinds.casts', 'wire.modle'))
    with pytest.raises(ValidationError):
        Budget.model_validate({'launches': -1})


def test_a_budget_of_an_earlier_release_limits_matmuls_as_products() -> None:
    assert Budget.model_validate({'kinds': {'product': 2}}) == Budget(kinds={'matmul': 2})


@pytest.mark.parametrize('axis', AXES)
def test_every_axis_of_a_mesh_has_a_limit(axis: str) -> None:
    assert Budget.model_validate({'wire': {axis: 6}}).wire == {axis: 6}


@pytest.mark.parametrize('microbatches', [1, 4])
def test_weights_are_cast_once_a_step_and_attention_runs_forward_once(microbatches: int) -> None:
    size = 'model.num_layers=4', 'model.vocab_size=1000', 'mesh.data=1', 'mesh.model=1'
    step = 'train.dtype=bfloat16', f'train.microbatches={microbatches}', 'train.batch_size=32'
    config = megajax.load('tiny', [*size, *step, 'model.hidden_size=512'])
    inspection, _ = inspect_with_text(config, target='h100', hosts=None)
    runs = dict.fromkeys(('attention', 'attention gradient'), 0)
    for kernel in inspection.kernels:
        if kernel.kind in runs:
            runs[kernel.kind] += kernel.times
    assert runs == dict.fromkeys(runs, 4 * microbatches)
    cast = sum(
        kernel.times * kernel.bytes for kernel in inspection.kernels if kernel.kind == 'cast'
    )
    matrices = sum(
        x.times * x.flops for x in products(config, flash=True) if multiplies_a_weight(x)
    )
    assert cast == pytest.approx(6 * matrices / (2 * 32 * config.train.seq_len), rel=1e-3)


def multiplies_a_weight(product: Product) -> bool:
    """Forward, and so once for each weight."""
    return product.where in ('layers', 'head') and product.phase == 'forward'
