"""A batch of BERT's depends on the config and the step alone, its segments are of one document, and
masking is as the paper says.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_config
from tokenizers import models, pre_tokenizers, processors

from megajax.core.config import Config, ConfigError
from megajax.corpus.build import build
from megajax.corpus.job import Job
from megajax.runtime.data import Data, load_data, make_tokenizer
from megajax.runtime.data.masked import MASKED, SPECIAL, DocumentPieces, MaskedBatches, Vocabulary
from megajax.runtime.data.text.parts import Part
from megajax.runtime.data.tokens.indexed import Sequences, from_lengths

LENGTH, EOD = 29, 1
S = LENGTH + 3
CLS, SEP, MASK, PAD = 2, 3, 4, 5
FIRST = 10  # ordinary ids, of which each token has its own
sizes = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5), min_size=1, max_size=12)


def part_of(documents: list[list[int]], *, eod: bool = False) -> Part:
    """Documents of sentences of these lengths, whose tokens count up; the last token of a document
    is EOD if asked.
    """
    lengths = np.array([length for document in documents for length in document], np.int32)
    tokens = np.arange(FIRST, FIRST + lengths.sum(), dtype=np.int32)
    made = from_lengths('x', tokens, lengths)
    bounds = np.cumsum([0, *map(len, documents)])
    if eod:
        ends = np.cumsum([sum(document) for document in documents]) - 1
        tokens[ends[[sum(document) > 0 for document in documents]]] = EOD
    sequences = Sequences(
        name='x', tokens=tokens, lengths=made.lengths, pointers=made.pointers, documents=bounds
    )
    return Part(sequences=sequences, first=0, last=len(lengths))


def read_all(pieces: DocumentPieces) -> list[tuple[list[int], list[int]]]:
    read = []
    for index in range(len(pieces)):
        window = np.zeros(LENGTH, np.int32)
        found, sentences = pieces.read(index, window)
        read.append((window[:found].tolist(), sentences))
    return read


@given(documents=sizes, eod=st.booleans())
@settings(max_examples=50)
def test_a_piece_is_of_one_document_in_order_and_has_two_tokens_at_least(
    documents: list[list[int]], eod: bool
) -> None:
    part = part_of(documents, eod=eod)
    document_of = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    begins = {int(part.sequences.start(i)) for i in range(len(part))}
    seen = set()
    for tokens, sentences in read_all(DocumentPieces(part, length=LENGTH, eod=EOD)):
        assert EOD not in tokens
        assert len(tokens) >= 2
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        places = np.array(tokens) - FIRST
        assert len(set(document_of[places])) == 1
        assert [places[0] + sentence for sentence in sentences] == [
            int(p) for p in places[1:] if p in begins
        ]
        assert not seen & set(tokens)
        seen |= set(tokens)


def test_a_document_without_sentences_is_cut_into_equal_pieces_and_nothing_is_lost() -> None:
    read = read_all(DocumentPieces(part_of([[3], [100], [29]]), length=LENGTH, eod=EOD))
    assert [len(tokens) for tokens, _ in read] == [25, 25, 25, 25, 29]
    assert [token for tokens, _ in read for token in tokens] == list(range(FIRST + 3, FIRST + 132))


def test_cuts_move_to_the_start_of_a_sentence() -> None:
    read = read_all(DocumentPieces(part_of([[12, 12, 12, 12]]), length=LENGTH, eod=EOD))  # halves
    assert [(len(tokens), sentences) for tokens, sentences in read] == [(24, [12]), (24, [12])]
    read = read_all(DocumentPieces(part_of([[20, 30]]), length=LENGTH, eod=EOD))
    assert [(len(tokens), sentences) for tokens, sentences in read] == [
        (20, []),
        (29, []),
    ]  # and one token is left out


def batches(
    documents: list[list[int]],
    *,
    seed: int = 7,
    order: list[int] | None = None,
    batch_size: int = 4,
) -> MaskedBatches:
    pieces = DocumentPieces(part_of(documents), length=LENGTH, eod=EOD)
    vocabulary = Vocabulary(
        cls=CLS,
        sep=SEP,
        mask=MASK,
        pad=PAD,
        others=np.arange(FIRST, FIRST + sum(map(sum, documents))),
    )
    order = list(range(len(pieces))) if order is None else order
    return MaskedBatches(
        pieces, order, seq_len=S, batch_size=batch_size, seed=seed, vocabulary=vocabulary
    )


def test_a_row_is_two_segments_of_a_piece_in_their_order_or_swapped_and_padding() -> None:
    orders = set()
    made = batches([[12, 8], [29], [7, 7, 7]] * 20, batch_size=60)[0]
    for row in range(60):
        tokens, types, padding, masked = (
            made[name][row] for name in ('tokens', 'token_types', 'segment_ids', 'loss_mask')
        )
        whole = np.where(masked > 0, made['labels'][row], tokens)
        end = S - padding.sum()
        assert (whole[end:] == PAD).all()
        assert padding.tolist() == [0] * end + [1] * (S - end)
        middle = int(types.argmax()) - 1
        assert types.tolist() == [0] * (middle + 1) + [1] * (end - middle - 1) + [0] * (S - end)
        assert (whole[0], whole[middle], whole[end - 1]) == (CLS, SEP, SEP)
        first, second = whole[1:middle], whole[middle + 1 : end - 1]
        swapped = int(made['swapped'][row, 0])
        piece = np.concatenate([second, first] if swapped else [first, second])
        assert piece.tolist() == list(range(piece[0], piece[0] + [20, 29, 21][row % 3]))
        cut = len(second if swapped else first)
        assert cut in ([12], [14], [7, 14])[row % 3]  # at a sentence, or in the middle
        orders.add((row % 3, swapped, cut))
    assert len(orders) == 2 + 2 + 4


def test_15_percent_are_masked_of_which_80_are_mask_10_anything_and_10_as_they_were() -> None:
    made = batches([[29]] * 2000, batch_size=2000)[0]
    masked = made['loss_mask'] > 0
    assert set(masked.sum(1)) == {round(MASKED * 29)}
    assert not (
        masked & ((made['tokens'] == CLS) | (made['tokens'] == SEP) | (made['tokens'] == PAD))
    ).any()
    tokens, labels = made['tokens'][masked], made['labels'][masked]
    assert (tokens == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens == labels).mean() == pytest.approx(0.1, abs=0.02)
    assert not made['labels'][~masked].any()
    assert made['swapped'].mean() == pytest.approx(0.5, abs=0.05)
    share = np.bincount((labels - FIRST) % 29) / 2000  # of each token of a piece
    assert share == pytest.approx(np.full(29, 4 / 29), abs=0.03)


def test_the_batch_of_a_step_is_the_same_in_any_parts_and_a_sample_is_masked_anew_each_time() -> (
    None
):
    made = batches([[29]] * 8, order=[0, 1, 2, 3] * 2)
    first, second, other = made[0], made[1], batches([[29]] * 8, seed=8)[0]
    for name, x in first.items():
        np.testing.assert_array_equal(
            np.concatenate([made.rows(0, i, i + 1)[name] for i in range(4)]), x
        )
        np.testing.assert_array_equal(batches([[29]] * 8)[0][name], x)
    assert (first['tokens'] != second['tokens']).any(1).all()
    assert (first['tokens'] != other['tokens']).any(1).all()


def test_rows_that_fill_up_the_last_batch_count_for_nothing() -> None:
    last = batches([[29]] * 5)[1]
    assert last['loss_mask'].any(1).tolist() == [True, False, False, False]


TEXT = 'def f(x):\n    return x + 1\n' * 40


def bert(folder: Path, **data: object) -> Config:
    for number in range(20):
        (folder / f'{number}.txt').write_text(TEXT + f'# {number}\n')
    corpus = {'corpus': str(folder), 'tokenizer': 'bytes', 'split': '15,5,0'}
    return make_config('bert', model={'vocab_size': 300}, data=corpus | data)


def load(config: Config) -> Data:
    return load_data(config)


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe'])
def test_bytes_and_a_bpe_trained_here_get_the_special_tokens(
    tmp_path: Path, tokenizer: str
) -> None:
    data = load(bert(tmp_path, tokenizer=tokenizer))
    assert data.tokenizer is not None
    assert data.tokenizer.vocab_size <= 300
    batch = data.train[0]
    assert (batch['tokens'][:, 0] == data.tokenizer.token_id('[CLS]')).all()
    assert data.tokenizer.eod not in batch['tokens'][batch['loss_mask'] == 0]
    assert batch['loss_mask'].sum() > 0
    assert len(data.validation) > 0
    data.tokenizer.save(tmp_path / 'saved.json')
    again = make_tokenizer(str(tmp_path / 'saved.json'), 300, special=SPECIAL)
    assert again.fingerprint == data.tokenizer.fingerprint


def test_a_word_piece_is_for_masked_lm_alone(tmp_path: Path) -> None:
    pieces = [
        '[UNK]',
        *SPECIAL,
        'de',
        '##f',
        'f',
        'x',
        'return',
        '(',
        ')',
        ':',
        '+',
        '#',
        *'0123456789',
        *(f'##{n}' for n in range(10)),
    ]
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token='[UNK]')
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(['[UNK]', *SPECIAL])
    ends = [(name, pieces.index(name)) for name in ('[CLS]', '[SEP]')]
    backend.post_processor = processors.TemplateProcessing(
        single='[CLS] $A [SEP]', special_tokens=ends
    )
    backend.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'text').mkdir()
    config = bert(tmp_path / 'text', tokenizer=str(tmp_path / 'tokenizer.json'))
    batch = load(config).train[0]
    places = np.nonzero(batch['tokens'] == pieces.index('[CLS]'))
    np.testing.assert_array_equal(
        places, [np.arange(len(batch['tokens'])), np.zeros(len(batch['tokens']))]
    )
    assert {pieces[i] for i in batch['labels'][batch['loss_mask'] > 0]} <= set(pieces) - set(
        SPECIAL
    )
    with pytest.raises(
        ConfigError, match='WordPiece tokenizer, whose tokens cannot be converted back'
    ):
        load(
            config.model_copy(
                update={'model': config.model.model_copy(update={'objective': 'next_token'})}
            )
        )


@pytest.mark.usefixtures('one_thread')
def test_a_corpus_of_a_blend_without_a_document_to_mask_is_named(tmp_path: Path) -> None:
    tokenizer = str(tmp_path / 'tokenizer.json')
    make_tokenizer('bytes', 300, special=SPECIAL).save(tokenizer)
    for name, text in {'long': TEXT, 'short': 'a'}.items():
        inputs = str(tmp_path / f'{name}.jsonl')
        Path(inputs).write_text(f'{json.dumps({"text": text})}\n' * 40)
        build(Job(out=str(tmp_path / name), inputs=(inputs,), tokenizer=tokenizer, workers=1))
    data = {'blend': {str(tmp_path / name): 1 for name in ('long', 'short')}}
    with pytest.raises(
        ConfigError, match=r'no document to train on has 4 tokens, .*, in \S*/short;'
    ):
        load(make_config('bert', model={'vocab_size': 300}, data=data))


def test_a_tokenizer_without_them_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / 'tokenizer.json'
    make_tokenizer('bytes', 300, special=SPECIAL).save(file)
    content = json.loads(file.read_text())
    content['added_tokens'] = [
        token for token in content['added_tokens'] if token['content'] not in ('[SEP]', '[MASK]')
    ]
    file.write_text(json.dumps(content))
    (tmp_path / 'text').mkdir()
    with pytest.raises(
        ConfigError, match=r'has no \[SEP\], \[MASK\], which model.objective=masked_lm needs'
    ) as error:
        load(bert(tmp_path / 'text', tokenizer=str(file)))
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ('row', 'template', 'message'),
    [
        (
            {'messages': [{'role': 'user', 'content': TEXT}]},
            None,
            r'data.corpus: .* has messages, and model.objective=masked_lm reads text, not chats',
        ),
        (
            {'text': TEXT},
            'chat.jinja',
            r'data.chat_template: model.objective=masked_lm reads text, .*; remove it',
        ),
    ],
)
def test_chats_are_refused(
    tmp_path: Path, row: dict[str, object], template: str | None, message: str
) -> None:
    corpus = tmp_path / 'chats.jsonl'
    corpus.write_text(f'{json.dumps(row)}\n' * 40)
    data = {'corpus': str(corpus), 'tokenizer': 'bytes', 'chat_template': template}
    with pytest.raises(ConfigError, match=message):
        load(make_config('bert', model={'vocab_size': 300}, data=data))
