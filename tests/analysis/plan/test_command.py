"""The command and the call, as a user types them."""

import functools
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import disk_full_at, exhaustive
from support import megajax as run_here
from typer.testing import CliRunner

import megajax
from megajax.analysis.plan import Plan
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.memory import UNDERCOUNT
from megajax.analysis.plan.report import to_text
from megajax.analysis.plan.verify import verified
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.memory import USABLE
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import has_compiler

MOST_CALLS = 3_100_000  # of Python functions; a slow core makes them in 2 to 3 s


@functools.cache
def plan_of(name: str, gpu: str, gpus: int) -> Plan:
    # A batch with few divisors has few layouts.
    config = changed(megajax.load(name), train__batch_size=2 * gpus)
    return megajax.plan(config, gpu=gpu, gpus=gpus)


# A prime number of layers has no pipelines, and so fewer layouts.
TWO_BY_FOUR = 'mesh.data=2', 'mesh.model=4', 'train.batch_size=16', 'model.num_layers=23'


@functools.cache
def two_by_four() -> Plan:
    return megajax.plan(megajax.load('gpt2_345m', TWO_BY_FOUR), gpu='h100')


@functools.cache
def of_large_layers() -> Plan:
    keys = 'mesh.data=16', 'mesh.model=1', 'model.num_layers=31', 'train.batch_size=16'
    config = megajax.load('llama3_70b', [*keys, 'train.microbatches=1'])
    return megajax.plan(config, gpu='a100_40gb')


def test_the_command_says_what_the_call_says(tmp_path):
    json, winner = tmp_path / 'plan.json', tmp_path / 'winner.yaml'
    keys = 'train.batch_size=16', 'train.microbatches=1'
    done = run_here(
        'plan',
        'gpt2_124m',
        *keys,
        '--gpu',
        'h100',
        '--gpus',
        8,
        '--tokens',
        '300e9',
        '--json',
        json,
        '--write',
        winner,
    )
    assert done.returncode == 0, done.stderr
    called = megajax.plan(megajax.load('gpt2_124m', keys), gpu='h100', gpus=8, tokens=300e9)
    assert Plan.model_validate_json(json.read_text()) == called
    assert str(called) in done.stdout
    titles = [line.strip() for line in done.stdout.splitlines()]
    assert {
        f'peak memory per GPU ({called.memory_moment})',
        f'time per step, ± {called.band:.0%}',
        f'layouts, times ± {called.band:.0%}',
    } <= set(titles)
    assert megajax.load(winner) == called.fastest()
    assert called.fastest().mesh.data * called.fastest().mesh.model == 8


def test_on_a_full_disk_the_plan_is_printed_and_its_file_is_a_mistake(tmp_path):
    arguments = 'plan', 'gpt2_345m', *TWO_BY_FOUR, '--gpu', 'h100', '--json', str(tmp_path / 'x')
    with disk_full_at(10):
        done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert 'cannot be written: File too large' in str(done.exception)
    assert str(two_by_four()) in done.stdout


def test_a_plot_that_cannot_be_drawn_leaves_the_plan_and_its_files(tmp_path):
    files = json, layout, plot = [tmp_path / name for name in ('p.json', 'fast.yaml', 's.svg')]
    options = (
        x for pair in zip(('--json', '--write', '--schedule'), files, strict=True) for x in pair
    )
    done = CliRunner().invoke(app, ['plan', 'gpt2_345m', *TWO_BY_FOUR, *map(str, options)])
    assert isinstance(done.exception, ConfigError)
    said = 'mesh.stages: 1 has no schedule to draw (the planned layout is data=2 x model=4)'
    assert said in str(done.exception)
    assert str(two_by_four()) in done.stdout
    assert Plan.model_validate_json(json.read_text()) == two_by_four()
    assert layout.exists()
    assert not plot.exists()


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='there is no /dev/full')
def test_a_plan_that_cannot_be_printed_is_in_its_file(tmp_path):
    arguments = ['plan', 'gpt2_345m', *TWO_BY_FOUR, '--gpu', 'h100', '--json', str(tmp_path / 'x')]
    with (
        pytest.raises(OSError, match='No space left'),
        open('/dev/full', 'w') as stdout,
        redirect_stdout(stdout),
    ):
        app(arguments)
    assert Plan.model_validate_json((tmp_path / 'x').read_text()) == two_by_four()


def test_a_config_on_its_own_mesh_is_planned_as_it_is():
    config, plan = megajax.load('gpt2_345m', TWO_BY_FOUR), two_by_four()
    assert not plan.is_from_search
    assert plan.planned() == resolved(config, on_gpu=True)
    assert plan.layout.reason.startswith('+')
    assert plan.seconds > plan.best.seconds
    assert sum(line.bytes for line in plan.memory) == plan.layout.bytes
    assert plan.layout.fits == (plan.layout.bytes <= plan.memory_available)
    assert plan.memory_available == int(USABLE * hardware('h100').memory / (1 + UNDERCOUNT))


@pytest.mark.slow
@pytest.mark.parametrize('recompute', [exhaustive('none'), 'full'])
def test_the_papers_rate_counts_recomputation_where_there_is_some(recompute):
    config = megajax.load(
        'gpt2_345m', ['mesh.data=2', 'mesh.model=4', f'train.recompute={recompute}']
    )
    plan, model, train = megajax.plan(config, gpu='h100'), config.model, config.train
    layer, head = (
        24 * model.hidden_size**2 + 4 * train.seq_len * model.hidden_size,
        2 * model.hidden_size * model.padded_vocab_size,
    )
    flops = (
        train.batch_size
        * train.seq_len
        * ((4 if recompute == 'full' else 3) * model.num_layers * layer + 3 * head)
    )
    assert plan.paper_tflops_per_gpu == pytest.approx(flops / plan.seconds / 8 / 1e12)
    assert megajax.plan(megajax.load('llama3_8b'), gpu='h100').paper_tflops_per_gpu is None


def test_what_is_sharded_is_named_and_written():
    plan = plan_of('llama3_8b', 'h100', 16)
    best = plan.fastest()
    assert plan.layout.shard == best.optim.shard
    assert plan.sharding.startswith(
        {'gradients': 'ZeRO-2; ', 'weights': 'ZeRO-3; '}[plan.layout.shard]
    )
    assert f'ZeRO                    {plan.sharding}'[:60] in str(plan)
    kinds = {(layout.shard, layout.replicas) for layout in plan.layouts if layout.fits}
    assert {shard for shard, _ in kinds} == {'none', 'optimizer', 'gradients', 'weights'}
    assert {replicas for _, replicas in kinds} > {1, 2}


@pytest.mark.slow
def test_a_grid_is_named_with_what_it_sends():
    plan = megajax.plan(megajax.load('llama3_8b'), gpu='h100', gpus=8)
    assert plan.grids is not None
    assert re.fullmatch(
        r'not worth it: the best 2-D layout \(2x2\) takes [\d.]+% longer; '
        r'its layers send 1.42x the bytes of model=4',
        plan.grids,
    )
    assert 'model=2x2, sequence parallel' in str(plan)
    config = changed(
        megajax.load('gpt3_175b', ['train.overlap=none']),
        mesh__data=8,
        train__batch_size=32,
        train__microbatches=1,
    )
    plan = megajax.plan(config, gpu='h100', gpus=512)
    assert plan.layout.model_rows == plan.fastest().mesh.model_rows > 1
    assert plan.grids is not None
    assert plan.grids.startswith('worth it: ')
    assert {line.axis for line in plan.transfers} >= {'row', 'model', 'row+model', 'data'}
    assert 'exposed collectives, row' in str(plan)


def test_every_layout_but_the_fastest_has_a_reason():
    plan = plan_of('llama3_8b', 'h100', 16)
    for layout in plan.layouts:
        if layout == plan.best:
            assert layout.reason == ''
        elif layout.seconds is not None:
            assert re.match(r'\+\d', layout.reason)
        elif layout.fits:
            assert layout.reason.startswith('at least ')
        else:
            assert layout.reason.startswith('needs ')


def test_the_largest_microbatch_fits_and_one_row_more_does_not():
    keys = 'mesh.data=1', 'mesh.model=8', 'mesh.sequence_parallel=true', 'train.microbatches=1'
    keys = *keys, 'train.recompute=full', 'optim.shard=none'
    rows = megajax.plan(
        megajax.load('llama3_8b', [*keys, 'train.batch_size=1']), gpu='h100'
    ).largest_microbatch
    for count, fits in ((rows, True), (rows + 1, False)):
        config = megajax.load('llama3_8b', [*keys, f'train.batch_size={count}'])
        assert megajax.plan(config, gpu='h100').layout.fits == fits


def test_a_config_that_does_not_fit_exits_1_and_shows_what_does():
    done = run_here(
        'plan',
        'llama3_8b',
        'mesh.data=8',
        'mesh.model=1',
        'train.batch_size=64',
        'train.microbatches=1',
        'optim.shard=none',
        '--gpu',
        'h100',
    )
    assert done.returncode == 1
    assert 'does not fit in 76.0 GB' in done.stdout
    assert 'data=8 x model=1, 8 microbatches of 1, ZeRO-3, batch_split ' in done.stdout
    assert re.search(
        r'ZeRO                    ZeRO-[23]; .*no ZeRO: does not fit \([\d.]+ GB\)', done.stdout
    )


def test_dropout_in_attention_is_named_where_a_config_does_not_fit():
    large = ('train.batch_size=248', 'train.microbatches=1', 'train.recompute=none')
    keys = ('mesh.data=8', 'mesh.model=1', 'model.num_layers=23', *large)
    for rate, is_named in ((0.1, True), (0.0, False)):
        config = megajax.load('gpt2_345m', [*keys, f'model.attention_dropout={rate}'])
        plan = megajax.plan(config, gpu='h100')
        assert ('GB with model.attention_dropout=0' in plan.layout.reason) == is_named
        assert ('GB with model.attention_dropout=0' in to_text(plan, width=200)) == is_named


def test_tensor_parallelism_is_worth_it_where_nothing_fits_without_it():
    plan = of_large_layers()
    assert plan.verdict.startswith('required: without it the smallest layout needs ')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            'llama3_8b mesh.data=1 train.batch_size=8 train.microbatches=1 --gpus 1',
            'no layout fits on 1 x NVIDIA H100 SXM 80 GB: the smallest needs ',
        ),
        ('gpt2_124m --gpus 5', '512 is not a multiple of mesh.data=5; use 510 or 515'),
        (
            'gpt2_124m --gpus 12',
            '12 GPUs do not fill hosts of 8: use 8 or 16, or set the number of GPUs per host',
        ),
        (
            'gpt2_124m --global-batch-size 3',
            'train.batch_size: 3 is not a multiple of mesh.data=8 x train.microbatches=4',
        ),
        (
            'gpt2_124m --gpu tpu',
            'GPU tpu: choose among a100, a100_40gb, b200, b300, gb200, gb300, h100, h100_96gb, ',
        ),
        (
            'gpt2_124m --gpu v100',
            'train.dtype=bfloat16: NVIDIA V100 SXM3 32 GB computes in float16, float32',
        ),
        (
            'gpt2_124m --gpu v100 --verify',
            'verify with gpu v100: the step can be compiled for a100, b200, h100, h200',
        ),
        (
            'gpt2_124m --json README.md/x.json',
            'README.md/x.json: README.md is a file, not a folder',
        ),
        ('gpt2_124m --write tests', 'tests is a folder: give the name of a file in it'),
        ('gpt2_124m --roofline x.gif', 'x.gif: a plot must end in .png, .svg, .pdf'),
        ('gpt2_124m --roofline x.png --scaling x.png', 'x.png would be written twice'),
        ('gpt2_124m --json x.svg --schedule x.svg', 'x.svg would be written twice'),
        (
            '--table megatron_2019',
            '--table megatron_2019: choose among scaling, heads, strong, megatron, narayanan',
        ),
        ('--gpu h100', 'plan needs a config'),
        (
            'gpt2_124m train.batch_size=3',
            'train.batch_size: 3 is not a multiple of mesh.data=8 x train.microbatches=4',
        ),
        ('gpt2_124m train.batch_size=3', 'or add --gpus 8 to search for a layout'),
        ('gpt2_124m train.batch_size=3 mesh.data=8 --gpus 8', '3 is not a multiple of mesh.data=8'),
        ('--gpus 0', '--gpus: must be greater than or equal to 1, not 0; use 1 to 1,048,576'),
        ('--gpus many', 'must be a valid integer, not many; use 1 to 1,048,576'),
        (
            '--gpu-hour-price 0',
            'must be greater than or equal to 0.01, not 0; use 0.01 to 1,000,00',
        ),
        ('--tokens 0', '--tokens: must be greater than or equal to 1, not 0; use 1 to 1,000,000,0'),
        *((f'--tokens {value}', f'not {value}; use 1 to') for value in ('-1', 'inf', 'nan')),
        ('--imbalance nan', 'not nan; use 1 to'),
        ('--program deepspeed', "--program: 'deepspeed' is not one of 'megajax', 'megatron'"),
        ('calibrate mine.yaml --seconds 0', 'must be greater than or equal to 1, not 0; use 1 or '),
        ('calibrate here.txt', 'here.txt: give a file name that ends in .yaml'),
    ],
)
def test_a_wrong_call_names_the_fix(arguments, message):
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ['plan', *arguments.split()], catch_exceptions=False)
    assert message in str(caught.value)


@pytest.mark.parametrize('batch', ['train.batch_size=1', '--global-batch-size=1'])
def test_a_batch_that_the_presets_mesh_does_not_divide_is_searched(batch):
    long = 'train.seq_len=1048576', 'model.max_seq_len=1048576'
    called = CliRunner().invoke(app, ['plan', 'llama3_8b', *long, batch, '--gpus', '64'])
    assert called.exit_code == 0
    assert 'fastest layout: data=1 x context=8 x model=8, ring' in called.stdout


def test_a_wrong_call_exits_2():
    done = run_here('plan', 'gpt2_124m', '--gpu', 'tpu')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('error: GPU tpu: choose among a100, ')


def test_the_tables_of_the_papers_are_shown():
    done = run_here('plan', '--table', 'narayanan')
    assert done.returncode == 0
    assert '2 rows held out: mean error' in done.stdout


@pytest.mark.slow
def test_a_plan_needs_no_jax_and_no_more_calls_than_a_core_makes_in_seconds():
    """Calls are counted because seconds differ by a factor of two between machines."""
    code = (
        'import sys, megajax; config = megajax.load("llama3_8b"); calls = 0\n'
        'def count(frame, event, argument):\n'
        '    global calls; calls += event == "call"\n'
        'sys.setprofile(count); megajax.plan(config, gpu="h100", gpus=64); sys.setprofile(None)\n'
        'print("jax" in sys.modules, calls)'
    )
    has_jax, calls = subprocess.check_output([sys.executable, '-c', code], text=True).split()
    assert has_jax == 'False'
    assert int(calls) < MOST_CALLS


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_verify_shows_the_memory_that_the_compiler_planned():
    small = 'gpt2_124m', 'model.num_layers=2', 'mesh.data=4', 'mesh.model=2'
    done = run_here('plan', *small, '--gpu', 'h100', '--verify')
    assert done.returncode == 0, done.stderr
    assert 'compiled' in done.stdout


def test_layouts_that_do_not_fit_are_dim():
    plan = of_large_layers()
    rows = [line for line in plan._repr_html_().splitlines() if 'data=' in line and ' GB ' in line]
    too_large = ['needs ' in line for line in rows]
    assert too_large == ['<span' in line for line in rows]
    assert {*too_large} == {True, False}


def test_the_fastest_layout_is_compiled_too_where_it_is_another(monkeypatch):
    def compiled(config, gpu, hosts):
        return SimpleNamespace(arguments=config.mesh.model, temporaries=10 * hosts, outputs=100)

    monkeypatch.setattr('megajax.analysis.plan.verify.compile_in_child', compiled)
    plan = two_by_four()
    assert plan.fastest().mesh.model == 1
    checked = verified(plan, 'h100')
    assert (checked.compiled_bytes, checked.best_compiled_bytes) == (114, 111)
    again = verified(megajax.plan(plan.fastest(), gpu='h100'), 'h100')
    assert (again.compiled_bytes, again.best_compiled_bytes) == (111, 111)


def test_a_plan_that_was_written_with_the_old_names_is_read():
    plan = two_by_four()
    old = plan.model_dump_json().replace('"schema_version":3', '"schema_version":2')
    for before, after in (
        ('"products":', '"matmul":'),
        ('"microbatch_rows":', '"microbatch_sequences":'),
        ('"weights"', '"gathered_weights"'),
        ('"buffers"', '"workspace"'),
        ('"fragments"', '"fragmentation"'),
    ):
        assert after in old
        old = old.replace(after, before)
    assert Plan.model_validate_json(old) == plan


def test_an_option_with_its_old_name_works_and_warns():
    called = CliRunner().invoke(app, ['plan', 'gpt2_124m', '--gpus', '8', '--price=2'])
    assert 'warning: --price is now --gpu-hour-price' in called.stderr
    assert ' at 2 per GPU-hour' in called.stdout
