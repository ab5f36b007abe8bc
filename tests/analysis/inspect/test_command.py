"""`megajax inspect` as a user calls it, on a terminal, in a notebook and for GPUs that are not
there.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import exhaustive, slow
from support import megajax as run_here
from typer.testing import CliRunner

import megajax
from megajax.analysis.inspect import Inspection, inspect_with_text
from megajax.base.render.units import si
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.core.hardware.targets import has_compiler, num_hosts

SMALL = 'model.num_layers=2', 'model.vocab_size=1000', 'train.batch_size=8'


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(app, ['inspect', *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    assert (done.exception.exit_code, done.stdout) == (2, '')
    return str(done.exception)


@pytest.fixture(scope='module')
def inspected(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    folder = tmp_path_factory.mktemp('inspected')
    files = folder / 'it.json', folder / 'it.txt'
    written = '--json', files[0], '--hlo', files[1]
    return run_here('inspect', 'tiny', *SMALL, '--memory', *written), *files


def test_it_prints_the_table_and_exits_0_where_nothing_is_more(inspected):
    done, _, _ = inspected
    assert done.returncode == 0, done.stderr
    assert 'attention  backward  model  2 AR f32[1,4,128,128]' in done.stdout
    assert 'bytes sent, relative to Megatron  data: 1.000x, model: 1.000x' in done.stdout
    assert re.search(
        r'matmul work  \S+ TFLOP per step and device, 1.000x what the config', done.stdout
    )
    assert done.stdout.rstrip().endswith("ok: no collective sends more than Megatron's")


def test_memory_is_shown_by_use_and_line_with_the_same_sum(inspected):
    done, written, _ = inspected
    memory = Inspection.model_validate_json(written.read_text()).memory
    whole = si(memory.needed)
    by_use, lines = re.findall(r'^total +(\S+ \S+) +100.0%$', done.stdout, re.MULTILINE)
    assert by_use == lines == whole
    assert f'outputs = {whole}' in done.stdout
    assert re.search(
        r'^activations +mlp +core/model/\S+\.py:\d+ +\d+ f32\[', done.stdout, re.MULTILINE
    )
    assert sum(arrays.bytes for arrays in memory.at_peak) == memory.needed


def test_json_holds_all_of_it_in_the_documented_schema(inspected):
    _, written, text = inspected
    inspection = Inspection.model_validate_json(written.read_text())
    assert inspection.ok
    assert inspection.mesh == {'data': 2, 'model': 2}
    schema = Inspection.model_json_schema()['$defs']
    assert all(field['description'] for field in schema['Transfer']['properties'].values())
    described = {'Overlap': ('seconds', 'hidden_seconds'), 'Products': ('compiled', 'expected')}
    for name, keys in described.items():
        assert all(schema[name]['properties'][key]['description'] for key in keys)
    assert inspection.products.ratio == pytest.approx(1, abs=1e-3)
    assert (inspection.rates, inspection.schedule, inspection.wire_seconds) == (None, [], {})
    assert json.loads(written.read_text())['schema_version'] == 2
    assert text.read_text().startswith('HloModule jit_train_step')


@pytest.mark.slow
def test_in_a_notebook_it_is_an_object_with_the_same_tables(inspected):
    inspection = megajax.inspect(megajax.load('tiny', SMALL))
    assert inspection.ok
    assert str(inspection).split('compiled in')[0] == inspected[0].stdout.split('compiled in')[0]
    assert 'attention' in inspection._repr_html_()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['tiny', '--target', 'h1000'], 'target h1000: choose among cpu, a100, b200, h100, h200'),
        (
            ['tiny', '--hosts', '3'],
            '3 hosts do not divide the 4 devices of the mesh: choose among 1, 2, 4',
        ),
        (
            ['tiny', '--json', '/dev/null/it.json'],
            '/dev/null/it.json: /dev/null is a file, not a folder: choose another file',
        ),
        (['tiny', '--minimize'], '--bisect and --minimize explain a wrong result of --run'),
        (['tiny', '--reduce'], '--bisect and --minimize explain a wrong result of --run'),
        (['tiny', 'mesh.model=3'], 'model.num_heads: 8 is not a multiple of mesh.model=3'),
    ],
)
def test_a_wrong_call_exits_2_and_names_the_fix(arguments, message):
    assert message in refusal(*arguments)


@pytest.mark.parametrize(
    ('devices', 'hosts'), [(1, 1), (8, 1), (12, 2), (16, 2), (20, 4), (512, 64)]
)
def test_hosts_are_the_fewest_that_share_the_devices_with_at_most_8_each(devices, hosts):
    assert num_hosts(devices) == hosts


@pytest.mark.skipif(has_compiler(), reason="XLA's GPU compiler is installed, so nothing is missing")
def test_a_gpu_target_without_its_compiler_says_what_to_install():
    assert install('gpu-compile') in refusal('tiny', '--target', 'h100')


@pytest.mark.skipif(
    not has_compiler(),
    reason=(
        "needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'; `make inspect` installs it"
    ),
)
@pytest.mark.parametrize('target', [*map(exhaustive, ('a100', 'h200', 'b200')), slow('h100')])
def test_a_step_compiles_for_every_gpu_and_sends_no_more_than_megatron(target):
    config = megajax.load(
        'tiny',
        [*SMALL, 'mesh.sequence_parallel=true', 'train.dtype=bfloat16', 'train.microbatches=2'],
    )
    inspection, text = inspect_with_text(config, target=target, hosts=2)
    assert inspection.ok
    assert '__cudnn$fmha' in text
    assert {one.crosses_hosts for one in inspection.schedule if one.axis == 'data'} == {True}
    assert {one.crosses_hosts for one in inspection.schedule if one.axis == 'model'} == {False}
    assert inspection.memory.device > 80e9
    assert inspection.products.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_a_quick_look_compiles_a_loop_and_says_so() -> None:
    keys = 'mesh.data=1', 'mesh.model=2', 'train.batch_size=4', 'train.microbatches=1'
    split = 'train.overlap=batch_split', 'train.unroll=true', 'train.seq_len=64'
    config = megajax.load('tiny', [*keys, *split, 'model.dropout=0', 'model.num_layers=2'])
    whole, quick = (megajax.inspect(config, scan=scan) for scan in (False, True))
    assert (whole.unrolled, quick.unrolled) == (True, False)
    assert (whole.scan, quick.scan) == (False, True)
    assert 'overlap batch_split, layers compiled separately' in str(whole)
    assert 'layers in a loop (--scan; a run compiles them separately)' in str(quick)
    assert whole.ratios == quick.ratios


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(),
    reason=(
        "needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'; `make inspect` installs it"
    ),
)
def test_halves_that_take_turns_hide_more_of_the_same_bytes():
    overrides = (
        'model.num_layers=2',
        'mesh.data=1',
        'mesh.model=2',
        'mesh.sequence_parallel=true',
        'train.batch_size=4',
        'train.recompute=full',
        'optim.shard=none',
    )
    plain, overlap = (
        megajax.inspect(
            megajax.load('llama3_8b', [*overrides, 'train.microbatches=1', f'train.overlap={how}']),
            target='h100',
        )
        for how in ('none', 'auto')
    )
    assert plain.ok
    assert overlap.ok
    assert overlap.ratios == plain.ratios
    assert overlap.overlapped_share['model'] > plain.overlapped_share['model'] + 0.2
    assert overlap.wire_seconds['model'] == pytest.approx(plain.wire_seconds['model'])
    assert overlap.hidden_seconds['model'] > 1.5 * plain.hidden_seconds['model'] > 0
    for one in overlap.schedule:
        assert 0 <= one.hidden_seconds <= one.seconds
        assert one.overlapped_gflops or not one.hidden_seconds
