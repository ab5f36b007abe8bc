"""The learning rates of a converted command are those of Megatron-LM, at every step."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from megajax.core.config import ConfigError, load
from megajax.core.train.optimizer import make_schedule
from megajax.interop.megatron.command_line.line import read_line
from megajax.interop.megatron.command_line.to_config import from_megatron

LR, LOW, BATCH, SHOWN = 1e-3, 1e-5, 8, 60
LINE = (
    'pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 '
    f'--global-batch-size {BATCH} --vocab-size 512 --tokenizer-type NullTokenizer '
    f'--lr {LR} --min-lr {LOW} '
)
STYLES = ('constant', 'linear', 'cosine', 'inverse-square-root', 'WSD')
FALLS = {
    'linear': lambda part: 1 - part,
    'cosine': lambda part: (math.cos(math.pi * part) + 1) / 2,
    'exponential': lambda part: 2 * 0.5**part - 1,
    'minus_sqrt': lambda part: 1 - math.sqrt(part),
}


def rates_of(line: str, folder: Path) -> tuple[int, np.ndarray]:
    """The steps of a command, and its rates at the first SHOWN steps, of which some come after."""
    (folder / 'my.yaml').write_text(from_megatron(read_line((LINE + line).split())))
    config = load(folder / 'my.yaml')
    rates = make_schedule(config.optim, config.train.steps)(np.arange(SHOWN, dtype=np.int32))
    return config.train.steps, np.asarray(rates, np.float64)


def megatron(
    at: int, *, warmup: float, end: float, style: str, init: float, fall: float, form: str
) -> float:
    """The rate of OptimizerParamScheduler after `at` samples; lengths are numbers of samples."""
    if warmup and at <= warmup:
        return init + (LR - init) * at / warmup
    if style == 'constant':
        return LR
    if at > end:
        return LOW
    if style == 'inverse-square-root':
        return max(LOW, LR * math.sqrt(max(warmup, 1) / max(at, 1)))
    if style == 'WSD':
        left = 1.0 if at <= end - fall else FALLS[form]((at - (end - fall)) / fall)
    else:
        left = FALLS[style]((at - warmup) / (end - warmup))
    return LOW + (LR - LOW) * left


@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('unit', ['iters', 'samples'])
def test_the_rate_of_every_step_is_that_of_megatron(style: str, unit: str, tmp_path: Path) -> None:
    draw = random.Random(f'{style} {unit}')
    scale, size = (
        (BATCH, 1) if unit == 'iters' else (1, BATCH)
    )  # samples in a unit, units in a step
    for _ in range(6):
        end = draw.randint(20 * size, 45 * size)
        total = draw.choice([end, draw.randint(15 * size, 55 * size)])
        warmup = draw.choice([0, 1, draw.randint(1, end // 2)])
        fall = draw.randint(1, end - warmup)
        form, init = draw.choice([*FALLS]), draw.choice([0.0, LR / 10])
        line = f'--train-{unit} {total} --lr-decay-style {style} --lr-warmup-init {init} '
        line += f'--lr-warmup-{unit} {warmup} ' if warmup else ''
        line += f'--lr-decay-{unit} {end} ' if end != total or draw.random() < 0.5 else ''
        if style == 'WSD':
            line += f'--lr-wsd-decay-{unit} {fall} --lr-wsd-decay-style {form}'
        steps, found = rates_of(line, tmp_path)
        assert steps == total * scale // BATCH < SHOWN
        expected = [
            megatron(
                step * BATCH,
                warmup=warmup * scale,
                end=end * scale,
                style=style,
                init=init,
                fall=fall * scale,
                form=form,
            )
            for step in range(SHOWN)
        ]
        assert found == pytest.approx(expected, abs=1e-6 * LR), line


def test_a_fraction_of_a_warm_up_is_that_of_the_decay(tmp_path: Path) -> None:
    _, found = rates_of('--train-iters 50 --lr-decay-iters 130 --lr-warmup-fraction 0.05', tmp_path)
    assert found[:7] == pytest.approx([LR * step / 6.5 for step in range(7)], abs=1e-6 * LR)


@pytest.mark.parametrize('style', ['cosine', 'WSD --lr-wsd-decay-iters 20'])
def test_a_decay_to_the_same_rate_is_constant(style: str, tmp_path: Path) -> None:
    line = f'--train-iters 50 --lr-warmup-iters 5 --lr-decay-style {style} --min-lr {LR}'
    _, found = rates_of(line, tmp_path)
    assert found[5:] == pytest.approx(LR)


@pytest.mark.parametrize(
    ('line', 'falls'),
    [('--lr-decay-style WSD --lr-wsd-decay-samples 4', 20), ('--lr-decay-samples 4', 1)],
)
def test_a_decay_within_one_step_is_converted(line: str, falls: int, tmp_path: Path) -> None:
    _, found = rates_of(f'--train-samples 160 {line}', tmp_path)
    assert found == pytest.approx([LR] * falls + [LOW] * (SHOWN - falls))


def test_rates_are_exact_a_million_steps_later(tmp_path: Path) -> None:
    line = '--train-samples 8000003 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt'
    (tmp_path / 'my.yaml').write_text(
        from_megatron(read_line(f'{LINE} {line} --lr-wsd-decay-samples 80000'.split()))
    )
    config = load(tmp_path / 'my.yaml')
    rate = make_schedule(config.optim, config.train.steps)
    for step in (990_000, 990_001, 990_002, 995_000, 999_999, 1_000_000):
        part = (8 * step - 7_920_003) / 80_000
        expected = LOW + (LR - LOW) * (1 - math.sqrt(max(part, 0)))
        assert float(rate(np.int32(step))) == pytest.approx(expected, abs=1e-6 * LR)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--lr-decay-style WSD', '--lr-wsd-decay-iters is missing'),
        ('--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style sine', 'minus_sqrt'),
        ('--weight-decay-incr-style linear', 'the decay is constant'),
        ('--lr-decay-style polynomial', 'inverse-square-root'),
    ],
)
def test_a_schedule_that_megajax_lacks_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_megatron(read_line(f'{LINE} --train-iters 10 {line}'.split()))
