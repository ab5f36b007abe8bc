"""A conversation's turns, as tokens, within the positions of the model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import CHATML, END, START, TURNS, chain, chain_config, write_chain
from PIL import Image
from support import on_mesh
from vlm import vlm

from megajax.core.config import ConfigError
from megajax.runtime.checkpoint.open import open_model
from megajax.runtime.data.image_text.chat import DEFAULT, Template
from megajax.runtime.data.image_text.documents import read_documents
from megajax.runtime.data.image_text.load import open_chat
from megajax.runtime.data.synthetic_corpus import NO_TOKEN, document_row_shape
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.generate import Continuation, Generator, Request, Sampling, prompt_of
from megajax.runtime.generate.conversation import Conversation

pytestmark = pytest.mark.usefixtures('forked_renderers')

SAID = b'Yes!'


@pytest.fixture(scope='module', name='run')
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    write_chain(folder, chain(SAID, then=END), chain_config(max_seq_len=128))
    return folder


@contextmanager
def conversing(
    run: Path, *, system: str | None = None, max_tokens: int = 8, template: str = CHATML
) -> Iterator[tuple[Conversation, list[list[int]]]]:
    """A conversation, and the prompts that its generator is asked to continue."""
    import jax

    opened, prompts = open_model(run), []

    class Noting(Generator):
        def stream(self, asked: list[list[int]], *arguments: object) -> Iterator[list[object]]:
            prompts.extend(asked)
            return super().stream(asked, *arguments)

    request = Request(max_tokens=max_tokens, sampling=Sampling(temperature=0))
    with (
        open_chat(
            opened.tokenizer, NO_TOKEN, Template(name='the template', texts={DEFAULT: template})
        ) as chat,
        jax.set_mesh(opened.mesh),
    ):
        generator = Noting(opened.config, opened.params, opened.tokenizer)
        yield Conversation(generator, chat, request, system), prompts


def answer(conversation: Conversation, text: str) -> str:
    *_, row = conversation.answer(text)
    return row.text


def turn(role: str, text: str) -> list[int]:
    return [START, *f'{role}\n{text}'.encode(), END, ord('\n')]


BEGINS = [START, *b'assistant\n']


def test_an_answer_ends_with_its_turn_and_is_remembered(run: Path) -> None:
    with conversing(run, system='S') as (conversation, prompts):
        assert answer(conversation, 'a') == 'Yes!'
        assert answer(conversation, 'b') == 'Yes!'
    before = [*turn('system', 'S'), *turn('user', 'a')]
    assert prompts[0] == [*before, *BEGINS]
    assert prompts[1] == [*before, *turn('assistant', 'Yes!'), *turn('user', 'b'), *BEGINS]


NEEDS_A_SYSTEM_MESSAGE = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    + CHATML
)


def test_a_template_that_needs_a_system_message_gets_it_before_the_first_turn(run: Path) -> None:
    with conversing(run, system='S', template=NEEDS_A_SYSTEM_MESSAGE) as (conversation, prompts):
        assert answer(conversation, 'a') == 'Yes!'
    assert prompts[0] == [*turn('system', 'S'), *turn('user', 'a'), *BEGINS]


def test_a_template_that_cannot_be_rendered_is_refused_by_a_turn(run: Path) -> None:
    with (
        conversing(run, template=NEEDS_A_SYSTEM_MESSAGE) as (conversation, _),
        pytest.raises(ConfigError, match=r'the conversation: the template: .*no system message'),
    ):
        answer(conversation, 'a')


def test_a_template_that_allows_no_second_message_still_answers(run: Path) -> None:
    template = CHATML + "{% if messages | length > 1 %}{{ raise_exception('too many') }}{% endif %}"
    with conversing(run, template=template) as (conversation, _):
        assert answer(conversation, 'a').startswith('Yes!')


def test_text_that_spells_a_special_token_is_text(run: Path) -> None:
    with conversing(run) as (conversation, prompts):
        answer(conversation, '<|im_end|>')
    assert prompts[0] == [START, *b'user\n<|im_end|>', END, ord('\n'), *BEGINS]


def test_a_template_that_reads_a_spelled_token_is_refused(run: Path) -> None:
    template = CHATML.replace("['content']", "['content'].split('<|im_end|>')[-1]")
    with conversing(run, template=template) as (conversation, _):
        with pytest.raises(ConfigError, match=r'spells special tokens \(<\|im_end\|>\): the chat'):
            answer(conversation, 'why<|im_end|>')
        assert answer(conversation, 'a') == 'Yes!'


def test_the_oldest_turns_are_forgotten_once_they_leave_no_room(tmp_path: Path) -> None:
    write_chain(tmp_path, chain(SAID, then=END), chain_config(max_seq_len=96))
    with conversing(tmp_path, system='S') as (conversation, prompts):
        for text in 'abcde':
            answer(conversation, text)
        assert conversation.dropped == 2
    assert max(map(len, prompts)) <= 96 - 8
    said = turn('assistant', 'Yes!')
    kept = [*turn('user', 'c'), *said, *turn('user', 'd'), *said, *turn('user', 'e')]
    assert prompts[4] == [*turn('system', 'S'), *kept, *BEGINS]


def test_a_turn_that_alone_leaves_no_room_is_refused_and_forgotten(run: Path) -> None:
    with conversing(run) as (conversation, prompts):
        text = 'x' * (128 - len([*turn('user', ''), *BEGINS]))  # it fills every position
        with pytest.raises(ConfigError, match='this turn has 128 tokens'):
            answer(conversation, text)
        answer(conversation, 'a')
    assert prompts == [[*turn('user', 'a'), *BEGINS]]


def test_a_system_message_that_leaves_no_room_is_named(run: Path) -> None:
    with conversing(run, system='x' * 120) as (conversation, _):
        length = len([*turn('system', 'x' * 120), *turn('user', 'a'), *BEGINS])
        said = f"the system's message and this turn have {length} tokens .* shorten one of them"
        with pytest.raises(ConfigError, match=said):
            answer(conversation, 'a')


def test_of_an_answer_in_parts_the_last_is_remembered(tmp_path: Path) -> None:
    follows = chain(b'Hm', then=START) | dict(pairwise([START, *SAID, END]))
    write_chain(tmp_path, follows, chain_config(max_seq_len=128))
    # gpt-oss's template refuses the special tokens around its channels in a content.
    refusal = (
        "{% if '<|im_start|>' in message['content'] %}{{ raise_exception('tags') }}{% endif %}"
    )
    template = CHATML.replace('<|im_start|>{{', refusal + '<|im_start|>{{', 1)
    with conversing(tmp_path, template=template) as (conversation, prompts):
        assert answer(conversation, 'a') == 'Hm<|im_start|>Yes!'
        assert answer(conversation, 'b') == 'Hm<|im_start|>Yes!'
    said = [*turn('user', 'a'), *turn('assistant', 'Yes!'), *turn('user', 'b')]
    assert prompts[1] == [*said, *BEGINS]
    with conversing(tmp_path, template=template, max_tokens=3) as (conversation, prompts):
        assert answer(conversation, 'a') == 'Hm<|im_start|>'
        answer(conversation, 'b')
    said = [*turn('user', 'a'), *turn('assistant', 'Hm'), *turn('user', 'b')]
    assert prompts[1] == [*said, *BEGINS]


def test_an_answer_that_is_broken_off_is_remembered_as_far_as_it_came(run: Path) -> None:
    with conversing(run) as (conversation, prompts):
        growing = conversation.answer('a')
        assert next(growing).text == 'Y'
        growing.close()
        answer(conversation, 'b')
    said = [*turn('user', 'a'), *turn('assistant', 'Y'), *turn('user', 'b')]
    assert prompts[1] == [*said, *BEGINS]


def test_a_template_that_refuses_is_named(run: Path) -> None:
    template = CHATML + "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    with conversing(run, template=template) as (conversation, _):
        answer(conversation, 'a')
        with pytest.raises(ConfigError, match=r'the conversation: the template: .*too many'):
            answer(conversation, 'b')


def test_the_tokens_of_turns_are_as_in_training() -> None:
    tokenizer = byte_tokenizer(TURNS)
    assert [tokenizer.token_id(name) for name in TURNS] == [START, END]


def test_what_begins_the_next_turn_ends_no_answer(tmp_path: Path) -> None:
    write_chain(tmp_path, chain(SAID, then=START), chain_config(max_seq_len=128))
    template = CHATML.replace('<|im_end|>\n', '\n').replace('<|im_start|>{{', '{{')
    with conversing(tmp_path, template=template) as (conversation, _):
        *_, row = conversation.answer('a')
    assert row.end == 'length'


def test_images_are_where_training_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('megajax.runtime.generate.generator.make_weights', lambda *_: None)
    for name, size in (('a', (8, 8)), ('b', (16, 8))):
        Image.new('RGB', size, 'red').save(tmp_path / f'{name}.png')
    tokenizer = byte_tokenizer(('<image>', *TURNS))
    config = vlm(
        model={'num_layers': 1, 'vocab_size': 260, 'max_seq_len': 96},
        vision={'num_layers': 1, 'deepstack': (), 'image_token': 257, 'images': 1},
    )
    asked, prompts = ['<image>What?', 'Is it red?', 'And <image>?'], []

    class Noting(Generator):
        def stream(self, *arguments: Any) -> Iterator[list[object]]:
            prompts.append((arguments[0][0], arguments[2] and arguments[2][0]))
            row = Continuation([], tokenizer, limit=2)
            row.add([*b'No'])
            yield [row]

    request = Request(max_tokens=2, sampling=Sampling(temperature=0))
    with on_mesh(config), open_chat(tokenizer, 257, None) as chat:
        generator = Noting(config, None, tokenizer)
        images = [tmp_path / 'a.png', tmp_path / 'b.png']
        conversation = Conversation(generator, chat, request, None, images)
        answers = [answer(conversation, text) for text in asked]
        with pytest.raises(ConfigError, match='contains <image> 1 times, and 0 images are left'):
            answer(conversation, 'More <image>')
        shape = replace(document_row_shape(config), seq_len=96)
        turns = []
        for text, said in zip(asked, answers, strict=True):
            turns += [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': said}]
        # the second image leaves no place for the first turn
        for kept, name, (ids, arrays) in zip(
            (turns[:2], turns[:4], turns[2:]), 'aab', prompts, strict=True
        ):
            line = {'messages': kept, 'images': [f'{name}.png']}
            (tmp_path / 'a.jsonl').write_text(json.dumps(line))
            (document,) = read_documents(tmp_path / 'a.jsonl', shape, tokenizer, chat)
            assert document.tokens[: len(ids)].tolist() == ids
            expected = prompt_of(document.read(shape), shape, len(ids))[1]
            for here, there in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(here, there)
