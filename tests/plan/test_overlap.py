"""What overlaps, beside the schedule of compiled steps."""

import pytest

import megajax
from megajax.config import Config
from megajax.hardware.gpu import has_compiler
from megajax.plan.communication import communication
from megajax.plan.overlap import beside

STEP = 'mesh.data=1', 'mesh.model=4', 'model.num_layers=4', 'train.batch_size=4', 'train.microbatches=1', 'train.dtype=bfloat16'


def share(config: Config) -> float:
    """Of the bytes over `model`."""
    found = [(one.times * one.wire_bytes, beside(one, config).share) for one in communication(config) if one.site.axis == 'model']
    return sum(size * part for size, part in found) / sum(size for size, _ in found)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'")
@pytest.mark.parametrize('sequence_parallel', ['false', 'true'])
@pytest.mark.parametrize('recompute', ['none', 'full'])
@pytest.mark.parametrize('xla', ['default', 'overlap'])
def test_the_share_is_that_of_a_compiled_step(sequence_parallel, recompute, xla):
    overrides = f'mesh.sequence_parallel={sequence_parallel}', f'train.recompute={recompute}', f'train.xla={xla}'
    config = megajax.load('gpt2_345m', [*STEP, *overrides])
    assert megajax.inspect(config, target='h100').overlapped_share['model'] == pytest.approx(share(config), abs=0.12)


def test_only_products_of_the_same_phase_hide_and_never_more_than_all():
    for xla in ('default', 'overlap'):
        config = megajax.load('llama3_8b', ['mesh.sequence_parallel=true', 'train.recompute=full', f'train.xla={xla}', 'mesh.data=4'])
        for one in communication(config):
            part, names = beside(one, config)
            assert 0 <= part <= 1
            assert bool(part) == bool(names)
            assert not part or one.site.axis == 'model'
