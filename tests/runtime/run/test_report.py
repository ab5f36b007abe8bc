"""What the lines of a run say, and that they fit a terminal."""

import re
from collections.abc import Mapping

import jax
import pytest
from support import make_config

from megajax.core.config import load
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flops import step_flops
from megajax.core.counts.parameters import num_parameters
from megajax.core.parallel.placements import Placement
from megajax.runtime.run.log.report import Report

STEP = {
    'taken': 1.0,
    'loss': 2.34567,
    'lr': 3e-4,
    'grad_norm': 0.3125,
    'step_ms': 500.0,
    'data_wait_ms': 1.0,
    'checkpoint_ms': 0.1,
}
SPEED = {
    'tokens_per_s': 1234567.0,
    'tflops_per_device': 412.345,
    'mfu': 0.4169,
    'memory_bytes': 71.23e9,
}


def said(
    capsys: pytest.CaptureFixture[str],
    *steps: Mapping[str, float],
    start: int = 0,
    total: int = 100_000,
) -> list[str]:
    with Report().progress(start=start, steps=total, log_every=len(steps)) as progress:
        for number, values in enumerate(steps, start + 1):
            progress.step(number, {'skipped_steps': 0, **values})
    return capsys.readouterr().out.splitlines()


def remarks(capsys: pytest.CaptureFixture[str], values: Mapping[str, float]) -> list[str]:
    return [line for line in said(capsys, values) if line.startswith('step 1  ')]


def test_a_line_has_all_numbers_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, {**STEP, **SPEED}, start=99_999)
    assert line == (
        'step 100000/100000  loss 2.346  lr 3.00e-04  grad norm 0.31  1,234,567 tokens/s  412 '
        'TFLOP/s  MFU 41.7%  71.2 GB'
    )
    assert len(line) < 120


def test_on_a_terminal_the_lines_stay_above_a_bar_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (('FORCE_COLOR', '1'), ('TERM', 'xterm'), ('COLUMNS', '80')):
        monkeypatch.setenv(name, value)
    steps = [STEP | SPEED | {'loss': loss} for loss in (11.25, 10.5)]
    with Report().progress(start=99_998, steps=100_000, log_every=1) as progress:
        for number, values in enumerate(steps, 99_999):
            progress.step(number, {'skipped_steps': 0, **values})
    shown = re.sub(r'\x1b\[[\d;?]*[a-zA-Z]', '', capsys.readouterr().out)
    lines = [line.strip() for line in re.split('[\r\n]+', shown)]
    for number, loss in ((99_999, '11.250'), (100_000, '10.500')):
        at = lines.index(f'step {number}/100000  loss {loss}  lr 3.00e-04  grad norm 0.31')
        assert lines[at + 1] == '1,234,567 tokens/s  412 TFLOP/s  MFU 41.7%  71.2 GB'
    bars = [line for line in lines if '━' in line]
    assert any('100000/100000' in bar and 'loss 10.500  MFU 41.7% left' in bar for bar in bars)
    assert all(len(line) <= 80 and '…' not in line for line in lines)


def test_a_rate_of_1000_and_more_has_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, {**STEP, **SPEED, 'tflops_per_device': 1234.5})
    assert ' 1,234 TFLOP/s ' in line


def test_what_is_not_known_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(
        capsys,
        {**STEP, 'tokens_per_s': 3.5, 'tflops_per_device': 0.0123, 'planned_memory_bytes': 81.3e6},
    )
    assert line == (
        'step 1/100000  loss 2.346  lr 3.00e-04  grad norm 0.31  4 tokens/s  0.0123 TFLOP/s  '
        '81.3 MB planned'
    )


def test_a_line_has_the_routing_of_a_mixture_of_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    routing = {'expert_load': 1.318, 'dropped': 0.0123, 'router_entropy': 1.9, 'balance_loss': 0.02}
    (line,) = said(capsys, {**STEP, **SPEED, **routing, 'idle_experts': 0.0})
    assert (
        '  grad norm 0.31  expert load 1.32x  dropped 1.2%  router entropy 1.90  '
        'balance loss 0.02  1,234,567 tokens/s'
    ) in line


def test_experts_that_receive_nothing_for_long_are_told_once_until_they_receive_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    idle = [3.0] + [2.0] * 250 + [0.0] + [1.0] * 100
    steps = [{**STEP, **SPEED, 'idle_experts': count} for count in idle]
    found = [line for line in said(capsys, *steps) if 'received no token' in line]
    assert [line.partition(' experts')[0] for line in found] == [
        'step 100  at least 2',
        'step 352  at least 1',
    ]
    assert 'model.experts.balance_loss' in found[0]


def test_rates_are_those_of_all_steps_since_the_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow, fast = (
        {'step_ms': 900.0, 'tokens_per_s': 100 / 0.9},
        {'step_ms': 100.0, 'tokens_per_s': 1000.0},
    )
    assert (
        '  200 tokens/s' in said(capsys, {**STEP, **slow}, {**STEP, **fast})[0]
    )  # 200 tokens in a second


@pytest.mark.parametrize(
    ('values', 'remark'),
    [
        ({'data_wait_ms': 200.0}, 'step 1  waited for data 0.20 s of 0.50 s'),
        (
            {'checkpoint_ms': 2000.0},
            'step 1  saving blocked training for 2.00 s; the steps took 0.50 s',
        ),
        (
            {'slowest_process': 3, 'slowest_process_behind_ms': 60.0},
            'step 1  process 3 reaches each step 60.0 ms later than the median',
        ),
    ],
)
def test_what_holds_the_steps_up_is_said(
    capsys: pytest.CaptureFixture[str], values: dict[str, float], remark: str
) -> None:
    assert said(capsys, {**STEP, **values})[1:] == [remark]


def test_a_delay_of_a_tenth_of_the_steps_is_not_worth_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {**STEP, 'step_ms': 2000.0, 'slowest_process': 3}
    for late in ('data_wait_ms', 'checkpoint_ms', 'slowest_process_behind_ms'):
        assert [len(remarks(capsys, slow | {late: ms})) for ms in (200.0, 201.0)] == [0, 1]
    quick = {**STEP, 'step_ms': 50.0}
    assert [len(remarks(capsys, quick | {'data_wait_ms': ms})) for ms in (100, 101)] == [0, 1]


def test_skipped_steps_are_said_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = {
        **STEP,
        'taken': 0.0,
        'overflow': 0.0,
        'finite': 0.0,
        'loss': float('nan'),
        'skipped_steps': 2,
    }
    assert (
        said(capsys, skipped)[0]
        == 'step 1 is skipped: its loss is nan and its gradient norm 0.3125; 2 so far'
    )
    overflow = {**skipped, 'overflow': 1.0, 'loss_scale': 2.0**16}
    assert (
        said(capsys, overflow)[0]
        == 'step 1 is skipped: in fp16 its gradients overflow at a loss scale of 65,536; 2 so far'
    )
    lines = said(capsys, overflow, skipped, {**STEP, 'taken': 1.0}, overflow)
    assert lines[-1] == (
        'skipped    3 of 4 steps: 2 for gradients that overflow in fp16, '
        '1 for a loss or gradient that is not finite'
    )
    assert (
        said(capsys, {**skipped, 'finite': 1.0})[-1]
        == 'skipped    1 of 1 steps: 1 for a spike in the loss'
    )


@pytest.mark.parametrize(
    ('first', 'tried'), [(2.0**25, 'overflow at 33,554,432, and hold'), (2.0**19, 'hold')]
)
def test_the_scales_that_the_first_batch_was_tried_at_are_said(
    capsys: pytest.CaptureFixture[str], first: float, tried: str
) -> None:
    Report().loss_scale(first, 2.0**19)
    said = (
        f'loss scale the gradients of the first batch {tried} at 524,288: '
        'the run begins with 131,072'
    )
    assert capsys.readouterr().out.splitlines() == [said]


def test_a_parameter_has_its_shape_its_axes_and_its_bytes_in_this_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('COLUMNS', '30')  # a log file has no width
    table = Placement(
        name='embedding.table', shape=(4096, 256), spec=('model', None), bytes_per_device=2_097_152
    )
    Report().placements([table], load('tiny').model)
    head, row, total = capsys.readouterr().out.splitlines()
    assert head.split() == ['parameter', 'shape', 'placement', 'bytes', 'per', 'device']
    assert row.split() == ['embedding.table', '4096x256', 'model,-', '2,097,152']
    assert total.split() == ['950,912', 'parameters', '2,097,152']


def test_a_run_with_adapters_says_how_many_parameters_are_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load('tiny', ['lora.rank=8', 'model.dropout=0'])
    counts = num_parameters(config.model), num_parameters(config.model, trained=True)
    Report().placements([], config.model)
    # (in + out) x rank of qkv, out, up and down, in each of two layers
    per_layer = 8 * sum((128 + 384, 128 + 128, 128 + 768, 384 + 128))
    assert counts[1] == config.model.num_layers * per_layer
    last = capsys.readouterr().out.splitlines()[-1]
    share = counts[1] / counts[0]
    assert last == f'trained    {counts[1]:,} of {counts[0]:,} parameters ({share:.2%})'


def test_a_run_that_trains_all_parameters_has_no_line_on_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Report().placements([], load('tiny').model)
    assert 'trained' not in capsys.readouterr().out


@pytest.mark.parametrize(
    ('milliseconds', 'estimate'),
    [
        ([102e3], '1 min 42 s a step: the 1,999 steps that are left take about 2 d 9 h'),
        ([102e3, 1e3], '1 min 42 s a step: the 1,999 steps that are left take about 2 d 9 h'),
        ([900.0], None),
        ([900.0, 500.0], '500 ms a step: the 1,998 steps that are left take about 16 min 39 s'),
    ],
)  # fmt: skip
def test_the_time_of_a_run_is_said_after_its_first_or_its_second_step(
    capsys: pytest.CaptureFixture[str], milliseconds: list[float], estimate: str | None
) -> None:
    with Report().progress(start=0, steps=2000, log_every=10) as progress:
        for step, ms in enumerate(milliseconds, 1):
            progress.step(step, {**STEP, 'skipped_steps': 0, 'step_ms': ms})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ([f'time       {estimate}'] if estimate else [])


def test_a_line_is_broken_at_its_spaces_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (('FORCE_COLOR', '1'), ('TERM', 'xterm'), ('COLUMNS', '80')):
        monkeypatch.setenv(name, value)
    line = 'data       ' + 'tokenizer of 4096 tokens, ' * 8
    Report().say(line)
    shown = [part.rstrip() for part in capsys.readouterr().out.splitlines()]
    assert all(len(part) <= 80 for part in shown)
    assert {part[:11] for part in shown[1:]} == {' ' * 11}
    assert ' '.join(part.strip() for part in shown) == line.strip()


def test_what_overlaps_is_told_and_how_the_layers_are_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {'dropout': 0.0}
    for mesh, on_gpu in (({'model': 2}, True), ({'model': 2}, False), ({}, True)):
        config = make_config('gpt', model=sizes, mesh=mesh)
        Report().parallelism(resolved(config, on_gpu=on_gpu))
    assert capsys.readouterr().out.splitlines() == [
        'overlap    batch_split, each layer compiled on its own',
        'overlap    none, each layer compiled on its own',
    ]


def test_a_pipeline_is_told_with_its_bubble_and_a_context_with_its_exchange(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = {'stages': 2, 'virtual_stages': 2, 'context': 2}
    sizes = {'num_layers': 8, 'dropout': 0.0}
    config = make_config('gpt', model=sizes, mesh=mesh, train={'microbatches': 4, 'batch_size': 4})
    Report().parallelism(config)
    Report().parallelism(make_config('gpt'))
    assert capsys.readouterr().out.splitlines() == [
        'pipeline   2 stages of 2 x 2 layers, 1f1b, 4 microbatches: bubble 12.5% of the busy time',
        'context    2 shards of 16 tokens, which exchange keys and values all at once '
        '(mesh.context_exchange=gather)',
    ]
    windows = {**sizes, 'position': 'rope', 'layers': [{'window': 4}, {}]}
    mesh = {'context': 2, 'context_exchange': 'ring'}
    Report().parallelism(make_config('gpt', model=windows, mesh=mesh))
    assert capsys.readouterr().out.splitlines() == [
        'context    2 shards of 16 tokens, which exchange keys and values shard by shard '
        '(mesh.context_exchange=ring) and of 4 tokens with each neighbor (windows)',
    ]
    plain = make_config('gpt', model=sizes, train={'microbatches': 4, 'batch_size': 4})
    assert step_flops(config).model == step_flops(plain).model


def test_simulated_devices_are_said_to_be_so_whatever_the_machine_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Report().mesh(jax.make_mesh((2, 2), ('data', 'model')))
    said = 'mesh       data=2 x model=2, 4 devices, simulated on the CPU\n'
    assert capsys.readouterr().out == said


def test_a_task_of_slurm_without_a_gpu_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('megajax.runtime.run.log.report.lacks_gpus_of_slurm', lambda: True)
    Report().mesh(jax.make_mesh((1, 1), ('data', 'model')))
    assert '\nnote       Slurm gave this task no GPU' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('active', 'normalize', 'is_noted'), [(1, True, True), (1, False, False), (2, True, False)]
)
def test_a_router_that_the_loss_does_not_train_is_noted(
    active: int, normalize: bool, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = f'{{count: 4, active: {active}, normalize: {normalize}, ffn_size: 64}}'
    Report().experts(load('tiny', [f'model.experts={experts}']))
    assert ('normalize=false' in capsys.readouterr().out) == is_noted


def test_a_sample_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Report().say('sample: [b]:smile:')
    assert capsys.readouterr().out == 'sample: [b]:smile:\n'
