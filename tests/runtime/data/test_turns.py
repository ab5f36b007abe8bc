"""Which tokens of a chat the assistant says, and what else of a line reaches its template."""

import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from runtime.data.test_corpus import carried_out

from megajax.core.config import ConfigError
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.chat import DEFAULT, PlainChat, Rendering, Request, Template
from megajax.runtime.data.image_text.documents import FileDocument, read_documents
from megajax.runtime.data.image_text.lines import pieces_of
from megajax.runtime.data.image_text.load import open_chat
from megajax.runtime.data.image_text.turns import Vocabulary
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.synthetic_corpus import NO_TOKEN
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer

pytestmark = pytest.mark.usefixtures('forked_renderers')

SPECIAL = ('<s>', '<|end|>', '<|user|>', '<|assistant|>')
TOKENIZER = byte_tokenizer(SPECIAL)
SHAPE = RowShape(
    seq_len=500,
    images=0,
    patches=PatchSize(patch_size=1, merge_size=1, max_patches=1),
    image_token=NO_TOKEN,
    mrope=False,
)
PLAIN = '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}'
BEGIN = '{% if add_generation_prompt %}<|assistant|>{% endif %}'
EOD = '<|endoftext|>'


def turns(*contents: str) -> list[dict[str, Any]]:
    roles = ['user', 'assistant'] * len(contents)
    return [{'role': role, 'content': text} for role, text in zip(roles, contents, strict=False)]


def read(
    folder: Path,
    template: str | None,
    line: dict[str, Any],
    tokenizer: Tokenizer = TOKENIZER,
    ignored: tuple[str, ...] = (),
) -> FileDocument:
    (folder / 'a.jsonl').write_text(json.dumps(line) + '\n')
    given = None if template is None else Template(name='chat.jinja', texts={DEFAULT: template})
    with open_chat(tokenizer, NO_TOKEN, given, ignored=ignored) as chat:
        (document,) = read_documents(folder / 'a.jsonl', SHAPE, tokenizer, chat)
    return document


def shown(document: FileDocument) -> tuple[str, str]:
    """The text of a document, and that of the tokens that count."""
    return (
        TOKENIZER.decode(document.tokens),
        TOKENIZER.decode(document.tokens[document.answered]),
    )


def refusal(folder: Path, template: str | None, line: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as found:
        read(folder, template, line)
    assert str(found.value).startswith(f'{folder}/a.jsonl:1: ')
    return str(found.value)


def test_a_document_begins_as_its_template_does_and_ends_once(tmp_path: Path) -> None:
    text, answered = shown(read(tmp_path, PLAIN + BEGIN, {'messages': turns('a', 'b')}))
    assert text == f'<|user|>a<|end|><|assistant|>b<|end|>{EOD}'
    assert answered == f'b<|end|>{EOD}'


class Counting(PlainChat):
    """Counts the messages that are rendered together, to which the limits of a template apply."""

    most = 0

    def render(self, requests: Sequence[Request], *, place: str) -> list[Rendering]:
        self.most = max(self.most, sum(len(request.messages) for request in requests))
        return super().render(requests, place=place)


def test_the_limits_of_a_template_do_not_hold_for_all_turns_together() -> None:
    chat = Counting({}, image='', eod=EOD)
    messages = turns('a', 'b') * 50
    vocabulary = Vocabulary(special={}, image_token=NO_TOKEN)
    pieces = pieces_of({'messages': messages}, vocabulary, chat, 'a.jsonl:1')
    assert sum(piece.answered for piece in pieces) == 50
    assert chat.most <= 2 * len(messages)


def test_special_tokens_after_all_turns_do_not_hide_the_earlier_ones(tmp_path: Path) -> None:
    template = (
        PLAIN + '{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}'
    )
    line = {'messages': turns('a', 'b', 'c', 'd')}
    text, answered = shown(read(tmp_path, template, line))
    assert (
        text == f'<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>{EOD}'
    )
    assert answered == f'b<|end|>d<|end|>{EOD}'


def test_a_last_turn_may_end_otherwise_than_earlier_ones(tmp_path: Path) -> None:
    template = (
        '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}'
        '{% if loop.last and m.role == "assistant" %}<|endoftext|>{% else %}<|end|>{% endif %}'
        '{% endfor %}'
    )
    _, answered = shown(read(tmp_path, template + BEGIN, {'messages': turns('a', 'b', 'c', 'd')}))
    assert answered == f'bd{EOD}'


def test_a_turn_begins_after_its_header_where_the_prompt_says_more(tmp_path: Path) -> None:
    template = PLAIN + '{% if add_generation_prompt %}<|assistant|>think: {% endif %}'
    _, answered = shown(read(tmp_path, template, {'messages': turns('a', 'b', 'c', 'd')}))
    assert answered == f'b<|end|>d<|end|>{EOD}'


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    template = '{% if messages[0].role == "system" %}!{% endif %}' + PLAIN + BEGIN
    line = {'messages': [{'role': 'assistant', 'content': 'Hello'}, *turns('a', 'b')]}
    _, answered = shown(read(tmp_path, template, line))
    assert answered == f'Hello<|end|>b<|end|>{EOD}'


def test_marks_of_generation_say_what_counts(tmp_path: Path) -> None:
    template = (
        '{% for m in messages %}{% if m.role == "assistant" %}<|assistant|>{% generation %}'
        '{{ m.content }}{% if loop.last %}!{% endif %}{% endgeneration %}<|end|>'
        '{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}'
    )
    text, answered = shown(read(tmp_path, template, {'messages': turns('a', 'b', 'c', 'd')}))
    assert text == f'<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>d!<|end|>{EOD}'
    assert answered == 'bd!'
    assert 'marks nothing in this line' in refusal(tmp_path, template, {'messages': turns('a')})


def test_a_template_that_leaves_out_earlier_reasoning_is_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    template = (
        '{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.reasoning_content %}'
        '({{ m.reasoning_content }}){% endif %}{{ m.content }}<|end|>{% endfor %}' + BEGIN
    )
    messages = turns('a', 'b', 'c', 'd')
    for message in messages[1::2]:
        message['reasoning_content'] = 'why'
    one = {'messages': messages[:2]}
    assert shown(read(tmp_path, template, one))[1] == f'(why)b<|end|>{EOD}'
    text = refusal(tmp_path, template, {'messages': messages})
    assert 'writes message 2 differently if more messages follow' in text
    assert '{% generation %}' in text
    assert 'one assistant message' in text


@pytest.mark.parametrize('ascii', ['False', 'True'])
def test_what_a_line_spells_is_text_in_all_of_its_fields(tmp_path: Path, ascii: str) -> None:
    template = (
        '{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m | tojson }}<|end|>'
        '{% endfor %}' + BEGIN
    ).replace('tojson', f'tojson(ensure_ascii={ascii})')
    spelled = 'a <|end|> b'
    call = {'function': {'name': spelled, 'arguments': {spelled: [spelled]}}}
    line = {
        'messages': [
            {'role': 'user', 'content': spelled, 'name': spelled},
            {'role': 'assistant', 'reasoning_content': spelled, 'tool_calls': [call]},
        ],
        'tools': [{'name': spelled}],
    }
    document = read(tmp_path, template, line)
    text, answered = shown(document)
    tokens = document.tokens.tolist()
    counts = {name: tokens.count(TOKENIZER.token_id(name)) for name in SPECIAL}
    assert counts == {'<s>': 0, '<|end|>': 2, '<|user|>': 1, '<|assistant|>': 1}
    assert text.count(spelled) == 8  # reasoning has two names
    assert answered.endswith(f'}}<|end|>{EOD}')


@pytest.mark.parametrize(
    'read_name',
    ["{{ m.content.split('<s>')[-1] }}", "{{ m.content | replace('<s>', '') }}"],
)
def test_a_template_that_reads_a_spelled_token_is_refused(tmp_path: Path, read_name: str) -> None:
    template = PLAIN.replace('{{ m.content }}', read_name) + BEGIN
    assert shown(read(tmp_path, template, {'messages': turns('a', 'b')}))[1] == f'b<|end|>{EOD}'
    assert (
        shown(read(tmp_path, template, {'messages': turns('<|end|>', 'b')}))[0].count('<|end|>')
        == 3
    )
    text = refusal(tmp_path, template, {'messages': turns('a', 'why<s>b')})
    assert 'spells special tokens (<s>): the chat template then writes a different text' in text


def test_tools_documents_and_other_variables_reach_the_template(tmp_path: Path) -> None:
    template = (
        '{{ tools[0].name }}{{ documents[0].text }}{{ date_string }}{{ thinking is true }}'
        + PLAIN
        + BEGIN
    )
    line = {
        'messages': turns('a', 'b'),
        'tools': [{'name': 'T'}],
        'documents': [{'text': 'D'}],
        'date_string': '1 May',
        'chat_template_kwargs': {'thinking': True},
    }
    assert shown(read(tmp_path, template, line))[0].startswith('TD1 MayTrue<|user|>')


@pytest.mark.parametrize(
    ('line', 'key'),
    [
        ({'tools': [{'name': 'f'}]}, 'tools'),
        ({'documents': [{'text': 'd'}]}, 'documents'),
        ({'source': 'web'}, 'source'),
        ({'chat_template_kwargs': {'enable_thinking': False}}, 'enable_thinking'),
    ],
)
def test_a_key_that_nothing_reads_is_named_unless_it_is_ignored(
    tmp_path: Path, line: dict[str, Any], key: str
) -> None:
    line |= {'messages': turns('a', 'b')}
    for template in (PLAIN + BEGIN, None):
        text = refusal(tmp_path, template, line)
        assert f'"{key}"' in text
        assert f'data.ignored_keys=[{key}]' in text
        assert shown(read(tmp_path, template, line, ignored=(key,)))[1].startswith('b')
    nothing = {**line, key: None, 'chat_template_kwargs': None}
    assert read(tmp_path, PLAIN + BEGIN, nothing)


def test_a_key_of_a_message_that_nothing_reads_is_named(tmp_path: Path) -> None:
    messages = turns('a', 'b')
    messages[1]['reasoning_content'] = 'why'
    text = refusal(tmp_path, PLAIN + BEGIN, {'messages': messages})
    assert '"reasoning_content" of message 2' in text


@pytest.mark.parametrize('content', [{}, {'content': None}])
def test_a_call_without_content_is_written_by_a_template_that_allows_it(
    tmp_path: Path, content: dict[str, None]
) -> None:
    template = (
        '{% for m in messages %}<|{{ m.role }}|>{% if m.content %}{{ m.content }}{% endif %}'
        '{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}<|end|>{% endfor %}'
    )
    call = {'role': 'assistant', 'tool_calls': [{'function': {'name': 'f'}}], **content}
    line = {'messages': [*turns('a'), call, {'role': 'tool', 'content': {'degrees': 22}}]}
    assert shown(read(tmp_path, template + BEGIN, line))[1] == 'f<|end|>'
    assert '"assistant" has no text in "content"' in refusal(tmp_path, None, line)


@pytest.mark.parametrize('template', [None, PLAIN + BEGIN])
def test_for_a_model_of_text_image_is_a_word(tmp_path: Path, template: str | None) -> None:
    svg = '<svg><image>x</image></svg>'
    _, answered = shown(read(tmp_path, template, {'messages': turns(svg, svg)}))
    assert answered.startswith(svg)
    assert svg in shown(read(tmp_path, template, {'text': svg}))[0]
    pictures = {'messages': turns(svg, svg), 'images': ['a.png']}
    assert 'this is a text-only model' in refusal(tmp_path, template, pictures)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ({'tools': '{}'}, '"tools" is {}, not a list of objects'),
        ({'documents': ['d']}, '"documents" is [\'d\'], not a list of objects'),
        ({'chat_template_kwargs': 3}, '"chat_template_kwargs" is 3, not an object'),
        ({'chat_template_kwargs': {'messages': []}}, 'has messages, which it must not set'),
        ({'tools': [], 'chat_template_kwargs': {'tools': []}}, 'has tools, which it must not set'),
        ({'add_generation_prompt': True}, '"add_generation_prompt" is for what generates'),
        ({'tools': [{'a': '\ud800'}]}, 'unpaired surrogate'),
    ],
)
def test_variables_of_another_form_are_refused(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, PLAIN + BEGIN, {'messages': turns('a', 'b'), **line})


@pytest.mark.parametrize('role', ['asistant', 'Assistant', ' assistant', 'gpt', 'function_call'])
@pytest.mark.parametrize('template', [None, PLAIN + BEGIN])
def test_an_answer_under_another_role_is_rejected_and_not_left_out_of_the_loss(
    tmp_path: Path, template: str | None, role: str
) -> None:
    line = {'messages': [*turns('a', 'b', 'c'), {'role': role, 'content': 'd'}]}
    text = refusal(tmp_path, template, line)
    assert f'message 4 has the role "{role}", whose turns do not count' in text
    assert 'write "assistant"' in text


@pytest.mark.parametrize('role', ['tool', 'developer', 'observation', 'ipython', 'context'])
def test_other_roles_are_no_answers(tmp_path: Path, role: str) -> None:
    line = {'messages': [{'role': role, 'content': 'x'}, *turns('a', 'b')]}
    assert shown(read(tmp_path, PLAIN + BEGIN, line))[1] == f'b<|end|>{EOD}'


def test_marks_of_generation_may_count_a_role_of_another_name(tmp_path: Path) -> None:
    template = (
        '{% for m in messages %}<|{{ m.role }}|>{% if m.role == "model" %}{% generation %}'
        '{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}'
    )
    line = {'messages': [*turns('a'), {'role': 'model', 'content': 'b'}]}
    assert shown(read(tmp_path, template, line))[1] == f'b<|end|>{EOD}'


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
def test_the_command_that_joins_parts_reads_the_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = map(pytest.importorskip, ('pyarrow', 'pyarrow.parquet'))
    parts = [{'type': 'text', 'text': 'it'}, {'type': 'text', 'text': "'s"}]
    said = [{'role': 'user', 'content': parts}, {'role': 'assistant', 'content': parts, 'x': None}]
    old = tmp_path / 'old.parquet'
    parquet.write_table(pyarrow.Table.from_pylist([{'messages': said}]), old)
    given = Template(name='chat.jinja', texts={DEFAULT: PLAIN + BEGIN})
    with open_chat(TOKENIZER, NO_TOKEN, given) as chat:
        with pytest.raises(ConfigError, match='the parts of message 1') as error:
            list(read_documents(old, SHAPE, TOKENIZER, chat))
        new = carried_out(str(error.value), old)
        (document,) = read_documents(new, SHAPE, TOKENIZER, chat)
    assert shown(document)[1] == f"it's<|end|>{EOD}"


def test_parts_that_a_template_prints_as_a_list_are_rejected(tmp_path: Path) -> None:
    parts = [{'type': 'text', 'text': "it's"}, {'type': 'text', 'text': '<|end|>'}]
    line = {'messages': [{'role': 'user', 'content': parts}, *turns('a', 'b')[1:]]}
    text = refusal(tmp_path, PLAIN + BEGIN, line)
    assert 'the chat template writes the parts of message 1 as [{' in text
    assert 'map(.text) | join("")' in text
    joined = PLAIN.replace('m.content', 'm.content if m.content is string else m.content[0].text')
    assert shown(read(tmp_path, joined + BEGIN, line))[1] == f'b<|end|>{EOD}'


def test_lists_may_be_json_in_a_text(tmp_path: Path) -> None:
    template = '{{ tools | tojson }}' + PLAIN + BEGIN
    given = {'messages': turns('a', 'b'), 'tools': [{'name': 'f'}]}
    as_texts = {key: json.dumps(value) for key, value in given.items()}
    assert shown(read(tmp_path, template, as_texts)) == shown(read(tmp_path, template, given))


def test_what_json_has_no_form_for_reaches_the_template_as_its_text(tmp_path: Path) -> None:
    time = datetime(2024, 1, 2, 3)
    line = {'messages': turns('a', 'b'), 'at': time, 'cost': Decimal('1.5')}
    vocabulary = Vocabulary(special=TOKENIZER.special_tokens(), image_token=NO_TOKEN)
    for text, other in ((str(time), 'cost'), ('1.5', 'at')):
        name = 'cost' if other == 'at' else 'at'
        given = Template(name='', texts={DEFAULT: '{{ ' + name + ' }}' + PLAIN + BEGIN})
        with open_chat(TOKENIZER, NO_TOKEN, given, ignored=(other,)) as chat:
            pieces = pieces_of(line, vocabulary, chat, 'a:1')
        assert pieces[0].text == text
    with (
        open_chat(TOKENIZER, NO_TOKEN, Template(name='', texts={DEFAULT: PLAIN + BEGIN})) as chat,
        pytest.raises(ConfigError, match=r'"at", "cost": the chat template does not read this'),
    ):
        pieces_of(line, vocabulary, chat, 'a:1')
