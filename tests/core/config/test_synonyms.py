"""A name that another program has for a key gets the key, wherever it is written."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError, load
from megajax.core.config.keys import keys_in
from megajax.core.config.overrides import KEYS
from megajax.core.config.synonyms import _DIFFERENT, _NAMES, _VALUES

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ('name', 'key'),
    [
        ('mesh.tp', 'mesh.model'),
        ('mesh.dp', 'mesh.data'),
        ('mesh.pp', 'mesh.stages'),
        ('mesh.cp', 'mesh.context'),
        ('mesh.sp', 'mesh.sequence_parallel'),
        ('mesh.fsdp', 'mesh.data'),
        ('tensor_model_parallel_size', 'mesh.model'),
        ('train.lr', 'optim.lr'),
        ('learning-rate', 'optim.lr'),
        ('train.max_steps', 'train.steps'),
        ('max_iters', 'train.steps'),
        ('batch', 'train.batch_size'),
        ('train.batch', 'train.batch_size'),
        ('gradient_accumulation_steps', 'train.microbatches'),
        ('model.n_layers', 'model.num_layers'),
        ('model.d_model', 'model.hidden_size'),
        ('model.n_heads', 'model.num_heads'),
        ('model.N_HEADS', 'model.num_heads'),
        ('vision.n_layers', 'vision.num_layers'),
        ('model.intermediate_size', 'model.ffn_size'),
        ('model.sliding_window', 'model.window'),
        ('model.no_rope_layers', 'model.layers'),
        ('model.apply_layernorm_1p', 'model.zero_centered_norm'),
        ('model.embedding_multiplier', 'model.embedding_scale'),
        ('train.weight_decay', 'optim.weight_decay'),
        ('train.grad_clip', 'optim.grad_clip'),
        ('optim.max_grad_norm', 'optim.grad_clip'),
        ('lora.r', 'lora.rank'),
        ('data.dataset', 'data.corpus'),
        ('run.output_dir', 'run.dir'),
        ('load', 'run.start_from'),
        ('run.name', 'run.dir'),
        ('model.path', 'run.start_from'),
        ('tokenizer.path', 'data.tokenizer'),
        ('eval.every', 'train.eval_every'),
        ('train.stpes', 'train.steps'),
        ('optimm.beta1', 'optim.beta1'),
        ('train.optimizer', 'optim.kind'),
        ('mesh.ep', 'mesh.experts'),
        ('model.num_experts', 'model.experts.count'),
        ('num_experts_per_tok', 'model.experts.active'),
        ('resume_from_checkpoint', 'run.dir'),
    ],
)
def test_an_unknown_key_names_the_one_that_other_programs_call_so(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load('tiny', [f'{name}=2'])
    assert str(error.value).endswith(f'{name}: unknown key; did you mean {key}?')


@pytest.mark.parametrize(
    ('override', 'value'),
    [
        ('optim.shard=ZeRO-2', 'gradients'),
        ('optim.shard=1', 'optimizer'),
        ('optim.shard=FULL_SHARD', 'weights'),
        ('train.dtype=bf16', 'bfloat16'),
        ('train.dtype=bfloat_16', 'bfloat16'),
        ('train.recompute=true', 'full'),
        ('model.norm=layer_norm', 'layernorm'),
        ('model.activation=silu', 'swiglu'),
        ('optim.schedule=cosin', 'cosine'),
    ],
)
def test_a_value_that_other_programs_call_so_is_named(override: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf'; did you mean {value}\?$'):
        load('tiny', [override])


@pytest.mark.parametrize('allowed', _VALUES)
def test_a_value_is_no_other_name_of_a_value(allowed: str) -> None:
    assert not {allowed} & {name for names in _VALUES.values() for name in names}


@pytest.mark.parametrize(
    ('name', 'instead'),
    [
        ('train.epochs', 'use train.steps'),
        ('lora.dropout', 'not supported in adapters'),
        ('optim.warmup_ratio', r'use optim\.warmup_steps, .*: ratio x train\.steps$'),
        ('per_device_train_batch_size', r'size x mesh\.data x train\.microbatches$'),
        ('data_parallel_shard_degree', r'use mesh\.data, .*: degree x mesh\.replicas$'),
        ('model.sliding_window_pattern', r'model\.layers=\[{},{"window":null}\]$'),
    ],
)
def test_a_key_that_none_here_means_gets_the_reason(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        load('tiny', [f'{name}=2'])


@pytest.mark.parametrize(
    'name',
    [
        'model.name',
        'optim.weights',
        'vision.path',
        'lora.path',
        'train.name',
        'run.input',
        'loss.name',
        'train.compile',
        'mesh.nodes',
        'train.loss',
        'model.flash',
        'run.id',
    ],
)
def test_a_name_of_something_else_gets_the_keys_of_its_section(name: str) -> None:
    with pytest.raises(ConfigError, match='unknown key; known keys: '):
        load('tiny', [f'{name}=2'])
    with pytest.raises(ConfigError, match='no such section or key; sections: '):
        keys_in(name)


def test_a_name_means_one_key_and_is_none_itself() -> None:
    names = [name for group in (*_NAMES.values(), *_DIFFERENT.values()) for name in group]
    own = {path.partition('.')[2] for path in KEYS}
    assert len(names) == len({*names})
    assert own.isdisjoint(names)
    assert _NAMES.keys() <= {key.path for key in keys_in()}


@pytest.mark.parametrize(
    ('line', 'fix'),
    [
        ('train tiny --steps 10', 'train.steps=10'),
        ('train tiny --lr=3e-4', 'optim.lr=3e-4'),
        ('train tiny --train.steps 10', 'train.steps=10'),
        ('train tiny --batch-size 4 optim.lr=1', 'train.batch_size=4'),
        ('train tiny --tp', 'mesh.model=VALUE'),
        ('train --config x.yaml', 'the config is an argument: megajax train x.yaml'),
        ('plan tiny --tp 2', 'mesh.model=2'),
        ('inspect tiny --num-layers 2', 'model.num_layers=2'),
        ('generate runs/small --dp 2', 'mesh.data=2'),
        ('config show tiny --lr 3', 'optim.lr=3'),
        ('train tiny --warmup-ratio 0.03', 'ratio x train.steps'),
        ('train tiny --micro-batch-size 4', 'train.batch_size // (mesh.data x size)'),
        (
            'train tiny --per-device-train-batch-size 4',
            'size x mesh.data x train.microbatches',
        ),
        ('train tiny --resume-from-checkpoint runs/a', 'run.dir=runs/a'),
        ('train tiny --num-experts 8', 'model.experts.count=8'),
    ],
)
def test_an_option_that_is_a_key_gets_the_override(line: str, fix: str) -> None:
    done = RUNNER.invoke(app, line.split())
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith(fix)


@pytest.mark.parametrize('line', ['train tiny --foo 3', 'report --lr 3', 'doctor --steps 3'])
def test_another_option_is_refused_as_before(line: str) -> None:
    done = RUNNER.invoke(app, line.split())
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert 'No such option' in done.output


def test_an_option_of_a_launched_command_gets_the_override() -> None:
    with pytest.raises(ConfigError, match=r'section\.key=value, train\.steps=VALUE'):
        load('tiny', ['--steps', '10'])
    with pytest.raises(ConfigError, match=r'section\.key=value, use optim\.warmup_steps'):
        load('tiny', ['--warmup-ratio', '0.03'])


def test_the_pattern_of_windows_that_a_message_shows_is_one() -> None:
    with pytest.raises(ConfigError) as error:
        load('tiny', ['model.sliding_window_pattern=2'])
    override = str(error.value).split()[-1]
    layers = load('tiny', ['model.window=16', override]).model.layer_configs
    assert [layer.window for layer in layers] == [16, None] * (len(layers) // 2)


def folder_of_run(folder: Path, name: str) -> Path:
    (folder / name / 'checkpoints' / '100').mkdir(parents=True)
    (folder / name / 'config.yaml').write_text('')
    return folder / name


def test_a_folder_in_place_of_a_config_gets_the_key_of_its_kind(tmp_path: Path) -> None:
    run = folder_of_run(tmp_path / 'runs', 'small')
    of_run = f'its config is {run}/config.yaml'
    for folder, fix in (
        (run, f'{of_run}, and to resume it, use run.dir={run}'),
        (run / 'checkpoints' / '100', f'{of_run}, and to start a run from its weights, use '),
        (run / 'checkpoints' / '100', f'use run.start_from={run}/checkpoints/100'),
        (run.parent, f'is a folder of runs; for one of them, {of_run}, and to resume it, use '),
        (tmp_path, 'is a folder; give a YAML file, or a preset'),
        (
            f'run.dir={run}',
            f'is an override; put a config before it, for example {run}/config.yaml',
        ),
        ('run.dir=none', 'is an override; put a config before it, for example tiny'),
    ):
        with pytest.raises(ConfigError) as error:
            load(folder)
        assert fix in str(error.value)


def test_a_misspelled_file_gets_its_neighbor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'small.yaml').write_text('')
    monkeypatch.chdir(tmp_path)
    for name, near in (
        ('smal.yaml', 'small.yaml'),
        ('smal', 'small.yaml'),
        ('tny.yaml', 'tiny'),
    ):
        with pytest.raises(ConfigError, match=f'did you mean {near}[?]'):
            load(name)
