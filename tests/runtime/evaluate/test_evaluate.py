"""The evaluations, on texts small enough to count by hand, and held to the harness's own code where
it is installed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoints import laid_out
from flax import nnx
from support import exhaustive, graph_of, make_config, on_mesh, random_params, slow, start_token
from twelve_tokenizers import TWELVE

from megajax.core.config import Config, ConfigError
from megajax.core.model.computation import Computation
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from megajax.runtime.evaluate import Scorer, Window, lambada, perplexity, wikitext
from megajax.runtime.evaluate.detokenize import detokenize_wikitext
from megajax.runtime.evaluate.perplexity import windows
from megajax.runtime.evaluate.score import Scored
from megajax.runtime.generate import Request, Sampling

TOKENIZER = byte_tokenizer()


def small(*mesh: int, sequence_parallel: bool = True) -> Config:
    model = {'vocab_size': 257, 'dropout': 0.0, 'max_seq_len': 16}
    return make_config(
        'llama', *mesh, sequence_parallel=sequence_parallel, model=model, train={'seq_len': 16}
    )


class Oracle:
    """Scores without a model: a token costs as many nats as there are tokens before it in its
    window, and is right unless it is an x.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or small()
        self.seen: list[Window] = []

    def __call__(self, asked: Sequence[Window]) -> Iterator[Scored]:
        for window in asked:
            self.seen.append(window)
            assert len(self.seen) < 1000, 'the windows have no end'
            last, ids = len(window.tokens), np.asarray(window.tokens)
            targets = slice(last - window.num_targets, last)
            yield Scored(np.arange(last, dtype=float)[targets], (ids != ord('x'))[targets])

    def in_any_order(self, asked: Sequence[Window]) -> list[Scored]:
        return list(self(asked))


@pytest.mark.parametrize('mesh', [exhaustive((1, 1)), (2, 4)])
def test_scores_are_the_models_log_probabilities(mesh: tuple[int, int]) -> None:
    config, random = small(*mesh), np.random.default_rng(0)
    asked = [
        Window(random.integers(257, size=length).tolist(), targets)
        for length, targets in ((17, 16), (5, 2), (2, 1), (9, 8))
    ] * 3
    with on_mesh(config):
        params = random_params(config, std=0.3)
        found = Scorer(config, params).in_any_order(asked)
    with on_mesh(small()):
        params = random_params(small(), std=0.3)
        graph, computation = graph_of(small()), Computation.of(small())
        logits = jax.jit(lambda params, token_BS: nnx.merge(graph, params)(token_BS, computation))
        for window, one in zip(asked[:4], found[:4], strict=True):
            token_BS = np.zeros((1, 16), np.int32)
            token_BS[0, : len(window.tokens) - 1] = window.tokens[:-1]
            logit_SV = np.asarray(logits(params, token_BS), np.float64)[0, :, :257]
            places = np.arange(len(window.tokens))[-window.num_targets :] - 1
            labels = np.array(window.tokens)[-window.num_targets :]
            log_total = np.log(np.exp(logit_SV).sum(-1))
            np.testing.assert_allclose(
                one.nll, log_total[places] - logit_SV[places, labels], rtol=1e-4
            )
            np.testing.assert_array_equal(one.is_top, logit_SV[places].argmax(-1) == labels)
    assert len(found) == len(asked)
    np.testing.assert_allclose(found[0].nll, found[4].nll, rtol=1e-5)


@pytest.mark.parametrize(
    'layout', ['data=3 x model=2, weights', slow('data=4 replicas=2 x model=2, gradients')]
)
def test_a_state_between_steps_scores_as_one_device_does(layout: str) -> None:
    found = {}
    for name in ('one device', layout):
        config = laid_out(name)
        with on_mesh(config):
            scorer = Scorer(config, random_params(config, std=0.3))
            found[name] = scorer.in_any_order([Window(range(17), 16), Window(range(9), 3)])
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-5)


def test_a_grid_scores_and_generates_nothing_and_is_refused_with_the_mesh_that_does() -> None:
    config = laid_out('data=2 x model_rows=2 model=2, optimizer')
    with pytest.raises(
        ConfigError,
        match=r'mesh\.model_rows=2: generation and scoring shard sequences over mesh.data '
        'and a model over mesh.model alone; '
        r'use mesh\.model_rows=1 mesh\.data=2 mesh\.model=4$',
    ):
        Scorer(config, nnx.State({}))


def test_a_window_may_be_as_long_as_the_model_reads_and_one_where_positions_are_learned() -> None:
    config = make_config(
        'gpt', model={'vocab_size': 257, 'dropout': 0.0, 'max_seq_len': 20}, train={'seq_len': 20}
    )
    tokens = np.random.default_rng(0).integers(257, size=21)
    with on_mesh(config):
        params = random_params(config, std=0.3)
        [found] = Scorer(config, params)([Window(tokens, 20)])
        graph, computation = graph_of(config), Computation.of(config)
        logits = jax.jit(lambda params, token_BS: nnx.merge(graph, params)(token_BS, computation))
        logit_SV = np.asarray(logits(params, tokens[None, :-1]), np.float64)[0, :, :257]
    expected = np.log(np.exp(logit_SV).sum(-1)) - logit_SV[np.arange(20), tokens[1:]]
    np.testing.assert_allclose(found.nll, expected, rtol=1e-4)


def test_the_most_probable_token_is_counted_right() -> None:
    config = small(1, 4)
    with on_mesh(config):
        scorer = Scorer(config, random_params(config, std=0.3))
        tokens = [5]
        for _ in range(2):  # greedy decoding by trying every token
            tried = scorer([Window([*tokens, i], 1) for i in range(257)])
            right = [i for i, one in enumerate(tried) if one.is_top[0]]
            assert len(right) == 1
            tokens += right
        (whole,) = scorer([Window(tokens, 2)])
    assert whole.is_top.all()


def spied(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Scorer, list[tuple[int, ...]]]:
    """A scorer without a model, for which a token costs its id and the even ones are right, and the
    shapes that it computes.
    """
    shapes: list[tuple[int, ...]] = []

    def score(
        _: object, token_BS: np.ndarray, label_BS: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert token_BS.shape == label_BS.shape
        shapes.append(token_BS.shape)
        return label_BS.astype(np.float32), label_BS % 2 == 0

    monkeypatch.setattr('megajax.runtime.evaluate.score._make_score', lambda *_: score)
    return Scorer(config, nnx.State({})), shapes


@pytest.mark.parametrize(
    ('predicted', 'padded'),
    [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (65, 100), (100, 100)],
)
def test_windows_are_padded_to_16_or_a_power_of_two_that_the_model_reads(
    predicted: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, shapes = spied(make_config('llama', model={'max_seq_len': 100}), monkeypatch)
    [found] = scorer([Window(range(7, 8 + predicted), predicted)])
    assert shapes == [(8, padded)]
    assert found.nll.tolist() == list(range(8, 8 + predicted))


def test_the_last_tokens_of_each_window_are_scored_in_the_order_of_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer, _ = spied(small(), monkeypatch)
    asked = [
        Window([1, 2, 3, 4], 2),
        Window([5, 6], 1),
        Window([7, 8, 9], 2),
        *[Window([1, 2], 1)] * 7,
    ]
    for found in (list(scorer(asked)), scorer.in_any_order(asked)):
        assert [one.nll.tolist() for one in found] == [[3, 4], [6], [8, 9], *[[2]] * 7]
        assert [one.is_top.tolist() for one in found[:3]] == [[False, True], [True], [True, False]]


def test_windows_of_like_lengths_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, shapes = spied(make_config('llama', model={'max_seq_len': 64}), monkeypatch)
    scorer.in_any_order([Window(range(50), 1), Window(range(3), 1)] * 8)
    assert sorted(shapes) == [(8, 16), (8, 64)]


@pytest.mark.parametrize(('data', 'rows'), [(1, 8), (3, 9), (4, 8), (16, 16)])
def test_every_data_shard_scores_as_many_windows(
    data: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, shapes = spied(make_config('llama', data, train={'batch_size': data}), monkeypatch)
    assert len(list(scorer([Window([1, 2], 1)] * (rows + 1)))) == rows + 1
    assert shapes == [(rows, 16)] * 2


@pytest.mark.parametrize(
    ('num_tokens', 'length', 'stride'),
    [(40, 8, 8), (40, 8, 3), (41, 8, 5), (9, 8, 2), (5, 8, 1), (2, 8, 8), (100, 16, 16)],
)
def test_each_token_but_the_first_is_predicted_once_from_what_a_window_holds(
    num_tokens: int, length: int, stride: int
) -> None:
    predicted: list[int] = []
    for number, window in enumerate(windows(range(num_tokens), length, stride)):
        tokens, num_targets = window.tokens, window.num_targets
        assert list(tokens) == list(range(tokens[0], tokens[-1] + 1))
        assert len(tokens) <= length + 1
        assert num_targets <= stride or number == 0
        assert len(tokens) == min(length + 1, num_tokens)  # all the context there is
        predicted += tokens[-num_targets:]
    assert predicted == list(range(1, num_tokens))


def test_perplexity_counts_tokens_and_bytes(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('äb')  # 3 bytes, so 3 tokens, and the end of the document
    (tmp_path / 'b.txt').write_text('cde')
    oracle = Oracle()
    found = perplexity(oracle, TOKENIZER, [str(tmp_path)])
    ids = [TOKENIZER.eod, *'äb'.encode(), TOKENIZER.eod, *b'cde', TOKENIZER.eod]
    assert [list(window.tokens) for window in oracle.seen] == [ids]
    assert (found.documents, found.tokens, found.bytes) == (2, 8, 6)
    total = sum(range(1, 9))
    assert found.loss == total / 8
    assert found.perplexity == pytest.approx(math.exp(total / 8))
    assert found.bits_per_byte == pytest.approx(total / 6 / math.log(2))


def test_texts_that_spell_special_tokens_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {'a.txt': 'as is', 'b.txt': 'x <|endoftext|> y'}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / 'c.jsonl').write_text('{"text": "x <|endoftext|> y"}\n')
    tasks = {'b.txt': wikitext, 'c.jsonl': lambada}
    perplexity(Oracle(), TOKENIZER, [str(tmp_path / name) for name in ('a.txt', 'b.txt')])
    for name, task in tasks.items():
        task(Oracle(make_config('llama')), TOKENIZER, str(tmp_path / name))
    said = '1 document spells special tokens (<|endoftext|>), which are read as letters'
    assert [said in record.getMessage() for record in caplog.records] == [True] * 3
    assert [record.getMessage().partition(':')[0][-6:] for record in caplog.records] == [
        *('/b.txt', '/b.txt', '.jsonl')
    ]


def test_a_window_moves_by_its_own_length_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('x' * 35)
    for stride, moves in (
        (None, [16, 16, 4]),
        (16, [16, 16, 4]),
        (10, [16, 10, 10]),
        (1, [16, *[1] * 20]),
    ):
        oracle = Oracle()
        perplexity(oracle, TOKENIZER, [str(tmp_path)], stride=stride)
        assert [window.num_targets for window in oracle.seen] == moves


def test_the_window_of_wikitext_moves_by_32_tokens_as_in_the_paper(tmp_path: Path) -> None:
    (tmp_path / 'wiki').write_text('a ' * 80)
    oracle = Oracle(make_config('llama', model={'max_seq_len': 64}))
    wikitext(oracle, TOKENIZER, str(tmp_path / 'wiki'))
    assert [window.num_targets for window in oracle.seen] == [64, 32, 32, 31]


def test_a_loss_beyond_all_numbers_is_an_infinite_perplexity(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('x' * 2000)
    oracle = Oracle(make_config('llama', model={'max_seq_len': 2000}))
    found = perplexity(oracle, TOKENIZER, [str(tmp_path)])
    assert math.isfinite(found.loss)
    assert found.perplexity == math.inf
    (tmp_path / 'a.jsonl').write_text(json.dumps({'text': f'a {"x" * 100}'}))
    assert lambada(oracle, TOKENIZER, str(tmp_path / 'a.jsonl')).perplexity == math.inf


def test_two_words_of_two_tokens_are_a_text_for_wikitext(tmp_path: Path) -> None:
    (tmp_path / 'wiki').write_text('= =')  # of which the rules make ==
    found = wikitext(Oracle(), TOKENIZER, str(tmp_path / 'wiki'), stride=1)
    assert (found.original_tokens, found.tokens, found.loss) == (2, 2, 1)
    assert found.perplexity == found.token_perplexity == pytest.approx(math.e)


@pytest.mark.parametrize(
    ('text', 'ids', 'counts'),
    [('ab', [1, 2], '1 words and 2 tokens'), ('a b', [3], '2 words and 1 tokens')],
)
def test_wikitext_of_one_word_or_token_is_refused(
    text: str, ids: list[int], counts: str, tmp_path: Path
) -> None:
    (tmp_path / 'wiki').write_text(text)
    tokenizer = SimpleNamespace(start=[], encode_batch=lambda _: [ids])
    with pytest.raises(ConfigError, match=f'wiki has {counts}: use a text with at least two'):
        wikitext(Oracle(), tokenizer, str(tmp_path / 'wiki'))


def test_wikitext_is_normalised_by_the_words_of_the_file(tmp_path: Path) -> None:
    text = ' = Title = \n a well @-@ known , " quoted " word . \n'
    (tmp_path / 'wiki.test.tokens').write_text(text)
    oracle = Oracle()
    found = wikitext(oracle, TOKENIZER, str(tmp_path / 'wiki.test.tokens'), stride=4)
    plain = ' = Title =\na well-known, "quoted" word.\n'
    ids = list(plain.encode())
    assert detokenize_wikitext(text) == plain
    assert (
        found.original_tokens == 14
    )  # '= Title = \n a well @-@ known , " quoted " word .', of which the line break is one
    assert found.tokens == len(ids)
    # 16 tokens to predict in the first window, with 1, 2, ... before them; then the last 4 of
    # windows of 17, and what is left over.
    rest = len(ids) - 17
    losses = [*range(1, 17), *[13, 14, 15, 16] * (rest // 4), *range(17 - rest % 4, 17)]
    assert len(losses) == len(ids) - 1
    assert found.loss == pytest.approx(sum(losses) / (len(ids) - 1))
    assert found.token_perplexity == pytest.approx(math.exp(found.loss))
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / (14 - 1)))


@pytest.mark.parametrize(
    ('tokens', 'plain'),
    [
        ("the players ' goal", "the players' goal"),
        ('1 @,@ 000 or 1 @.@ 5', '1,000 or 1.5'),
        ('yes : no ; a . b ! c ? d , e', 'yes: no; a. b! c? d, e'),
        ('( in ) [ here ] { too }', '(in) [here] {too}'),
        ('said " so " and \' thus \'', 'said "so" and \'thus\''),
        ('= = = Section = = =', '=== Section ==='),
        ('20 ° C \n line', '20°C\nline'),
        ("it 's N times", "it's 1 times"),
    ],
)
def test_the_spaces_that_wikitext_has_put_in_are_taken_out(tokens: str, plain: str) -> None:
    assert detokenize_wikitext(tokens) == plain


def test_the_rules_are_those_of_the_harness() -> None:
    theirs = pytest.importorskip(
        'lm_eval.tasks.wikitext.preprocess_wikitext',
        reason='lm-evaluation-harness is not installed',
    )
    pieces = [
        *'ab=NsC0 \n"\'([{}])°:;.!?,',
        ' @-@ ',
        ' @,@ ',
        ' @.@ ',
        ' , ',
        ' . ',
        " 's ",
        ' = = ',
        ' " ',
        " ' ",
        ' ( ',
        ' ) ',
    ]
    random = np.random.default_rng(0)
    for _ in range(2000):
        text = ''.join(random.choice(pieces, size=random.integers(1, 40)))
        assert detokenize_wikitext(text) == theirs.wikitext_detokenizer({'page': text})


def test_the_last_word_of_lambada_is_right_if_all_its_tokens_are(tmp_path: Path) -> None:
    passages = [
        'one two three',
        'one x two fox',
        'the end , he said x.',
        'word',
        'of more than sixteen bytes',
    ]
    file = tmp_path / 'lambada.jsonl'
    file.write_text(''.join(json.dumps({'text': text}) + '\n' for text in passages))
    oracle = Oracle()
    found = lambada(oracle, TOKENIZER, str(file))
    asked = [
        (bytes(i for i in window.tokens if i < 256).decode(), window.num_targets)
        for window in oracle.seen
    ]
    assert asked[0] == ('one two three', len(' three'))
    assert asked[2] == ('the end , he said x.'[-17:], len(' x.'))
    assert asked[3] == (' word', 5)  # after the end of the document before it
    assert asked[4][0] == 'of more than sixteen bytes'[-17:]
    assert (found.passages, found.right, found.accuracy) == (5, 3, 0.6)
    assert found.cut == 2
    losses = [
        sum(range(len(window.tokens) - window.num_targets, len(window.tokens)))
        for window in oracle.seen
    ]
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 5))


def test_passages_in_a_table_are_rejected_with_the_fix_of_a_table(tmp_path: Path) -> None:
    file = tmp_path / 'lambada.csv'
    file.write_text('text,n\na b,1\n')
    with pytest.raises(ConfigError, match=r'lambada.csv: is CSV or TSV .*write its rows as JSON'):
        lambada(Oracle(), TOKENIZER, str(file))


def test_a_passage_is_cut_only_if_it_is_longer_than_the_model_reads(tmp_path: Path) -> None:
    file = tmp_path / 'lambada.jsonl'
    passages = [
        'twelve and four',
        'thirteen and five',
        'fourteen, and six',
        'eighteen and seven',
        '1 wordofmorethansixteen',
    ]
    file.write_text('\n\n'.join(json.dumps({'text': text}) for text in passages))
    oracle = Oracle()
    found = lambada(oracle, TOKENIZER, str(file))
    assert [len(window.tokens) for window in oracle.seen] == [15, 17, 17, 17, 17]
    assert [window.num_targets for window in oracle.seen] == [5, 5, 4, 6, 16]
    assert (found.passages, found.cut) == (5, 2)


@pytest.mark.parametrize('kind', TWELVE)
def test_the_tokens_of_a_last_word_are_those_that_the_harness_scores(
    kind: str, tmp_path: Path
) -> None:
    backend = TWELVE[kind]()
    tokenizer = Tokenizer(backend, kind)
    passages = ['the cat sat on the mat', 'Say it again, and again', 'do return self', "x don't"]
    file = tmp_path / 'lambada.jsonl'
    file.write_text('\n'.join(json.dumps({'text': text}) for text in passages))
    oracle = Oracle(make_config('llama', model={'max_seq_len': 2000, 'vocab_size': 1000}))
    lambada(oracle, tokenizer, str(file))
    for window, passage in zip(oracle.seen, passages, strict=True):
        whole, context = (
            backend.encode(text, add_special_tokens=False).ids
            for text in (passage, passage.rpartition(' ')[0])
        )
        assert list(window.tokens) == [*tokenizer.start, *whole]
        assert window.num_targets == len(whole) - len(context)


def test_what_a_document_starts_with_is_read_and_the_first_is_not_predicted(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(start_token(tmp_path / 'tokenizer.json'))
    (tmp_path / 'text').mkdir()
    for name in 'ab':
        (tmp_path / f'text/{name}.txt').write_text(name)
    (tmp_path / 'lambada.jsonl').write_text('{"text": "a b"}\n{"text": "b"}\n')
    oracle = Oracle()
    found = perplexity(oracle, tokenizer, [str(tmp_path / 'text')])
    assert (found.tokens, found.bytes) == (5, 2)
    (tmp_path / 'wiki').write_text('a b')
    assert wikitext(oracle, tokenizer, str(tmp_path / 'wiki'), stride=4).tokens == 3
    lambada(oracle, tokenizer, str(tmp_path / 'lambada.jsonl'))
    texts = [
        [257, ord('a'), 256, 257, ord('b'), 256],
        [257, *b'a b'],
        [257, *b'a b'],
        [257, *b' b'],
    ]
    assert [list(window.tokens) for window in oracle.seen] == texts


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"txt": "a b"}', "has no passage under 'text'"),
        ('{"text": " "}', "has no passage under 'text'"),
        ('{"text": "a \\ud800"}', "has no passage under 'text'"),
        ('3', 'is int, not a JSON object'),
        ('[' * 100_000, 'is not JSON'),
    ],
    ids=range(5),
)
def test_what_is_not_lambada_is_refused_with_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / 'lambada.jsonl'
    file.write_text(f'{{"text": "a b"}}\n{line}\n')
    with pytest.raises(ConfigError, match=f'lambada.jsonl:2: {message}'):
        lambada(Oracle(), TOKENIZER, str(file))


def test_a_passage_with_a_line_separator_is_one_passage(tmp_path: Path) -> None:
    (tmp_path / 'a.ndjson').write_text('\ufeff{"text": "one\u2028two three"}\n', 'utf-8')
    assert lambada(Oracle(), TOKENIZER, str(tmp_path / 'a.ndjson')).passages == 1


@pytest.mark.parametrize('task', [lambada, wikitext])
def test_a_file_without_text_is_refused(tmp_path: Path, task: Callable[..., object]) -> None:
    (tmp_path / 'a.jsonl').write_text('')
    with pytest.raises(ConfigError, match=r'a.jsonl'):
        task(Oracle(), TOKENIZER, str(tmp_path / 'a.jsonl'))


def test_documents_without_text_have_no_perplexity(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigError, match=r'a.jsonl.* contains no text'):
        perplexity(Oracle(), TOKENIZER, [str(tmp_path / 'a.jsonl')])


def test_a_stride_that_leaves_tokens_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'long.txt').write_text('a text of more than one window')
    with pytest.raises(ConfigError, match=r'stride 17 must be from 1 to model.max_seq_len=16'):
        perplexity(Oracle(), TOKENIZER, [str(tmp_path)], stride=17)
    with pytest.raises(ConfigError, match='stride 0 must be from 1'):
        wikitext(Oracle(), TOKENIZER, str(tmp_path / 'long.txt'), stride=0)


def ask(*arguments: object) -> SimpleNamespace:
    """A request of the harness."""
    return SimpleNamespace(args=arguments)


def test_the_harness_gets_what_it_asks_for() -> None:
    pytest.importorskip('lm_eval', reason='lm-evaluation-harness is not installed')
    from megajax.runtime.evaluate.harness import HarnessModel

    config = small(1, 2)
    with on_mesh(config):
        params = random_params(config, std=0.3)
        model, scorer = HarnessModel(config, params, TOKENIZER), Scorer(config, params)
        choices = model.loglikelihood(
            [ask('one', ' two'), ask('', 'x'), ask('longer than it can read', ' end')],
            disable_tqdm=True,
        )
        (rolled,) = model.loglikelihood_rolling([ask('a text of more than sixteen bytes')])
        greedy, sampled, stopped = model.generate_until(
            [
                ask('ab', {'until': [], 'max_gen_toks': 6}),
                ask('ab', {'until': [], 'max_gen_toks': 6, 'do_sample': True, 'temperature': 5.0}),
                ask('ab', {'until': 'ZZ', 'max_gen_toks': 6}),
            ]
        )
        ids = list(b'one two')
        (one,) = scorer([Window(ids, 4)])
        (empty,) = scorer([Window([TOKENIZER.eod, ord('x')], 1)])
        (long,) = scorer([Window(list(b'longer than it can read end')[-17:], 4)])
        text = [TOKENIZER.eod, *b'a text of more than sixteen bytes']
        parts = scorer([Window(text[:17], 16), Window(text[16:33], 16), Window(text[17:34], 1)])
        assert rolled == pytest.approx(-sum(part.nll.sum() for part in parts), rel=1e-5)
    for (likelihood, is_greedy), expected in zip(choices, (one, empty, long), strict=True):
        assert likelihood == pytest.approx(-expected.nll.sum(), rel=1e-5)
        assert is_greedy == expected.is_top.all()
    assert greedy == stopped != sampled


@pytest.fixture(name='harness')
def import_harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, whose models score with an `Oracle` and continue a prompt by its bytes in
    capitals.
    """

    def scorer(config: Config, params: None) -> Oracle:
        assert params is None
        return Oracle(config)

    def generator(config: Config, params: None, tokenizer: Tokenizer) -> SimpleNamespace:
        assert (config, params, tokenizer) == (small(), None, TOKENIZER)
        return SimpleNamespace(stream=stream)

    def stream(
        prompts: Sequence[Sequence[int]], request: Request
    ) -> Iterator[list[SimpleNamespace | None]]:
        rows = [
            SimpleNamespace(ids=[*TOKENIZER.decode(ids).upper().encode()], end=None)
            for ids in prompts
        ]
        yield [None] * len(rows)
        for added in (b'.', b'more'):
            for row in rows:
                row.ids += [] if row.end else added
            yield rows

    pytest.importorskip('lm_eval', reason='lm-evaluation-harness is not installed')
    spec = find_spec('megajax.runtime.evaluate.harness')
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'Scorer', scorer)
    monkeypatch.setattr(module, 'Generator', generator)
    return module


GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize(
    ('given', 'wanted'),
    [
        ({}, Request(max_tokens=256, sampling=GREEDY)),
        ({'until': None, 'max_gen_toks': '7'}, Request(max_tokens=7, sampling=GREEDY)),
        ({'until': 'END'}, Request(max_tokens=256, sampling=GREEDY, stops=('END',))),
        ({'until': ['\n', 'END']}, Request(max_tokens=256, sampling=GREEDY, stops=('\n', 'END'))),
        (
            {'max_tokens': 5, 'max_new_tokens': 6, 'max_completion_tokens': 7},
            Request(max_tokens=6, sampling=GREEDY),
        ),
        ({'max_completion_tokens': 7}, Request(max_tokens=7, sampling=GREEDY)),
        (
            {'temperature': 0.5},
            Request(max_tokens=256, sampling=Sampling(temperature=0.5, top_k=50)),
        ),
        ({'temperature': 0.0}, Request(max_tokens=256, sampling=GREEDY)),
        ({'temperature': 0.5, 'do_sample': False}, Request(max_tokens=256, sampling=GREEDY)),
        (
            {'do_sample': True, 'temperature': 1, 'top_k': 5, 'top_p': 0.9, 'num_beams': 1},
            Request(max_tokens=256, sampling=Sampling(temperature=1, top_k=5, top_p=0.9)),
        ),
        (
            {'do_sample': True, 'temperature': 1, 'top_k': 0},
            Request(max_tokens=256, sampling=Sampling(temperature=1)),
        ),
    ],
)
def test_a_task_says_how_a_text_goes_on(
    harness: ModuleType, given: dict[str, object], wanted: Request
) -> None:
    assert harness.requests_of([('sums', given)], 257) == [wanted]


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({}, 'max_gen_toks=256 must be at least 1 and less than model.max_seq_len=16'),
        ({'max_new_tokens': 16}, 'max_gen_toks=16 .* set max_gen_toks to at most 15 in a copy of'),
        ({'max_gen_toks': 0}, 'max_gen_toks=0 must be at least 1'),
        ({'max_gen_toks': 6, 'max_length': 9}, 'max_length=9 counts the context .* set max_gen_to'),
        ({'max_gen_toks': 6, 'do_sample': True}, 'do_sample=true needs a temperature above 0'),
        ({'max_gen_toks': 6, 'do_sample': True, 'temperature': 0.0}, '.* a temperature above 0'),
        ({'max_gen_toks': 6, 'temperature': 1, 'top_p': 1.5}, 'top-p 1.5 must be above 0'),
        ({'max_gen_toks': 6, 'until': ['.', '']}, 'until has an empty string'),
        ({'max_gen_toks': 6, 'num_beams': 10}, r'num_beams=10 is not supported \(the keys are do_'),
        ({'max_gen_toks': 6, 'min_p': 0.1}, 'min_p=0.1 is not supported'),
    ],
)
def test_what_a_task_sets_is_kept_to_or_rejected_by_name(
    harness: ModuleType, given: dict[str, object], message: str
) -> None:
    model = harness.HarnessModel(small(), None, TOKENIZER)
    right = ask('ab', {'max_gen_toks': 6})
    wrong = SimpleNamespace(args=('ab', given), task_name='sums')
    with pytest.raises(ConfigError, match=f'^generation_kwargs of sums: {message}'):
        model.generate_until([right, wrong, wrong])


def test_a_context_begins_as_a_document_does(harness: ModuleType, tmp_path: Path) -> None:
    model = harness.HarnessModel(small(), None, TOKENIZER)
    assert (model.eot_token_id, model.prefix_token_id) == (256, 256)
    assert model.tok_encode('ab') == [*b'ab']
    model = harness.HarnessModel(
        small(), None, load_tokenizer(start_token(tmp_path / 'tokenizer.json'))
    )
    assert (model.eot_token_id, model.prefix_token_id) == (256, 257)
    assert (
        model.tok_encode('ab') == model.tok_encode('ab', add_special_tokens=True) == [257, *b'ab']
    )
    assert model.tok_encode('ab', add_special_tokens=False) == [*b'ab']


def test_the_harness_finds_one_process(harness: ModuleType) -> None:
    model = harness.HarnessModel(small(), None, TOKENIZER)
    assert (model.rank, model.world_size) == (0, 1)


def test_the_end_of_what_is_too_long_has_its_likelihood(harness: ModuleType) -> None:
    model = harness.HarnessModel(small(), None, TOKENIZER)
    pairs = [
        (b'one', b' two'),
        (b'a' * 14, b' end'),
        (b'b', b'c' * 16),
        (b'f', b'xyz'),
    ]
    found = model._loglikelihood_tokens(
        [(None, [*context], [*target]) for context, target in pairs]
    )
    # A token costs as much as there is before it: of 17 at most.
    assert found == [(-18.0, True), (-58.0, True), (-136.0, True), (-6.0, False)]


@pytest.mark.parametrize(
    ('context', 'continuation', 'message'),
    [
        ('a', 'e' * 17, "'eee.*' after 'a', which has 17 tokens .* than model.max_seq_len=16"),
        ('ab', '', "the likelihood of '' after 'ab', which has an empty continuation"),
        ('', '', 'an empty continuation'),
        (' ', 'x', "'x' after ' ', which has no token of the context alone"),
        ('', 'merged', 'no token of the continuation alone'),
    ],
)
def test_what_has_no_likelihood_is_rejected(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    context: str,
    continuation: str,
    message: str,
) -> None:
    model = harness.HarnessModel(small(), None, TOKENIZER)
    monkeypatch.setattr(
        model,
        'tok_encode',
        lambda text, **_: [model.prefix_token_id] if text == 'merged' else list(text.encode()),
    )
    with pytest.raises(ConfigError, match=message):
        model.loglikelihood([ask('a', 'b'), ask(context, continuation)], disable_tqdm=True)


def test_each_text_has_the_likelihood_of_its_own_windows(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_pieces(
        ids: list[int], *, prefix_token: int, max_seq_len: int, context_len: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        assert context_len == 1
        for start in range(0, len(ids), max_seq_len):
            yield [ids[start - 1] if start else prefix_token], ids[start : start + max_seq_len]

    monkeypatch.setattr(harness, 'get_rolling_token_windows', in_pieces)
    monkeypatch.setattr(harness, 'make_disjoint_window', lambda pair: pair)
    model = harness.HarnessModel(small(), None, TOKENIZER)
    found = model.loglikelihood_rolling([ask('abc'), ask('d' * 34), ask('ef')])
    assert found == [-6.0, -(2 * 136 + 3.0), -3.0]


def test_continuations_come_in_the_order_of_asking_from_the_end_of_a_context(
    harness: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = {'until': '.', 'max_gen_toks': 6}, {'until': [], 'max_gen_toks': 15}
    requests = [('abc', short), ('def', long), ('', short), ('a context that is long', short)]
    model = harness.HarnessModel(small(), None, TOKENIZER)
    found = model.generate_until([ask(*request) for request in requests])
    assert found == [
        'ABC',
        'F.more',
        '<|ENDOFTEXT|>',
        'AT IS LONG',
    ]  # 16 positions less 6 or 15
    assert '2 of 4 contexts lost their first tokens' in caplog.text
    model._loglikelihood_tokens(
        [(None, [1] * 15, [2]), (None, [1] * 16, [2]), (None, [1], [2] * 16)]
    )
    assert '1 of 3' not in caplog.text
    model._loglikelihood_tokens([(None, [1] * 16, [2]), (None, [1] * 16, [2, 3])])
    assert '1 of 2 contexts lost' in caplog.text


def test_a_generation_config_decides_what_a_task_leaves_open(
    harness: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = {'top_k': 20, 'top_p': 0.8, 'temperature': 0.1, 'repetition_penalty': 1.05}
    model = harness.HarnessModel(small(), None, TOKENIZER, {**generation, 'typical_p': 1.0})
    asked: list[Request] = []
    monkeypatch.setattr(model, '_continue', lambda _, request: [asked.append(request)])
    drawn = {'max_gen_toks': 6, 'do_sample': True, 'temperature': 0.7}
    model.generate_until([ask('a', drawn), ask('a', drawn | {'top_k': 0, 'top_p': 0.5})])
    assert [request.sampling for request in asked] == [
        Sampling(temperature=0.7, top_k=20, top_p=0.8),
        Sampling(temperature=0.7, top_p=0.5),
    ]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith('generation_config.json: repetition_penalty=1.05 has no effect here')


def test_an_answer_ends_at_the_first_token_with_which_a_stop_is_complete(
    harness: ModuleType,
) -> None:
    model = harness.HarnessModel(small(), None, byte_tokenizer(['<|x|>', '<|y|>']))
    assert model._answer([*b'ab', 258, *b'c', 257, *b'd'], ['<|x|>']) == 'abc'
    assert model._answer([*b'ab', 258, *b'c', 257, *b'd'], []) == 'abcd'
    assert model._answer([*b'one two one'], ['two', 'ne t']) == 'o'


def test_a_task_is_looked_for_in_its_folder_and_only_its_numbers_are_kept(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[object] = []

    def manager(_: int, include_path: object) -> SimpleNamespace:
        folders.append(include_path)
        return SimpleNamespace(
            match_tasks=lambda names: [name for name in names if name != 'bogus']
        )

    def evaluate(
        *, model: object, tasks: list[str], task_manager: object, **_: object
    ) -> dict[str, object]:
        assert isinstance(model, harness.HarnessModel)
        assert task_manager
        return {
            'results': {
                task: {'alias': task, 'acc,none': 0.5, 'acc_stderr,none': 'N/A'} for task in tasks
            }
        }

    monkeypatch.setattr(harness, 'Tasks', manager)
    monkeypatch.setattr(harness, 'simple_evaluate', evaluate)
    mine = ['b/own', 'a/other', 'b/third', 'theirs']
    found = harness.evaluate_tasks(small(), None, TOKENIZER, mine)
    assert found == {name: {'acc,none': 0.5} for name in ('own', 'other', 'third', 'theirs')}
    harness.evaluate_tasks(small(), None, TOKENIZER, ['theirs'])
    assert folders == [['a', 'b'], None]
    with pytest.raises(ConfigError, match='knows no task bogus: lm_eval ls tasks'):
        harness.evaluate_tasks(small(), None, TOKENIZER, ['theirs', 'a/bogus'])


TASK = """
task: opposites
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/opposites.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{word}}}} is not"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
"""


@pytest.mark.slow
def test_a_task_of_ones_own_runs_in_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('lm_eval', reason='lm-evaluation-harness is not installed')
    from megajax.runtime.evaluate.harness import HarnessModel, evaluate_tasks

    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    documents = [
        {'word': word, 'choices': ['up', 'down', 'left'], 'answer': answer}
        for word, answer in (('up', 1), ('down', 0), ('x', 2))
    ]
    (tmp_path / 'opposites.jsonl').write_text(
        ''.join(json.dumps(document) + '\n' for document in documents)
    )
    (tmp_path / 'opposites.yaml').write_text(TASK.format(folder=tmp_path))
    config = small()
    with on_mesh(config):
        params = random_params(config, std=0.3)
        found = evaluate_tasks(config, params, TOKENIZER, [f'{tmp_path}/opposites'])
        model, right = HarnessModel(config, params, TOKENIZER), 0
        for document in documents:
            asked = [
                SimpleNamespace(args=(f'{document["word"]} is not', f' {choice}'))
                for choice in document['choices']
            ]
            right += int(
                np.argmax(
                    [likelihood for likelihood, _ in model.loglikelihood(asked, disable_tqdm=True)]
                )
                == document['answer']
            )
        with pytest.raises(ConfigError, match='knows no task bogus'):
            evaluate_tasks(config, params, TOKENIZER, ['bogus'])
    assert found['opposites']['acc,none'] == pytest.approx(right / 3)


def test_a_task_whose_arguments_cannot_be_kept_to_ends_before_the_first_request(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'opposites.jsonl').write_text('{"word": "up", "choices": ["up"], "answer": 0}\n')
    task = TASK.format(folder=tmp_path)
    (tmp_path / 'opposites.yaml').write_text(task)
    for name, kwargs in (('first', 'max_gen_toks: 16'), ('second', 'num_beams: 3, until: "."')):
        changed = task.replace('task: opposites', f'task: {name}').replace(
            'multiple_choice', f'generate_until\ngeneration_kwargs: {{{kwargs}}}'
        )
        lines = [line for line in changed.splitlines() if 'doc_to_choice' not in line]
        (tmp_path / f'{name}.yaml').write_text('\n'.join(lines) + '\n')
    with pytest.raises(ConfigError) as error:
        harness.evaluate_tasks(
            small(), None, TOKENIZER, [f'{tmp_path}/{x}' for x in ('opposites', 'first', 'second')]
        )
    assert [
        str(problem).split(' must')[0].split(' is ')[0] for problem in error.value.problems
    ] == [
        'generation_kwargs of first: max_gen_toks=16',
        'generation_kwargs of second: max_gen_toks=256',
        'generation_kwargs of second: num_beams=3',
    ]
