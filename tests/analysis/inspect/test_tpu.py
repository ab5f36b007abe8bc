"""Programs for TPUs: a step that libtpu compiled for four v5p chips, and the command."""

import lzma
import re
from collections import Counter
from pathlib import Path

import pytest
from support import megajax as run_here
from typer.testing import CliRunner

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection
from megajax.commands.main import app
from megajax.core.hardware import tpus
from megajax.core.hardware.tpus import TPUS, has_tpu_compiler
from megajax.core.train.compiled_step import CompiledStep
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

STORED = Path(__file__).parent / 'stored/v5p_zero3.json.xz'  # by libtpu 0.0.42, without its configs
SETTINGS = [
    'mesh.data=2',
    'mesh.model=2',
    'mesh.sequence_parallel=true',
    'optim.shard=weights',
    'model.hidden_size=1024',
    'model.num_heads=8',
    'train.batch_size=8',
    'train.microbatches=1',
    'train.dtype=bfloat16',
]


@pytest.fixture(scope='module')
def compiled() -> CompiledStep:
    return CompiledStep.from_json(lzma.decompress(STORED.read_bytes()).decode())


@pytest.fixture(scope='module')
def inspection(compiled: CompiledStep) -> Inspection:
    return audit(megajax.load('tiny', SETTINGS), compiled, 'v5p')


def test_every_collective_of_a_tpu_is_at_a_site_and_none_sends_more(inspection) -> None:
    assert inspection.ok
    assert not [row.site for row in inspection.rows if row.site.startswith('other')]
    assert inspection.ratios['data'] == pytest.approx(1)
    assert inspection.ratios['model'] == pytest.approx(0.8, abs=1e-3)  # as on GPUs


def test_reduce_scatters_and_the_trip_counts_of_loops_are_read(inspection) -> None:
    """XLA for TPUs writes a fused all-reduce, and leaves the trip count to the loop's condition."""
    kinds = {(row.site, row.phase): {each.kind for each in row.placed} for row in inspection.rows}
    assert kinds['attention', 'forward'] == {'all-gather', 'reduce-scatter'}
    assert kinds['gradients', 'backward'] == {'reduce-scatter'}
    [row] = [row for row in inspection.rows if (row.site, row.phase) == ('mlp', 'forward')]
    assert [each.times for each in row.placed] == [2, 2]  # layers


def test_the_matmuls_of_a_tpu_are_those_that_the_config_requires(inspection) -> None:
    assert inspection.products.compiled == inspection.products.expected > 0


def test_the_report_says_that_nothing_ran_and_estimates_no_times(inspection) -> None:
    text = to_text(inspection)
    assert 'megajax has never run a program on a TPU' in text
    assert re.search(r'^cycles  [\d,]+ per step, estimated by XLA', text, re.MULTILINE)
    assert f'{inspection.memory.needed / TPUS["v5p"].memory:.0%} of 102.8 GB' in text
    assert inspection.rates is inspection.compute_seconds is None
    assert (inspection.schedule, inspection.kernels) == ([], [])


def test_an_all_reduce_outside_of_a_fusion_sends_all_of_it(compiled) -> None:
    """A slice after it does not make it cheaper on a TPU, unlike in a program for CPUs."""
    text = compiled.text.replace(
        'kind=kCustom, calls=%all-reduce-scatter', 'to_apply=%all-reduce-scatter'
    )
    changed = re.sub(r' fusion(\(\S+\), to_apply=%all-reduce-scatter)', r' call\1', text)
    kinds = [
        Counter(each.kind for each in collectives(Program(each), compiled.mesh))
        for each in (compiled.text, changed)
    ]
    assert kinds[0]['reduce-scatter'] == 11
    assert kinds[1]['reduce-scatter'] == 0
    assert kinds[1]['all-reduce'] == kinds[0]['all-reduce'] + 11


@pytest.mark.parametrize('option', ['--run', '--kernels', '--memory'])
def test_options_that_need_a_gpu_are_rejected(option: str) -> None:
    done = CliRunner().invoke(app, ['inspect', 'tiny', '--target', 'v6e', option])
    assert done.exception is not None
    assert done.exception.exit_code == 2
    assert option in str(done.exception)
    assert '--target' in str(done.exception)


def test_without_libtpu_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpus, 'has_tpu_compiler', lambda: False)
    done = CliRunner().invoke(app, ['inspect', 'tiny', '--target', 'v5p'])
    assert done.exception is not None
    assert done.exception.exit_code == 2
    assert 'tpu-compile]' in str(done.exception)


@pytest.mark.slow
@pytest.mark.skipif(
    not has_tpu_compiler(), reason="needs XLA's TPU compiler: the extra tpu-compile"
)
@pytest.mark.parametrize('target', TPUS)
def test_a_step_is_compiled_for_a_tpu(target: str) -> None:
    done = run_here('inspect', 'tiny', 'mesh.data=2', 'mesh.model=2', '--target', target)
    assert done.returncode == 0, done.stderr
    assert 'bytes sent, relative to Megatron  data: 1.000x, model: 1.000x' in done.stdout
    assert '1.000x what the config requires' in done.stdout
