"""Whatever config.json holds, it is imported, or refused at once by the key and its value."""

import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megajax.base.files import json_file
from megajax.base.files.json_file import MAX_DEPTH, read_json
from megajax.core.config import ConfigError, reload
from megajax.interop.folder import settings
from megajax.interop.huggingface.directories import import_huggingface
from megajax.interop.huggingface.families import read_config_json, read_family
from megajax.interop.huggingface.preprocessor import read_preprocessor
from megajax.interop.huggingface.tensors import INDEX, read_tensors

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob('config.json'))
NEW = (
    *('rope_theta', 'rope_scaling', 'rope_parameters', 'head_dim', 'tie_word_embeddings'),
    *('sliding_window', 'layer_types', 'n_inner'),
)
DEEP: list[Any] = []
for _ in range(MAX_DEPTH - 5):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    'null': None,
    'string': 'x',
    'list': [1, None],
    'dict': {'a': 1},
    'negative': -1,
    'huge': 10**18,
    'digits': 10**4000,
    'million': 1_000_000,
    'NaN': math.nan,
    'bool': True,
    'deep': DEEP,
}
# Rules between keys, which megajax's own names state.
BETWEEN_KEYS = {
    'image_token_id': 'vision.image_token',
    'spatial_merge_size': 'vision.merge_size',
    'rope_parameters': 'model.mrope_section',
}


def changed(
    keys: dict[str, Any], value: Any, added: tuple[str, ...] = NEW
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key, with what `keys` are where it has this value."""
    for key in dict.fromkeys((*keys, *added)):
        yield key, {**keys, key: copy.deepcopy(value)}
        if isinstance(keys.get(key), dict):
            for inner, group in changed(keys[key], value, ()):
                yield inner, {**keys, key: group}


def import_settings(keys: dict[str, Any], file: Path) -> None:
    _, model, _ = read_family(keys, str(file))
    fits = ['vision.max_patches=64'] if 'vision' in model else []
    reload(settings(model, Path('run'), None), fits, place=str(file))


@pytest.mark.parametrize('value', VALUES)
@pytest.mark.parametrize('file', FILES, ids=lambda file: file.parent.name)
def test_every_key_may_have_any_value_or_is_named(file: Path, value: str) -> None:
    keys, accepted, begin = json.loads(file.read_bytes()), 0, time.process_time()
    for key, mutant in changed(keys, VALUES[value]):
        try:
            import_settings(mutant, file)
            accepted += 1
        except ConfigError as error:
            message = str(error)
        else:
            continue
        assert key in message or BETWEEN_KEYS.get(key, key) in message, f'{key}: {message}'
        assert len(message) < 3_000, key
    assert accepted  # keys without effect, such as bos_token_id
    assert time.process_time() - begin < 10


def write(folder: Path, **keys: Any) -> Path:
    llama = json.loads((HERE / 'data/llama2/config.json').read_bytes())
    (folder / 'config.json').write_text(json.dumps(llama | keys))
    return folder


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        ({'rope_theta': None, 'rope_parameters': None}, 'rope_theta: must be a valid number'),
        ({'rope_scaling': 'x', 'rope_parameters': None}, 'rope_scaling: "x": only an object'),
        (
            {'max_position_embeddings': '2048'},
            "max_position_embeddings: must be a valid integer, not '2048'",
        ),
        (
            {'num_hidden_layers': 1_000_000},
            'num_hidden_layers: must be less than or equal to 10000, not 1000000',
        ),
        (
            {'num_attention_heads': 64, 'hidden_size': 32, 'head_dim': None},
            'hidden_size // num_attention_heads: must be greater than 0, not 0',
        ),
        ({'model_type': ['llama']}, 'model_type: ["llama"]: only gpt2, '),
        ({'layer_types': 3}, 'layer_types: 3: only a list is supported'),
    ],
)
def test_an_import_is_refused_by_key_and_value(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        import_huggingface(write(tmp_path, **keys), tmp_path / 'run')
    assert f'{tmp_path}/config.json: {message}' in str(error.value)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('text', 'why'),
    [
        ('[' * 100_000, f'more than {MAX_DEPTH} nested objects and lists'),
        ('{"a":' * 100_000, f'more than {MAX_DEPTH} nested objects and lists'),
        (f'{{"a": {"[" * 60}{"]" * 60}}}', f'more than {MAX_DEPTH} nested objects and lists'),
        (f'{{"a": {"9" * 5_000}}}', 'not JSON: Exceeds the limit'),
        ('x' * 50_000, 'not JSON: Expecting value'),
        ('{"a": 1}' + ' ' * 1_000_000, 'more than 1,000,000 bytes'),
        ('[1]', 'not a JSON object'),
        ('null', 'not a JSON object'),
        ('', 'not JSON: '),
    ],
    ids=['lists', 'objects', '60 lists', 'digits', 'text', 'large', 'list', 'null', 'empty'],
)
def test_what_is_no_config_json_is_told_in_a_line(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json_file.MAX_BYTES == 100_000_000
    monkeypatch.setattr(json_file, 'MAX_BYTES', 1_000_000)
    for name in ('config.json', 'preprocessor_config.json'):
        (tmp_path / name).write_text(text)
    for read in (read_config_json, lambda folder: read_preprocessor(folder, {'patch_size': 16})):
        with pytest.raises(ConfigError) as error:
            read(tmp_path)
        assert f'config.json: {why}' in str(error.value)
        assert len(str(error.value)) < 500


def test_an_object_of_some_depth_is_read(tmp_path: Path) -> None:
    (tmp_path / 'config.json').write_text(json.dumps({'a': DEEP}))
    assert read_json(tmp_path / 'config.json') == {'a': DEEP}


@pytest.mark.parametrize('inner', ['', '1'])
def test_the_deepest_object_that_is_read_has_the_limit(inner: str, tmp_path: Path) -> None:
    file, lists = tmp_path / 'x.json', MAX_DEPTH - 1
    file.write_text(f'{{"a": {"[" * lists}{inner}{"]" * lists}}}')
    read_json(file)
    file.write_text(f'{{"a": [{"[" * lists}{inner}{"]" * lists}]}}')
    with pytest.raises(ConfigError, match=f'more than {MAX_DEPTH} nested'):
        read_json(file)


def test_an_index_of_tensors_is_bounded_as_config_json_is(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map":' * 100_000)
    with pytest.raises(ConfigError, match=f'more than {MAX_DEPTH} nested objects and lists'):
        read_tensors(tmp_path)


def test_text_is_missed_only_where_there_is_no_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tokenizer = HERE / 'data/llama2', HERE / 'data/gpt2/tokenizer.json'
    import_huggingface(folder, tmp_path / 'with', [f'data.tokenizer={tokenizer}'])
    assert 'tokenizer' not in caplog.text
    import_huggingface(folder, tmp_path / 'without')
    assert f'{folder} has no tokenizer.json: the run works on token ids only; for' in caplog.text
