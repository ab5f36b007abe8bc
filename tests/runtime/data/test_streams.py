"""Batches of streams: the same on every mesh, at every place of the corpus, and after a resume."""

import json
import re
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from runtime.data import stores
from runtime.data.test_inputs import write_parquet
from runtime.data.test_load import assert_equal, config
from vlm import vlm

from megajax.base.errors import ConfigError
from megajax.runtime.data import Data, load_data
from megajax.runtime.data.sources import shares
from megajax.runtime.data.streams import Place, StreamedBatches

TEXTS = [f'{i}: ' + 'word ' * (i % 40) for i in range(600)]
KEYS = 'data.order=streamed', 'data.tokenizer=bytes', 'train.eval_batches=3'


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shares of some lines, and a cache of the test."""
    monkeypatch.setattr(shares, 'SMALLEST', 1000)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture(name='here')
def make_here(tmp_path: Path) -> Path:
    here = tmp_path / 'here'
    here.mkdir()
    for name, texts in (('a', TEXTS[:200]), ('b', TEXTS[200:400])):
        lines = (json.dumps({'text': text}) for text in texts)
        (here / f'{name}.jsonl').write_text('\n'.join(lines))
    write_parquet(here / 'c.parquet', TEXTS[400:])
    return here


def load(corpus: object, *keys: str) -> Data:
    return load_data(config(f'data.corpus={corpus}', *KEYS, *keys))


def batches_of(corpus: object, *keys: str) -> StreamedBatches:
    train = load(corpus, *keys).train
    assert isinstance(train, StreamedBatches)
    return train


def documents(tokens: np.ndarray, eod: int) -> list[bytes]:
    ends = np.flatnonzero(tokens == eod)
    return [bytes(part[:-1].astype(np.uint8)) for part in np.split(tokens, ends + 1)[:-1]]


def test_an_epoch_has_each_document_of_its_part_once(here: Path) -> None:
    documents_of_training = batches_of(here)._documents
    num_shares = len(documents_of_training.numbers)
    found = Counter[bytes]()
    for stream in range(4):
        for block in documents_of_training.blocks(stream, 4, 0, 0):
            if stream + 4 * block.share >= num_shares:  # of the next epoch
                break
            found.update(documents(block.tokens, 256))
    assert max(found.values()) == 1
    assert found.keys() <= {text.encode() for text in TEXTS}
    assert len(found) > 0.8 * len(TEXTS)


@pytest.mark.parametrize('keys', [[], ['data.document_mask=true']])
def test_sequences_do_not_depend_on_the_process_that_reads_them(
    here: Path, keys: list[str]
) -> None:
    whole, first, second = (batches_of(here, *keys) for _ in range(3))
    for step in (0, 1, 5, 30):
        parts = first.rows(step, 0, 3), second.rows(step, 3, 4)
        for name, value in whole[step].items():
            assert np.array_equal(value, np.concatenate([part[name] for part in parts]))


def test_a_stream_is_one_text_whose_windows_overlap_by_a_token(here: Path) -> None:
    batches = batches_of(here)
    steps = [batches[step] for step in range(60)]
    for row in range(4):
        labels = np.concatenate([step['labels'][row] for step in steps])
        tokens = np.concatenate([step['tokens'][row] for step in steps])
        assert np.array_equal(tokens[1:], labels[:-1])
        known = {text.encode() for text in TEXTS}
        assert set(documents(tokens, 256)[1:]) <= known


def test_with_a_document_mask_documents_begin_after_their_ends(here: Path) -> None:
    batch = batches_of(here, 'data.document_mask=true')[7]
    begins = batch['positions'] == 0
    assert np.array_equal(begins[:, 1:], batch['tokens'][:, :-1] == 256)


@pytest.mark.parametrize('stop', [1, 13, 40])
def test_a_resumed_run_goes_on_to_the_token(here: Path, stop: int) -> None:
    before = batches_of(here)
    for step in range(stop + 2):  # two more were prefetched
        before[step]
    place = before.place(stop)
    after = batches_of(here).continued(stop, place['samples'], place['streams'])
    for step in range(stop, stop + 30):
        assert_equal(before[step], after[step])
    assert after.place(stop + 3) == before.place(stop + 3)


def test_a_place_is_known_where_its_stream_was_read(here: Path) -> None:
    batches = batches_of(here)
    assert batches.place(0)['streams'] == [Place()] * 4
    for step in range(20):
        batches.rows(step, 1, 3)
    places = batches.place(20)['streams']
    assert [place is not None for place in places] == [False, True, True, False]


def test_other_lengths_and_batch_sizes_go_on_to_the_token(here: Path) -> None:
    before = batches_of(here)
    for step in range(10):
        before[step]
    place = before.place(10)
    after = batches_of(here, 'train.seq_len=16', 'train.batch_size=2')
    after = after.continued(10, 2 * place['samples'], place['streams'])
    found = [after[step]['tokens'] for step in range(10, 14)]
    # Eight samples of 16 tokens: two for each of the four streams.
    halves = np.concatenate(found).reshape(2, 4, 16)
    assert np.array_equal(np.concatenate(list(halves), axis=1), before[10]['tokens'])


def test_batches_can_be_read_again(here: Path) -> None:
    batches = batches_of(here)
    seen = [batches[step] for step in range(200)]
    for step in (150, 0, 3, 199):
        assert_equal(batches[step], seen[step])


def test_an_epoch_has_every_share_in_an_order_of_its_own(here: Path) -> None:
    shuffled = batches_of(here)._documents
    size = len(shuffled.numbers)
    first, second = ([shuffled.order[i] for i in range(n, n + size)] for n in (0, size))
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second


def test_an_evaluation_reads_its_shares_once(here: Path) -> None:
    data = load(here, 'data.split=50,50,0', 'train.eval_batches=900')
    assert len(data.validation) == 900
    read = [data.validation[step] for step in range(len(data.validation))]
    counted = sum(int(batch['loss_mask'].sum()) for batch in read)
    whole = sum(len(text.encode()) + 1 for text in TEXTS)
    assert 0.3 * whole < counted < 0.7 * whole
    assert not read[-1]['loss_mask'].any()
    seen = [
        text
        for row in range(4)
        for text in documents(
            np.concatenate([batch['tokens'][row][batch['loss_mask'][row] > 0] for batch in read]),
            256,
        )
    ]
    assert len(seen) == len(set(seen))
    trained = batches_of(here, 'data.split=50,50,0')
    tokens = np.concatenate([trained[step]['tokens'] for step in range(100)], axis=1)
    of_training = {text for row in tokens for text in documents(row, 256)[1:]}
    assert of_training.isdisjoint(seen)


@pytest.fixture(params=['memory', 's3', 'web'])
def there(
    request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == 'web':
        (here / 'index.html').write_text(
            ''.join(f'<a href="{path.name}">{path.name}</a>' for path in here.iterdir())
        )
        with stores.web(here) as server:
            yield server.url
        return
    store = stores.memory(here.parent.name) if request.param == 'memory' else None
    with store or stores.s3(monkeypatch.setenv) as url:
        stores.copy(here, url)
        yield url


@pytest.mark.parametrize('name', ['a.jsonl', 'c.parquet'])
def test_a_url_has_the_batches_of_the_file(here: Path, there: str, name: str) -> None:
    one, other = load(here / name), load(f'{there}/{name}')
    for step in (0, 1, 7):
        assert_equal(one.train[step], other.train[step])
    assert_equal(one.validation[0], other.validation[0])
    assert one.fingerprints[str(here / name)] == other.fingerprints[f'{there}/{name}']
    assert one.summary == other.summary
    assert re.fullmatch(
        r'0\.0 MB, streamed: \d+ shares to train on, \d+ to validate; 257 tokens', one.summary
    )


def test_the_first_batches_need_only_the_first_shares(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, 'SMALLEST', 1 << 16)
    line = json.dumps({'text': 'long ' * 5000}) + '\n'
    (here / 'long.jsonl').write_text(line * 400)  # 10 MB
    with stores.web(here) as server:
        batches = batches_of(f'{server.url}/long.jsonl')
        batches[0]
        assert len(server.asked) < 12  # of 40 blocks of 256 KiB
        asked = len(server.asked)
        again = batches_of(f'{server.url}/long.jsonl')
        assert_equal(again[0], batches[0])
        assert len(server.asked) == asked  # from the cache


@pytest.mark.parametrize(
    ('keys', 'said'),
    [
        (['train.batch_size=500'], 'data.order: streamed reads 500 sequences at once'),
        (['data.chat_template=x.jinja'], 'which data.order=streamed does not read'),
        (['data.split=1,0,0', 'data.corpus=none'], 'no such file or folder'),
    ],
)
def test_what_cannot_be_streamed_is_refused(here: Path, keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        load(here, *keys)
    assert said in str(found.value)


def test_chats_and_token_files_are_for_another_order(here: Path, tmp_path: Path) -> None:
    line = json.dumps({'messages': [{'role': 'user', 'content': 'Why? ' * 50}]})
    (tmp_path / 'chat.jsonl').write_text((line + '\n') * 100)
    with pytest.raises(ConfigError, match=r'data\.order=stateless to train on chats'):
        load(tmp_path / 'chat.jsonl')
    oracles = Path(__file__).parent / 'oracles/gpt_dataset'
    for suffix in ('.bin', '.idx'):
        shutil.copy(oracles / f'a{suffix}', tmp_path)
    with pytest.raises(ConfigError, match='streamed is for text, and'):
        load(tmp_path / 'a', 'data.tokenizer=none', 'train.sample_prompts=[]')


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_images_are_not_streamed_as_letters(name: str, tmp_path: Path) -> None:
    rows = [{'text': 'A cat <image>' * 20, 'images': ['a.png']}] * 100
    if name == 'a.parquet':
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    data = {'corpus': str(tmp_path / name), 'tokenizer': 'bytes', 'order': 'streamed'}
    model = {'vocab_size': 300}
    sees = vlm(data=data, model=model, vision={'image_token': 257})
    with pytest.raises(ConfigError, match=r'has 1 images, .*use data.order=stateless to'):
        load_data(sees)
    with pytest.raises(ConfigError, match=r'has 1 images, .*use a model with a vision section'):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        ('', "small.jsonl' contains no text; give a text file"),
        ('{"text": "a"}', "asks for more parts than there are shares (1); use '1,0,0'"),
    ],
)
def test_a_corpus_that_is_too_small_is_an_error(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / 'small.jsonl').write_text(content)
    with pytest.raises(ConfigError) as found:
        load(tmp_path / 'small.jsonl')
    assert said in str(found.value)


def test_a_table_without_texts_names_its_columns(tmp_path: Path) -> None:
    for name, said in (('messages', 'use data.order=stateless'), ('body', 'name the text "text"')):
        path = tmp_path / f'{name}.parquet'
        pytest.importorskip('pyarrow.parquet').write_table(
            pytest.importorskip('pyarrow').table({name: ['text'] * 9}), path
        )
        with pytest.raises(ConfigError, match=f'its columns: {name}; {said}'):
            load(path)


def test_each_stream_can_keep_a_file_open(here: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        load(here)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_corpus_without_text_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / 'blank.jsonl').write_text(' \n' * 9000)
    with pytest.raises(ConfigError, match='have no text'):
        load(tmp_path / 'blank.jsonl')


@pytest.mark.parametrize('name', ['one.jsonl', 'one.txt'])
def test_a_corpus_of_one_long_line_is_read_by_all_streams(tmp_path: Path, name: str) -> None:
    text = 'word ' * 10_000
    content = json.dumps({'text': text}) if name == 'one.jsonl' else text
    (tmp_path / name).write_text(content)
    batches = batches_of(tmp_path / name, 'data.split=1,0,0')
    assert all(bytes(row[1:5].astype(np.uint8)) == b'ord ' for row in batches[0]['tokens'])


def test_an_error_is_raised_again_and_is_not_the_end(here: Path) -> None:
    batches = batches_of(here)
    path = here / 'a.jsonl'
    content = path.read_bytes()
    path.write_bytes(content.replace(b'word', b'\xff\xff\xff\xff'))
    for _ in range(2):
        with pytest.raises(ConfigError, match='is not UTF-8'):
            list(map(batches.__getitem__, range(60)))
    path.write_bytes(content)
    assert_equal(batches[59], batches_of(here)[59])
