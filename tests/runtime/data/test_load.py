"""From a config to batches: text, Megatron's files and blends of them; what cannot be used is
refused with file and fix.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megajax.core.config import Config, ConfigError, load
from megajax.corpus.describe import verify
from megajax.runtime.data import (
    encode_documents,
    load_data,
    make_tokenizer,
    read_documents,
    split_documents,
)
from megajax.runtime.data.corpus_tokenizer import tokenizer_of_pairs
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.text.tokenizer import train_bpe
from megajax.runtime.data.token_pairs import Pair, check_pairs
from megajax.runtime.data.tokens.indexed import read_pair, write_index
from megajax.runtime.data.tokens.token_ids import token_range

ORACLES = Path(__file__).parent / 'oracles/gpt_dataset'
SMALL = [
    'train.batch_size=4',
    'train.seq_len=32',
    'mesh.data=1',
    'mesh.model=1',
    'model.vocab_size=300',
]
IDS = ['data.tokenizer=none', 'train.sample_prompts=[]', 'model.vocab_size=70000']


def config(*overrides: str) -> Config:
    return load('tiny', [*SMALL, *overrides])


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache/megajax/token_ranges'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(40):
        (folder / f'{i}.py').write_text(
            f'def f{i}(x):\n    return x + {i}  # é\n' * 5, encoding='utf-8'
        )
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    shutil.copy(ORACLES / 'a.bin', tmp_path / 'a.bin')
    shutil.copy(ORACLES / 'a.idx', tmp_path / 'a.idx')
    return tmp_path / 'a'


def build(prefix: Path) -> Path:
    """A pair and what lies beside it, as `megajax data build` leaves them."""
    tokenizer = train_bpe(['def f(x):\n    return x\n' * 9], 265)
    tokens, lengths = encode_documents(
        [f'def f{i}(x):\n    return x * {i}\n' * 9 for i in range(40)], tokenizer
    )
    Path(f'{prefix}.bin').write_bytes(tokens.tobytes())
    with Path(f'{prefix}.idx').open('wb') as file:
        write_index(file, tokens.dtype, lengths, np.arange(41))
    tokenizer.save(f'{prefix}.tokenizer.json')
    Path(f'{prefix}.json').write_text(manifest_of(prefix, tokens).model_dump_json())
    return prefix


def manifest_of(prefix: Path, tokens: np.ndarray) -> Manifest:
    from hashlib import sha256

    tokenizer = Path(f'{prefix}.tokenizer.json')
    return Manifest(
        tokenizer=tokenizer.name,
        tokenizer_sha256=sha256(tokenizer.read_bytes()).hexdigest(),
        vocab_size=265,
        eod=264,
        append_eod=True,
        documents=40,
        tokens=len(tokens),
        max_token=int(tokens.max()),
        text_bytes=1000,
        bin_sha256=sha256(tokens.tobytes()).hexdigest(),
    )


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_each_document_ends_with_the_end_of_document_token() -> None:
    tokenizer = make_tokenizer('bytes', 257)
    texts = [chr(i) * i for i in range(150)]
    tokens, lengths = encode_documents(texts, tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [token for text in texts for token in [*text.encode(), 256]]
    assert lengths.tolist() == [len(text.encode()) + 1 for text in texts]
    assert encode_documents([], tokenizer)[0].shape == (0,)


def test_text(folder: Path) -> None:
    data, again = (
        load_data(config(f'data.corpus={folder}')),
        load_data(config(f'data.corpus={folder}')),
    )
    assert data.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert_equal(data.train[17], again.train[17])
    assert data.summary.startswith(
        '37 documents (0.0 MB) to train on, 3 (0.0 MB) to validate; 300 tokens'
    )
    _, validation, _ = split_documents(read_documents(str(folder)), '95,5,0')
    expected, _ = encode_documents([document.text for document in validation], data.tokenizer)
    batches = [data.validation[step] for step in range(len(data.validation))]
    labels = np.concatenate([batch['labels'][batch['loss_mask'] == 1] for batch in batches])
    assert labels.tolist() == expected[1:].tolist()


def test_a_folder_of_token_files_is_not_read_as_text(folder: Path) -> None:
    other = folder / 'other.bin'  # files of another program
    for path in (other, other.with_suffix('.idx')):
        path.write_bytes(b'\0' * 100)
    load_data(config(f'data.corpus={folder}'))
    prefix = build(folder / 'web')
    message = rf'data\.corpus: {folder} contains token files \({prefix}\.idx\); give their prefix, '
    for order in ('stateless', 'streamed'):
        with pytest.raises(ConfigError, match=rf'{message}data\.corpus={prefix}, or move'):
            load_data(config(f'data.corpus={folder}', f'data.order={order}'))
    build(folder / 'sub')
    with pytest.raises(ConfigError, match=rf'prefixes, data\.corpus={folder}/sub, mix them with'):
        load_data(config(f'data.corpus={folder}'))
    lines = '\n'.join(json.dumps({'text': f'line {i} ' * 9}) for i in range(40))
    (folder / 'web.jsonl').write_text(lines)  # from which the token files were built
    assert load_data(config(f'data.corpus={folder}')).summary.startswith('39 documents')


def test_a_corpus_in_which_special_tokens_were_parsed_is_named(tmp_path: Path) -> None:
    prefix = build(tmp_path / 'web')
    settings = f'data.corpus={prefix}', 'model.vocab_size=265', 'data.tokenizer=auto'
    assert load_data(config(*settings)).summary.endswith(f'of {prefix}')
    file = Path(f'{prefix}.json')
    written = file.read_text()
    assert '"parse_special":false,' in written
    file.write_text(written.replace('"parse_special":false,', ''))  # of an earlier version
    assert load_data(config(*settings)).summary.endswith(f'of {prefix}')
    file.write_text(written.replace('"parse_special":false', '"parse_special":true'))
    assert load_data(config(*settings)).summary.endswith(f'{prefix} (built with --parse-special)')


def test_documents_to_train_on_that_spell_special_tokens_are_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(0, 40, 4):
        (folder / f'{i}.py').write_text(f'<|endoftext|>\nx = {i}\n' * 9)
    load_data(config(f'data.corpus={folder}', 'data.tokenizer=bytes'))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith('data.corpus: 10 documents spell special tokens (<|endoftext|>), whi')


def test_the_vocabulary_is_made_from_training_documents_alone(folder: Path) -> None:
    before = load_data(config(f'data.corpus={folder}')).tokenizer
    _, validation, _ = split_documents(read_documents(str(folder)), '95,5,0')
    (folder / validation[0].name).write_text('entirely different words\n' * 50, encoding='utf-8')
    assert load_data(config(f'data.corpus={folder}')).tokenizer.fingerprint == before.fingerprint


def test_a_changed_document_is_noticed_in_the_part_that_it_belongs_to(folder: Path) -> None:
    key = f'data.corpus={folder}'
    train, validation, _ = split_documents(read_documents(str(folder)), '95,5,0')
    names = {train[0].name: str(folder), validation[0].name: f'validation documents of {folder}'}
    for document, name in names.items():
        before = load_data(config(key, 'data.tokenizer=bytes')).fingerprints
        (folder / document).write_text('entirely different words\n' * 50, encoding='utf-8')
        after = load_data(config(key, 'data.tokenizer=bytes')).fingerprints
        assert {key for key in after if after[key] != before[key]} == {name}
    assert load_data(config(key, 'data.split=1,0,0')).fingerprints.keys() == {str(folder)}


@pytest.mark.slow  # it trains a tokenizer on 30 MB; test_tokenizer.py has one on less
def test_the_standard_library_fills_a_vocabulary_and_compresses() -> None:
    data = load_data(load('tiny', ['mesh.data=1', 'mesh.model=1', 'model.vocab_size=512']))
    assert data.tokenizer.vocab_size == 512
    bytes_per_token = float(data.summary.split('512 tokens, ')[1].split()[0])
    assert bytes_per_token > 2


@pytest.mark.parametrize('order', ['stateless', 'megatron'])
def test_without_a_validation_part_there_are_no_validation_batches(pair: Path, order: str) -> None:
    assert (
        len(
            load_data(
                config(*IDS, f'data.corpus={pair}', 'data.split=1,0,0', f'data.order={order}')
            ).validation
        )
        == 0
    )


@pytest.mark.parametrize('order', ['stateless', 'megatron'])
def test_a_corpus_of_a_blend_without_a_validation_part_is_left_out_of_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    long, single = str(build(tmp_path / 'long')), tmp_path / 'single'
    tokens = read_pair(long).tokens[:200]
    single.with_suffix('.bin').write_bytes(tokens.tobytes())
    with single.with_suffix('.idx').open('wb') as file:
        write_index(file, tokens.dtype, np.array([200]), np.arange(2))
    keys = [f'data.order={order}', f'data.tokenizer={long}.tokenizer.json']
    both = load_data(config(f'data.blend={{{long}: 1, {single}: 1}}', *keys))
    assert f'evaluations do not read {single}: data.split=95,5,0 leaves no sequence' in caplog.text
    alone = load_data(config(f'data.blend={{{long}: 1}}', *keys))
    assert len(both.validation) == len(alone.validation) > 0
    assert_equal(both.validation[0], alone.validation[0])


@pytest.mark.parametrize(('eval_batches', 'is_early'), [(1, False), (2, True)])
def test_the_corpus_with_which_the_evaluations_of_a_blend_end_is_named(
    pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, eval_batches: int, is_early: bool
) -> None:
    small = build(tmp_path / 'small')
    blend = f'data.blend={{{pair}: 1, {small}: 1}}'
    data = load_data(config(blend, *IDS, f'train.eval_batches={eval_batches}'))
    assert len(data.validation) == 2
    assert (f'reads 6 of 15 sequences to validate on, because {pair}' in caplog.text) == is_early


def test_files_of_megatron_in_the_stateless_order() -> None:
    data = load_data(config(*IDS, f'data.corpus={ORACLES}/a', 'data.split=900,50,50'))
    training = read_pair(ORACLES / 'a')
    tokens = training.tokens[: training.start(54)]
    epoch = -(-(len(tokens) - 1) // 32)
    rows = [data.train.rows(i // 4, i % 4, i % 4 + 1) for i in range(epoch)]
    labels = sorted(tuple(row['labels'][row['loss_mask'] == 1]) for row in rows)
    assert labels == sorted(tuple(tokens[1 + i * 32 : 1 + (i + 1) * 32]) for i in range(epoch))
    assert data.summary.startswith(
        '54 sequences (2,360 tokens) to train on, 3 sequences (166 tokens) to validate'
    )


@pytest.mark.parametrize(
    ('run', 'corpus'),
    [('one_epoch', 'data.corpus={}/a'), ('blend', 'data.blend={{{0}/a: 0.7, {0}/b: 0.3}}')],
)
def test_batches_in_the_order_of_megatron(run: str, corpus: str) -> None:
    results = np.load(ORACLES / 'gpt_dataset.npz')
    num_samples = json.loads(str(results['settings']))['runs'][run]['num_samples'][0]
    steps = (
        f'train.steps={num_samples // 2}',
        'train.batch_size=2',
        'data.split=900,50,50',
        'data.order=megatron',
    )
    data = load_data(config(*IDS, corpus.format(ORACLES), *steps))
    for step in range(num_samples // 2)[:32]:
        np.testing.assert_array_equal(
            data.train[step]['tokens'], results[f'{run}/train/tokens'][2 * step : 2 * step + 2]
        )
        np.testing.assert_array_equal(
            data.train[step]['labels'], results[f'{run}/train/labels'][2 * step : 2 * step + 2]
        )


def test_the_tokenizer_beside_a_pair_is_the_run_s(tmp_path: Path) -> None:
    prefix = build(tmp_path / 'web')
    data = load_data(config(f'data.corpus={prefix}'))
    assert data.tokenizer.vocab_size == 265
    assert data.tokenizer.decode(read_pair(prefix).tokens[:6]).startswith('def f')


@pytest.mark.parametrize('note', ['', '3', '[1]', '[null, 2]', '[0, Infinity]', '[' * 100_000])
def test_ids_are_read_where_the_note_of_them_is_damaged(pair: Path, notes: Path, note: str) -> None:
    assert token_range(read_pair(pair)) == (0, 999)
    for file in notes.iterdir():
        file.write_text(note)
    assert token_range(read_pair(pair)) == (0, 999)


@pytest.mark.parametrize('token', [2**40, -(2**40)])
def test_an_id_that_no_vocabulary_has_is_named_with_its_byte(
    tmp_path: Path, notes: Path, token: int
) -> None:
    tokens = np.arange(120)
    tokens[2] = token
    (tmp_path / 'long.bin').write_bytes(tokens.tobytes())
    with (tmp_path / 'long.idx').open('wb') as file:
        write_index(file, tokens.dtype, np.array([120]), np.arange(2))
    message = f'at byte 16: .* below {token}, which is token 2 of .*; build the files again'
    with pytest.raises(ConfigError, match=message):
        load_data(config(*IDS, f'data.corpus={tmp_path}/long'))


def test_ids_are_read_once_and_again_when_the_file_changes(pair: Path, notes: Path) -> None:
    assert token_range(read_pair(pair)) == (0, 999)
    note = next(notes.iterdir())
    note.write_text('[0, 12]')
    assert token_range(read_pair(pair)) == (0, 12)
    os.utime(f'{pair}.bin', ns=(1, 1))
    assert token_range(read_pair(pair)) == (0, 999)


@pytest.mark.parametrize('vocab_size', [265, 300])
def test_a_bad_id_that_was_noted_and_is_no_longer_in_the_file_is_no_error(
    tmp_path: Path, notes: Path, vocab_size: int
) -> None:
    """A file that was restored by `rsync -a` has its old size and modification time."""
    sequences = read_pair(build(tmp_path / 'web'))
    tokenizer = make_tokenizer(f'{tmp_path}/web.tokenizer.json', 265)
    found = token_range(sequences)
    (note,) = notes.iterdir()
    for noted in ('[0, 299]', '[-1, 264]'):
        note.write_text(noted)
        of_config = config(f'model.vocab_size={vocab_size}')
        check_pairs(of_config, [Pair(sequences, None, {})], tokenizer)
        assert token_range(sequences) == found


def test_a_manifest_is_of_its_files_whatever_range_of_ids_was_noted(
    tmp_path: Path, notes: Path
) -> None:
    prefix = build(tmp_path / 'web')
    sequences, manifest = read_pair(prefix), Manifest.read(prefix)
    token_range(sequences)
    (note,) = notes.iterdir()
    for noted in ('[0, 70000]', '[0, 12]'):
        note.write_text(noted)
        with pytest.raises(ConfigError, match=r'100 ids end below'):
            check_pairs(config('model.vocab_size=100'), [Pair(sequences, manifest, {})], None)
        note.write_text(noted)
        assert 'ids from' in verify(prefix)[-1]
        assert token_range(sequences)[1] == manifest.max_token


def test_the_batch_size_that_is_advised_for_a_small_corpus_fits_the_mesh(folder: Path) -> None:
    keys = [f'data.corpus={folder}', 'train.seq_len=128', 'data.tokenizer=bytes']
    mesh = ['mesh.data=4', 'train.microbatches=2']
    with pytest.raises(ConfigError, match=r'128 is more than the \d+ sequences') as error:
        load_data(config(*keys, *mesh, 'train.batch_size=128'))
    size = int(str(error.value).rpartition('; use ')[2].partition(',')[0])
    assert size % 8 == 0
    assert load_data(config(*keys, *mesh, f'train.batch_size={size}')).train[0]
    keys[0] += '/0.py'
    with pytest.raises(ConfigError, match=r'; use a shorter train\.seq_len or a larger corpus$'):
        load_data(config(*keys, *mesh, 'train.batch_size=128'))


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (['data.corpus={folder}', 'train.seq_len=128', 'train.batch_size=128'],
         r'train.batch_size: 128 is more than the \d+ sequences'),
        (['data.corpus={folder}', 'data.tokenizer=none'],
         r'data.tokenizer: none is not supported for text .data.corpus=.*; use bpe'),
        (['data.corpus={pair}'], (
            r'data.tokenizer: no tokenizer is known: there is no .*a.json; '
            r'give the tokenizer.json that'
        )),
        (['data.corpus={pair}', 'data.tokenizer=bpe'],
         r'data.tokenizer: bpe is trained on text, but .*a contains tokens; use auto'),
        (['data.corpus={pair}', 'data.tokenizer=none'],
         r'train.sample_prompts: is not supported with data.tokenizer=none'),
        ([*IDS[:2], 'data.corpus={pair}', 'model.vocab_size=500'],
         r'a.bin: at byte \d+: .*500 ids end below \d+.*; use 1000 or more'),
        (['data.corpus={folder}/0.py', 'data.split=0.00001,99,0', 'data.tokenizer=bytes'],
         r'data.corpus: .*0.py has 0 tokens to train on, .*or another data.split'),
        ([*IDS, 'data.corpus={pair}', 'data.split=1,999,0'],
         r'data.corpus: .*a has 0 tokens to train on, in 0 of 60 sequences'),
        ([*IDS, 'data.corpus={pair}.idx'],
         r'data.corpus: .*a.idx: give the prefix of the two files, .*a'),
        ([*IDS, 'data.corpus={folder}/ids.bin'],
         r'ids: there is no ids.idx; give the prefix .*if ids.bin .*nanoGPT.*docs/data.md'),
        ([*IDS, 'data.corpus=x', 'data.blend={{{pair}: 1}}'],
         r'data.corpus: x cannot be combined with data.blend=.*a; set only one'),
        ([*IDS, 'data.blend={{{pair}: 1, {pair}2: 1}}'],
         r'a2: there is no a2.bin and no a2.idx; give the prefix'),
        ([*IDS, 'data.blend={{{pair}: -1}}'], r'data.blend: .*greater than 0'),
    ],
)  # fmt: skip
def test_what_cannot_be_used(folder: Path, pair: Path, overrides: list[str], message: str) -> None:
    (folder / 'ids.bin').write_bytes(np.arange(9, dtype=np.uint16).tobytes())
    with pytest.raises(ConfigError, match=message):
        load_data(config(*(override.format(folder=folder, pair=pair) for override in overrides)))


@pytest.mark.parametrize(('preset', 'end'), [('tiny', ', or none'), ('bert_336m', '')])
def test_tokens_of_an_unknown_tokenizer_need_one_that_the_model_supports(
    preset: str, end: str
) -> None:
    with pytest.raises(ConfigError, match=f'give the tokenizer.json that made the tokens{end}$'):
        tokenizer_of_pairs(load(preset), {'wiki': None})


def replaced(prefix: Path, key: str, value: object) -> None:
    path = Path(f'{prefix}.json')
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def make_symlink(prefix: Path) -> None:
    tokenizer = Path(f'{prefix}.tokenizer.json')
    tokenizer.symlink_to(tokenizer.rename(f'{prefix}.elsewhere'))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda p: replaced(p, 'tokenizer', '../web.tokenizer.json'),
         r"tokenizer '../web.tokenizer.json' is not a plain file in the same"),
        (lambda p: replaced(p, 'tokenizer', '/etc/passwd'),
         r"web.json: tokenizer '/etc/passwd' is not a plain file in the same folder"),
        (lambda p: replaced(p, 'tokens', 7),
         r'web.json: tokens is 7, but the files have \d+; the manifest belongs to other files'),
        (lambda p: replaced(p, 'documents', 41),
         r'web.json: documents is 41, but the files have 40; the manifest belongs to other files'),
        (lambda p: replaced(p, 'max_token', 70000),
         r'web.json: max_token is 70000, but the largest id in the files is 264; the manifest'),
        (lambda p: replaced(p, 'tokens', 'many'),
         r'web.json: is not what megajax data build wrote \(tokens: '),
        (lambda p: Path(f'{p}.json').write_text('{'),
         r'web.json: is not what megajax data build wrote'),
        (lambda p: Path(f'{p}.tokenizer.json').unlink(),
         r'web.tokenizer.json: is missing, and web.json names it'),
        (lambda p: Path(f'{p}.tokenizer.json').write_text('{}'),
         r'web.tokenizer.json: is not the tokenizer that made these tokens'),
        (make_symlink, r"tokenizer 'web.tokenizer.json' is not a plain file in the same folder"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_not_true(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    prefix = build(tmp_path / 'web')
    change(prefix)
    with pytest.raises(ConfigError, match=message):
        load_data(config(f'data.corpus={prefix}'))


def test_another_tokenizer_than_the_one_that_built_the_data(tmp_path: Path) -> None:
    prefix, other = build(tmp_path / 'web'), tmp_path / 'other.json'
    make_tokenizer('bpe', 290, ['while True: pass\n' * 9]).save(other)
    with pytest.raises(
        ConfigError,
        match=(
            r'data.tokenizer: .*other.json did not make these tokens: '
            r'their tokenizer is .*web.tokenizer.json'
        ),
    ):
        load_data(config(f'data.corpus={prefix}', f'data.tokenizer={other}'))
    load_data(config(f'data.corpus={prefix}', f'data.tokenizer={prefix}.tokenizer.json'))


def test_documents_that_end_with_another_token_than_the_tokenizers(tmp_path: Path) -> None:
    prefix = build(tmp_path / 'web')
    (tmp_path / 'web.tokenizer_config.json').write_text(json.dumps({'eos_token': 'x'}))
    with pytest.raises(
        ConfigError,
        match=r'web.tokenizer.json ends documents with token \d+, .* ends them with 264',
    ):
        load_data(config(f'data.corpus={prefix}'))


def test_a_blend_of_two_tokenizers(tmp_path: Path) -> None:
    first, second = build(tmp_path / 'web'), build(tmp_path / 'code')
    load_data(config(f'data.blend={{{first}: 1, {second}: 2}}'))
    make_tokenizer('bytes', 300).save(f'{second}.tokenizer.json')
    tokens = np.array(read_pair(second).tokens)
    Path(f'{second}.json').write_text(manifest_of(second, tokens).model_dump_json())
    with pytest.raises(
        ConfigError,
        match=(
            r'web.tokenizer.json did not make these tokens: their tokenizer is .*code.*; '
            r'blend corpora that share'
        ),
    ):
        load_data(config(f'data.blend={{{first}: 1, {second}: 2}}'))
