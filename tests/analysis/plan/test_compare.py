"""GPUs next to each other: what is cheapest, and what fits."""

import json

import pytest
from typer.testing import CliRunner

from megajax.analysis.plan.compare import compare, with_price
from megajax.commands.main import app
from megajax.core.config import ConfigError, load

SMALL = ('mesh.data=4', 'mesh.model=1', 'train.batch_size=4', 'train.microbatches=1')


def test_the_cheapest_machine_is_first(tmp_path) -> None:
    file = tmp_path / 'compared.json'
    asked = '--compare', 'h200=9,h100=2', '--tokens', '1e9', '--json', str(file)
    done = CliRunner().invoke(app, ['plan', 'gpt2_124m', *SMALL, *asked])
    assert done.exit_code == 0
    h100, h200 = json.loads(file.read_text())['machines']
    assert (h100['gpu'], h200['gpu']) == ('h100', 'h200')
    assert h100['cost'] == pytest.approx(2 * h100['gpu_hours'])
    assert h200['days'] * 24 * 4 == pytest.approx(h200['gpu_hours'])
    assert h200['days'] < h100['days']
    assert 'longest sequence' in done.stdout


def test_more_memory_needs_fewer_gpus() -> None:
    config = load('llama3_8b', ('mesh.data=4', 'train.batch_size=8', 'train.microbatches=1'))
    large, small = compare(config, {'h100': None, 'b300': None}).machines  # the fastest is first
    assert (large.gpu, small.gpu) == ('b300', 'h100')
    assert large.fewest_gpus < small.fewest_gpus


def test_a_machine_on_which_nothing_fits_is_last() -> None:
    config = load(
        'llama3_70b', ('mesh.data=8', 'mesh.model=1', 'train.batch_size=8', 'train.microbatches=1')
    )
    found = compare(config, {'h100': 1.0, 'b300': 2.0})
    assert [x.layout is None for x in found.machines] == [False, True]
    assert found.machines[1].fewest_gpus is None
    assert 'does not fit' in str(found)


def test_a_machine_without_the_dtype_is_an_error() -> None:
    config = load('gpt2_124m', (*SMALL, 'train.dtype=bfloat16'))
    with pytest.raises(ConfigError, match=r'V100 .* computes in float16'):
        compare(config, {'v100': None})


@pytest.mark.parametrize('text', ['h100=', 'h100=cheap', 'h100=-1', 'h100=inf'])
def test_a_price_is_a_positive_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r'use for example h100=2\.5'):
        with_price(text)
