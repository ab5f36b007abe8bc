"""GPUs next to each other: what is cheapest, and what fits."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megajax.analysis.plan.compare import compare, read_prices
from megajax.commands.main import app
from megajax.core.config import ConfigError, load
from megajax.core.hardware.records import hardware

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


def test_hosts_may_have_any_number_of_gpus() -> None:
    keys = 'mesh.data=12', 'train.batch_size=12', 'train.microbatches=1', 'model.num_layers=31'
    config = load('llama3_8b', keys)
    gpus = {'h100': None, 'a100_40gb': None}
    of_six = compare(config, gpus, gpus=12, gpus_per_host=6).machines
    assert [machine.fewest_gpus for machine in of_six] == [4, 6]
    with pytest.raises(ConfigError, match='do not fill hosts of 8'):
        compare(config, {'h100': None}, gpus=12)
    # GPUs in other hosts are still compared.
    fills, does_not = compare(config, {'h100': None, 'gb200': None}, gpus=12).machines
    assert (fills.gpu, fills.reason) == ('gb200', '')
    assert does_not.layout is None
    assert does_not.reason.startswith('12 GPUs do not fill hosts of 8')


def test_a_gpu_whose_link_was_not_measured_says_so(tmp_path: Path) -> None:
    gpu = hardware('h100').model_copy(update={'across_hosts': None})
    (file := tmp_path / 'mine.yaml').write_text(
        gpu.model_copy(update={'die': None}).model_dump_json()
    )
    keys = 'mesh.data=16', 'mesh.model=1', 'train.batch_size=64', 'model.num_layers=11'
    config = load('gpt2_124m', keys)
    machines = compare(config, {str(file): None, 'h100': None}).machines
    assert [machine.reason[:13] for machine in machines] == ['', 'across_hosts:']


def test_all_gpus_may_be_the_fewest() -> None:
    keys = 'mesh.data=24', 'mesh.model=1', 'train.batch_size=24', 'train.microbatches=1'
    config = load('llama3_70b', ('model.num_layers=97', 'train.seq_len=2048', *keys))
    (machine,) = compare(config, {'h100': None}, gpus=24).machines
    assert machine.layout is not None
    assert machine.fewest_gpus == 24  # 16 are too few


def test_the_command_takes_the_gpus_per_host() -> None:
    asked = '--compare', 'h100,a100', '--gpus', '6', '--gpus-per-host', '3'
    done = CliRunner().invoke(app, ['plan', 'gpt2_124m', 'train.batch_size=12', *asked])
    assert done.exit_code == 0
    assert 'on 6 GPUs' in done.stdout


def test_a_machine_on_which_nothing_fits_is_last() -> None:
    keys = 'mesh.data=8', 'mesh.model=1', 'train.batch_size=8', 'train.microbatches=1'
    config = load('llama3_70b', ('model.num_layers=79', *keys))
    found = compare(config, {'h100': 1.0, 'b300': 2.0})
    assert [x.layout is None for x in found.machines] == [False, True]
    assert found.machines[1].fewest_gpus is None
    assert 'none fits or divides the batch' in str(found)


def test_a_machine_without_the_dtype_is_last_and_is_an_error_alone() -> None:
    config = load('gpt2_124m', (*SMALL, 'train.dtype=bfloat16'))
    first, last = compare(config, {'v100': None, 'h100': None}).machines
    assert (first.gpu, first.reason) == ('h100', '')
    assert (last.layout, last.reason) == (None, 'does not compute in bfloat16')
    with pytest.raises(ConfigError, match=r'V100 .* computes in float16'):
        compare(config, {'v100': None})


def test_the_longest_sequence_may_need_a_longer_one_than_the_config_has() -> None:
    """One short sequence is not divisible among 64 GPUs, and a long one is."""
    config = load('llama3_8b')
    (found,) = compare(config, {'h100': None}, target_batch=1).machines
    assert found.layout is None
    assert found.longest_sequence == 2**22


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        *((f'h100={price}', 'use for example h100=2.5') for price in ('', 'cheap', '-1', '0')),
        ('h100=inf', "'inf' is not a price"),
        ('h100=2,H100=3', 'h100 is listed twice'),
        ('h100,,h200', "'' has no name of a GPU; use for example h100=2.5,h200=3.2"),
    ],
)
def test_a_wrong_price_names_the_fix(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace('.', r'\.')):
        read_prices(text)


@pytest.mark.parametrize(
    'options', ['--gpu-hour-price 2', '--link pcie', '--what-if', '--gpu h100']
)
def test_an_option_that_a_comparison_would_ignore_is_an_error(options: str) -> None:
    asked = 'plan', 'gpt2_124m', '--compare', 'h100', *options.split()
    with pytest.raises(ConfigError, match='not supported with --compare; remove it'):
        CliRunner().invoke(app, asked, catch_exceptions=False)
