"""Presets have the schedule of their paper, or the layout that the plan advises."""

import re

import pytest
from ruamel.yaml import YAML
from support import ROOT, exhaustive, load_script, slow

import megajax
from megajax.core.config import Config, presets, recipes
from megajax.core.counts.parameters import num_parameters

script = load_script('presets', 'scripts')
FAST = ('qwen3_8b',)
SLOW = 'llama3_8b', 'llama3_70b', 'qwen3_vl_2b'


@pytest.mark.parametrize(
    'name',
    [
        name if name in FAST else slow(name) if name in SLOW else exhaustive(name)
        for name in script.PRESETS
    ],
)
def test_a_preset_fits_and_no_layout_is_more_than_3_percent_faster(name: str) -> None:
    config = megajax.load(name)
    plan = megajax.plan(config, gpu=script.GPU)
    assert plan.layout.fits
    assert plan.seconds <= 1.03 * plan.layouts[0].seconds
    said = re.search(r'On (\d+) H100s, .* ([\d.]+) s a step and ([\d.]+) GB', text_of(name))
    assert said is not None
    assert int(said[1]) == config.mesh.num_devices
    assert float(said[2]) == pytest.approx(plan.seconds, rel=0.03)
    assert float(said[3]) == pytest.approx(plan.layout.bytes / 1e9, rel=0.03)


def text_of(name: str) -> str:
    return (ROOT / f'configs/{name}.yaml').read_text()


@pytest.mark.parametrize('name', [*presets(), *recipes()])
def test_the_learning_rate_of_a_preset_decays(name: str) -> None:
    optim = megajax.load(name).optim
    assert optim.schedule != 'constant'
    assert optim.min_lr <= optim.lr / 5


@pytest.mark.parametrize('name', [name for name in presets() if name.startswith('bert_')])
def test_the_learning_rate_of_a_bert_decays_over_the_2_million_steps_of_its_paper(
    name: str,
) -> None:
    config = megajax.load(name)
    assert (config.optim.decay_steps or config.train.steps) == 2_000_000


def test_the_heads_of_the_trained_8_3b_model_are_named_and_leave_its_size() -> None:
    timed, key = megajax.load('megatron_8.3b'), 'model.num_heads=24'
    assert key in text_of('megatron_8.3b')
    trained = megajax.load('megatron_8.3b', [key])
    assert trained.model.head_dim == 128
    assert num_parameters(trained.model) == num_parameters(timed.model)


def test_a_layout_is_written_among_the_keys_and_comments_of_a_preset_and_read_back() -> None:
    config = megajax.load(
        'llama3_8b', ['mesh.data=2', 'train.batch_size=16', 'model.num_layers=31']
    )
    plan = megajax.plan(config, gpu='h100', gpus=16)
    before = text_of('llama3_8b')
    after = script.rewritten(before, plan)
    assert script.rewritten(after, plan) == after
    assert after.splitlines()[:2] == before.splitlines()[:2]
    assert layout(plan.fastest()) == layout(read(after))
    kept = [
        line for line in before.splitlines() if re.match(r'  (lr|seq_len|beta2|\w+_size):', line)
    ]
    assert [line for line in after.splitlines() if line in kept] == kept


def layout(config: Config) -> tuple[object, ...]:
    return config.mesh, config.train.microbatches, config.train.recompute, config.optim.shard


def read(text: str) -> Config:
    return Config.model_validate(YAML(typ='safe', pure=True).load(text))
