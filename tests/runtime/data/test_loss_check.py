"""Data in which no token counts in the loss are rejected before the first step."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import make_config
from vlm import vlm

from megajax.core.config import Config, ConfigError
from megajax.runtime.data import load_data
from megajax.runtime.data.batches import Batches
from megajax.runtime.data.image_text.documents import FileDocument
from megajax.runtime.data.tokens.indexed import write_index
from megajax.runtime.run.evaluation import losses_of

pytestmark = pytest.mark.usefixtures('forked_renderers')

MARKS_NOTHING = (
    '{% for m in messages %}{{ m.role }}{{ m.content }}{% generation %}{% endgeneration %}'
    '{% endfor %}{% if add_generation_prompt %}assistant{% endif %}'
)


def pair(folder: Path, lengths: list[int]) -> Path:
    tokens = 1 + np.arange(sum(lengths), dtype=np.uint16) % 200
    (folder / 'pair.bin').write_bytes(tokens.tobytes())
    with (folder / 'pair.idx').open('wb') as file:
        write_index(file, tokens.dtype, np.array(lengths, np.int32), np.arange(len(lengths) + 1))
    return folder / 'pair'


def chat(folder: Path, answers: list[str]) -> Path:
    turns = [
        [{'role': 'user', 'content': f'{number:02}'}, {'role': 'assistant', 'content': answer}]
        for number, answer in enumerate(answers)
    ]
    path = folder / 'a.jsonl'
    path.write_text(''.join(json.dumps({'messages': messages}) + '\n' for messages in turns))
    return path


def config(corpus: Path, *, train: dict[str, Any] | None = None, **data: Any) -> Config:
    return make_config(
        model={'vocab_size': 300, 'max_seq_len': 32},
        train={'batch_size': 2, 'seq_len': 32, 'sample_prompts': []} | (train or {}),
        data={'corpus': str(corpus), 'tokenizer': 'bytes', 'split': '50,50,0'} | data,
    )


def of_step(batches: Batches, step: int) -> list[list[int]]:
    batch = batches[step]
    return [
        labels[mask > 0].tolist()
        for labels, mask in zip(batch['labels'], batch['loss_mask'], strict=True)
    ]


@pytest.mark.parametrize('order', ['stateless', 'megatron'])
@pytest.mark.parametrize('split', ['50,50,0', '100,0,0'])
def test_documents_of_one_token_apart_are_rejected(tmp_path: Path, order: str, split: str) -> None:
    keys = {'tokenizer': 'none', 'order': order, 'split': split}
    corpus = pair(tmp_path, [1] * 200)
    with pytest.raises(ConfigError, match=r'data.corpus: no token counts .*document_mask=false'):
        load_data(config(corpus, document_mask=True, **keys))
    load_data(config(corpus, document_mask=False, **keys))


def test_validation_in_which_nothing_counts_is_rejected(tmp_path: Path) -> None:
    corpus = pair(tmp_path, [5] * 100 + [1] * 100)
    with pytest.raises(ConfigError, match=r'no token counts .* rows of an evaluation'):
        load_data(config(corpus, document_mask=True, tokenizer='none'))


def test_an_evaluation_that_ends_before_the_first_token_that_counts_is_rejected(
    tmp_path: Path,
) -> None:
    corpus = pair(tmp_path, [5] * 64 + [1] * 64 + [5] * 64)
    keys = {'document_mask': True, 'tokenizer': 'none', 'split': '64,128,0'}
    with pytest.raises(ConfigError, match=r'the 2 rows of an .*larger train.eval_batches'):
        load_data(config(corpus, train={'eval_batches': 1}, **keys))
    load_data(config(corpus, train={'eval_batches': 4}, **keys))


@pytest.mark.parametrize('split', ['50,50,0', '100,0,0'])
def test_a_template_whose_marks_hold_no_answers_is_rejected(tmp_path: Path, split: str) -> None:
    pytest.importorskip('jinja2')
    (tmp_path / 'nothing.jinja').write_text(MARKS_NOTHING)
    template = str(tmp_path / 'nothing.jinja')
    with pytest.raises(ConfigError, match=r'data.corpus: no token counts .* chat template'):
        load_data(config(chat(tmp_path, ['ok'] * 40), chat_template=template, split=split))


def test_only_special_tokens_are_named_and_have_no_bits_per_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_data(config(chat(tmp_path, ['ok'] * 40)))
        assert not caplog.records
        load_data(config(chat(tmp_path, [''] * 40)))
    assert [record.getMessage().partition(' rows ')[2] for record in caplog.records] == [
        f'{use}, only special tokens count in the loss, so bits per byte cannot be computed'
        for use in ('to train on', 'of an evaluation')
    ]
    losses, text = losses_of(Counter(nll=6.0, tokens=3.0, bytes=0.0))
    assert losses == {'validation_loss': 2}
    assert text == '2.000 nats per token'


def test_one_answer_among_many_is_found(tmp_path: Path) -> None:
    load_data(config(chat(tmp_path, [''] * 39 + ['ok']), split='100,0,0'))


def test_documents_too_short_to_mask_are_rejected(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f'{number}.txt').write_text('ab')
    bert = make_config(
        'bert', model={'vocab_size': 300}, data={'corpus': str(tmp_path), 'tokenizer': 'bytes'}
    )
    with pytest.raises(ConfigError, match=r'no document to train on has 4 tokens, .*longer'):
        load_data(bert)


def test_tokens_of_another_tokenizer_are_rejected(tmp_path: Path) -> None:
    large = make_config(
        model={'vocab_size': 300},
        data={'corpus': str(pair(tmp_path, [99] * 20)), 'tokenizer': 'bytes'},
    )
    load_data(large)
    np.memmap(tmp_path / 'pair.bin', np.uint16, 'r+')[7] = 290
    with pytest.raises(ConfigError, match=r'bytes has 257 tokens, but .* token 290 in .*or none'):
        load_data(large)


@pytest.mark.parametrize('document_mask', [False, True])
@pytest.mark.parametrize('sees', [False, True])
def test_a_sample_counts_what_its_row_counts(
    tmp_path: Path, sees: bool, document_mask: bool
) -> None:
    corpus = pair(tmp_path, [1, 5, 1, 1, 30, 2] * 9)
    keys = {'tokenizer': 'none', 'document_mask': document_mask, 'split': '50,50,0'}
    of_corpus = config(corpus, **keys)
    if sees:
        of_corpus = vlm(
            data={'corpus': str(corpus)} | keys,
            model={'vocab_size': 300, 'max_seq_len': 32},
            vision={'image_token': 257},
            train={'batch_size': 2, 'seq_len': 32, 'sample_prompts': []},
        )
    batches = load_data(of_corpus).train
    for step in range(8):
        samples = [batches.order[2 * step + row] for row in range(2)]
        assert [batches.counted(i).tolist() for i in samples] == of_step(batches, step)


def test_a_row_of_documents_counts_without_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new('RGB', (8, 8), 'red').save(tmp_path / 'a.png')
    lines = [{'text': f'{i} <image> {i}', 'images': ['a.png']} for i in range(9)]
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    batches = load_data(
        vlm(
            data={'corpus': str(tmp_path), 'tokenizer': 'bytes', 'split': '100,0,0'},
            model={'vocab_size': 300, 'max_seq_len': 64},
            vision={'image_token': 257},
            train={'batch_size': 2, 'seq_len': 48},
        )
    ).train
    expected = of_step(batches, 0)
    monkeypatch.delattr(FileDocument, 'read')
    assert [batches.counted(batches.order[i]).tolist() for i in range(2)] == expected
