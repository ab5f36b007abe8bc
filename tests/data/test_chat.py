"""Chat templates are rendered as transformers does, within limits of time, text and memory."""

import time
from pathlib import Path

import pytest

from megajax.config import ConfigError
from megajax.config.extras import install
from megajax.data.image_text.chat import PlainChat, TemplateChat

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
    with pytest.raises(ConfigError) as found, TemplateChat(path) as chat:
        chat.render([(MESSAGES, False)], place=PLACE)
    assert found.value.exit_code == 2
    assert time.monotonic() - start < 30
    return str(found.value)


def test_a_template_writes_what_the_plain_form_writes_for_the_same_tokens(tmp_path: Path) -> None:
    special = {'<|im_start|>': 1, '<|im_end|>': 2}
    plain = PlainChat(special, image='<|image_pad|>', eod='<|endoftext|>')
    requests = [(MESSAGES, False), (MESSAGES[:1], True), ([], True)]
    with TemplateChat(write(tmp_path, CHATML)) as chat:
        texts = chat.render(requests, place=PLACE)
        assert texts == plain.render(requests, place=PLACE)
        assert chat.render(requests[:1], place=PLACE) == texts[:1]
    assert texts[0].endswith('<|im_start|>assistant\nHello<|im_end|>\n')


def test_what_transformers_offers_can_be_used(tmp_path: Path) -> None:
    template = (
        '{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}'
        '{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}'
    )
    with TemplateChat(write(tmp_path, template), bos='<s>', eos='</s>') as chat:
        texts = chat.render([([{'role': 'user', 'content': '<é>'}], False)], place=PLACE)
    assert texts == ['<s>{"role": "user", "content": "<é>"}</s>']


@pytest.mark.parametrize(
    'loop',
    [
        '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}',
        '{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}'
        '{% endfor %}',
        '{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}'
        '{{ two(60) }}',
        '{{ 7 ** (7 ** (7 ** 7)) }}',
        '{{ (range(99999) | list * 900) | sum }}' * 50,
    ],
)
def test_a_template_that_loops_is_ended_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr('megajax.data.image_text.chat.MAX_SECONDS', 0.3)
    path = write(tmp_path, f'hello\n{loop}')
    text = refusal(path)
    assert text.startswith(f'{PLACE}: {path}: ')
    assert 'takes too long, in line 2' in text or 'takes more than 0.3 s' in text


@pytest.mark.parametrize(
    ('template', 'message'),
    [
        ("{{ 'x' * 5999999 }}", 'characters'),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", '4,194,304 characters'),
        ("{{ 'x' * 9999999999 }}", 'fills the memory'),
        ("\n{{ raise_exception('no system role') }}", 'no system role, in line 2'),
        ('{{ messages[7].content }}', 'in line 1'),
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


def test_without_jinja2_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('megajax.data.image_text.chat.find_spec', lambda name: None)
    assert install('chat') in refusal(write(tmp_path, CHATML))
