"""One file, or one command line, in; an equal config or every mistake out."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.core.config import ConfigError, dump, load, presets, reload
from megajax.core.config.load import CONFIG
from megajax.core.config.overrides import typed_override
from megajax.runtime.checkpoint.digests import find_step
from megajax.runtime.run.infer_config import config_of_overrides

MODEL = (
    'model: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 1000, max_seq_len: 1024}\n'
)


def write(folder: Path, text: str) -> Path:
    file = folder / 'run.yaml'
    file.write_text(text, encoding='utf-8')
    return file


def mistakes(source: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(source, overrides)
    return str(error.value).splitlines()


@pytest.mark.parametrize('preset', presets())
def test_a_dumped_config_loads_back_equal(preset: str, tmp_path: Path) -> None:
    config = load(preset)
    assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize('empty', ['lora: {}', 'lora:', 'lora:\n  # rank: 8', 'lora: {alpha: 16}'])
def test_a_section_that_lacks_its_required_keys_is_not_left_out(tmp_path: Path, empty: str) -> None:
    file = write(tmp_path, f'{MODEL}{empty}\n')
    (said,) = mistakes(file)
    assert said.startswith(str(file))
    assert said.endswith(': lora.rank: required, and has no default; add it')
    lora = load(file, ['lora.rank=4']).lora
    assert lora is not None
    assert lora.rank == 4


@pytest.mark.parametrize('absent', ['lora: null', 'lora: ~', 'mesh: {}', 'train:', 'vision: null'])
def test_a_section_may_be_null_or_have_its_defaults(tmp_path: Path, absent: str) -> None:
    assert load(write(tmp_path, f'{MODEL}{absent}\n')) == load(write(tmp_path, MODEL))


def test_a_merge_is_read_inside_a_group_and_rejected_with_its_line_elsewhere(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, f'{MODEL[:-2]}, layers: [&one {{window: 8}}, {{<<: *one}}]}}\n')
    assert [one.window for one in load(file).model.layers] == [8, 8]
    said = 'merges are supported only inside a group such as model.experts; write the keys here'
    for text, path in ('train: {<<: {steps: 5}}', 'train.<<'), ('<<: {train: {steps: 5}}', '<<'):
        assert mistakes(write(tmp_path, f'{MODEL}{text}\n')) == [f'{file}:2: {path}: {said}']


@pytest.mark.parametrize('absent', ['lora=null', 'lora=~'])
def test_an_override_removes_a_section_that_may_be_null(tmp_path: Path, absent: str) -> None:
    begun = load(write(tmp_path, f'{MODEL}lora: {{rank: 4, alpha: 8.0}}\n'))
    assert begun.lora is not None
    without = load(write(tmp_path, MODEL))
    assert reload(begun.model_dump(mode='json'), [absent], place='record.json') == without
    for keys in ('{}', '{rank: 4}'):
        assert load(write(tmp_path, f'{MODEL}lora: {keys}\n'), [absent]) == without
    again = load(tmp_path / 'run.yaml', ['lora.alpha=2', absent, 'lora.rank=8']).lora
    assert again is not None
    assert (again.rank, again.alpha) == (8, 32.0)
    (said,) = mistakes(tmp_path / 'run.yaml', 'mesh=null')
    assert said.startswith('override mesh=null: not of the form section.key=value')


@pytest.mark.parametrize(
    ('scaling', 'said'),
    [
        ('{type: linear, factor: -8}', 'factor must be greater than or equal to 1e-14, not -8'),
        ('{type: linear}', 'factor required, and has no default; add it'),
        ('{type: linar, factor: 8}', "type must be 'linear', 'llama3', 'yarn' or 'longrope', not"),
    ],
)
def test_a_mistake_in_a_group_is_not_hidden_by_a_default_that_needs_the_key(
    scaling: str, said: str
) -> None:
    (rope,) = mistakes('tiny', 'model.position=rope', f'model.rope_scaling={scaling}')
    assert f': model.rope_scaling: {said}' in rope
    (layer,) = mistakes(
        'tiny', 'model.position=rope', f'model.layers=[{{rope_scaling: {scaling}}}]'
    )
    assert f': model.layers: [0].rope_scaling.{said}' in layer


@pytest.mark.parametrize(
    'text',
    [
        'off',
        'null',
        '3e-4',
        '2026-01-01',
        'a: b',
        '# x',
        ' ',
        ' y ',
        'two\nlines',
        '"',
        'é',
        'long ' * 40,
    ],
)
def test_text_stays_text(text: str, tmp_path: Path) -> None:
    config = load(write(tmp_path, MODEL))
    config = config.model_copy(update={'data': config.data.model_copy(update={'corpus': text})})
    assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    ('override', 'value'),
    [
        ('optim.lr=3e-4', 3e-4),
        ('optim.lr=1', 1.0),
        ('mesh.sequence_parallel=true', True),
        ('data.corpus=off', 'off'),
        ('data.corpus=a=b', 'a=b'),
        ('data.corpus=2026-01-01', '2026-01-01'),
        ('data.split=90,5,5', '90,5,5'),
        ('run.dir=', None),
        ('train.sample_prompts=[def, "class "]', ('def', 'class ')),
    ],
)
def test_an_override_is_a_yaml_1_2_value(override: str, value: object, tmp_path: Path) -> None:
    section, key = override.partition('=')[0].split('.')
    assert getattr(getattr(load(write(tmp_path, MODEL), [override]), section), key) == value


def test_overrides_beat_the_file_and_the_last_one_stands(tmp_path: Path) -> None:
    file = write(tmp_path, MODEL + 'train: {steps: 5}')
    assert load(file, ['train.steps=6', 'train.steps=7']).train.steps == 7


EXPERTS = 'model:\n  experts: {count: 4, active: 2, ffn_size: 32, balance_loss: 0.01}\n'
EXPERTS += ''.join(f'  {part}\n' for part in MODEL[8:-2].split(', '))


def test_an_override_of_a_key_in_a_group_keeps_the_other_keys_of_the_group(tmp_path: Path) -> None:
    file = write(tmp_path, EXPERTS)
    experts = load(file, ['model.experts.capacity=1.5', 'model.experts.active=1']).model.experts
    assert experts is not None
    assert (experts.active, experts.capacity, experts.balance_loss) == (1, 1.5, 0.01)
    whole = 'model.experts={count: 8, active: 2, ffn_size: 16}'
    for overrides, expected in (
        ([whole, 'model.experts.count=16'], (16, 16, 0.0)),
        (['model.experts.count=16', whole], (8, 16, 0.0)),
    ):
        experts = load(file, overrides).model.experts
        assert experts is not None
        assert (experts.count, experts.ffn_size, experts.balance_loss) == expected


def test_a_stored_group_can_be_changed_too(tmp_path: Path) -> None:
    stored = load(write(tmp_path, EXPERTS)).model_dump(mode='json')
    config = reload(stored, ['model.experts.capacity=2.0'], place='record.json')
    assert config.model.experts is not None
    assert config.model.experts.capacity == 2


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.experts.active=0', 'model.experts: active must be greater than 0, not 0'),
        ('model.experts.active=8', 'model.experts.active: 8 is more than model.experts.count=4'),
        (
            'model.experts.activ=1',
            'model.experts.activ: unknown key; did you mean model.experts.active?',
        ),
        ('model.layers.window=8', 'model.layers.window: model.layers is a list, which is set as a'),
        (
            'model.rope_scaling.factor=8',
            'model.rope_scaling.factor: model.rope_scaling is not set; set it as a whole: '
            "'model.rope_scaling={type: VALUE, factor: 8}'",
        ),
        (
            'train.profile.steps=3',
            'train.profile.steps: train.profile is not set; set it as a whole: '
            "'train.profile={start: VALUE, steps: 3}'",
        ),
    ],
)
def test_a_mistake_in_an_override_inside_a_group_is_reported_there(
    override: str, message: str, tmp_path: Path
) -> None:
    (found,) = mistakes(write(tmp_path, EXPERTS), override)
    assert found.startswith(f'override {override}: {message}')


def test_a_mistake_of_the_file_in_a_group_keeps_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, EXPERTS.replace('count: 4', 'count: 0'))
    (found,) = mistakes(file, 'model.experts.capacity=1.5')
    assert found == f'{file}:2: model.experts: count must be greater than 0, not 0'


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    assert load(write(tmp_path, MODEL + 'train:\n')) == load(write(tmp_path, MODEL))


@pytest.mark.parametrize('value', ['big', '-4', 'null', '.inf', 'true', '0'])
def test_a_loss_scale_is_auto_or_a_number(tmp_path: Path, value: str) -> None:
    (message,) = mistakes(write(tmp_path, MODEL), f'train.loss_scale={value}')
    assert message.startswith(
        f'override train.loss_scale={value}: train.loss_scale: '
        "must be 'auto' or a power of two, not "
    )


def test_every_mistake_is_reported_at_once_with_its_place(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """\
model:
  num_layers: 2
  num_layers: 3
  hidden_size: 64
  num_heads: four
  num_head: 4
  vocab_size: 1000
  norm: batchnorm
  bias: off
trian:
  steps: 3
optim:
  lr: 1e-6
data: stdlib
""",
    )
    assert mistakes(file, 'mesh.model=3', 'lr=3', 'train.steps', 'run.dir=[', 'optim.beta1=1') == [
        f'{file}:3: model.num_layers: written twice, first on line 2; delete one of the two',
        f'{file}:6: model.num_head: unknown key; did you mean model.num_heads?',
        f'{file}:10: trian: unknown key; did you mean train?',
        (
            f'{file}:14: data: must be a group of keys; it has corpus, blend, tokenizer, split, '
            'order, chat_template, ignored_keys, document_mask'
        ),
        'override lr=3: lr: unknown key; did you mean optim.lr?',
        'override train.steps: not of the form section.key=value, for example train.steps=100',
        (
            'override run.dir=[: not valid YAML: expected the node content, '
            "but found '<stream end>'; put the value in quotes"
        ),
        f"{file}:5: model.num_heads: must be a valid integer, not 'four'",
        f'{file}: model.max_seq_len: required, and has no default; add it',
        f"{file}:8: model.norm: must be 'layernorm' or 'rmsnorm', not 'batchnorm'",
        f"{file}:9: model.bias: must be true or false, not 'off'",
        'override optim.beta1=1: optim.beta1: must be less than or equal to 0.9999999, not 1',
        (
            'override mesh.model=3: model.vocab_size: 1000 is padded to 1024, '
            'which mesh.model=3 does not divide; use mesh.model 1'
        ),
        (
            f'{file}:13: optim.min_lr: 1e-05 exceeds optim.lr=1e-06; use less than 1e-06, '
            'for example 1e-07'
        ),
    ]


@pytest.mark.parametrize(
    'value',
    ['8.0', '"8"', 'true', 'null', '[8]', '{a: 8}', '.inf'],
    ids=['float', 'text', 'bool', 'null', 'list', 'group', 'infinity'],
)
def test_no_value_is_converted_to_another_type(value: str, tmp_path: Path) -> None:
    (message,) = mistakes(write(tmp_path, MODEL), f'train.batch_size={value}')
    assert 'train.batch_size: must be a valid integer, not ' in message


@pytest.mark.parametrize(
    ('text', 'line'),
    [
        ('model:\n  bias: a: b\n', 2),
        ('model:\n\tbias: 1\n', 2),
        ('model: !!python/name:os.system\n', 1),
        ('--- {}\n--- {}\n', 2),
        ('- 1', 1),
    ],
    ids=['colon', 'tab', 'python object', 'two documents', 'list'],
)
def test_bad_yaml_is_reported_by_line(text: str, line: int, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    assert mistakes(file)[0].startswith(f'{file}:{line}: ')


def test_a_missing_file_names_the_nearest_preset() -> None:
    (message,) = mistakes('configs/llama3_8.yaml')
    assert message.startswith(
        'configs/llama3_8.yaml: no such file or preset; did you mean llama3_8b? presets: '
        'arr_coc_32b, bert_1.3b, '
    )


def test_a_missing_file_names_the_files_that_are_there(tmp_path: Path) -> None:
    for name in 'my.yaml', '.hidden.yaml':
        (tmp_path / name).touch()
    (near,), (far,) = mistakes(tmp_path / 'my.yml'), mistakes(tmp_path / 'mu.yaml')
    assert f'; did you mean {tmp_path}/my.yaml? presets: ' in near
    assert f'; YAML files there: {tmp_path}/my.yaml; presets: ' in far


def test_a_misspelled_run_gets_the_run_as_it_is_typed(tmp_path: Path) -> None:
    for run in 'a b/small', 'a b/other':
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / CONFIG).touch()
    missing = tmp_path / 'a b/smal'
    meant = f"did you mean 'run.dir={tmp_path}/a b/small'?"
    assert meant in mistakes(missing)[0]
    for read in (lambda: find_step(missing), lambda: find_step(missing / '10')):
        with pytest.raises(ConfigError, match=r'did you mean .*/small\?'):
            read()
    with pytest.raises(ConfigError, match=re.escape(meant)):
        config_of_overrides([f'run.dir={missing}'])


@pytest.mark.parametrize(
    ('override', 'quoted'),
    [
        ('run.dir=runs/sweep #2', """'run.dir="runs/sweep #2"'"""),
        ('run.dir=#7', """'run.dir="#7"'"""),
        ('train.steps=9 # few', """'train.steps="9 # few"'"""),
        ('data.blend=["a", # b\n "c"]', 'data.blend='),
    ],
)
def test_an_override_is_never_cut_at_a_comment(override: str, quoted: str) -> None:
    (said,) = mistakes('tiny', override)
    assert 'begins a comment in YAML; remove it, or put the text in quotes' in said
    assert quoted in said


@pytest.mark.parametrize('folder', ['runs/sweep#2', '"runs/sweep #2"', "'#7'", '"a\\"#"'])
def test_a_sign_inside_a_text_begins_no_comment(folder: str) -> None:
    said = load('tiny', [f'run.dir={folder}']).run.dir
    assert said == folder.strip('\'"').replace('\\', '')


@pytest.mark.parametrize('name', ['sweep #2', '7', 'a: b', '[x', 'null', 'it\'s "new"'])
def test_the_override_of_a_run_that_a_message_names_sets_it(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    run.mkdir()
    (run / CONFIG).write_text(dump(load('tiny')))
    fix = mistakes(run)[0].partition('to resume it, use ')[2]
    (override,) = shlex.split(fix)
    assert load('tiny', [override]).run.dir == str(run)
    (override,) = shlex.split(typed_override('run.dir', name))
    assert load('tiny', [override]).run.dir == name


def test_what_is_no_file_or_no_text_is_told(tmp_path: Path) -> None:
    assert mistakes(tmp_path) == [
        f'{tmp_path}: is a folder; give a YAML file, or a preset (megajax config list)'
    ]
    (tmp_path / 'binary.yaml').write_bytes(b'\xff\xfe')
    (message,) = mistakes(tmp_path / 'binary.yaml')
    assert message.startswith(f'{tmp_path}/binary.yaml: not valid YAML: ')


def test_a_config_can_be_hashed_and_a_blend_survives_its_dump(tmp_path: Path) -> None:
    config = load('tiny', ['data.blend={web: 0.7, code: 3}'])
    (tmp_path / 'again.yaml').write_text(dump(config))
    again = load(tmp_path / 'again.yaml')
    assert again == config
    assert hash(again) == hash(config)
    assert dict(again.data.blend) == {'web': 0.7, 'code': 3.0}


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    write(tmp_path, f'{MODEL}data: {{corpus: größe}}\n')
    code = (
        'from megajax.core.config import load; '
        f'print(ascii(load({str(tmp_path / "run.yaml")!r}).data.corpus))'
    )
    ascii_only = os.environ | {'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0', 'PYTHONUTF8': '0'}
    done = subprocess.run(
        [sys.executable, '-c', code], env=ascii_only, capture_output=True, text=True
    )
    assert done.stdout == f'{"größe"!a}\n', done.stderr


def test_a_path_as_a_key_of_the_file_is_told_its_section(tmp_path: Path) -> None:
    file = write(tmp_path, MODEL + 'optim.lr: 1e-4\n')
    assert mistakes(file) == [
        f'{file}:2: optim.lr: is not a section; write it under optim, as optim: {{lr: VALUE}}'
    ]


def test_blanks_around_the_key_of_an_override_are_no_part_of_it() -> None:
    assert load('tiny', ['optim.lr = 2e-3']).optim.lr == 2e-3


@pytest.mark.parametrize('written', ['5e-4', '5E-4', '.0005', '5.0e-04'])
def test_numbers_may_be_written_with_an_exponent_alone(written: str, tmp_path: Path) -> None:
    assert load(write(tmp_path, f'{MODEL}optim: {{lr: {written}}}\n')).optim.lr == 5e-4
    assert load('tiny', [f'optim.lr={written}', 'optim.min_lr=0']).optim.lr == 5e-4


def test_recorded_keys_without_effect_are_left_out_and_a_users_are_refused() -> None:
    """An earlier version may have accepted them, and an override may take their effect away."""
    stored = load('tiny_moe').model_dump(mode='json')
    stored['train']['schedule'] = 'gpipe'
    stored['optim']['decay_steps'] = 100
    stored['model']['experts'] |= {'balance_loss': 0.0, 'balance_over': 'sequence'}
    config = reload(stored, place='record.json')
    assert (config.train.schedule, config.optim.decay_steps) == ('1f1b', 100)
    assert config.model.experts.balance_over == 'batch'
    constant = 'optim.schedule=constant'
    assert reload(stored, [constant], place='record.json').optim.decay_steps is None
    with pytest.raises(ConfigError, match='decay_steps: 90 has no effect'):
        reload(stored, [constant, 'optim.decay_steps=90'], place='record.json')
    with pytest.raises(ConfigError, match='gpipe has no effect'):
        load('tiny_moe', ['train.schedule=gpipe'])


@pytest.mark.parametrize(
    ('effective', 'override', 'own'),
    [
        ('optim.kind=muon optim.momentum=0.9', 'optim.kind=adamw', 'optim.momentum=0.9'),
        ('train.dtype=float16 train.loss_scale=8', 'train.dtype=bfloat16', 'train.loss_scale=8'),
        (
            'model.experts.capacity=1.0 model.experts.capacity_group=64',
            'model.experts.capacity=null',
            'model.experts.capacity_group=64',
        ),
    ],
)
def test_an_override_takes_the_effect_of_recorded_keys_away(
    effective: str, override: str, own: str
) -> None:
    stored = load('tiny_moe', effective.split()).model_dump(mode='json')
    assert reload(stored, [override], place='record.json') == load('tiny_moe', [override])
    path = own.partition('=')[0]
    with pytest.raises(ConfigError, match=f'override {own}: {path}: '):
        reload(stored, [override, own], place='record.json')


@pytest.mark.parametrize(
    ('key', 'ratio', 'read'),
    [('warmup_steps', 0.03, 0), ('wsd_steps', 0.1, 1), ('decay_steps', 0.8, 1)],
)
@pytest.mark.parametrize('overrides', [[], ['train.steps=50_000']])
def test_a_recorded_ratio_is_the_steps_that_it_was_applied_to(
    key: str, ratio: float, read: int, overrides: list[str]
) -> None:
    stored = load('tiny', ['optim.schedule=wsd', 'optim.warmup_steps=0']).model_dump(mode='json')
    stored['optim'][key] = ratio
    optim = reload(stored, overrides, place='record.json').optim
    assert getattr(optim, key) == read
    with pytest.raises(ConfigError, match='is less than one step'):
        reload(stored, [f'optim.{key}={ratio}', *overrides], place='record.json')


def test_a_warm_up_of_inverse_sqrt_below_one_step_has_an_effect_and_stays() -> None:
    short = load('tiny', ['optim.schedule=inverse_sqrt', 'optim.warmup_steps=0.5'])
    assert reload(short.model_dump(mode='json'), place='record.json') == short
    assert short.optim.warmup_steps == 0.5


def test_a_recorded_schedule_that_never_decays_is_constant() -> None:
    stored = load('tiny').model_dump(mode='json')
    low = stored['optim']['min_lr']
    stored['optim'] |= {'lr': low, 'warmup_steps': 10, 'decay_steps': 100}
    optim = reload(stored, place='record.json').optim
    assert (optim.schedule, optim.lr, optim.warmup_steps) == ('constant', low, 10)
    with pytest.raises(ConfigError, match=r'=0.003: optim.schedule: cosine has no effect'):
        reload(stored, ['optim.lr=3e-3', 'optim.min_lr=0.003'], place='record.json')


def test_both_fixes_for_a_corpus_and_a_blend_in_a_file_are_valid(tmp_path: Path) -> None:
    file = tmp_path / 'both.yaml'
    file.write_text(dump(load('tiny')).replace('blend: {}', 'blend: {web: 1.0}'))
    with pytest.raises(ConfigError, match='set only one of them') as raised:
        load(file, ['data.corpus=mine'])
    fixes = re.findall(r'data\.\w+=[^ )]+', str(raised.value).partition(', add ')[2])
    assert fixes == ['data.corpus=stdlib', 'data.blend={}']
    for fix in fixes:
        load(file, ['data.corpus=mine', fix])
