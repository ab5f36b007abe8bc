"""Generation with a cache: the same as recomputing everything, on every mesh and in every batch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    abstract_state,
    by_name,
    exhaustive,
    graph_of,
    make_config,
    megajax,
    on_mesh,
    random_params,
    random_state,
    slow,
    start_token,
)
from twelve_tokenizers import TWELVE

from megajax.analysis.inspect import assert_collectives
from megajax.commands import generate as cli_generate
from megajax.commands.generate_output import is_cut, note_cut
from megajax.core.config import Config, ConfigError
from megajax.core.model.computation import Computation
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete
from megajax.interop.huggingface.families import read_config_json
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import from_huggingface
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from megajax.runtime.generate import (
    Continuation,
    Generator,
    Request,
    Sampling,
    encode_prompts,
    generate,
)
from megajax.runtime.generate.engine import Rows, _any_left, engine
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import choose, most_probable, row_keys
from megajax.runtime.generate.weights import LayerWeights, make_weights

GREEDY, RANDOM = Sampling(temperature=0), Sampling(temperature=0.9)
PROMPTS = [[5], [7, 8, 9], list(range(40, 52))]  # of other lengths, and no multiple of the mesh
MAX_TOKENS = 20  # more than one dispatch
choose_jitted = jax.jit(choose, static_argnums=(2, 3, 4))


def small(name: str, *mesh: int, **model: object) -> Config:
    """Without dropout, which only training has; sequence parallelism is on, and generation leaves
    it off.
    """
    return make_config(
        name, *mesh, sequence_parallel=True, model={'dropout': 0.0, 'tie_embeddings': False} | model
    )


def make_params(config: Config) -> nnx.State:
    """Large enough that attention is far from uniform; a bias of the last norm as large would
    always choose the same token.
    """
    return random_params(config, std=0.3 if config.model.norm == 'rmsnorm' else 0.05)


def continue_all(
    config: Config, prompts: Sequence[Sequence[int]] = PROMPTS, **request: object
) -> list[list[int]]:
    """The tokens after each prompt, from random parameters that are the same on every mesh."""
    with on_mesh(config):
        generator = Generator(config, make_params(config))
        *_, rows = generator.stream(
            prompts, Request(**{'max_tokens': MAX_TOKENS, 'sampling': GREEDY} | request)
        )
    return [row.ids for row in rows]


def recompute(config: Config, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding by the training model on the whole text for each token."""
    with on_mesh(config):
        params, graph, computation = make_params(config), graph_of(config), Computation.of(config)
        logits = jax.jit(lambda params, token_BS: nnx.merge(graph, params)(token_BS, computation))
        token_BS = np.zeros((config.mesh.data, config.model.max_seq_len), np.int32)
        token_BS[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + count):
            token_BS[0, end] = np.asarray(logits(params, token_BS))[0, end - 1].argmax()
    return token_BS[0, len(prompt) : len(prompt) + count].tolist()


@pytest.mark.parametrize('name', [slow('gpt'), 'llama', slow('olmo2')])
def test_the_cache_changes_nothing(name: str) -> None:
    config = small(name)
    made = continue_all(config)
    assert [len(ids) for ids in made] == [MAX_TOKENS] * len(PROMPTS)
    assert made[1] == recompute(config, PROMPTS[1], MAX_TOKENS)


@pytest.mark.parametrize(
    ('name', 'sampling', 'meshes'),
    [
        slow('gpt', GREEDY, [(2, 2), (1, 4)]),
        ('llama', GREEDY, [(2, 4)]),
        slow('llama', RANDOM, [(2, 2)]),
    ],  # llama has two key/value heads
    ids=['gpt', 'llama', 'random'],
)
def test_the_same_tokens_on_every_mesh(
    name: str, sampling: Sampling, meshes: list[tuple[int, int]]
) -> None:
    expected = continue_all(small(name), sampling=sampling)
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    for mesh in meshes:
        assert continue_all(small(name, *mesh), sampling=sampling) == expected, mesh


@pytest.mark.parametrize('sampling', [slow(GREEDY), RANDOM], ids=['greedy', 'random'])
def test_the_same_tokens_alone_as_in_a_batch(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = continue_all(small('llama'), sampling=sampling)
    monkeypatch.setattr('megajax.runtime.generate.generator.BATCH_SIZE', 1)
    assert continue_all(small('llama'), sampling=sampling) == expected


def test_another_seed_or_number_is_another_text() -> None:
    texts = [continue_all(small('llama'), [[5]] * 3, sampling=RANDOM, seed=seed) for seed in (0, 1)]
    assert len({tuple(ids) for made in texts for ids in made}) == 6


def test_a_text_ends_where_the_positions_do() -> None:
    config = small('gpt')
    full = list(range(config.model.max_seq_len - 3))
    assert [len(ids) for ids in continue_all(config, [full, [5], [6]])] == [
        3,
        MAX_TOKENS,
        MAX_TOKENS,
    ]


def test_other_lengths_and_parameters_compile_nothing_again() -> None:
    config = small('gpt', num_layers=1)
    continue_all(config, [[5, 6, 7]])
    run = engine(config)
    continue_all(config, [[5] * 12], max_tokens=18)
    assert (run.read._cache_size(), run.make._cache_size()) == (1, 1)


def abstract_rows(config: Config, count: int) -> tuple[LayerWeights, Rows]:
    """The arguments of a decode step in shapes and places."""
    zeros = np.zeros(count, np.int32)

    def make(params: nnx.State) -> tuple[LayerWeights, Rows]:
        weights = make_weights(config, params)
        rows, *_ = engine(config).read(
            weights,
            PromptBatch(np.zeros((count, 16), np.int32), zeros + 16),
            zeros + 9,
            zeros,
            np.uint32(0),
            np.array([-1], np.int32),
            num_slots=64,
            sampling=GREEDY,
        )
        return weights, rows

    return concrete(jax.eval_shape(make, abstract_state(config).params))


@pytest.mark.parametrize(
    ('name', 'kv_heads', 'model_axis'),
    [
        # embedding, two a layer; the largest logit and the token that has it
        slow('gpt', 8, {'all-reduce': 1 + 2 * 2 + 2}),
        slow('llama', 4, {'all-reduce': 1 + 2 * 2 + 2}),
        # fewer key/value heads than shards: the queries change places, keys and values are gathered
        ('llama', 2, {'all-reduce': 1 + 2 * 2 + 2, 'all-to-all': 2, 'all-gather': 2 * 2}),
        # and one for the norm of queries and keys over all heads
        slow('olmo2', 4, {'all-reduce': 1 + 3 * 2 + 2}),
    ],
)
def test_a_token_costs_two_all_reduces_a_layer(
    name: str, kv_heads: int, model_axis: dict[str, int]
) -> None:
    config = small(name, 2, 4, num_kv_heads=kv_heads)
    with on_mesh(config):
        weights, rows = abstract_rows(config, 4)

        @jax.jit
        def one_token(weights: LayerWeights, rows: Rows) -> tuple[Rows, jax.Array]:
            return engine(config)._make_one(
                weights, rows, jnp.uint32(0), jnp.array([-1, 7], jnp.int32), GREEDY
            )

        assert_collectives(one_token, weights, rows, model=model_axis, data={})


@pytest.mark.parametrize(
    'lengths', [exhaustive((64, 64)), ((24, 64))], ids=['full', 'full and window']
)
def test_a_token_copies_neither_the_cache_nor_a_weight(lengths: tuple[int, int]) -> None:
    kinds = [{} if length == 64 else {'window': length} for length in lengths]
    config = small('gpt', 1, 2, layers=kinds)
    with on_mesh(config):
        weights, rows = abstract_rows(config, 4)
        wanted_B = np.ones(4, bool)
        compiled = (
            engine(config)
            .make.lower(
                weights,
                rows,
                wanted_B,
                np.uint32(0),
                np.array([-1], np.int32),
                num_tokens=4,
                sampling=GREEDY,
            )
            .compile({'xla_backend_optimization_level': 2})
        )
    text = compiled.as_text()
    # On one of two devices: the caches and the head.
    large = [f'[4,4,{length},8]' for length in lengths] + ['[512,64]']
    assert all(f'f32{shape}' in text for shape in large)
    moved = [
        line
        for line in text.splitlines()
        if any(f' {op}(' in line for op in ('copy', 'transpose', 'convert'))
    ]
    assert not [line for line in moved for shape in large if shape in line.split('(')[0]]
    aliased = text.splitlines()[0].count('may-alias') + text.splitlines()[0].count('must-alias')
    assert aliased >= 2 * config.model.num_layers


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    config = small('gpt', 1, 4)
    with on_mesh(config):
        layout = Layout.of(config)
        wrong = np.where(np.arange(1024) < 1000, -1e30, 1e30)[None].astype('f4')
        logits_BV, first_B = jax.device_put(wrong, layout('BV')), jnp.zeros(1, jnp.int32)
        first_B = jax.device_put(first_B, layout('B'))
        key_B = jax.jit(row_keys)(jax.random.key(0), first_B, first_B)
        for sampling in (GREEDY, Sampling(temperature=1e20), Sampling(top_k=50, top_p=0.9)):
            assert choose_jitted(logits_BV, key_B, sampling, 1000, layout)[0] < 1000


def test_the_first_of_equal_logits_is_the_most_probable() -> None:
    config = small('gpt', 1, 4)
    with on_mesh(config):
        logits_BV = np.zeros((3, 1024), np.float32)
        logits_BV[0, [700, 300]] = 1
        logits_BV[1, 999] = 1
        layout = Layout.of(config)
        placed = jax.device_put(logits_BV, layout('BV'))
        assert np.asarray(most_probable(placed, 1000, layout)).tolist() == [300, 999, 0]


def test_logits_that_are_not_numbers_still_give_a_token_of_the_vocabulary() -> None:
    config = small('gpt', 1, 4)
    with on_mesh(config):
        layout = Layout.of(config)
        placed = jax.device_put(np.full((1, 1024), np.nan, np.float32), layout('BV'))
        assert most_probable(placed, 1000, layout)[0] < 1000


def frequencies(sampling: Sampling, probability: Sequence[float], draws: int = 4000) -> np.ndarray:
    config = small('gpt')
    with on_mesh(config):
        layout = Layout.of(config)
        logits_BV = np.broadcast_to(np.log(probability)[None], (draws, len(probability)))
        logits_BV = jax.device_put(logits_BV.astype('f4'), layout('BV'))
        rows_B = jax.device_put(jnp.arange(draws), layout('B'))
        first_B = jnp.zeros_like(rows_B)
        key_B = row_keys(jax.random.key(0), rows_B, first_B)
        token_B = np.asarray(choose_jitted(logits_BV, key_B, sampling, len(probability), layout))
    return np.bincount(token_B, minlength=len(probability)) / draws


@pytest.mark.parametrize(
    ('sampling', 'expected'),
    [
        (Sampling(temperature=1), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5), np.square([0.1, 0.4, 0.2, 0.3]) / 0.3),
        (Sampling(temperature=1e-38), [0, 1, 0, 0]),
        (Sampling(temperature=1, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1, top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(temperature=1, top_p=0.1), [0, 1, 0, 0]),
        (
            Sampling(temperature=1, top_k=3, top_p=0.5),
            [0, 4 / 7, 0, 3 / 7],
        ),  # of the three, 4/9 is not enough
        (Sampling(temperature=1, top_k=1), [0, 1, 0, 0]),
        (Sampling(temperature=1, top_k=9, top_p=1), [0.1, 0.4, 0.2, 0.3]),  # there are no nine
    ],
)
def test_tokens_come_as_often_as_asked(sampling: Sampling, expected: Sequence[float]) -> None:
    found = frequencies(sampling, [0.1, 0.4, 0.2, 0.3])
    assert not found[np.array(expected) == 0].any()
    np.testing.assert_allclose(found, expected, atol=0.03)


@pytest.mark.parametrize(('top_p', 'kept'), [(0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4)])
def test_no_token_is_kept_beyond_the_fewest_that_add_up_to_top_p(top_p: float, kept: int) -> None:
    found = frequencies(
        Sampling(temperature=1, top_p=top_p), [0.5, 0.25, 0.125, 0.125]
    )  # sums without rounding
    assert (found > 0).tolist() == [True] * kept + [False] * (4 - kept)


def test_each_row_and_position_draws_for_itself() -> None:
    with on_mesh(small('gpt')):
        places = np.indices((5, 5)).reshape(2, -1)
        key_B = row_keys(jax.random.key(0), *places)
    assert len(np.unique(jax.random.key_data(key_B), axis=0)) == 25


def texts_of(pieces: Sequence[bytes], **settings: object) -> tuple[list[str], Continuation]:
    """What is known of the text after each piece, and the continuation."""
    tokenizer = byte_tokenizer()
    row = Continuation(
        [tokenizer.eod], tokenizer, **{'limit': 100, 'ends': [tokenizer.eod]} | settings
    )
    known = []
    for piece in pieces:
        row.add(list(piece))
        known.append(row.text)
    return known, row


def test_half_a_character_is_not_shown() -> None:
    known, row = texts_of([b'gr', 'ü'.encode()[:1], 'ü'.encode()[1:], '√'.encode()[:2]], limit=6)
    assert known == ['gr', 'gr', 'grü', 'grü\ufffd']  # the last is the end, and stays half
    assert row.end == 'length'


JAPANESE = '祇園精舎の鐘の声、 諸行無常の響きあり\ufffd🙂'


@pytest.mark.parametrize('kind', ['Prepend and Replace', 'Metaspace first', 'byte-level'])
@pytest.mark.parametrize('prompt', ['', 'the ', '白く'])
@pytest.mark.parametrize('lost', [0, 1, 2])
def test_each_character_is_shown_once_and_as_soon_as_it_is_whole(
    kind: str, prompt: str, lost: int
) -> None:
    tokenizer = Tokenizer(TWELVE[kind](), kind)
    (ids,) = tokenizer.encode_batch([prompt + JAPANESE])
    number = len(tokenizer.encode_batch([prompt])[0]) if prompt else 0
    ids, number = list(map(int, ids)), number - lost if number > lost else number
    row = Continuation([tokenizer.eod, *ids[:number]], tokenizer, limit=len(ids) - number)
    known = ['']
    for i in ids[number:]:
        row.add([i])
        assert row.text.startswith(known[-1])
        known.append(row.text)
    text = row.text.lstrip()
    assert text == (prompt + JAPANESE)[-len(text) :]
    assert len(text) >= len(JAPANESE)
    assert max(len(b) - len(a) for a, b in pairwise(known)) <= 3  # U+FFFD waits for the next


@pytest.mark.parametrize('kind', ['Prepend and Replace', 'byte-level'])
def test_a_stop_of_several_bytes_ends_a_text_and_is_not_shown(kind: str) -> None:
    tokenizer = Tokenizer(TWELVE[kind](), kind)
    (ids,) = tokenizer.encode_batch(['春はあけぼの。山'])
    row = Continuation([tokenizer.eod], tokenizer, limit=99, stops=['ぼの', '�'])
    known = []
    for i in map(int, ids):
        row.add([i])
        known.append(row.text)
    assert (row.text.lstrip(), row.end) == ('春はあけ', 'stop')
    assert all(row.text.startswith(text) for text in known)


def test_a_cut_in_a_character_loses_that_character_alone() -> None:
    for tokenizer in byte_tokenizer(), Tokenizer(TWELVE['Prepend and Replace'](), 'Llama'):
        ids = list(tokenizer.encode_batch(['山ぎは'])[0])
        assert tokenizer.decode(ids[:-1]).strip() == '山ぎ\ufffd'
        assert tokenizer.decode([*ids[:-1], *ids[-3:]]).strip() == '山ぎ\ufffdは'


def test_a_text_ends_before_the_first_stop_and_shows_nothing_of_it() -> None:
    known, row = texts_of([b'one\n', b'tw', b'o\n\nthree END'], stops=['END', '\n\n'])
    assert known == ['one', 'one\ntw', 'one\ntwo']
    assert row.end == 'stop'


def test_what_only_begins_a_stop_is_shown_at_the_end() -> None:
    known, row = texts_of([b'one E', b'N'], stops=['END'], limit=6)
    assert known == ['one ', 'one EN']
    assert row.end == 'length'


def test_of_several_stops_the_first_in_the_text_counts_and_may_be_all_there_is() -> None:
    known, row = texts_of([b'one, two. three'], stops=['.', ',', '?'])
    assert (known, row.end) == (['one'], 'stop')
    known, row = texts_of([b'. one'], stops=['.'])
    assert (known, row.end) == ([''], 'stop')


def test_tokens_after_the_one_that_completes_a_stop_do_not_count() -> None:
    _, row = texts_of([b'one', b' tENDwo three'], stops=['END'])
    assert (row.text, row.end) == ('one t', 'stop')
    assert bytes(row.ids) == b'one tEND'


def test_the_longest_beginning_of_any_stop_is_held_back() -> None:
    known, _ = texts_of([b'abab', b'c', b'ab'], stops=['ababd', 'bc!'])
    assert known == ['', 'aba', 'ababc']


def test_what_comes_after_the_end_is_left_out() -> None:
    eod = byte_tokenizer().eod
    _, row = texts_of([[*b'one', eod, *b'two', eod], b'three'])
    assert (row.text, row.ids, row.end) == ('one', [*b'one'], 'eod')
    _, row = texts_of([b'one', b'two'], limit=3)
    assert (row.text, row.ids, row.end) == ('one', [*b'one'], 'length')


def test_a_text_is_what_comes_after_its_prompt() -> None:
    row = Continuation([*b'prompt '], byte_tokenizer(), limit=9, ends=[256])
    row.add([*b'text'])
    assert (row.text, row.end) == ('text', None)
    row = Continuation([5], None, limit=1, ends=[256])
    row.add([7])
    assert (row.text, row.ids, row.end) == ('', [7], 'length')


class FakeEngine:
    """Makes in each row its number, again and again, at most two in a dispatch, and keeps what it
    was asked.
    """

    def __init__(self) -> None:
        self.reads: list[SimpleNamespace] = []
        self.wanted: list[list[bool]] = []

    def read(
        self,
        _: object,
        batch: PromptBatch,
        left_B: np.ndarray,
        number_B: np.ndarray,
        seed: int,
        end_ids: np.ndarray,
        *ahead: None,
        num_slots: int,
        sampling: Sampling,
    ) -> tuple[SimpleNamespace, np.ndarray, None]:
        assert ahead == (None, None)  # without images there is nothing to look at
        self.reads.append(
            SimpleNamespace(
                token_BS=batch.token_BS,
                length_B=batch.length_B,
                left_B=left_B,
                number_B=number_B,
                seed=seed,
                end_ids=end_ids.tolist(),
                num_slots=num_slots,
                sampling=sampling,
            )
        )
        state = SimpleNamespace(left_B=left_B - 1, tokens_BIR=None)
        return state, np.where(left_B > 0, number_B, -1)[:, None], None

    def make(
        self,
        _: object,
        state: SimpleNamespace,
        is_wanted_B: np.ndarray,
        seed: int,
        end_ids: np.ndarray,
        *,
        num_tokens: int,
        sampling: Sampling,
    ) -> tuple[SimpleNamespace, np.ndarray]:
        asked, left_B = self.reads[-1], state.left_B
        told = (seed, end_ids.tolist(), sampling)
        assert told == (asked.seed, asked.end_ids, asked.sampling)
        self.wanted.append(is_wanted_B.tolist())
        assert len(self.wanted) < 100, 'a row never ends'
        is_made_BM = (np.arange(num_tokens) < np.minimum(left_B, 2)[:, None]) & is_wanted_B[:, None]
        state = SimpleNamespace(left_B=left_B - 2)
        return state, np.where(is_made_BM, asked.number_B[:, None], -1)


@pytest.fixture(name='fake')
def make_fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine that computes nothing, for every generator of the test."""
    fake = FakeEngine()
    monkeypatch.setattr('megajax.runtime.generate.generator.engine', lambda _: fake)
    monkeypatch.setattr('megajax.runtime.generate.generator.make_weights', lambda *_: None)
    return fake


@pytest.mark.parametrize(
    ('longest', 'max_tokens', 'padded', 'slots'),
    [
        (1, 1, 16, 64),
        (16, 48, 16, 64),
        (16, 49, 16, 128),
        (17, 1, 32, 64),
        (33, 9, 64, 128),
        (65, 1, 100, 128),
        (99, 999, 100, 256),
    ],
)
def test_prompts_are_padded_to_16_or_a_power_of_two_and_the_cache_holds_all_that_is_wanted(
    longest: int, max_tokens: int, padded: int, slots: int, fake: FakeEngine
) -> None:
    config = small('gpt', max_seq_len=100)
    next(Generator(config, None).stream([[7] * longest, [8, 9]], Request(max_tokens=max_tokens)))
    [asked] = fake.reads
    assert asked.token_BS.tolist() == [
        [0] * (padded - longest) + [7] * longest,
        [0] * (padded - 2) + [8, 9],
    ]
    assert asked.length_B.tolist() == [longest, 2]
    assert asked.left_B.tolist() == [min(max_tokens, 100 - longest), min(max_tokens, 98)]
    assert asked.num_slots == slots


def test_prompts_beyond_a_batch_wait_and_are_numbered_on(fake: FakeEngine) -> None:
    config = small('gpt')
    stream = Generator(config, None).stream([[5]] * 18, Request(max_tokens=1))
    assert [row is None for row in next(stream)] == [False] * 16 + [True] * 2
    *_, rows = stream
    assert [row.ids for row in rows] == [[number] for number in range(18)]
    assert [asked.token_BS.shape for asked in fake.reads] == [(16, 16)] * 2
    assert [asked.left_B.tolist() for asked in fake.reads] == [[1] * 16, [1, 1] + [0] * 14]


def test_every_data_shard_has_as_many_rows_and_only_those_that_go_on_are_wanted(
    fake: FakeEngine,
) -> None:
    config = small('gpt', 4)
    *_, rows = Generator(config, None).stream(
        [[5], [5] * 30, [5], [5] * 27, [5]], Request(max_tokens=7)
    )
    assert [len(row.ids) for row in rows] == [7, 2, 7, 5, 7]
    assert len(fake.reads[0].token_BS) == 8
    going_on = ['11111000', '10111000', '10101000']
    assert [
        ''.join(str(int(is_wanted)) for is_wanted in wanted) for wanted in fake.wanted
    ] == going_on


def test_the_engine_gets_the_seed_and_all_ends_if_a_text_ends_there(
    fake: FakeEngine,
) -> None:
    config, tokenizer = small('gpt', vocab_size=257), byte_tokenizer()
    tokenizer.also_ends([7, 256, 9])
    for given, to_eod in ((tokenizer, True), (tokenizer, False), (None, True)):
        list(
            Generator(config, None, given).stream(
                [[5]], Request(max_tokens=3, seed=2**32 - 1, to_eod=to_eod, sampling=RANDOM)
            )
        )
    assert [asked.end_ids for asked in fake.reads] == [[256, 7, 9], [-1], [-1]]
    assert {(int(asked.seed), asked.sampling) for asked in fake.reads} == {(2**32 - 1, RANDOM)}


def test_generating_passes_on_all_that_is_asked(fake: FakeEngine) -> None:
    config, tokenizer = small('gpt', vocab_size=257), byte_tokenizer()
    settings = {'temperature': 0.5, 'top_k': 3, 'top_p': 0.25, 'seed': 7}
    made = generate(config, None, tokenizer, ['x'] * 16 * 3, max_tokens=4, stops=['!!'], **settings)
    assert made[ord('!')] == ''
    assert made[:34:11] == ['\0' * 4, '\x0b' * 4, '\x16' * 4, '']
    [_, _, asked] = fake.reads
    assert (int(asked.seed), asked.sampling) == (7, Sampling(temperature=0.5, top_k=3, top_p=0.25))


def test_no_prompts_have_no_continuations(fake: FakeEngine) -> None:
    config = small('gpt', vocab_size=257)
    assert generate(config, None, byte_tokenizer(), [], max_tokens=4) == []
    assert fake.reads == []


@pytest.mark.parametrize(
    ('length', 'message'),
    [
        (0, 'prompt 2 has no token: begin it with the token that ends a document'),
        (33, 'prompt 2 has 33 tokens, more than model.max_seq_len=32: shorten it'),
    ],
)
def test_ids_that_are_no_prompt_are_refused(length: int, message: str, fake: FakeEngine) -> None:
    generator = Generator(small('gpt'), None)
    with pytest.raises(ConfigError, match=message):
        next(generator.stream([[5], [7] * length], Request(max_tokens=4)))
    assert fake.reads == []


def test_a_document_ends_at_its_last_token_unless_more_is_asked_for() -> None:
    config, tokenizer = small('llama', vocab_size=257), byte_tokenizer()
    with on_mesh(config):
        params = make_params(config)
        request = Request(max_tokens=8, sampling=GREEDY)
        *_, rows = Generator(config, params).stream(PROMPTS, request)
        last = rows[0].ids[4]  # of the first document, once the two have changed places
        assert last not in rows[0].ids[:4]
        for table in (params['embedding']['table'], params['head']):
            x_VD = np.array(table[...])
            x_VD[[last, tokenizer.eod]] = x_VD[[tokenizer.eod, last]]
            table[...] = jax.device_put(x_VD, table[...].sharding)
        generator = Generator(config, params, tokenizer)
        *_, ended = generator.stream(PROMPTS, request)
        *_, went_on = generator.stream(
            PROMPTS, Request(max_tokens=8, sampling=GREEDY, to_eod=False)
        )
    assert (ended[0].ids, ended[0].end) == (rows[0].ids[:4], 'eod')
    assert went_on[0].ids[:5] == [*rows[0].ids[:4], tokenizer.eod]
    assert [(len(row.ids), row.end) for row in went_on] == [(8, 'length')] * 3


def test_donated_params_are_freed_and_the_texts_stay_the_same() -> None:
    config, request = small('llama'), Request(max_tokens=4, sampling=GREEDY)
    with on_mesh(config):
        params = make_params(config)
        *_, expected = Generator(config, params).stream(PROMPTS, request)
        generator = Generator(config, params, donate=True)
        *_, rows = generator.stream(PROMPTS, request)
    assert [row.ids for row in rows] == [row.ids for row in expected]
    kept = [name for name, x in by_name(params).items() if not x.is_deleted()]
    assert not any('layers' in name for name in kept)


def test_each_of_several_ends_ends_its_row_and_is_not_part_of_the_text() -> None:
    config, tokenizer = small('llama', vocab_size=257), byte_tokenizer()
    with on_mesh(config):
        params = make_params(config)
        request = Request(max_tokens=MAX_TOKENS, sampling=GREEDY)
        *_, whole = Generator(config, params, tokenizer).stream(PROMPTS, request)
        tokenizer.also_ends([whole[0].ids[2], whole[1].ids[9]])
        *_, ended = Generator(config, params, tokenizer).stream(PROMPTS, request)
    for before, after in zip(whole, ended, strict=True):
        assert after.ids == before.ids[: len(after.ids)]
        assert not set(after.ids) & set(tokenizer.ends)
    assert (ended[0].ids, ended[0].end) == (whole[0].ids[:2], 'eod')
    assert (len(ended[1].ids) <= 9, ended[1].end) == (True, 'eod')


def test_a_prompt_is_the_start_of_a_document(tmp_path: Path) -> None:
    config = small('gpt', vocab_size=258)
    assert encode_prompts(config, byte_tokenizer(), ['x']) == [
        [256, ord('x')]
    ]  # after the end of another
    assert encode_prompts(
        config, load_tokenizer(start_token(tmp_path / 'tokenizer.json')), ['x']
    ) == [[257, ord('x')]]


def test_a_prompt_that_leaves_no_position_is_refused() -> None:
    config, tokenizer = small('gpt', vocab_size=257), byte_tokenizer()
    assert len(encode_prompts(config, tokenizer, ['x' * 30])[0]) == 31
    with pytest.raises(
        ConfigError,
        match=r'prompt 2 has 32 tokens, which leaves no room in model.max_seq_len=32: shorten it',
    ):
        encode_prompts(config, tokenizer, ['x', 'y' * 31])


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: Sampling(temperature=-1), 'temperature -1'),
        (lambda: Sampling(top_k=0), 'top-k 0'),
        (lambda: Sampling(top_p=1.5), 'top-p 1.5'),
        (lambda: Sampling(top_p=0), 'top-p 0'),
        (lambda: Sampling(temperature=float('inf')), 'temperature inf'),
        (lambda: Sampling(temperature=float('nan')), 'temperature nan'),
        (
            lambda: Sampling(temperature=-1, top_k=0, top_p=2),
            '(?s)temperature -1.*top-k 0.*top-p 2',
        ),
        (lambda: Request(max_tokens=0), 'max-tokens 0'),
        (lambda: Request(max_tokens=1, seed=-1), 'seed -1'),
        (lambda: Request(max_tokens=1, seed=2**32), 'seed 4294967296'),
        (lambda: Request(max_tokens=1, stops=('',)), 'a stop is empty'),
    ],
)
def test_what_cannot_be_asked_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_prompt_for_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match='the model has no tokenizer'):
        encode_prompts(small('gpt'), None, ['x'])


@pytest.mark.parametrize('family', [slow('gpt2'), 'llama'])
def test_transformers_makes_the_same_64_tokens(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    transformers = pytest.importorskip('transformers', reason='transformers is not installed')
    sizes = {'vocab_size': 257, 'bos_token_id': 256, 'eos_token_id': 256}
    if family == 'gpt2':
        settings = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=96, **sizes)
    else:
        settings = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=96,
            **sizes,
        )
    torch.manual_seed(family == 'llama')
    theirs = transformers.AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            x.copy_(0.15 * torch.randn_like(x) + (x.ndim == 1 and name.endswith('weight')))
    theirs.save_pretrained(tmp_path)
    expected, margins = [], []
    for prompt in PROMPTS:
        asked = {
            'max_new_tokens': 64,
            'min_new_tokens': 64,
            'do_sample': False,
            'output_logits': True,
            'return_dict_in_generate': True,
        }
        made = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **asked
        )
        expected.append(made.sequences[0, len(prompt) :].tolist())
        margins += [
            float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in made.logits)
        ]
    assert all(len(set(ids)) > 5 for ids in expected)
    assert min(margins) > 1e-4  # no tie that rounding decides
    for data, model in ((1, 1), (2, 2), (1, 4)):
        keys = read_config_json(tmp_path)[1]
        config = Config(
            model=keys,
            mesh={'data': data, 'model': model},
            train={'dtype': 'float32', 'seq_len': 96},
        )
        with on_mesh(config):
            params = from_huggingface(config, read_tensors(tmp_path), source=str(tmp_path))
            *_, rows = Generator(config, params).stream(
                PROMPTS, Request(max_tokens=64, sampling=GREEDY)
            )
        assert [row.ids for row in rows] == expected, (data, model)


@pytest.fixture(scope='module', name='run')
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = (
        tmp_path_factory.mktemp('run'),
        make_config('llama', 2, 2, model={'num_layers': 1, 'vocab_size': 257}),
    )
    with (
        on_mesh(config),
        Checkpoints(folder / 'checkpoints', config, tokenizer=byte_tokenizer()) as checkpoints,
    ):
        checkpoints.save(random_state(config), 1)
    return folder


@pytest.mark.slow
def test_the_command_writes_the_same_on_another_mesh(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'prompts.txt').write_text('one\ntwo \\n\n')
    for overrides in ([], ['mesh.data=1', 'mesh.model=4']):
        cli_generate.generate(run, overrides, prompts=tmp_path / 'prompts.txt', max_tokens=8)
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line['prompt'] for line in written] == ['one', 'two \\n'] * 2
    assert written[:2] == written[2:]
    assert {(line['tokens'], line['end']) for line in written} == {(8, 'length')}
    cli_generate.generate(run, ['mesh.data=1'], prompt=['one'], max_tokens=8)
    shown = capsys.readouterr()
    assert (shown.out, 'note:' in shown.err) == ('one' + written[0]['text'] + '\n', False)
    cli_generate.generate(run, ['mesh.data=1'], prompt=['one'], max_tokens=80, temperature=0)
    assert '1 of 1 texts were cut before --max-tokens 80' in capsys.readouterr().err


@pytest.mark.parametrize(('left', 'asked', 'is_noted'), [(3, 4, True), (4, 4, False)])
def test_a_text_that_the_models_positions_end_is_noted(
    left: int, asked: int, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config('llama', model={'max_seq_len': 9}, train={'seq_len': 9})
    row, request = Continuation([1] * (9 - left), None, limit=left), Request(max_tokens=asked)
    row.add([5])
    assert not is_cut(row, request)
    row.add([5] * (left - 1))
    note_cut(int(is_cut(row, request)), 2, request, config)
    assert capsys.readouterr().err == is_noted * (
        'note: 1 of 2 texts were cut before --max-tokens 4, at model.max_seq_len=9 including the '
        'prompt\n'
    )


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'overrides': ['mesh.model=3']}, 'mesh.model=3'),
        ({'prompt': ['x' * 32]}, 'prompt 1 has 33 tokens'),
        ({'prompts': Path('missing.txt')}, 'missing.txt: there is no such file'),
    ],
)
def test_a_wrong_command_is_refused(run: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli_generate.generate(run, **settings)


@pytest.mark.parametrize('option', ['--prompt', '--stop'])
def test_a_prompt_that_is_not_utf_8_is_refused_before_anything_is_opened(option: str) -> None:
    done = megajax('generate', 'nowhere', option, os.fsdecode(b'caf\xe9'))
    assert (done.returncode, done.stderr.count('\n')) == (2, 1), done.stderr
    assert f"error: {option}: 'caf\\udce9' is not UTF-8 at character 3" in done.stderr


def test_a_prompt_that_the_locale_misreads_is_rejected_with_the_setting_that_reads_it() -> None:
    command = [sys.executable, '-m', 'megajax', 'generate', 'nowhere', '--prompt', 'äö'.encode()]
    environment = os.environ | {'LC_ALL': 'C', 'PYTHONUTF8': '0'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        "--prompt: '\\xe4\\xf6' is UTF-8, but with this locale Python decodes it as ascii"
        in done.stderr
    )
    assert 'set PYTHONUTF8=1 or LC_ALL=C.UTF-8' in done.stderr


@pytest.mark.parametrize(('left', 'goes_on'), [([0, 0], False), ([0, 1], True), ([3, 2], True)])
def test_no_step_is_taken_once_every_row_has_ended(left: list[int], goes_on: bool) -> None:
    rows = SimpleNamespace(left_B=jnp.array(left))
    assert bool(_any_left(rows)) == goes_on
