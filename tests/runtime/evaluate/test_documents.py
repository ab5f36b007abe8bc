"""The perplexity of documents with pictures is the loss of training, on every mesh."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import exhaustive, on_mesh, random_params, relative_error, slow
from vlm import vlm

from megajax.core.config import Config, ConfigError
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.runtime.data import load_data
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.evaluate import Scorer, are_documents, document_perplexity
from megajax.runtime.evaluate.documents import DocumentPerplexity

pytestmark = pytest.mark.usefixtures('forked_renderers')

TOKENIZER = byte_tokenizer(('<image>',))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines = []
    for i in range(5):
        sizes = random.integers(4, 25, size=(i % 3, 2))
        for j, size in enumerate(sizes):
            pixels = random.integers(256, size=(*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f'{i}_{j}.png')
        messages = [
            {'role': 'user', 'content': '<image>' * len(sizes) + '?'},
            {'role': 'assistant', 'content': f'It is {i**9}.'},
        ]
        images = [f'{i}_{j}.png' for j in range(len(sizes))]
        lines.append(json.dumps({'messages': messages, 'images': images}) + '\n')
    (tmp_path / 'data.jsonl').write_text(''.join(lines))
    return tmp_path / 'data.jsonl'


def config(corpus: Path, data: int = 1, model: int = 1, **sections: Any) -> Config:
    return vlm(
        data,
        model,
        data={'corpus': str(corpus), 'tokenizer': 'bytes', 'split': '100,0,0'},
        model={'vocab_size': 258, 'max_seq_len': 64},
        vision={'image_token': 257},
        train={'batch_size': data, 'seq_len': 48},
        **sections,
    )


def evaluate(config: Config, *files: Path) -> DocumentPerplexity:
    with on_mesh(config):
        return document_perplexity(scorer_of(config), TOKENIZER, list(map(str, files)))


def scorer_of(config: Config) -> Scorer:
    """The same one for every corpus, which a scorer does not read."""
    data = config.data.model_copy(update={'corpus': 'none'})
    return _scorer(config.model_copy(update={'data': data}))


@functools.cache
def _scorer(config: Config) -> Scorer:
    return Scorer(config, random_params(config, std=0.1))


@pytest.mark.slow
@pytest.mark.parametrize('crossed', [exhaustive(False), True])
def test_it_is_the_loss_of_training_on_rows_of_one_document(corpus: Path, crossed: bool) -> None:
    of_corpus = config(corpus, crossed=crossed)
    found = evaluate(of_corpus, corpus)
    assert (found.documents, found.images) == (5, 4)
    nll = tokens = 0.0
    for i, line in enumerate(corpus.read_text().splitlines()):
        one = corpus.with_name(f'{i}.jsonl')
        one.write_text(line)
        here = config(one, crossed=crossed)
        with on_mesh(here):
            sums = make_eval_step(here)(
                random_params(here, std=0.1), place_batch(load_data(here).train[0])
            )
        nll, tokens = nll + float(sums['nll']), tokens + float(sums['tokens'])
    assert found.tokens == tokens == sum(len(f'It is {i**9}.') + 1 for i in range(5))
    assert found.bytes == tokens - 5
    assert relative_error(found.loss, nll / tokens) <= 1e-6


@pytest.mark.parametrize('mesh', [slow((2, 2)), slow((1, 4))])
def test_it_is_the_same_on_every_mesh(corpus: Path, mesh: tuple[int, int]) -> None:
    sections = {'optim': {'shard': 'weights'}} if mesh == (2, 2) else {}
    alone, found = (
        evaluate(config(corpus), corpus),
        evaluate(config(corpus, *mesh, **sections), corpus),
    )
    assert relative_error(found.loss, alone.loss) <= 1e-6
    assert dataclasses.replace(found, loss=0, perplexity=0, bits_per_byte=0) == (
        dataclasses.replace(alone, loss=0, perplexity=0, bits_per_byte=0)
    )


def test_a_picture_matters(corpus: Path) -> None:
    before = evaluate(config(corpus), corpus)
    Image.new('RGB', Image.open(corpus.with_name('2_0.png')).size, 'red').save(
        corpus.with_name('2_0.png')
    )
    assert relative_error(evaluate(config(corpus), corpus).loss, before.loss) > 1e-5


def test_a_document_that_is_too_long_is_refused_with_the_key_that_limits_it(corpus: Path) -> None:
    corpus.write_text(json.dumps({'text': 'x' * 70}))
    with pytest.raises(ConfigError, match=r'data.jsonl:1: has 72 .* use model.max_seq_len=71'):
        evaluate(config(corpus), corpus)


def test_only_special_tokens_have_a_loss_and_no_bits_per_byte(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{'role': 'user', 'content': '?'}, {'role': 'assistant', 'content': ''}]
    corpus.write_text(json.dumps({'messages': messages}))
    found = evaluate(config(corpus), corpus)
    assert (found.tokens, found.bytes, found.bits_per_byte) == (1, 0, None)
    assert 'data.jsonl: only special tokens count' in caplog.text


def test_files_of_both_kinds_are_refused(corpus: Path) -> None:
    (corpus.parent / 'a.txt').write_text('text')
    of_corpus = config(corpus)
    with on_mesh(of_corpus):
        scorer = scorer_of(of_corpus)
    text = str(corpus.parent / 'a.txt')
    assert are_documents(scorer, [str(corpus)])
    assert not are_documents(scorer, [text])
    with pytest.raises(ConfigError, match=r'a.txt: no JSON lines'):
        are_documents(scorer, [str(corpus), text])
