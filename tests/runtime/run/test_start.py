"""A run that begins with the weights of another: found, verified, held against its config, and left
as they are.
"""

import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_state, tiny
from runs import in_two_processes
from support import by_name, on_mesh, slow
from typer.testing import CliRunner
from vlm import relevant, vlm

import megajax
from megajax.commands.main import app
from megajax.core.config import CheckpointError, Config, ConfigError, dump
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.data import load_data
from megajax.runtime.data.synthetic_corpus import drawn_tokenizer
from megajax.runtime.data.text.tokenizer import byte_tokenizer, train_bpe
from megajax.runtime.run.chat_template import read_corpus
from megajax.runtime.run.infer_config import config_of_overrides, with_own_tokenizer
from megajax.runtime.run.start import (
    check_tokenizer,
    opened_folder,
    origin_of,
    run_folder,
    start_checkpoint,
)

ROTARY = {'position': 'rope', 'max_seq_len': 64}


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with on_mesh(tiny()):
        yield


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the weights of an import at step 0 and a whole state at step 3."""
    run, config = tmp_path_factory.mktemp('runs') / 'source', tiny(run={'wandb': 'mine'})
    with (
        on_mesh(config),
        Checkpoints(run / 'checkpoints', config, tokenizer=byte_tokenizer()) as checkpoints,
    ):
        checkpoints.save({'params': make_state(config, 0).params}, 0)
        checkpoints.save(make_state(config, 3), 3)
    byte_tokenizer().save(run / 'tokenizer.json')
    (run / 'config.yaml').write_text(dump(config))
    return run


@pytest.fixture
def source(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / 'source'))


def damage(checkpoint: Path) -> None:
    largest = max(
        (path for path in checkpoint.rglob('*') if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-1])


def find_start(config: Config, run: Path) -> Path | None:
    with start_checkpoint(config, run) as start:
        return start


def starting(source: Path, /, **sections: dict[str, Any]) -> Config:
    return tiny(2, 2, **{**sections, 'run': {'start_from': str(source)} | sections.get('run', {})})


@pytest.mark.parametrize(('name', 'step'), [('', 3), ('0', 0), ('checkpoints/0', 0), ('3', 3)])
def test_a_run_or_one_of_its_steps_is_found(source: Path, name: str, step: int) -> None:
    assert find_start(
        starting(source / name), source.parent / 'new'
    ) == source / 'checkpoints' / str(step)


@pytest.mark.parametrize('name', ['checkpoints/best', '4.holds-3'])
def test_a_copy_is_found_by_any_name(source: Path, name: str) -> None:
    copy = Path(shutil.copytree(source / 'checkpoints/3', source / name))
    assert find_start(starting(copy), source.parent / 'new') == copy


TOGETHER = """
import jax, logging, os, sys
from pathlib import Path
from megajax.core.config import ConfigError
from megajax.runtime.checkpoint import digests
from megajax.runtime.processes.distributed import processes
from megajax.runtime.run.start import _sound_in_all

os.chdir(sys.argv[1])
with processes():
    if jax.process_index() == 1:
        digests.find_steps = lambda folder: []
    for wanted in ('source', 'link/../source', 'source/checkpoints/0', 'source/0'):
        with _sound_in_all(Path(wanted)) as start:
            print('start', start.resolve())
    os.chdir('source/checkpoints/0')
    with _sound_in_all(Path('.')) as start:
        print('start', start.resolve())
    os.chdir('/' if jax.process_index() == 1 else sys.argv[1])
    try:
        with _sound_in_all(Path('source')):
            pass
    except ConfigError as error:
        print('error', error)
        raise
"""


@pytest.mark.faults
def test_two_processes_find_a_checkpoint_that_one_does_not_list_or_are_told_they_share_none(
    source: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(source, tmp_path / 'other/source'))
    (tmp_path / 'other/deep').mkdir()
    (tmp_path / 'link').symlink_to('other/deep')
    damage(source / 'checkpoints/3')
    outputs = in_two_processes(TOGETHER, str(tmp_path))
    first, third = source / 'checkpoints/0', other / 'checkpoints/3'
    expected = [first, third, first, first, first]
    for output in outputs:
        assert re.findall(r'^start (.*)$', output, re.MULTILINE) == list(map(str, expected)), output
    told = r'^error run.start_from: source/checkpoints/3: process 1 on \S+ cannot open .*: No such '
    assert re.search(told, outputs[1], re.MULTILINE), outputs[1]


def test_of_a_run_the_newest_that_verifies_is_taken_and_of_a_step_nothing_else(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(source / 'checkpoints/3')
    assert find_start(starting(source), source.parent / 'new') == source / 'checkpoints/0'
    assert 'checkpoints/3 is rejected' in caplog.text
    with pytest.raises(CheckpointError, match='3 cannot be used: run megajax checkpoint verify'):
        find_start(starting(source / '3'), source.parent / 'new')
    with pytest.raises(
        ConfigError,
        match=r'^run.start_from: .*7: no finished checkpoint there; choose one of steps 0, 3$',
    ):
        find_start(starting(source / '7'), source.parent / 'new')


@pytest.mark.parametrize(('data', 'model'), [(1, 1), (1, 4)])
def test_the_weights_are_the_same_bits_on_any_mesh(source: Path, data: int, model: int) -> None:
    config = tiny(data, model, train={'dtype': 'bfloat16'}, run={'start_from': str(source)})
    with on_mesh(config):
        start = find_start(config, source.parent / 'new')
        assert start
        actual, expected = (
            by_name(restore_params(start, config)),
            by_name(make_state(config, 3).params),
        )
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
        assert actual[name].sharding == x.sharding


def test_a_script_loads_the_weights_of_a_run_onto_any_mesh(source: Path) -> None:
    config = tiny(1, 4)
    with on_mesh(config):
        actual = by_name(megajax.load_params(source, config))
        expected = by_name(make_state(config, 3).params)
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
        assert actual[name].sharding == x.sharding


def test_a_script_that_loads_weights_into_another_model_is_told_the_keys(source: Path) -> None:
    message = r'hidden_size: 64, but 32 in .*/source/checkpoints/3, from which load_params .*; set'
    with pytest.raises(ConfigError, match=message):
        megajax.load_params(source, tiny(model={'hidden_size': 64}))


def test_a_run_that_has_begun_starts_from_nothing(source: Path) -> None:
    assert find_start(starting(source), source) is None
    assert find_start(tiny(), source.parent / 'new') is None


def test_every_key_of_another_model_is_named_with_its_fix(source: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_start(
            starting(source, model={'hidden_size': 64, 'norm': 'rmsnorm', 'max_seq_len': 64}),
            source.parent / 'new',
        )
    lines = str(error.value).splitlines()
    fixes = {line.split(':')[0]: line.rpartition('; ')[2] for line in lines}
    expected = {
        'hidden_size': '32',
        'head_dim': '8',
        'query_scale': str(8**-0.5),
        'ffn_size': '128',
        'norm': 'layernorm',
        'max_seq_len': '32',
    }
    assert fixes == {f'model.{key}': f'set model.{key}={value}' for key, value in expected.items()}
    assert all(f'in {source}/checkpoints/3' in line for line in lines)


def test_what_leaves_the_weights_their_meaning_may_differ_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tiny(model=ROTARY | {'num_layers': 2, 'layers': [{'window': 8}, {'rope_theta': 1e6}]})
    with Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    model = ROTARY | {'max_seq_len': 128, 'rope_theta': 5e5, 'dropout': 0.5}
    model |= {'num_layers': 2, 'layers': [{'window': 8}, {'rope_theta': 2e6}]}
    lora = {'rank': 4, 'targets': ['up']}
    with caplog.at_level(logging.INFO):
        assert find_start(
            starting(tmp_path / 'source', model=model, optim={'lr': 1.0}, lora=lora),
            tmp_path / 'new',
        )
    said = [record.message for record in caplog.records]
    assert said == [
        'start      lora.alpha: null -> 32.0',
        'start      lora.rank: null -> 4',
        'start      lora.targets: null -> ["up"]',
        'start      model.attention_dropout: 0.0 -> 0.5',
        'start      model.dropout: 0.0 -> 0.5',
        'start      model.layers: [{"window": 8}, {"rope_theta": 1000000.0}]'
        ' -> [{"window": 8}, {"rope_theta": 2000000.0}]',
        'start      model.max_seq_len: 64 -> 128',
        'start      model.rope_theta: 10000.0 -> 500000.0',
    ]


def test_rotary_keys_may_lengthen_the_context_and_not_lose_the_scaling_of_the_weights(
    tmp_path: Path,
) -> None:
    scaling = {'type': 'yarn', 'factor': 4.0, 'original_max_seq_len': 16}
    layers = [{'rope_scaling': None}, {'rope_theta': 1e6}]
    keys = ROTARY | {'rope_theta': 5e5, 'rope_scaling': scaling}
    keys |= {'num_layers': 2, 'layers': layers}
    old = tiny(model=keys)
    with Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)

    def start_with(**changed: Any) -> Path | None:
        config = starting(tmp_path / 'source', model=keys | changed)
        return find_start(config, tmp_path / 'new')

    for longer in (
        {'max_seq_len': 32},
        {'rope_theta': 6e5, 'rope_scaling': scaling | {'factor': 8.0}},
        {'layers': [{'rope_scaling': scaling}, {'rope_theta': 2e6}]},
    ):
        assert start_with(**longer)
    for key, other in (
        ('rope_theta', 1e4),
        ('rope_scaling', None),
        ('rope_scaling', {'type': 'linear', 'factor': 8.0}),
        ('rope_scaling', scaling | {'factor': 2.0}),
        ('rope_scaling', scaling | {'attention_factor': 1.0}),
        ('rope_scaling', scaling | {'factor': 8.0, 'original_max_seq_len': 8}),
        ('layers', [{'rope_scaling': None}, {'rope_theta': 1e5}]),
        ('layers', [{'rope_scaling': None}, {}]),
        ('layers', [{'rope_scaling': None}, {'rope_theta': 1e6, 'rope_scaling': None}]),
    ):
        with pytest.raises(ConfigError) as error:
            start_with(**{key: other})
        (line,) = str(error.value).splitlines()
        (fix,) = shlex.split(line.rpartition('; set ')[2])
        fixed, value = fix.split('=', 1)
        assert fixed == f'model.{key}'
        assert start_with(**{key: json.loads(value)}), line


def test_a_command_that_lengthens_the_context_scales_the_scores_for_its_own_factor(
    tmp_path: Path,
) -> None:
    scaling = {'type': 'yarn', 'factor': 4.0, 'original_max_seq_len': 16}
    old = tiny(model=ROTARY | {'rope_scaling': scaling}, lora={'rank': 4})
    with Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    longer = 'model.max_seq_len=128', 'model.rope_scaling.factor=8'
    command = [f'run.start_from={tmp_path}/source', *longer, 'lora=null']
    config, _ = config_of_overrides(command)
    keys = {'max_seq_len': 128, 'rope_scaling': scaling | {'factor': 8.0}}
    assert config.model == tiny(model=ROTARY | keys).model
    assert find_start(config, tmp_path / 'new')


def test_how_tokens_are_routed_in_training_may_differ_and_the_experts_may_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {'count': 4, 'active': 2, 'ffn_size': 16}
    old = tiny(model={'bias': False, 'experts': experts})
    with Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)

    def starts(**keys: Any) -> Path | None:
        model = {'bias': False, 'experts': experts | keys}
        return find_start(starting(tmp_path / 'source', model=model), tmp_path / 'new')

    with caplog.at_level(logging.INFO):
        assert starts(balance_loss=0.01, balance_over='sequence')
    said = [line for record in caplog.records if 'experts' in (line := record.message)]
    assert said == [
        'start      model.experts.balance_loss: 0.0 -> 0.01',
        'start      model.experts.balance_over: batch -> sequence',
    ]
    with pytest.raises(
        ConfigError, match=r'experts.active: 1, but 2 .* set model.experts.active=2'
    ):
        starts(active=1)


def test_a_run_cannot_add_an_encoder(source: Path) -> None:
    run = {'start_from': str(source)}
    with pytest.raises(ConfigError, match=r'has no encoder of images.*; remove the section vision'):
        find_start(vlm(run=run), source.parent / 'new')


def test_another_window_of_a_pattern_is_rejected_with_a_fix_for_the_shell(tmp_path: Path) -> None:
    old = tiny(model=ROTARY | {'num_layers': 2, 'layers': [{'window': 8}, {}]})
    with Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    model = ROTARY | {'num_layers': 2, 'layers': [{'window': 4}, {}]}
    fix = r"""; set 'model.layers=\[{"window": 8}, {}\]'$"""
    with pytest.raises(ConfigError, match=fix):
        find_start(starting(tmp_path / 'source', model=model), tmp_path / 'new')


def test_frozen_parts_may_change_where_a_run_begins_and_the_encoder_may_not(
    tmp_path: Path,
) -> None:
    old = vlm()
    with on_mesh(old), Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    run = {'start_from': str(tmp_path / 'source')}
    frozen = {'freeze': ('encoder',), 'images': 1, 'min_patches': 4}
    assert find_start(vlm(vision=frozen, run=run), tmp_path / 'new')
    with pytest.raises(ConfigError, match=r'vision.num_heads: 2, but 4 .* set vision.num_heads=4'):
        find_start(vlm(vision={'num_heads': 2}, run=run), tmp_path / 'new')


def test_regions_and_their_scorers_may_not_change_where_a_run_begins_and_the_tokens_may(
    tmp_path: Path,
) -> None:
    old, run = relevant(), {'start_from': str(tmp_path / 'source')}
    with on_mesh(old), Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    assert find_start(relevant(relevance={'total_tokens': 300}, run=run), tmp_path / 'new')
    for changed, said in (
        (
            {'regions': (1, 2)},
            r"regions: \[1, 2\], but \[2, 1\] .* set 'relevance.regions=\[2, 1\]'$",
        ),
        ({'scorer_size': 8}, r'scorer_size: 8, but 16 in .* set relevance.scorer_size=16$'),
    ):
        with pytest.raises(ConfigError, match=said):
            find_start(relevant(relevance=changed, run=run), tmp_path / 'new')


def test_a_run_cannot_add_scorers(tmp_path: Path) -> None:
    old = vlm()
    with on_mesh(old), Checkpoints(tmp_path / 'source/checkpoints', old) as checkpoints:
        checkpoints.save(make_state(old, 1), 1)
    config = relevant(run={'start_from': str(tmp_path / 'source')})
    with pytest.raises(ConfigError, match=r'no scorers of regions.*; remove the section relevance'):
        find_start(config, tmp_path / 'new')


def test_weights_are_not_given_the_ids_of_another_tokenizer(source: Path) -> None:
    checkpoint, other = source / 'checkpoints/3', train_bpe(['one two three one two three'], 300)
    check_tokenizer(checkpoint, byte_tokenizer())
    check_tokenizer(checkpoint, None)
    with pytest.raises(
        ConfigError,
        match=(
            rf'^data.tokenizer: .*{other.fingerprint}.* set '
            rf'data.tokenizer={source}/tokenizer.json$'
        ),
    ):
        check_tokenizer(checkpoint, other)


def test_drawn_images_begin_with_weights_of_their_own_tokenizer_and_no_other(
    tmp_path: Path,
) -> None:
    old = vlm()
    other = train_bpe(['one two three one two three'], 300)
    for name, tokenizer in (('own', drawn_tokenizer(old)), ('other', other)):
        folder = tmp_path / name / 'checkpoints'
        with on_mesh(old), Checkpoints(folder, old, tokenizer=tokenizer) as checkpoints:
            checkpoints.save(make_state(old, 1), 1)

    def starting_from(name: str) -> Config:
        run = {'start_from': str(tmp_path / name)}
        return vlm(run=run, data={'corpus': 'words', 'tokenizer': 'bytes'})

    assert find_start(starting_from('own'), tmp_path / 'new')
    with pytest.raises(
        ConfigError,
        match=r'^data.corpus: words uses the byte .*; train on .* data.corpus=FILE.jsonl$',
    ):
        find_start(starting_from('other'), tmp_path / 'new')


def test_each_record_says_where_the_weights_came_from_and_changing_it_later_is_told(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / 'new/checkpoints'
    with Checkpoints(folder, starting(source)) as checkpoints:
        checkpoints.origin = origin_of(source / 'checkpoints/0')
        checkpoints.save(make_state(tiny(), 1), 1)
    with caplog.at_level(logging.INFO), Checkpoints(folder, starting(source / '3')) as checkpoints:
        checkpoints.restore(1)
        checkpoints.save(make_state(tiny(), 2), 2)
    for step in ('1', '2'):
        origin = read_record(folder / step).origin
        assert (origin['checkpoint'], origin['step']) == (str(source / 'checkpoints/0'), '0')
    said = [record.message for record in caplog.records if 'run.start_from' in record.message]
    assert said == [
        (
            f'resume     run.start_from: {source} -> {source}/3, without effect: '
            'this run has begun; choose another run.dir for it'
        )
    ]


@pytest.mark.parametrize('damaged', [False, True])
def test_an_import_is_not_deleted_by_the_run_that_goes_on_from_it(
    tmp_path: Path, damaged: bool
) -> None:
    config = tiny(checkpoint={'keep': 1})
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save({'params': make_state(config, 0).params}, 0)
        checkpoints.save(make_state(config, 1), 1)
        checkpoints.wait()
        if damaged:
            damage(tmp_path / '0')
        checkpoints.save(make_state(config, 2), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['0', '2']


def test_a_command_without_a_config_has_that_of_what_it_names(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    went_on, name = config_of_overrides(['run.dir=source', 'run.start_from=other', 'train.steps=5'])
    assert (went_on.model, went_on.run.wandb, went_on.train.steps) == (tiny().model, 'mine', 5)
    began, name = config_of_overrides(['run.start_from=source', 'run.dir="new"'])
    assert (began.model, began.run.wandb, began.run.dir, name) == (
        tiny().model,
        None,
        'new',
        'source',
    )
    assert began.data.tokenizer == f'{source}/tokenizer.json'
    default, name = config_of_overrides(['train.steps=500'])
    assert (name, default.model.num_layers) == ('tiny', 2)


def test_a_run_dir_that_names_nothing_does_not_train_the_default(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(
        ConfigError,
        match=(
            r'run.dir=sourse: there is no run.* did you mean run.dir=source\?.* train tiny '
            r'run.dir=sourse$'
        ),
    ):
        config_of_overrides(['train.steps=5', 'run.dir=sourse'])
    with pytest.raises(
        ConfigError,
        match=(
            r'^run.dir=nowhere/at/all: there is no run to resume .* to begin a run there name its '
            r'config'
        ),
    ):
        config_of_overrides(['run.dir=nowhere/at/all'])


def test_a_run_resumes_with_its_own_tokenizer_wherever_it_is_and_takes_no_other_for_it(
    tmp_path: Path,
) -> None:
    began, run = tmp_path / 'import/tokenizer.json', tmp_path / 'run'
    config = tiny(data={'tokenizer': str(began)})
    with on_mesh(config), Checkpoints(run / 'checkpoints', config, tokenizer=byte_tokenizer()) as c:
        c.save(make_state(config, 3), 3)
    byte_tokenizer().save(run / 'tokenizer.json')
    moved = run.rename(tmp_path / 'moved')

    def tokenizer(config: Config, run: Path) -> str:
        return with_own_tokenizer(config, run).data.tokenizer

    assert tokenizer(config, moved) == str(moved / 'tokenizer.json')
    began.parent.mkdir()
    began.write_text('of another import, which is now at this place')
    assert tokenizer(config, moved) == str(moved / 'tokenizer.json')
    (moved / 'tokenizer.json').unlink()
    assert tokenizer(config, moved) == str(moved / 'checkpoints/3/tokenizer.json')
    for spec in str(tmp_path / 'mistyped.json'), 'bytes', 'auto':
        assert tokenizer(tiny(data={'tokenizer': spec}), moved) == spec
    assert tokenizer(config, tmp_path / 'new') == str(began)


@pytest.mark.parametrize('began', [False, True])
def test_a_text_is_read_with_the_tokenizer_of_the_weights_that_a_run_begins_with(
    source: Path, tmp_path: Path, began: bool
) -> None:
    (tmp_path / 'text.txt').write_text('one two three four ' * 200)
    config = starting(source, data={'corpus': str(tmp_path / 'text.txt')})
    start = find_start(config, tmp_path / 'new')
    run, start = (source, None) if began else (tmp_path / 'new', start)
    data, _ = read_corpus(config, run, start)
    check_tokenizer(source / 'checkpoints/3', data.tokenizer)


@pytest.mark.parametrize('spec', ['auto', 'bpe'])
def test_a_tokenizer_that_was_trained_on_a_text_is_kept_when_the_text_grows(
    tmp_path: Path, spec: str
) -> None:
    (tmp_path / 'text').mkdir()
    (tmp_path / 'text/0.txt').write_text('one two three four ' * 200)
    config = tiny(data={'corpus': str(tmp_path / 'text'), 'tokenizer': spec, 'split': '1,0,0'})
    data, _ = read_corpus(config, tmp_path / 'run', None)
    own = data.tokenizer
    assert own is not None
    with Checkpoints(tmp_path / 'run/checkpoints', config, tokenizer=own) as checkpoints:
        checkpoints.save(make_state(config, 3), 3)
    (tmp_path / 'text/1.txt').write_text('seventy eighty ninety ' * 200)
    data, _ = read_corpus(config, tmp_path / 'run', None)
    assert data.tokenizer is not None
    assert data.tokenizer.fingerprint == own.fingerprint
    fresh, _ = read_corpus(config, tmp_path / 'new', None)
    assert fresh.tokenizer is not None
    assert fresh.tokenizer.fingerprint != own.fingerprint


def build_corpus(folder: Path, name: str, **options: Any) -> str:
    """Build tokens of a text in a folder, as `megajax data build` does."""
    text = folder / 'text.txt'
    text.write_text('one two three four ' * 200)
    arguments = [str(folder / name), '--input', str(text)]
    arguments += [part for key, value in options.items() for part in (f'--{key}', str(value))]
    done = CliRunner().invoke(app, ['data', 'build', *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return str(folder / name)


@pytest.mark.usefixtures('one_thread')
@pytest.mark.parametrize('keys', [{}, {'tokenizer': 'own'}, slow({'tokenizer': 'auto'})])
def test_the_advice_on_tokens_of_another_tokenizer_ends_in_a_run_that_starts(
    source: Path, tmp_path: Path, keys: dict[str, str]
) -> None:
    corpus = build_corpus(tmp_path, 'web', **{'train-bpe': 300})
    own = f'{source}/tokenizer.json'
    keys = {key: value.replace('own', own) for key, value in keys.items()}
    with pytest.raises(ConfigError) as error:
        find_start(starting(source, data={'corpus': corpus, **keys}), tmp_path / 'new')
    message = str(error.value)
    built = re.search(r'megajax (data build \S+) --input FILES (--tokenizer \S+), and set', message)
    assert built, message
    words = [*built[1].split(), '--input', str(tmp_path / 'text.txt'), *built[2].split()]
    assert CliRunner().invoke(app, words).exit_code == 0
    again = re.search(r'set data\.corpus=(\S+);', message)[1]
    config = starting(source, data={'corpus': again, **keys})
    assert find_start(config, tmp_path / 'new')
    check_tokenizer(source / 'checkpoints/3', load_data(config).tokenizer)


@pytest.mark.usefixtures('one_thread')
def test_tokens_of_the_weights_tokenizer_are_read_though_some_of_its_tokens_have_no_row(
    tmp_path: Path,
) -> None:
    config = tiny()
    padded = byte_tokenizer([f'<{i}>' for i in range(config.model.vocab_size)])
    run = tmp_path / 'padded'
    with Checkpoints(run / 'checkpoints', config, tokenizer=padded) as checkpoints:
        checkpoints.save({'params': make_state(config, 0).params}, 0)
    padded.save(run / 'tokenizer.json')
    corpus = build_corpus(tmp_path, 'web', tokenizer=run / 'tokenizer.json')
    assert find_start(starting(run, data={'corpus': corpus}), tmp_path / 'new')


def test_the_advice_on_another_tokenizer_for_a_text_ends_in_a_run_that_starts(
    source: Path, tmp_path: Path
) -> None:
    text, other = tmp_path / 'text.txt', tmp_path / 'other.json'
    text.write_text('one two three four ' * 200)
    train_bpe([text.read_text()], 300).save(other)
    data = {'corpus': str(text), 'tokenizer': str(other)}
    with pytest.raises(ConfigError) as error:
        find_start(starting(source, data=data), tmp_path / 'new')
    key, value = str(error.value).rpartition('; set ')[2].split('=')
    assert key == 'data.tokenizer'
    config = starting(source, data={**data, 'tokenizer': value})
    assert find_start(config, tmp_path / 'new')
    check_tokenizer(source / 'checkpoints/3', load_data(config).tokenizer)


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_folder(tiny(), 'a') for _ in range(20)]
    assert len({*folders}) == 20
    assert all(folder.is_dir() for folder in folders)
    assert {folder.parent for folder in folders} == {Path('runs')}
    (tmp_path / 'runs/b').touch()
    with pytest.raises(ConfigError, match=r'^runs/b/c-.* cannot be created: .*set run\.dir'):
        run_folder(tiny(), 'b/c')


@pytest.mark.parametrize('named', [{}, {'dir': 'a/mine'}], ids=['unnamed', 'named'])
def test_a_start_that_fails_leaves_no_folder_of_its_own_without_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'users').mkdir()

    def start(file: str, config: Config) -> Path:
        with suppress(ConfigError), opened_folder(config, 'a') as folder:
            (folder / 'compiled').mkdir()
            (folder / file).touch()
            raise ConfigError('bad corpus')
        return folder

    assert not start('lock', tiny(run=named)).exists()
    assert start('config.yaml', tiny(run=named)).exists()
    assert start('lock', tiny(run={'dir': 'users'})).exists()
