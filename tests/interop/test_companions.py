"""What came with a model stays with it: through import, training and export."""

import json
import logging
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from interop.stored import DATA
from support import disk_full_at, on_mesh, random_params, write_run

from megajax.core.config import Config, ConfigError
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.digests import problems, sound_checkpoint
from megajax.runtime.checkpoint.hf_files import (
    FOLDER,
    Companions,
    companions_of_model,
    read_companions,
)
from megajax.runtime.checkpoint.open import open_model
from megajax.runtime.data.image_text.chat import Template
from megajax.runtime.data.text.tokenizer import byte_tokenizer, load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
GENERATION = {'eos_token_id': [49, 48, 7], 'temperature': 0.6, 'top_p': 0.9}
TOKENIZER = {'chat_template': TEMPLATE, 'eos_token': {'content': 'z'}, 'model_max_length': 32}
FILES = {
    'generation_config.json': json.dumps(GENERATION),
    'tokenizer_config.json': json.dumps(TOKENIZER),
    'special_tokens_map.json': '{"eos_token": "<|endoftext|>"}\n',
    'added_tokens.json': '{"<|endoftext|>": 49}',
    'chat_template.jinja': '{{ messages }}',
    'tokenizer.model': '\x00\x01',
}


def write_model(folder: Path, *names: str, **config: Any) -> Path:
    """GPT-2 with these of FILES and keys of config.json."""
    shutil.copytree(DATA / 'gpt2', folder)
    for name in names:
        (folder / name).write_text(FILES[name])
    keys = json.loads((folder / 'config.json').read_text()) | config
    (folder / 'config.json').write_text(json.dumps(keys))
    return folder


def token_ids(folder: Path) -> dict[str, Any]:
    keys = json.loads((folder / 'config.json').read_text())
    return {key: keys.get(key) for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')}


def test_an_export_has_the_files_and_the_token_ids_of_its_import(tmp_path: Path) -> None:
    ids = {'bos_token_id': 3, 'eos_token_id': [49, 48], 'pad_token_id': 0}
    model = write_model(tmp_path / 'in', *FILES, **ids)
    (model / 'modeling_gpt2.py').write_text('code')
    import_huggingface(model, tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    for name, content in FILES.items():
        assert (tmp_path / 'out' / name).read_text() == content, name
    assert token_ids(tmp_path / 'out') == ids
    assert not (tmp_path / 'out' / 'modeling_gpt2.py').exists()
    assert not problems(tmp_path / 'run' / 'checkpoints' / '0')


def test_an_export_ends_documents_with_the_token_of_the_run(tmp_path: Path) -> None:
    model = write_model(tmp_path / 'in', *FILES, eos_token_id=49)
    (tmp_path / 'mine').mkdir()
    shutil.copy(model / 'tokenizer.json', mine := tmp_path / 'mine' / 'tokenizer.json')
    (tmp_path / 'mine' / 'tokenizer_config.json').write_text('{"eos_token": "z"}')
    import_huggingface(model, tmp_path / 'run', [f'data.tokenizer={mine}'])
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    tokenizer = load_tokenizer(str(mine))
    assert load_tokenizer(str(tmp_path / 'out' / 'tokenizer.json')).eod == tokenizer.eod != 49
    assert token_ids(tmp_path / 'out')['eos_token_id'] == [tokenizer.eod, 49]
    generation = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
    assert generation == {**GENERATION, 'eos_token_id': [tokenizer.eod, 49, 48, 7]}
    settings = json.loads((tmp_path / 'out' / 'tokenizer_config.json').read_text())
    assert settings == TOKENIZER | {'eos_token': 'z'}


def test_a_model_without_a_tokenizer_keeps_its_ends_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / 'in', 'generation_config.json', eos_token_id=[5, 6])
    (model / 'tokenizer.json').unlink()
    import_huggingface(model, tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    assert token_ids(tmp_path / 'out')['eos_token_id'] == [5, 6]
    written = (tmp_path / 'out' / 'generation_config.json').read_text()
    assert written == FILES['generation_config.json']


def test_a_padding_token_without_a_row_is_imported_and_exported_with_its_id(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / 'in')
    keys = {'eos_token': '<|endoftext|>', 'pad_token': '[PAD]'}
    (model / 'tokenizer_config.json').write_text(json.dumps(keys))
    import_huggingface(model, tmp_path / 'run')
    opened = open_model(tmp_path / 'run').tokenizer
    assert opened is not None
    assert (opened.token_id('[PAD]'), opened.token_bytes[50:].tolist()) == (50, [0])
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['vocab_size'] == 50
    again = load_tokenizer(str(tmp_path / 'out' / 'tokenizer.json'))
    assert (again.fingerprint, again.token_id('[PAD]')) == (opened.fingerprint, 50)


def test_a_text_ends_at_every_end_of_the_import(tmp_path: Path) -> None:
    model = write_model(tmp_path / 'in', 'generation_config.json', eos_token_id=11)
    import_huggingface(model, tmp_path / 'run')
    tokenizer = open_model(tmp_path / 'run').tokenizer
    assert tokenizer is not None
    assert tokenizer.ends == (49, 48, 7)  # generation_config.json comes before config.json


@pytest.mark.parametrize(
    ('files', 'ends'),
    [
        ({}, ()),
        ({'generation_config.json': '{}', 'token_ids.json': '{"eos_token_id": 5}'}, (5,)),
        ({'generation_config.json': '{"eos_token_id": null}'}, ()),
        ({'generation_config.json': '{"eos_token_id": 128001}'}, (128001,)),
        ({'generation_config.json': '{"eos_token_id": 0}'}, (0,)),
    ],
)
def test_the_ends_are_those_that_transformers_finds(
    files: dict[str, str], ends: tuple[int, ...]
) -> None:
    assert Companions({name: text.encode() for name, text in files.items()}).ends == ends


@pytest.mark.parametrize(
    ('files', 'template'),
    [
        ({}, None),
        ({'tokenizer_config.json': '{"chat_template": "a"}'}, 'a'),
        ({'tokenizer_config.json': '{"chat_template": "a"}', 'chat_template.jinja': 'b'}, 'b'),
        ({'chat_template.json': '{"chat_template": "c"}'}, 'c'),
        (
            {
                'tokenizer_config.json': json.dumps(
                    {
                        'chat_template': [
                            {'name': 'tool_use', 'template': 't'},
                            {'name': 'default', 'template': 'd'},
                        ]
                    }
                )
            },
            'd',
        ),
    ],
)
def test_the_chat_template_is_found_where_transformers_finds_it(
    files: dict[str, str], template: str | None
) -> None:
    found = Companions({name: text.encode() for name, text in files.items()}).chat_template
    assert found == template


@pytest.mark.parametrize(
    ('files', 'templates'),
    [
        (
            {'chat_template.jinja': 'd', 'additional_chat_templates/tool_use.jinja': 't'},
            {'default': 'd', 'tool_use': 't'},
        ),
        (  # files come before tokenizer_config.json
            {
                'additional_chat_templates/rag.jinja': 'r',
                'tokenizer_config.json': '{"chat_template": "a"}',
            },
            {'rag': 'r'},
        ),
        (
            {
                'tokenizer_config.json': '{"chat_template": [{"name": "default", "template": "d"},'
                '{"name": "tool_use", "template": "t"}]}'
            },
            {'default': 'd', 'tool_use': 't'},
        ),
    ],
)
def test_templates_of_several_names_are_those_of_transformers(
    files: dict[str, str], templates: dict[str, str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = companions_of_model(tmp_path, {}, 50)
    assert found.chat_templates == templates
    found.write(tmp_path / 'run')
    assert read_companions(tmp_path / 'run') == found
    mine = found.with_template('mine')
    mine.write(tmp_path / 'run')
    assert mine.chat_templates == {'default': 'mine'}
    assert read_companions(tmp_path / 'run') == mine


@pytest.mark.parametrize('folder', ['processor_config', 'preprocessor_config'])
def test_the_template_of_a_processor_is_the_one_that_it_reads(folder: str, tmp_path: Path) -> None:
    (tmp_path / f'{folder}.json').write_text('{"processor_class": "Qwen3VLProcessor"}')
    (tmp_path / 'chat_template.json').write_text('{"chat_template": "of the processor"}')
    (tmp_path / 'chat_template.jinja').write_text('of the tokenizer')
    (tmp_path / 'tokenizer_config.json').write_text('{"chat_template": "old"}')
    assert companions_of_model(tmp_path, {}, 50).chat_template == 'of the tokenizer'
    found = companions_of_model(tmp_path, {}, 50, sees=True)
    assert found.chat_template == 'of the processor'
    mine = found.with_template('mine')
    assert mine.chat_template == 'mine'
    assert 'chat_template.json' not in mine.files
    if folder == 'processor_config':
        (tmp_path / f'{folder}.json').write_text('{"chat_template": "first", "a": 1}')
        first = companions_of_model(tmp_path, {}, 50, sees=True)
        assert first.chat_template == 'first'
        mine = first.with_template('mine')
        assert mine.chat_template == 'mine'
        assert json.loads(mine.files['processor_config.json']) == {'a': 1}


def test_a_processor_gets_the_template_of_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip('transformers', reason="it is in the extra 'test-hf'")
    (tmp_path / 'preprocessor_config.json').write_text('{}')
    (tmp_path / 'chat_template.json').write_text('{"chat_template": "old"}')
    found = companions_of_model(tmp_path, {}, 50, sees=True)
    for companions, expected in ((found, 'old'), (found.with_template('mine'), 'mine')):
        out = tmp_path / expected
        companions.write(out)
        read = transformers.ProcessorMixin.get_processor_dict(out / FOLDER)[0]
        assert read['chat_template'] == expected == companions.chat_template


@pytest.mark.parametrize('has_tokenizer', [True, False])
def test_an_import_to_a_full_disk_says_so(has_tokenizer: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / 'in')
    if not has_tokenizer:
        (model / 'tokenizer.json').unlink()
    fix = 'set TMPDIR to another folder' if has_tokenizer else 'choose another run directory'
    message = rf'cannot be written.*: File too large.*; free some space.*, or {fix}$'
    with disk_full_at(10), pytest.raises(ConfigError, match=message):
        import_huggingface(model, tmp_path / 'run')
    assert not (tmp_path / 'run' / 'checkpoints').exists()


@pytest.mark.parametrize('name', ['config.yaml', 'tokenizer_config.json', 'chat_template.jinja'])
def test_an_import_keeps_the_files_of_other_origin_in_its_folder(name: str, tmp_path: Path) -> None:
    model, run = write_model(tmp_path / 'in', *FILES), tmp_path / 'run'
    run.mkdir()
    (run / name).write_text('mine')
    message = f'run has files that no run has written .* replace: {name}; choose another path'
    with pytest.raises(ConfigError, match=message):
        import_huggingface(model, run)
    assert [(path.name, path.read_text()) for path in run.iterdir()] == [(name, 'mine')]
    (run / 'lock').touch()  # an import that failed
    import_huggingface(model, run)


def test_an_import_into_the_folder_of_its_model_keeps_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / 'in', *FILES)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    message = 'replace: tokenizer.json, tokenizer_config.json, chat_template.jinja; choose another'
    with pytest.raises(ConfigError, match=message):
        import_huggingface(model, model)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_an_import_writes_its_chat_template_as_a_file_to_train_with(tmp_path: Path) -> None:
    import_huggingface(write_model(tmp_path / 'in', 'tokenizer_config.json'), tmp_path / 'run')
    assert (tmp_path / 'run' / 'chat_template.jinja').read_text() == TEMPLATE


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('generation_config.json', '{"eos_token_id": "x"}', 'eos_token_id: "x": give an id'),
        ('generation_config.json', '{"eos_token_id": [true]}', 'eos_token_id: [true]: give an id'),
        ('generation_config.json', '{', 'generation_config.json: not JSON'),
        ('tokenizer_config.json', '[]', 'tokenizer_config.json: not a JSON object'),
        ('tokenizer_config.json', '[' * 100_000, 'tokenizer_config.json: not JSON'),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        companions_of_model(tmp_path, {}, 50)
    assert str(error.value).startswith(f'{tmp_path}: {name}: ')
    assert message in str(error.value)


@pytest.mark.slow
def test_training_and_its_resumption_carry_all_of_it_along(tmp_path: Path) -> None:
    ids = {'bos_token_id': 3, 'eos_token_id': [49, 48], 'pad_token_id': None}
    import_huggingface(
        write_model(tmp_path / 'in', *FILES, **ids),
        tmp_path / 'import',
        ['train.seq_len=16', 'train.dtype=float32'],
    )
    write_run(tmp_path, '')

    def train(steps: int, *more: str) -> None:
        command = [sys.executable, '-m', 'megajax', 'train', 'run.dir=run', f'train.steps={steps}']
        command += ['data.corpus=corpus', 'data.split="1,0,0"', 'train.batch_size=4', *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    train(1, 'run.start_from=import')
    shutil.move(tmp_path / 'import', tmp_path / 'gone')
    train(2, 'data.tokenizer=run/tokenizer.json')
    with sound_checkpoint(tmp_path / 'run') as newest:
        assert newest.name == '2'
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    for name, content in FILES.items():
        assert (tmp_path / 'out' / name).read_text() == content, name
    assert token_ids(tmp_path / 'out') == ids


def test_the_template_that_a_run_trains_with_takes_the_place_of_its_models(tmp_path: Path) -> None:
    before = Companions({name: text.encode() for name, text in FILES.items()})
    after = before.with_template('mine')
    assert after.chat_template == 'mine'
    assert after.ends == before.ends
    after = after.with_chat_time(datetime(2026, 11, 27, 9))
    after.write(tmp_path)
    assert read_companions(tmp_path) == after
    assert after.template('t') == Template(
        name='t', texts={'default': 'mine'}, now=datetime(2026, 11, 27, 9)
    )


@pytest.mark.parametrize(('family', 'warns'), [('llama', False), ('qwen2', True)])
def test_an_export_whose_tokenizer_transformers_reads_otherwise_says_so(
    family: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(
        model={
            **{'num_layers': 1, 'hidden_size': 16, 'num_heads': 2, 'vocab_size': 257},
            **{'max_seq_len': 16, 'norm': 'rmsnorm', 'activation': 'swiglu', 'position': 'rope'},
            **{'bias': False, 'qkv_bias': family == 'qwen2', 'tie_embeddings': False},
        },
        train={'seq_len': 16, 'dtype': 'float32'},
    )
    own = byte_tokenizer()
    with (
        on_mesh(config),
        Checkpoints(tmp_path / 'run' / 'checkpoints', config, tokenizer=own) as checkpoints,
    ):
        checkpoints.save({'params': random_params(config, 0.5)}, 1)
    with caplog.at_level(logging.WARNING):
        assert export_huggingface(tmp_path / 'run', tmp_path / 'out')[0] == family
    assert ('use PreTrainedTokenizerFast.from_pretrained' in caplog.text) == warns


def test_only_files_that_are_new_or_different_are_written(tmp_path: Path) -> None:
    first = Companions({'a.json': b'{}', 'b.json': b'[1]'})
    first.write(tmp_path)
    a, b = (tmp_path / FOLDER / name for name in first.files)
    before = a.stat()
    Companions({'a.json': b'{}', 'b.json': b'[2]'}).write(tmp_path)
    assert (a.stat().st_ino, a.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (a.read_bytes(), b.read_bytes()) == (b'{}', b'[2]')
