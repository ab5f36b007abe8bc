"""The evaluations, on texts small enough to count by hand, and held to the harness's own code where it is installed."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from support import make_config, on_mesh, random_params, start_token

from megajax.config import Config, ConfigError
from megajax.data.tokenizer import byte_tokenizer, load_tokenizer
from megajax.evaluate import Scorer, Window, lambada, perplexity, wikitext
from megajax.evaluate.detokenize import detokenize_wikitext
from megajax.evaluate.perplexity import windows
from megajax.evaluate.score import Scored
from megajax.model.decoder import model_graph

TOKENIZER = byte_tokenizer()


def small(*mesh: int, sequence_parallel: bool = True) -> Config:
    model = {'vocab_size': 257, 'dropout': 0.0, 'max_seq_len': 16}
    return make_config('llama', *mesh, sequence_parallel=sequence_parallel, model=model, train={'seq_len': 16})


class Oracle:
    """Scores without a model: a token costs as many nats as there are tokens before it in its window, and is right unless it is an x."""

    def __init__(self) -> None:
        self.config = small()
        self.seen: list[Window] = []

    def __call__(self, asked: Sequence[Window]) -> Iterator[Scored]:
        for window in asked:
            self.seen.append(window)
            last, ids = len(window.tokens), np.asarray(window.tokens)
            targets = slice(last - window.num_targets, last)
            yield Scored(np.arange(last, dtype=float)[targets], (ids != ord('x'))[targets])

    def in_any_order(self, asked: Sequence[Window]) -> list[Scored]:
        return list(self(asked))


@pytest.mark.parametrize('mesh', [(1, 1), (2, 4)])
def test_scores_are_the_models_log_probabilities(mesh: tuple[int, int]) -> None:
    config, random = small(*mesh), np.random.default_rng(0)
    asked = [Window(random.integers(257, size=length).tolist(), targets) for length, targets in ((17, 16), (5, 2), (2, 1), (9, 8))] * 3
    with on_mesh(config):
        params = random_params(config, std=0.3)
        found = Scorer(config, params).in_any_order(asked)
    with on_mesh(small()):
        params = random_params(small(), std=0.3)
        logits = jax.jit(lambda params, token_BS: nnx.merge(model_graph(small()), params)(token_BS))
        for window, one in zip(asked[:4], found[:4], strict=True):
            token_BS = np.zeros((1, 16), np.int32)
            token_BS[0, : len(window.tokens) - 1] = window.tokens[:-1]
            logit_SV = np.asarray(logits(params, token_BS), np.float64)[0, :, :257]
            places = np.arange(len(window.tokens))[-window.num_targets :] - 1
            labels = np.array(window.tokens)[-window.num_targets :]
            log_total = np.log(np.exp(logit_SV).sum(-1))
            np.testing.assert_allclose(one.nll, log_total[places] - logit_SV[places, labels], rtol=1e-4)
            np.testing.assert_array_equal(one.is_top, logit_SV[places].argmax(-1) == labels)
    assert len(found) == len(asked)
    np.testing.assert_allclose(found[0].nll, found[4].nll, rtol=1e-5)


def test_a_window_may_be_as_long_as_the_model_reads_and_one_where_positions_are_learned() -> None:
    config = make_config('gpt', model={'vocab_size': 257, 'dropout': 0.0, 'max_seq_len': 20}, train={'seq_len': 20})
    tokens = np.random.default_rng(0).integers(257, size=21)
    with on_mesh(config):
        params = random_params(config, std=0.3)
        [found] = Scorer(config, params)([Window(tokens, 20)])
        logits = jax.jit(lambda params, token_BS: nnx.merge(model_graph(config), params)(token_BS))
        logit_SV = np.asarray(logits(params, tokens[None, :-1]), np.float64)[0, :, :257]
    expected = np.log(np.exp(logit_SV).sum(-1)) - logit_SV[np.arange(20), tokens[1:]]
    np.testing.assert_allclose(found.nll, expected, rtol=1e-4)


def test_the_most_probable_token_is_counted_right() -> None:
    config = small(1, 4)
    with on_mesh(config):
        scorer = Scorer(config, random_params(config, std=0.3))
        tokens = [5]
        for _ in range(3):  # greedy decoding by trying every token
            tried = scorer([Window([*tokens, i], 1) for i in range(257)])
            right = [i for i, one in enumerate(tried) if one.is_top[0]]
            assert len(right) == 1
            tokens += right
        (whole,) = scorer([Window(tokens, 3)])
    assert whole.is_top.all()


@pytest.mark.parametrize(
    ('num_tokens', 'length', 'stride'), [(40, 8, 8), (40, 8, 3), (41, 8, 5), (9, 8, 2), (5, 8, 1), (2, 8, 8), (100, 16, 16)]
)
def test_each_token_but_the_first_is_predicted_once_from_what_a_window_holds(num_tokens: int, length: int, stride: int) -> None:
    predicted: list[int] = []
    for number, (tokens, num_targets) in enumerate(windows(range(num_tokens), length, stride)):
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


def test_wikitext_is_normalised_by_the_words_of_the_file(tmp_path: Path) -> None:
    text = ' = Title = \n a well @-@ known , " quoted " word . \n'
    (tmp_path / 'wiki.test.tokens').write_text(text)
    oracle = Oracle()
    found = wikitext(oracle, TOKENIZER, str(tmp_path / 'wiki.test.tokens'), stride=4)
    plain = ' = Title =\na well-known, "quoted" word.\n'
    ids = list(plain.encode())
    assert detokenize_wikitext(text) == plain
    assert found.original_tokens == 14  # '= Title = \n a well @-@ known , " quoted " word .', of which the line break is one
    assert found.tokens == len(ids)
    # 16 tokens to predict in the first window, with 1, 2, ... before them; then the last 4 of windows of 17, and what is left over.
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
    theirs = pytest.importorskip('lm_eval.tasks.wikitext.preprocess_wikitext', reason='lm-evaluation-harness is not installed')
    pieces = [*'ab=NsC0 \n"\'([{}])°:;.!?,', ' @-@ ', ' @,@ ', ' @.@ ', ' , ', ' . ', " 's ", ' = = ', ' " ', " ' ", ' ( ', ' ) ']
    random = np.random.default_rng(0)
    for _ in range(2000):
        text = ''.join(random.choice(pieces, size=random.integers(1, 40)))
        assert detokenize_wikitext(text) == theirs.wikitext_detokenizer({'page': text})


def test_the_last_word_of_lambada_is_right_if_all_its_tokens_are(tmp_path: Path) -> None:
    passages = ['one two three', 'one x two fox', 'the end , he said x.', 'word', 'of more than sixteen bytes']
    file = tmp_path / 'lambada.jsonl'
    file.write_text(''.join(json.dumps({'text': text}) + '\n' for text in passages))
    oracle = Oracle()
    found = lambada(oracle, TOKENIZER, str(file))
    asked = [(bytes(i for i in window.tokens if i < 256).decode(), window.num_targets) for window in oracle.seen]
    assert asked[0] == ('one two three', len(' three'))
    assert asked[2] == ('the end , he said x.'[-17:], len(' x.'))
    assert asked[3] == (' word', 5)  # after the end of the document before it
    assert asked[4][0] == 'of more than sixteen bytes'[-17:]
    assert (found.passages, found.right, found.accuracy) == (5, 3, 0.6)
    assert found.cut == 2
    losses = [sum(range(len(window.tokens) - window.num_targets, len(window.tokens))) for window in oracle.seen]
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 5))


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
    texts = [[257, ord('a'), 256, 257, ord('b'), 256], [257, *b'a b'], [257, *b'a b'], [257, *b' b']]
    assert [list(window.tokens) for window in oracle.seen] == texts


def test_what_is_not_lambada_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / 'lambada.jsonl'
    file.write_text('{"text": "a b"}\n{"txt": "a b"}\n')
    with pytest.raises(ConfigError, match=r"lambada.jsonl:2: not a JSON object with a passage under 'text'"):
        lambada(Oracle(), TOKENIZER, str(file))


def test_a_stride_that_leaves_tokens_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('text')
    with pytest.raises(ConfigError, match=r'stride 17 must be from 1 to model.max_seq_len=16'):
        perplexity(Oracle(), TOKENIZER, [str(tmp_path)], stride=17)


def test_the_harness_gets_what_it_asks_for() -> None:
    pytest.importorskip('lm_eval', reason='lm-evaluation-harness is not installed')
    from megajax.evaluate.harness import HarnessModel

    config = small(1, 2)

    def ask(*arguments: object) -> SimpleNamespace:
        return SimpleNamespace(args=arguments)

    with on_mesh(config):
        params = random_params(config, std=0.3)
        model, scorer = HarnessModel(config, params, TOKENIZER), Scorer(config, params)
        choices = model.loglikelihood([ask('one', ' two'), ask('', 'x'), ask('longer than it can read', ' end')], disable_tqdm=True)
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


def test_a_task_of_ones_own_runs_in_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('lm_eval', reason='lm-evaluation-harness is not installed')
    from megajax.evaluate.harness import HarnessModel, evaluate_tasks

    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    documents = [{'word': word, 'choices': ['up', 'down', 'left'], 'answer': answer} for word, answer in (('up', 1), ('down', 0), ('x', 2))]
    (tmp_path / 'opposites.jsonl').write_text(''.join(json.dumps(document) + '\n' for document in documents))
    (tmp_path / 'opposites.yaml').write_text(TASK.format(folder=tmp_path))
    config = small()
    with on_mesh(config):
        params = random_params(config, std=0.3)
        found = evaluate_tasks(config, params, TOKENIZER, [f'{tmp_path}/opposites'])
        model, right = HarnessModel(config, params, TOKENIZER), 0
        for document in documents:
            asked = [SimpleNamespace(args=(f'{document["word"]} is not', f' {choice}')) for choice in document['choices']]
            right += int(np.argmax([likelihood for likelihood, _ in model.loglikelihood(asked, disable_tqdm=True)]) == document['answer'])
        with pytest.raises(ConfigError, match='knows no task bogus'):
            evaluate_tasks(config, params, TOKENIZER, ['bogus'])
    assert found['opposites']['acc,none'] == pytest.approx(right / 3)
