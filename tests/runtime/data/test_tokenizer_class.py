"""A folder's tokenizer is read as transformers makes it of its class, or rejected."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from twelve_tokenizers import (
    EOD,
    SENTENCES,
    TWELVE,
    byte_level,
    random_text,
    sentencepiece,
    with_added_tokens,
)

from megajax.core.config import ConfigError
from megajax.runtime.data.text.tokenizer import load_tokenizer
from megajax.runtime.data.text.tokenizer_class import CLASSES, MISTRAL, OTHERS, QWEN2

KEYS: dict[str, list[dict[str, Any]]] = {
    'GPT2Tokenizer': [{}, {'add_prefix_space': True}],
    'GPTNeoXTokenizer': [{}, {'add_prefix_space': True}],
    'Qwen2Tokenizer': [{}],
    'LlamaTokenizer': [{}, {'legacy': True}, {'add_prefix_space': False}],
    'GemmaTokenizer': [{}],
    'BertTokenizer': [{}, {'do_lower_case': False, 'strip_accents': True}],
    'PreTrainedTokenizerFast': [{'add_prefix_space': True, 'legacy': True}],
}


def write(folder: Path, backend: Backend, family: str = 'llama', **keys: Any) -> str:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / 'tokenizer.json'))
    (folder / 'config.json').write_text(json.dumps({'model_type': family}))
    (folder / 'tokenizer_config.json').write_text(json.dumps(keys))
    return str(folder / 'tokenizer.json')


@pytest.mark.parametrize('name', KEYS)
def test_texts_have_the_ids_and_ids_the_texts_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip('transformers')
    draw, read = random.Random(1), 0
    for number, (kind, make) in enumerate(TWELVE.items()):
        for keys in KEYS[name]:
            known = make().get_vocab()
            end = next(name for name in (EOD, '</s>', '[SEP]') if name in known)
            folder = tmp_path / f'{number}{len(keys)}'
            path = write(folder, make(), tokenizer_class=name, eos_token=end, **keys)
            try:
                ours = load_tokenizer(path)
            except ConfigError as error:
                assert f'transformers makes a {name}, which reads' in str(error)  # noqa: PT017
                continue
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            for text in (' a', *(random_text(draw, ['</s', '[SEP']) for _ in range(20))):
                encoded = theirs(text, add_special_tokens=False, split_special_tokens=True)
                ids = encoded.input_ids
                assert ours.encode_batch([text])[0].tolist() == ids, (kind, keys, text)
                text_of_ids = ours._backend.decode(ids, skip_special_tokens=False)
                assert text_of_ids == theirs.decode(ids), (kind, keys, text)
            if '[CLS]' not in known:  # `masked.py` adds it
                assert ours._backend.encode('a').ids == theirs('a').input_ids, (kind, keys)
            read += 1
    assert read


def test_parts_that_differ_are_named_with_what_reads_the_file_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        keys = {'tokenizer_class': 'LlamaTokenizerFast', 'eos_token': '</s>'}
        (ids,) = load_tokenizer(write(tmp_path, sentencepiece(), **keys)).encode_batch([' the'])
        assert 'a LlamaTokenizer has a normalizer, pre_tokenizer of its own, not' in caplog.text
        caplog.clear()
        keys['tokenizer_class'] = 'PreTrainedTokenizerFast'
        as_is = load_tokenizer(write(tmp_path, sentencepiece(), **keys))
    assert not caplog.text
    assert len(as_is.encode_batch([' the'])[0]) == len(ids) + 1  # a space of its own


def test_a_family_that_decides_about_the_class_is_left_in_another_folder(tmp_path: Path) -> None:
    keys = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': EOD}
    text, backend = 'cafe\u0301', byte_level(normalizer=normalizers.NFD())
    path = write(tmp_path, backend, 'qwen2', **keys)
    (composed,) = load_tokenizer(path).encode_batch([text])
    (tmp_path / 'config.json').unlink()
    (decomposed,) = load_tokenizer(path).encode_batch([text])
    assert decomposed.tolist() == backend.encode(text).ids != composed.tolist()


def test_the_parts_of_published_folders_are_those_of_their_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpt2, qwen2 = byte_level(), byte_level(split=QWEN2, normalizer=normalizers.NFC(), trim=False)
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(False, trim_offsets=False)
    with caplog.at_level(logging.WARNING):
        for family, name, backend, end in (
            ('gpt2', 'GPT2Tokenizer', gpt2, EOD),
            ('qwen2', 'Qwen2Tokenizer', qwen2, EOD),
            ('mistral', 'LlamaTokenizer', sentencepiece(), '</s>'),
            ('mixtral', 'LlamaTokenizer', sentencepiece(), '</s>'),
        ):
            load_tokenizer(write(tmp_path, backend, family, tokenizer_class=name, eos_token=end))
    assert not caplog.text


def test_a_gpt_neox_adds_no_token_to_a_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = byte_level(normalizer=normalizers.NFC())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    keys = {'tokenizer_class': 'GPTNeoXTokenizer', 'eos_token': EOD}
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(write(tmp_path, backend, 'olmoe', **keys)).start == []
        assert not caplog.text
        backend.post_processor = processors.TemplateProcessing(
            f'{EOD} $A', None, [(EOD, backend.token_to_id(EOD))]
        )
        assert load_tokenizer(write(tmp_path, backend, 'olmoe', **keys)).start == []
    assert 'a GPTNeoXTokenizer has a post_processor of its own, not' in caplog.text


@pytest.mark.parametrize(
    ('name', 'backend', 'message'),
    [
        ('CodeGenTokenizerFast', byte_level, 'makes a CodeGenTokenizer, which does not read all'),
        (
            'GPT2Tokenizer',
            sentencepiece,
            'reads byte-level BPE, and tokenizer.json has BPE of S',
        ),
        ('BertTokenizer', byte_level, 'reads WordPiece, and tokenizer.json has byte-level BPE'),
    ],
)
def test_a_class_that_megajax_does_not_read_is_rejected_with_the_one_that_it_does(
    name: str, backend: Any, message: str, tmp_path: Path
) -> None:
    keys = {'eos_token': EOD if backend is byte_level else '</s>'}
    path = write(tmp_path, backend(), tokenizer_class=name, **keys)
    with pytest.raises(ConfigError, match=message) as raised:
        load_tokenizer(path)
    assert 'set "tokenizer_class": "PreTrainedTokenizerFast"' in str(raised.value)
    load_tokenizer(write(tmp_path, backend(), tokenizer_class='PreTrainedTokenizerFast', **keys))


def test_every_class_of_transformers_that_makes_its_own_parts_is_known() -> None:
    transformers = pytest.importorskip('transformers')
    backend = transformers.PreTrainedTokenizerFast
    auto = transformers.models.auto.tokenization_auto
    names = {name.removesuffix('Fast') for name in dir(transformers) if 'Tokenizer' in name}
    names |= {name.removesuffix('Fast') for name in auto.TOKENIZER_MAPPING_NAMES.values() if name}
    classes = {name: auto.tokenizer_class_from_name(name) for name in names}
    own = {
        name
        for name, made in classes.items()
        if isinstance(made, type)
        and issubclass(made, backend)
        and made is not backend
        and '__init__' in made.__dict__
    }
    assert {name for name in own if not OTHERS.fullmatch(name)} == CLASSES.keys()


def one_part() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize(
    ('make', 'model', 'is_fixed'),
    [
        (TWELVE["Llama 3's Split"], {'model_type': 'mistral'}, True),
        (one_part, {'model_type': 'mistral', 'transformers_version': '4.57.1'}, True),
        (TWELVE['Metaspace first'], {'transformers_version': '5.0.0.dev0'}, True),
        (one_part, {'model_type': 'mistral', 'transformers_version': '5.0.0'}, False),
        (one_part, {'model_type': 'llama'}, False),
        (one_part, None, False),
    ],
)
def test_a_mistral_has_the_regex_that_transformers_gives_it(
    make: Any, model: dict[str, str] | None, is_fixed: bool, tmp_path: Path
) -> None:
    content = json.loads(make().to_str())
    vocab = content['model']['vocab']
    vocab |= {f'never {i}': i for i in range(make().get_vocab_size(), 100_001)}
    end = '</s>' if '</s>' in vocab else EOD
    keys = {'tokenizer_class': 'PreTrainedTokenizerFast', 'fix_mistral_regex': True}
    path = write(tmp_path, Backend.from_str(json.dumps(content)), eos_token=end, **keys)
    (tmp_path / 'config.json').unlink()
    if model is not None:
        (tmp_path / 'config.json').write_text(json.dumps(model))
    ours = load_tokenizer(path)._backend
    assert (json.dumps(MISTRAL) in json.dumps(json.loads(ours.pre_tokenizer.__getstate__()))) == (
        is_fixed
    )
    transformers = pytest.importorskip('transformers')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    assert ours.pre_tokenizer.__getstate__() == theirs.pre_tokenizer.__getstate__()
    for text in ('theCat sayIt 123 on/\n\n the', *SENTENCES[:4]):
        assert ours.encode(text).ids == theirs.encode(text).ids


def properties(token: AddedToken, **changed: bool) -> dict[str, Any]:
    names = 'content', 'lstrip', 'rstrip', 'normalized', 'single_word', 'special'
    return {name: getattr(token, name) for name in names} | changed


def listed(backend: Backend, kind: str) -> dict[str, Any]:
    """What tokenizer_config.json says of the added tokens: all, or not what tokenizer.json says."""
    tokens = {str(i): x for i, x in sorted(backend.get_added_tokens_decoder().items())}
    first, (last, _) = next(iter(tokens)), list(tokens.items())[-1]
    new = {str(int(last) + 6): properties(AddedToken('<new>', special=True))}
    return {
        'all': {i: properties(x) for i, x in tokens.items()},
        'fewer': {first: properties(tokens[first])},
        'more, after a gap': {i: properties(x) for i, x in tokens.items()} | new,
        'other properties': {i: properties(x, lstrip=True) for i, x in tokens.items()},
    }[kind]


@pytest.mark.parametrize('kind', ['all', 'fewer', 'more, after a gap', 'other properties'])
@pytest.mark.parametrize(
    'name', ['Qwen2Tokenizer', 'GPT2Tokenizer', 'GPTNeoXTokenizer', 'PreTrainedTokenizerFast']
)
def test_added_tokens_are_those_that_transformers_gives_the_class(
    name: str, kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip('transformers')
    backend = with_added_tokens()
    keys = {'eos_token': EOD, 'added_tokens_decoder': listed(backend, kind)}
    ours = load_tokenizer(write(tmp_path, backend, tokenizer_class=name, **keys))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    decoder = ours._backend.get_added_tokens_decoder()
    assert {i: properties(x) for i, x in decoder.items()} == {
        i: properties(x) for i, x in theirs.added_tokens_decoder.items()
    }
    assert ours._backend.get_vocab() == theirs.get_vocab()


def test_a_class_has_the_added_tokens_that_are_listed_and_ends_with_its_own(tmp_path: Path) -> None:
    backend = byte_level()
    keys = {'tokenizer_class': 'Qwen2Tokenizer', 'added_tokens_decoder': listed(backend, 'fewer')}
    tokenizer = load_tokenizer(write(tmp_path, backend, 'qwen3', eos_token=EOD, **keys))
    assert tokenizer.special_tokens() == {EOD: backend.token_to_id(EOD)}
    assert tokenizer.eod == backend.token_to_id(EOD)
