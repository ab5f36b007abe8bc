"""The batch of a step depends on the config and the step alone, and an epoch holds every token once."""

from pathlib import Path

import numpy as np
import pytest

from megajax.config import Config, ConfigError, load
from megajax.data import Batch, Batches, Document, encode_documents, load_data, make_tokenizer, read_documents, split_documents

S, B = 8, 4
TOKENS = np.arange(1, 1002, dtype=np.uint16)  # 125 whole windows


def shuffled(tokens: np.ndarray = TOKENS, *, seed: int = 3) -> Batches:
    return Batches(tokens, seq_len=S, batch_size=B, seed=seed)


def samples(batches: Batches, first: int, count: int) -> list[tuple[int, ...]]:
    rows = [row for step in range(first // B, -(-(first + count) // B)) for row in batches[step]['labels']]
    return [tuple(row.tolist()) for row in rows[first % B :][:count]]


def assert_equal(a: Batch, b: Batch) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_each_document_ends_with_the_end_of_document_token() -> None:
    tokenizer = make_tokenizer('bytes', 257, [])
    documents = [Document(name=f'{i}', text=chr(i) * i) for i in range(150)]
    expected = [token for i in range(150) for token in [*(chr(i) * i).encode(), 256]]
    tokens = encode_documents(documents, tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected
    assert encode_documents([], tokenizer).shape == (0,)


@pytest.mark.parametrize('seed', [None, 3])
def test_labels_are_the_tokens_that_follow(seed: int | None) -> None:
    batches = Batches(TOKENS, seq_len=S, batch_size=B, seed=seed)
    for step in range(31):
        batch = batches[step]
        assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
            'tokens': ((B, S), 'int32'),
            'labels': ((B, S), 'int32'),
            'loss_mask': ((B, S), 'float32'),
        }
        assert batch['loss_mask'].all()
        np.testing.assert_array_equal(batch['labels'], batch['tokens'] + 1)
        np.testing.assert_array_equal(batch['tokens'][:, 0] % S, 1)


def test_every_epoch_has_every_label_once_in_an_order_of_its_own() -> None:
    batches = shuffled()
    epochs = [samples(batches, epoch * 125, 125) for epoch in range(3)]
    whole = [tuple(range(i * S + 2, i * S + S + 2)) for i in range(125)]
    assert [sorted(epoch) for epoch in epochs] == [whole] * 3
    assert len({tuple(epoch) for epoch in [*epochs, whole]}) == 4


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    straight, resumed = shuffled(), shuffled()
    for step in range(40):
        straight[step]
    assert_equal(straight[40], resumed[40])
    assert not np.array_equal(resumed[40]['tokens'], shuffled(seed=4)[40]['tokens'])
    assert_equal(shuffled(seed=2**40 + 1)[0], shuffled(seed=2**40 + 1)[0])


@pytest.mark.parametrize('seed', [None, 3])
def test_the_rows_of_processes_make_up_the_batch(seed: int | None) -> None:
    batches = Batches(TOKENS[:950], seq_len=S, batch_size=B, seed=seed)
    for step in (0, len(batches) - 1):
        parts = [batches.rows(step, 0, 1), batches.rows(step, 1, 4)]
        assert_equal(batches[step], {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


@pytest.mark.parametrize('length', [0, 1, 2, 8, 9, 10, 32, 33, 34, 41, 1001])
def test_in_order_every_label_counts_once(length: int) -> None:
    batches = Batches(TOKENS[:length], seq_len=S, batch_size=B)
    found = [batches[step] for step in range(len(batches))]
    labels = [label for batch in found for label in batch['labels'][batch['loss_mask'] == 1].tolist()]
    assert labels == TOKENS[1:length].tolist()
    assert all(batch['labels'].shape == (B, S) and batch['loss_mask'].any() for batch in found)
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_a_short_last_window_is_trained_on_once_an_epoch() -> None:
    batches = shuffled(TOKENS[: 7 * S + 4])
    rows = [(label, mask) for step in range(2) for label, mask in zip(*(batches[step][n] for n in ('labels', 'loss_mask')), strict=True)]
    assert sorted(int(label) for row, mask in rows for label in row[mask == 1]) == TOKENS[1 : 7 * S + 4].tolist()


def test_fewer_samples_than_a_batch() -> None:
    with pytest.raises(ConfigError, match=r'batch_size: 4 is more than the 3 sequences of train.seq_len=8 in 25 tokens; use at most 3'):
        shuffled(TOKENS[:25])


def config(folder: Path, *overrides: str) -> Config:
    small = ['train.batch_size=4', 'train.seq_len=32', 'mesh.data=1', 'mesh.model=1', 'model.vocab_size=300']
    return load('tiny', [f'data.corpus={folder}', *small, *overrides])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / f'{i}.py').write_text(f'def f{i}(x):\n    return x + {i}  # é\n' * 5, encoding='utf-8')
    return tmp_path


def test_data_of_a_config(folder: Path) -> None:
    data, again = load_data(config(folder)), load_data(config(folder))
    assert data.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert_equal(data.train[17], again.train[17])
    assert data.train_size.documents + data.validation_size.documents == 40
    assert data.train_size.bytes + data.validation_size.bytes == sum(path.stat().st_size for path in folder.iterdir())
    validation = [data.validation[step] for step in range(len(data.validation))]
    labels = np.concatenate([batch['labels'][batch['loss_mask'] == 1] for batch in validation])
    assert len(labels) == data.validation_size.tokens - 1
    assert data.summary.startswith(f'{data.train_size.documents} documents')


def test_the_vocabulary_is_made_from_training_documents_alone(folder: Path) -> None:
    before = load_data(config(folder)).tokenizer
    _, validation, _ = split_documents(read_documents(str(folder)), '95,5,0')
    (folder / validation[0].name).write_text('entirely different words\n' * 50, encoding='utf-8')
    assert load_data(config(folder)).tokenizer.fingerprint == before.fingerprint


def test_without_a_validation_part_there_are_no_validation_batches(folder: Path) -> None:
    data = load_data(config(folder, 'data.split=1,0,0'))
    assert len(data.validation) == 0
    assert data.validation_size.documents == 0


def test_the_standard_library_fills_a_vocabulary_and_compresses() -> None:
    data = load_data(load('tiny', ['mesh.data=1', 'mesh.model=1', 'model.vocab_size=512']))
    assert data.tokenizer.vocab_size == 512
    assert data.train_size.documents > 10 * data.validation_size.documents > 0
    assert data.train_size.bytes / data.train_size.tokens > 2
