"""Chat templates are rendered as transformers does, within limits of time, text and memory."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support import slow

from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.runtime.data.image_text.chat import (
    DEFAULT,
    Message,
    PlainChat,
    Rendering,
    Request,
    Template,
    TemplateChat,
    read_template,
)

pytestmark = pytest.mark.usefixtures('forked_renderers')

MESSAGES = [
    {'role': 'user', 'content': 'Hi'},
    {'role': 'assistant', 'content': 'Hello'},
]
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PLACE = 'chats.jsonl:3'


def write(folder: Path, template: str) -> Path:
    (folder / 'chat.jinja').write_text(template, 'utf-8')
    return folder / 'chat.jinja'


def refusal(path: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ConfigError) as found, TemplateChat(read_template(path)) as chat:
        chat.render([Request(messages=MESSAGES)], place=PLACE)
    assert found.value.exit_code == 2
    assert time.monotonic() - start < 30
    return str(found.value)


def test_a_template_writes_what_the_plain_form_writes_for_the_same_tokens(tmp_path: Path) -> None:
    special = {'<|im_start|>': 1, '<|im_end|>': 2}
    plain = PlainChat(special, image='<|image_pad|>', eod='<|endoftext|>')
    requests = [
        Request(messages=MESSAGES),
        Request(messages=MESSAGES[:1], begins=True),
        Request(messages=[], begins=True),
    ]
    with TemplateChat(read_template(write(tmp_path, CHATML))) as chat:
        renderings = chat.render(requests, place=PLACE)
        assert renderings == plain.render(requests, place=PLACE)
        assert chat.render(requests[:1], place=PLACE) == renderings[:1]
    assert renderings[0].text.endswith('<|im_start|>assistant\nHello<|im_end|>\n')


def test_what_transformers_offers_can_be_used() -> None:
    template = (
        '{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}'
        '{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}'
    )
    found = rendered(template, [{'role': 'user', 'content': '<é>'}], bos_token='<s>')
    assert found.text == '<s>{"role": "user", "content": "<é>"}'
    assert found.marked == [(3, len(found.text))]


def rendered(template: str, messages: list[Message], **variables: Any) -> Rendering:
    tokens = {key: variables.pop(key) for key in [*variables] if key.endswith('_token')}
    several = {DEFAULT: template} if isinstance(template, str) else template
    now = datetime(2026, 11, 27, 13, 45)
    with TemplateChat(Template(name='t', texts=several, now=now), tokens) as chat:
        (found,) = chat.render([Request(messages=messages, variables=variables)], place=PLACE)
    return found


HELLO = [{'role': 'user', 'content': 'ä'}]


@pytest.mark.parametrize(
    ('template', 'text'),
    [
        ('{{ {"b": "ä<", "a": 1} | tojson }}', '{"b": "ä<", "a": 1}'),
        ('{{ "ä" | tojson(ensure_ascii=True) }}', '"\\u00e4"'),
        ('{{ "ä" | tojson(ensure_ascii=False) }}', '"ä"'),
        (
            '{{ {"b": 1, "a": [2]} | tojson(sort_keys=True, separators=(",", ":")) }}',
            '{"a":[2],"b":1}',
        ),
        ('{{ [1] | tojson(indent=2) }}', '[\n  1\n]'),
        ('{{ strftime_now("%d %b %Y, %H:%M") }}', '27 Nov 2026, 13:45'),
        (
            '{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}',
            'True True False',
        ),
        ('{{ pad_token }}{{ unk_token is defined }}', '<pad>False'),
        ('{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}', '2'),
        ('{% if true %}\n{{ messages[0].content }}\n  {% endif %}\n', 'ä'),
    ],
)
def test_filters_and_globals_are_those_of_transformers(template: str, text: str) -> None:
    assert rendered(template, HELLO, pad_token='<pad>').text.strip() == text


def test_a_key_that_is_null_is_absent_and_reasoning_has_all_its_names() -> None:
    template = '{% for m in messages %}{{ m | tojson }}{% endfor %}'
    null = {'role': 'assistant', 'content': None, 'tool_calls': None, 'thinking': 'why'}
    text = rendered(template, [null]).text
    assert text == '{"thinking": "why", "role": "assistant", "reasoning_content": "why"}'


def test_marks_are_where_the_template_has_them_also_in_a_nested_loop() -> None:
    template = (
        '{% for m in messages %}[{{ m.role }}]{% if m.role == "assistant" %}{% generation %}'
        '{% for x in m.content %}{{ x }}.{% endfor %}{% endgeneration %}{% endif %}{% endfor %}'
    )
    found = rendered(template, [*MESSAGES, *MESSAGES])
    assert found.text == '[user][assistant]H.e.l.l.o.' * 2
    assert [found.text[start:stop] for start, stop in found.marked] == ['H.e.l.l.o.'] * 2
    assert rendered('{{ messages }}', MESSAGES).marked is None


@pytest.mark.parametrize(
    ('template', 'unread'),
    [
        ('{{ messages[0].content }}', [(0, 'tools'), (0, 'id'), (1, 'name')]),
        ('{{ messages[0].content }}{{ tools }}{{ id }}', [(1, 'name')]),
        ('{{ messages[0] | tojson }}{% if tools %}{% endif %}', [(0, 'id')]),
        ('{{ messages[0] }}{{ tools }}{{ id }}', []),
        ('{% for k, v in messages[0].items() %}{{ v }}{% endfor %}{{ tools }}{{ id }}', []),
        (
            '{% if "name" in messages[0] %}{{ messages[0].get("content") }}{% endif %}{{ id }}',
            [(0, 'tools')],
        ),
    ],
)
def test_what_a_template_does_not_read_is_named(
    template: str, unread: list[tuple[int, str]]
) -> None:
    said = [{'role': 'user', 'content': 'a', 'name': 'Ada'}]
    found = rendered(template + '{{ messages[0].role }}', said, tools=[{'a': 1}], id=7, empty=[])
    assert found.unread == unread


def test_reasoning_is_read_under_any_name_and_a_link_to_a_call_need_not_be() -> None:
    said = [
        {'role': 'assistant', 'content': 'a', 'thinking': 'b'},
        {'role': 'tool', 'content': 'c', 'tool_call_id': '1', 'name': 'f'},
    ]
    text = '{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}'
    assert rendered(text, said).unread == [(1, 'thinking')]
    text = '{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.reasoning_content }}{% endfor %}'
    assert not rendered(text, said).unread


def test_of_several_templates_the_one_for_tools_is_for_lines_with_tools() -> None:
    several = {'default': 'd', 'tool_use': '{{ tools | length }}'}
    assert rendered(several, []).text == 'd'
    assert rendered(several, [], tools=[]).text == '0'
    with pytest.raises(ConfigError, match='templates named rag, and none named default'):
        rendered({'rag': ''}, [])


def test_a_namespace_refuses_names_with_an_underscore_as_in_transformers() -> None:
    with pytest.raises(ConfigError, match="'_a' begins with an underscore"):
        rendered('{% set ns = namespace(_a=1) %}', [])


@pytest.mark.parametrize(
    'loop',
    [
        '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}',
        slow(
            '{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}'
            '{% endfor %}'
        ),
        '{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}'
        '{{ two(60) }}',
        '{{ 7 ** (7 ** (7 ** 7)) }}',
        slow('{{ (range(99999) | list * 900) | sum }}' * 50),
    ],
)
def test_a_template_that_loops_is_ended_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr('megajax.runtime.data.image_text.chat.MAX_SECONDS', 0.1)
    path = write(tmp_path, f'hello\n{loop}')
    text = refusal(path)
    assert text.startswith(f'{PLACE}: {path}: ')
    assert 'takes more than 0.1 s' in text


@pytest.mark.parametrize(
    ('template', 'message'),
    [
        ("{{ 'x' * 5999999 }}", 'characters'),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", '4,194,304 characters'),
        ("{{ 'x' * 9999999999 }}", 'fills the memory'),
        ("\n{{ raise_exception('no system role') }}", 'no system role, in line 2'),
        ('{{ messages[7].content }}', 'in line 1'),
        (
            "{{ raise_exception('no system role') }}",
            'cannot be rendered: no system role, in line 1',
        ),
        ('{{ messages.append(1) }}', 'in line 1'),
        ("{{ ''.__class__.__mro__ }}", 'unsafe'),
    ],
)
def test_other_mistakes_of_a_template_are_named(
    tmp_path: Path, template: str, message: str
) -> None:
    path = write(tmp_path, template)
    text = refusal(path)
    assert text.startswith(f'{PLACE}: {path}: cannot be rendered')
    assert message in text


def test_a_template_that_cannot_be_compiled_or_read_is_refused(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, 'a\n{% if %}'))
    assert 'in line 2' in text
    assert 'cannot be read' in refusal(tmp_path / 'missing.jinja')


def test_a_template_is_the_same_in_json_and_after_a_byte_order_mark(tmp_path: Path) -> None:
    texts = []
    for name, content in {
        'chat.jinja': CHATML,
        'marked.jinja': f'\ufeff{CHATML}',
        'chat_template.json': json.dumps({'chat_template': CHATML}, indent=2),
        'tokenizer_config.json': json.dumps({'eos_token': '<e>', 'chat_template': CHATML}),
    }.items():
        (tmp_path / name).write_text(content, 'utf-8')
        texts.append(read_template(tmp_path / name).texts)
    assert texts == [{DEFAULT: CHATML}] * 4


def test_the_templates_of_json_are_those_between_which_transformers_chooses(tmp_path: Path) -> None:
    texts = {'default': CHATML, 'tool_use': 'tools', 'rag': 'documents'}
    listed = [{'name': name, 'template': text} for name, text in texts.items()]
    (tmp_path / 'config.json').write_text(json.dumps({'chat_template': listed}))
    del texts['rag']
    assert read_template(tmp_path / 'config.json').texts == texts


@pytest.mark.parametrize('value', [{}, {'chat_template': [{'name': 'rag', 'template': 'a'}]}])
def test_json_without_a_template_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / 'config.json').write_text(json.dumps(value))
    with pytest.raises(
        ConfigError, match=r'config.json: is JSON without a text or a template "default" in "chat_'
    ):
        read_template(tmp_path / 'config.json')


def test_without_jinja2_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('megajax.runtime.data.image_text.chat.find_spec', lambda name: None)
    assert install('chat') in refusal(write(tmp_path, CHATML))
