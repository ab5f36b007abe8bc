"""`megajax compare` as a user calls it, on configs, runs, directories and files."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from analysis.compare.small import PLAIN, from_seed, small, with_fault
from click.testing import Result
from interop.stored import DATA
from support import make_config, slow, write_run
from typer.testing import CliRunner

import megajax
from megajax.analysis.compare import site_memory, sources
from megajax.analysis.compare.api import _batch, _Side
from megajax.analysis.compare.in_transformers import _modules, check_installed
from megajax.analysis.compare.recording import About, Recording, read_recording, write_recording
from megajax.analysis.compare.site_memory import check_site_memory
from megajax.analysis.compare.sources import Source, check_comparable
from megajax.commands.main import app
from megajax.core.config import Config, ConfigError, dump, load
from megajax.core.config.load import dump_sections
from megajax.core.parallel.mesh import mesh_for
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.interop.huggingface.families import write_family
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.hf_files import TEMPLATE, Companions
from megajax.runtime.data import load_data

TINY = load('tiny')
ONE_LAYER = small(model={'num_layers': 1})


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ['compare', *map(str, arguments)])


def verdict(result: Result) -> str:
    assert result.exit_code in (0, 1), result.exception
    return ' '.join(result.output.partition('weights: ')[2].split())


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / 'small.yaml').write_text(dump(small()))
    return tmp_path / 'small.yaml'


def save_run(run: Path, config: Config, params: Any, step: int = 0) -> None:
    with jax.set_mesh(mesh_for(config)), Checkpoints(run / 'checkpoints', config) as checkpoints:
        checkpoints.save({'params': params(config)}, step)


def test_a_run_at_its_start_is_its_config_to_the_bit(written: Path) -> None:
    run = written.parent / 'run'
    save_run(run, small(), from_seed)
    result = command(run, written)
    assert result.exit_code == 0, result.exception
    assert verdict(result).startswith('all 19 bit-identical bit-identical: all 33')


def test_a_run_that_saves_meanwhile_is_compared_with_itself(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, find = written.parent / 'run', sources.sound_checkpoint
    save_run(run, ONE_LAYER, from_seed)

    @contextmanager
    def find_and_save(path: Path) -> Iterator[Path]:
        with find(path) as checkpoint:
            fault = ('layers', 'mlp', 'up', 'weight')
            save_run(run, ONE_LAYER, lambda config: with_fault(config, fault, 0.1), 1)
            yield checkpoint

    monkeypatch.setattr(sources, 'sound_checkpoint', find_and_save)
    assert verdict(command(run, run)).startswith('all 11 bit-identical')


@pytest.mark.slow
def test_two_steps_of_a_run_differ_where_a_weight_does(written: Path) -> None:
    run, json_file = written.parent / 'run', written.parent / 'it.json'
    fault = ('layers', 'mlp', 'up', 'weight')
    save_run(run, small(), from_seed)
    save_run(run, small(), lambda config: with_fault(config, fault, 0.1), 1)
    result = command(run / '0', run / '1', '--json', json_file)
    assert result.exit_code == 1
    assert '1 of 19 differ: layers.1.mlp.up.weight' in verdict(result)
    assert 'first difference: layers.1.mlp forward' in verdict(result)
    sites = json.loads(json_file.read_text())['sites']
    assert next(site['name'] for site in sites if site['error'] > site['limit']) == 'layers.1.mlp'


@pytest.mark.slow
def test_a_directory_is_its_import_to_the_bit(tmp_path: Path) -> None:
    import_huggingface(
        DATA / 'llama3', tmp_path / 'run', ['train.seq_len=16', 'train.batch_size=2']
    )
    result = command(DATA / 'llama3', tmp_path / 'run')
    assert result.exit_code == 0, result.exception
    assert 'bit-identical: all' in verdict(result)


def test_adapters_are_merged_for_a_side_that_has_none(written: Path) -> None:
    run, lora = written.parent / 'run', small(model={'num_layers': 1}, lora={'rank': 2})

    def trained(config: Config) -> Any:
        random = np.random.default_rng(0)
        return jax.tree.map(
            lambda x: x + random.normal(0, 0.05, x.shape).astype(x.dtype), from_seed(config)
        )

    save_run(run, lora, trained)
    export_huggingface(run, written.parent / 'out')
    result = command(run, written.parent / 'out')
    assert result.exit_code == 0, result.output or result.exception
    assert 'adapters: merged into the weights of A' in result.output


@pytest.mark.slow
@pytest.mark.parametrize('arguments', ['run out', 'out run'])
def test_a_directory_has_the_loss_and_the_documents_of_the_other_side(
    arguments: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written.parent)
    config = small(
        model={'num_layers': 1, 'dropout': 0.1, 'attention_dropout': 0.2},
        loss={'z_loss': 0.01, 'label_smoothing': 0.1},
        data={'document_mask': True},
    )
    save_run(Path('run'), config, from_seed)
    export_huggingface(Path('run'), Path('out'))
    result = command(*arguments.split())
    assert result.exit_code == 0, result.output or result.exception
    assert 'bit-identical: all' in verdict(result)
    for key in ('loss.', 'document_mask', 'dropout'):
        assert key not in result.output.partition('site')[0]


def test_the_data_of_a_run_are_written_by_its_own_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    Path('chats.jsonl').write_text((json.dumps({'messages': turns}) + '\n') * 20)
    text = '{% for x in messages %}[{{ x.role }}]{{ x.content }}{% endfor %}'
    run = tmp_path / 'run' / 'checkpoints' / '0'
    Companions({TEMPLATE: text.encode()}).write(run)
    config = make_config(
        'llama',
        model={'vocab_size': 300, 'max_seq_len': 64},
        train={'seq_len': 64, 'batch_size': 1},
        data={'corpus': 'chats.jsonl', 'tokenizer': 'bytes'},
    )
    source = Source(name='run', kind='run', path=run, overrides=())
    tokens = source.data(config).train[0]['tokens'][0].astype('uint8').tobytes()
    assert tokens.startswith(b'[user]a[assistant]b')


@pytest.mark.parametrize(
    ('kinds', 'corpus', 'meant'),
    [
        ('huggingface run', '', 'run'),
        ('huggingface run', 'data.corpus=x', 'run'),
        ('run config', '', 'run'),
        ('huggingface huggingface', 'data.corpus=x', 'huggingface'),
        ('huggingface huggingface', '', None),
    ],
)
def test_the_data_are_those_of_the_side_that_has_some(
    kinds: str, corpus: str, meant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data(source: Source, config: Config) -> SimpleNamespace:
        return SimpleNamespace(train=[source.kind])

    monkeypatch.setattr(Source, 'data', data)
    overrides = tuple(filter(None, [corpus]))
    sides = [
        _Side(
            source=Source(name=kind, kind=kind, path=Path(kind), overrides=overrides), config=TINY
        )
        for kind in kinds.split()
    ]
    if meant:
        assert _batch(sides, data=True) == meant
    else:
        with pytest.raises(ConfigError, match=r'--data: huggingface is a Hugging .* set data\.c'):
            _batch(sides, data=True)


def test_the_data_of_a_directory_have_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'tokenizer.json').touch()
    monkeypatch.setattr('megajax.runtime.data.load_data', lambda config: config.data.tokenizer)
    for overrides, tokenizer in (
        ((), str(tmp_path / 'tokenizer.json')),
        (('data.tokenizer=bytes',), 'bytes'),
    ):
        source = Source(name='out', kind='huggingface', path=tmp_path, overrides=overrides)
        assert source.data(load('tiny', overrides)) == tokenizer


def test_a_dump_is_compared_with_a_config_over_its_own_batch(written: Path) -> None:
    file = written.parent / 'a.npz'
    megajax.compare.dump(str(written), str(file))
    assert 'bit-identical: all' in verdict(command(file, file))
    assert megajax.compare.compare(str(file), written).same_bits


def test_a_file_that_cannot_be_a_dump_is_named_before_anything_compiles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'old: a dump is a \.npz file; name it old\.npz'):
        megajax.compare.dump('tiny', 'old')
    (tmp_path / 'a.npz').mkdir()
    with pytest.raises(ConfigError, match=r'a\.npz is a folder: give the name of a file in it'):
        megajax.compare.dump('tiny', tmp_path / 'a.npz')


@pytest.mark.slow
def test_the_first_batch_of_the_data_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    sections = small('gpt', model={'vocab_size': 300}).model_dump(mode='json')
    del sections['data']
    file = write_run(tmp_path, dump_sections(sections)) / 'a.npz'
    result = command(tmp_path / 'small.yaml', '--data', '--dump', file)
    assert result.exit_code == 0, result.exception
    assert result.output == f'{file}\n'
    recording = read_recording(file)
    expected = load_data(load(tmp_path / 'small.yaml')).train[0]
    assert recording.batch.keys() == expected.keys()
    assert np.array_equal(recording.batch['tokens'], expected['tokens'])
    with pytest.raises(ConfigError, match=r'--data: \S*a\.npz contains its own batch'):
        raise command(file, file, '--data').exception or AssertionError


def test_a_directory_routes_tokens_as_the_other_side_does(tmp_path: Path) -> None:
    experts = {'z_loss': 0.01, 'balance_loss': 0.1, 'balance_over': 'sequence', 'capacity': 1.25}
    overrides = [f'model.experts.{key}={value}' for key, value in experts.items()]
    config = load('tiny_moe', ['model.experts.scale=1', *overrides])
    family, keys = write_family(config.model)
    (tmp_path / 'config.json').write_text(json.dumps(keys))
    with Source.opened(str(tmp_path), []) as source:
        assert source.family == family
        theirs = source.config(config).model.experts
    assert theirs == config.model.experts


def test_a_directory_has_the_dropout_the_loss_and_the_documents_of_the_other_side(
    tmp_path: Path,
) -> None:
    config = small(
        model={'dropout': 0.1, 'attention_dropout': 0.2},
        loss={'z_loss': 0.01, 'label_smoothing': 0.1},
        data={'document_mask': True},
    )
    (tmp_path / 'config.json').write_text(json.dumps(write_family(config.model)[1]))
    with Source.opened(str(tmp_path), []) as source:
        theirs, alone = source.config(config), source.config()
    for section in ('model', 'loss', 'train'):
        assert getattr(theirs, section) == getattr(config, section)
    assert theirs.data.document_mask
    check_comparable(config, theirs, names=['a', 'b'], fixed=(False, False))
    assert (alone.model.dropout, alone.loss.z_loss, alone.data.document_mask) == (0, 0, False)


@pytest.mark.parametrize(
    ('key', 'values'), [('train.batch_size', (8, 16)), ('data.document_mask', ('false', 'true'))]
)
def test_a_fix_changes_the_side_that_is_no_dump(key: str, values: tuple[object, object]) -> None:
    a, b = (load('tiny', [f'{key}={value}']) for value in values)
    sides = ((False, True), f'--a {key}={values[1]}'), ((True, False), f'--b {key}={values[0]}')
    for fixed, fix in sides:
        with pytest.raises(ConfigError, match=f'set {fix}$'):
            check_comparable(a, b, names=['a', 'b'], fixed=fixed)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['tiny'], 'compare needs two sources, got tiny: give A and B, or A and --dump FILE'),
        (['lr=1/a', 'runs/lr=1'], 'compare needs two sources, got runs/lr=1: give A and B'),
        (['tiny', 'tiny', '--dump', 'a.npz'], 'give only A, without --b'),
        (['tiny', '--dump', 'a.npz', '--all'], 'no effect with --dump, which compares nothing'),
        (['tiny', '--dump', 'a.txt'], 'a dump is a .npz file; name it a.npz'),
        (['tiny', 'nowhere'], 'nowhere: no such file or preset'),
        (['tiny', 'nowhere.npz'], 'nowhere.npz cannot be read: No such file'),
        (['tiny', 'a.npz', '--b', 'mesh.model=1'], 'which mesh.model=1 cannot change'),
        (
            ['tiny', 'tiny', '--b', 'train.seq_len=64'],
            'train.seq_len: 128 in tiny but 64 in tiny',
        ),
        (
            ['tiny', 'tiny', '--b', 'model.num_layers=4'],
            'model.num_layers: 2 in tiny but 4 in tiny',
        ),
        (
            ['tiny', 'tiny', '--b', 'data.document_mask=true'],
            'the same attention mask on both sides; set --b data.document_mask=false',
        ),
        (['tiny_vlm', 'tiny'], 'tiny_vlm: compare does not support vision models'),
        (['tiny', 'tiny', '--b', 'mesh.model=3'], '8 is not a multiple of mesh.model=3'),
    ],
)
def test_a_mistake_is_named_before_anything_compiles(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ('memory', 'fix'),
    [
        (10**11, r'set train\.batch_size=8$'),
        (10**9, r'set train\.batch_size=8 and train\.seq_len below 13$'),
    ],
)
def test_results_that_do_not_fit_in_host_memory_are_named_before_anything_compiles(
    memory: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_memory, 'host_memory', lambda: memory)
    keys = 'train.batch_size=512', 'mesh.data=1', 'train.microbatches=2'
    sizes = r'512 sequences of 1,024 tokens need at least 4\.9 TB'
    with pytest.raises(
        ConfigError, match=rf'^train\.batch_size: the results .* {sizes}, .*: {fix}'
    ):
        megajax.compare.compare(*2 * ['megatron_8.3b'], overrides=keys, of_b=['mesh.data=4'])


def test_the_fix_of_results_that_do_not_fit_changes_a_dump_that_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need = 4 * 16 * 8 * (12 * 32 + small().model.vocab_size)
    monkeypatch.setattr(site_memory, 'host_memory', lambda: 2 * need)
    both = [small(), small(mesh={'data': 2}, train={'microbatches': 2})]
    check_site_memory(both, num_executed=1)
    monkeypatch.setattr(site_memory, 'host_memory', lambda: 2 * need - 1)
    check_site_memory(both[:1], num_executed=1)
    check_site_memory(both, num_executed=0)  # both are in memory already
    for configs in (both, both[::-1]):  # the dump's config must accept the batch, too
        with pytest.raises(ConfigError, match=r': dump again with train\.batch_size=4$'):
            check_site_memory(configs, num_executed=1)


def test_a_dump_with_dropout_is_not_compared_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('megajax.analysis.compare.in_transformers.find_spec', lambda name: name)
    config = small(model={'dropout': 0.1}).model_dump(mode='json')
    about = About(
        source='small', config=config, executed_with='', megajax='', platform='', weights={}
    )
    file = tmp_path / 'a.npz'
    write_recording(file, Recording(about=about, batch={}, forward={}, gradients={}))
    expected = r'a\.npz was computed with dropout.*model\.dropout=0 model\.attention_dropout=0'
    with pytest.raises(ConfigError, match=expected):
        megajax.compare.compare(file, DATA / 'llama2', transformers='b')


def test_transformers_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('megajax.analysis.compare.in_transformers.find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r'needs torch and transformers, .*test-hf'):
        check_installed()


def test_each_layer_has_the_modules_of_its_own_sublayers() -> None:
    experts = {'count': 4, 'active': 2, 'ffn_size': 32, 'first_dense': 1}
    model = small(model={**PLAIN, 'experts': experts}).model
    source = Source(
        name='out', kind='huggingface', path=Path('out'), overrides=(), family='glm4_moe'
    )
    for index, second in enumerate(('mlp', 'experts')):
        modules = _modules(source, model.layer_config(index))
        assert modules == {
            'attention.norm': 'model.layers.{}.input_layernorm',
            'attention': 'model.layers.{}.self_attn',
            f'{second}.norm': 'model.layers.{}.post_attention_layernorm',
            second: 'model.layers.{}.mlp',
        }


class TestWithTransformers:
    """The same directory, executed by transformers, where it is installed."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
        pytest.importorskip('transformers', reason="transformers is in the extra 'test-hf'")

    @pytest.mark.parametrize(
        'name',
        [
            *('gpt2', slow('llama2'), slow('phi3'), slow('qwen2'), 'qwen3', 'mixtral'),
            *(slow('qwen3_moe'), slow('olmoe'), slow('gpt_oss')),
        ],
    )
    def test_no_site_differs(self, name: str) -> None:
        result = command(DATA / name, DATA / name, '--transformers', 'b')
        assert result.exit_code == 0, result.output or result.exception

    def test_no_site_of_layers_with_an_mlp_and_with_experts_differs(self, tmp_path: Path) -> None:
        from interop.make_data import SIZES, random_model

        keys = {'num_key_value_heads': 2, 'head_dim': 8, 'pad_token_id': None}
        keys |= {'moe_intermediate_size': 12, 'n_routed_experts': 4, 'num_experts_per_tok': 2}
        random_model('glm4_moe', SIZES | keys).save_pretrained(tmp_path)
        result = command(tmp_path, tmp_path, '--transformers', 'b', 'train.seq_len=16')
        assert result.exit_code == 0, result.output or result.exception

    def test_the_row_of_a_pad_token_has_its_gradient(self, tmp_path: Path) -> None:
        folder = tmp_path / 'padded'
        shutil.copytree(DATA / 'llama2', folder)
        keys = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps(keys | {'pad_token_id': 3}))
        result = command(folder, folder, '--transformers', 'b')
        assert result.exit_code == 0, result.output or result.exception

    def test_another_rope_is_found_in_the_attention_of_the_first_layer(self) -> None:
        sides = DATA / 'llama2', DATA / 'llama2', '--transformers', 'b'
        result = command(*sides, '--a', 'model.rope_theta=5000')
        assert result.exit_code == 1
        assert 'first difference: layers.0.attention forward' in verdict(result)

    def test_only_a_directory_is_executed_by_it(self) -> None:
        result = command('tiny', DATA / 'llama2', '--transformers', 'a')
        assert 'tiny is not a Hugging Face directory' in str(result.exception)
