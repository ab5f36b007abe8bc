"""A folder's special tokens are those that transformers reads from its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megajax.core.config import ConfigError
from megajax.corpus.build import build
from megajax.corpus.job import Job
from megajax.interop.huggingface.families import FAMILIES
from megajax.runtime.data import make_tokenizer
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.text.token_names import BY_DEFAULT, OF_FAMILY
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer
from megajax.runtime.data.tokens.indexed import read_pair

END, TURN, BEGIN = '<|end|>', '<|turn|>', '<|begin|>'
NEW = {'content': '<new>', 'lstrip': False, 'rstrip': False, 'normalized': False}
FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    'strings': {'tokenizer_config.json': {'bos_token': BEGIN, 'eos_token': TURN}},
    'null': {'tokenizer_config.json': {'bos_token': None, 'eos_token': END, 'pad_token': None}},
    'typed': {'tokenizer_config.json': {'eos_token': {'__type': 'AddedToken', **NEW}}},
    'a map that adds': {
        'tokenizer_config.json': {'eos_token': END, 'pad_token': BEGIN},
        'special_tokens_map.json': {'eos_token': {**NEW}, 'additional_special_tokens': [TURN]},
    },
    'a map that is not read': {
        'tokenizer_config.json': {'eos_token': END, 'added_tokens_decoder': {'260': NEW}},
        'special_tokens_map.json': {'eos_token': TURN},
    },
    'added tokens': {
        'tokenizer_config.json': {'eos_token': END, 'extra_special_tokens': ['<t1>']},
        'added_tokens.json': {'<t0>': 261, '<t1>': 260},
    },
    'tokens of a model': {
        'tokenizer_config.json': {
            'eos_token': END,
            'image_token': '<image>',
            'extra_special_tokens': {'video_token': '<video>'},
            'additional_special_tokens': ['<more>'],
        }
    },
    'a class with tokens of its own': {
        'config.json': {'model_type': 'qwen2'},
        'tokenizer_config.json': {'tokenizer_class': 'LlamaTokenizerFast', 'eos_token': TURN},
    },
    'a class that is not used': {
        'config.json': {'model_type': 'mistral'},
        'tokenizer_config.json': {'tokenizer_class': 'GPT2Tokenizer', 'eos_token': END},
    },
    'no tokenizer_config.json': {'config.json': {'model_type': 'gpt2', 'eos_token_id': 258}},
}


AS_THE_FILE_SAYS = 'TokenizersBackend', 'MistralCommonBackend'  # they read tokenizer.json as it is


def write(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """Write a byte tokenizer of 260 entries, the last three special, and other files."""
    backend = make_tokenizer('bytes', 257)._backend
    backend.add_special_tokens([END, TURN, BEGIN])
    backend.save(str(folder / 'tokenizer.json'))
    for name, keys in files.items():
        (folder / name).write_text(json.dumps(keys))
    return str(folder / 'tokenizer.json')


def added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    return dict(tokenizer.get_added_tokens_decoder())


@pytest.mark.parametrize('files', FOLDERS.values(), ids=FOLDERS)
def test_tokens_have_the_names_and_ids_that_transformers_reads(
    files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    transformers = pytest.importorskip('transformers')
    ours = load_tokenizer(write(tmp_path, files))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.named_tokens == theirs.special_tokens_map
    assert {x.content: i for i, x in added_tokens(ours._backend).items()} == {
        x.content: i for i, x in theirs.added_tokens_decoder.items()
    }


def test_every_family_has_the_tokenizer_class_that_transformers_gives_it() -> None:
    auto = pytest.importorskip('transformers.models.auto.tokenization_auto')
    whatever, by_default = dict[str, str](), dict[str, str]()
    for family in FAMILIES:
        name = auto.TOKENIZER_MAPPING_NAMES.get(family)
        if name in AS_THE_FILE_SAYS:
            whatever[family] = ''
        elif family in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            whatever[family] = name
        elif name:
            by_default[family] = name
    assert (whatever, by_default) == (OF_FAMILY, BY_DEFAULT)


@pytest.mark.parametrize('files', FOLDERS.values(), ids=FOLDERS)
def test_a_saved_tokenizer_names_the_same_tokens_without_the_other_files(
    files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    first = load_tokenizer(write(tmp_path, files))
    for name in ('tokenizer.json', 'web.tokenizer.json'):
        (tmp_path / 'run').mkdir(exist_ok=True)
        first.save(tmp_path / 'run' / name)
        again = load_tokenizer(str(tmp_path / 'run' / name))
        assert (again.named_tokens, again.eod, again.fingerprint) == (
            first.named_tokens,
            first.eod,
            first.fingerprint,
        )


def test_of_a_prefix_only_the_names_of_its_tokens_are_read(tmp_path: Path) -> None:
    first = load_tokenizer(write(tmp_path, {}))
    first.save(tmp_path / 'web.tokenizer.json')
    for name in ('config.json', 'generation_config.json', 'special_tokens_map.json'):
        (tmp_path / f'web.{name}').write_text('{"eos_token_id": 259, "eos_token": "<turn>"}')
    again = load_tokenizer(str(tmp_path / 'web.tokenizer.json'))
    assert (again.named_tokens, again.eod) == (first.named_tokens, first.eod)


def end_of(tokenizer: Tokenizer) -> str:
    return tokenizer.decode([tokenizer.eod])


def test_the_end_is_that_of_the_tokenizer_then_of_the_model_then_of_generation(
    tmp_path: Path,
) -> None:
    files: dict[str, dict[str, Any]] = {}
    for name, keys, end in (
        ('generation_config.json', {'eos_token_id': 259}, '<|endoftext|>'),  # without config.json
        ('config.json', {'model_type': 'llama', 'eos_token_id': None}, BEGIN),
        ('config.json', {'model_type': 'llama', 'eos_token_id': [258, 257]}, TURN),
        ('tokenizer_config.json', {'eos_token': END}, END),
    ):
        files[name] = keys
        assert end_of(load_tokenizer(write(tmp_path, files))) == end


def test_a_tokenizer_json_alone_ends_with_a_well_known_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, {}))
    assert (end_of(tokenizer), tokenizer.named_tokens) == ('<|endoftext|>', {})


def test_a_class_token_that_the_files_lack_ends_no_document(tmp_path: Path) -> None:
    files = {'config.json': {'model_type': 'gpt2', 'eos_token_id': 257}}
    path = Path(write(tmp_path, files))
    path.write_text(path.read_text().replace('<|endoftext|>', '<|other|>'))
    tokenizer = load_tokenizer(str(path))
    assert (end_of(tokenizer), tokenizer.named_tokens['eos_token']) == (END, '<|endoftext|>')


@pytest.mark.usefixtures('one_thread')
def test_token_files_keep_the_names_and_end_with_the_named_token(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('a text')
    path = write(tmp_path, {'tokenizer_config.json': {'bos_token': BEGIN, 'eos_token': TURN}})
    out = tmp_path / 'web'
    inputs = (str(tmp_path / 'a.txt'),)
    build(Job(out=str(out), inputs=inputs, tokenizer=path, workers=1, append_eod=True))
    manifest = Manifest.read(out)
    assert manifest is not None
    assert (manifest.eod, read_pair(out).tokens[-1]) == (258, 258)
    again = load_tokenizer(str(manifest.tokenizer_path))
    assert again.named_tokens == {'bos_token': BEGIN, 'eos_token': TURN}


@pytest.mark.parametrize(
    'keys',
    [
        {'eos_token': 5},
        {'eos_token': {'lstrip': True}},
        {'extra_special_tokens': [7]},
        {'extra_special_tokens': 'x'},
        {'added_tokens_decoder': {'x': NEW}},
        {'added_tokens_decoder': {'260': '<new>'}},
        {'added_tokens_decoder': {'260': {**NEW, 'lstrip': 'x'}}},
    ],
)
def test_a_value_that_is_no_token_is_rejected_with_file_and_key(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, {'tokenizer_config.json': keys})
    with pytest.raises(ConfigError, match=f'tokenizer_config.json: {next(iter(keys))}: .*names no'):
        load_tokenizer(path)
