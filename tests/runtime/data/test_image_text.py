"""JSON lines with pictures become rows that hold whole documents; mistakes name file and line."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megajax.core.config import ConfigError
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.chat import PlainChat
from megajax.runtime.data.image_text.documents import FileDocument, encode_prompt, read_documents
from megajax.runtime.data.image_text.load import ImageTextData, load_image_text
from megajax.runtime.data.image_text.turns import VISION
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer

pytestmark = pytest.mark.usefixtures('forked_renderers')

TOKENIZER = byte_tokenizer(('<image>',))
QWEN = byte_tokenizer(('<|im_start|>', '<|im_end|>', *VISION, '<|image_pad|>'))
QWEN_IMAGE = QWEN.special_tokens()['<|image_pad|>']
EOD, IMAGE = 256, 257
KEYS = 'train.seq_len', 'vision.images'
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{% else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
            {%- else %}{{- part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_shape(seq_len: int = 63, **options: object) -> RowShape:
    fields: dict[str, object] = {
        'seq_len': seq_len,
        'images': 2,
        'patches': PatchSize(patch_size=2, merge_size=2, max_patches=24),
        'image_token': IMAGE,
        'mrope': True,
    }
    return RowShape(**{**fields, **options})


SHAPE = make_shape()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, (height, width) in {'a': (8, 12), 'b': (4, 4), 'c': (1, 1)}.items():
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'{name}.png')
    return tmp_path


def write(folder: Path, *lines: object, name: str = 'data.jsonl') -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text('\n'.join(texts) + '\n', 'utf-8')
    return folder / name


def documents(
    path: Path, tokenizer: Tokenizer = TOKENIZER, shape: RowShape = SHAPE
) -> list[FileDocument]:
    special = tokenizer.special_tokens()
    pad = '<|image_pad|>'.join(VISION) if tokenizer is QWEN else '<image>'
    chat = PlainChat(special, image=pad, eod='<|endoftext|>')
    return list(read_documents(path, shape, tokenizer, chat))


def load_rows(
    path: Path, shape: RowShape = SHAPE, tokenizer: Tokenizer = TOKENIZER, **options: object
) -> ImageTextData:
    fields: dict[str, object] = {'batch_size': 1, 'seed': 0, 'split': '100,0,0', **options}
    return load_image_text(str(path), shape, tokenizer, **fields)


def shown(document: FileDocument, tokenizer: Tokenizer = TOKENIZER) -> tuple[str, str]:
    """The text of a document, and that of the tokens that count."""
    return (
        tokenizer.decode(document.tokens),
        tokenizer.decode(document.tokens[document.answered]),
    )


def test_of_a_text_everything_counts_but_the_pictures(folder: Path) -> None:
    line = {'text': 'see <image> and <image>!', 'images': ['a.png', 'b.png']}
    (document,) = documents(write(folder, line))
    text, answered = shown(document)
    end = '<|endoftext|>'
    assert text == f'{end}see {"<image>" * 6} and <image>!{end}'
    assert answered == f'see  and !{end}'
    assert list(document.grids) == [(4, 6), (2, 2)]


@pytest.mark.parametrize('marked', [False, True])
def test_no_token_counts_that_an_image_predicts_whose_end_relevance_may_leave_empty(
    folder: Path, marked: bool
) -> None:
    """With cross-attention, no token of the sequence is empty."""
    line = {'text': '<image>A cat.<image>', 'images': ['a.png', 'b.png']}
    patches = dataclasses.replace(SHAPE.patches, budget=3, marked=marked)
    (document,) = documents(write(folder, line), shape=make_shape(patches=patches))
    _, answered = shown(document)
    assert answered == ('A cat.<|endoftext|>' if marked else ' cat.')


@pytest.mark.parametrize('budget', [0, 3])
def test_texts_whose_first_token_after_an_image_relevance_does_not_count_are_in_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, budget: int
) -> None:
    turns = [{'role': 'user', 'content': '<image>What?'}, {'role': 'assistant', 'content': 'A.'}]
    whole = [{'text': '<image>\nA cat.'}, {'text': 'A <image>'}, {'messages': turns}]
    lines = [{**line, 'images': ['b.png']} for line in (*whole, {'text': 'A <image> b'})]
    shape = make_shape(patches=dataclasses.replace(SHAPE.patches, budget=budget))
    documents(write(folder, *lines[:3]), shape=shape)
    assert 'directly follows' not in caplog.text
    path = write(folder, *lines)
    documents(path, shape=shape)
    assert (f'in 1 document, such as {path}:4, text directly' in caplog.text) == (budget > 0)


def test_of_messages_the_turns_of_the_assistant_count(folder: Path) -> None:
    line = {
        'messages': [
            {'role': 'system', 'content': 'Be short.'},
            {'role': 'user', 'content': '<image>What is it?'},
            {'role': 'assistant', 'content': 'A cat.'},
            {'role': 'user', 'content': 'Sure?'},
            {'role': 'assistant', 'content': 'Yes.'},
        ],
        'images': ['b.png'],
    }
    (document,) = documents(write(folder, line), shape=make_shape(200))
    text, answered = shown(document)
    end = '<|endoftext|>'
    assert text == (
        f'{end}system: Be short.\nuser: <image>What is it?\nassistant: A cat.{end}'
        f'user: Sure?\nassistant: Yes.{end}'
    )
    assert answered == f'A cat.{end}Yes.{end}'


def test_a_part_whose_other_keys_are_null_is_read_as_without_them(folder: Path) -> None:
    parts = [{'type': 'image', 'image': 'b.png'}, {'type': 'text', 'text': 'What is it?'}]
    full = [{'text': None, 'image': None, **part} for part in parts]
    template, shape = folder / 'chat.jinja', make_shape(100, image_token=QWEN_IMAGE)
    template.write_text(
        CHATML.replace("part.type == 'image'", "'image' in part or part.type == 'image'"), 'utf-8'
    )
    found = []
    for content in (parts, full):
        turns = [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': 'A cat.'}]
        batch = load_rows(write(folder, {'messages': turns}), shape, QWEN, template=template).train
        found.append(batch[0]['tokens'][0].tolist())
    assert found[0] == found[1]
    assert found[0].count(QWEN_IMAGE) == 1


@pytest.mark.parametrize('with_template', [False, True])
def test_chatml_counts_what_generation_would_write(folder: Path, with_template: bool) -> None:
    content = [{'type': 'image', 'image': 'b.png'}, {'type': 'text', 'text': 'Say <|im_end|>'}]
    line = {
        'messages': [
            {'role': 'user', 'content': content},
            {'role': 'assistant', 'content': '<|im_start|>'},
        ]
    }
    template = folder / 'chat.jinja'
    template.write_text(CHATML, 'utf-8')
    image_token = QWEN_IMAGE
    data = load_rows(
        write(folder, line),
        make_shape(100, image_token=image_token),
        QWEN,
        template=template if with_template else None,
    )
    batch = data.train[0]
    tokens, labels = batch['tokens'][0], batch['labels'][0]
    assert QWEN.decode(tokens).rstrip('\0') == (
        f'{"" if with_template else "<|endoftext|>"}<|im_start|>user\n'
        '<|vision_start|><|image_pad|><|vision_end|>Say <|im_end|>'
        '<|im_end|>\n<|im_start|>assistant\n<|im_start|><|im_end|>\n<|endoftext|>'
    )
    counted = labels[batch['loss_mask'][0] == 1]
    assert QWEN.decode(counted) == '<|im_start|><|im_end|>\n<|endoftext|>'
    special = QWEN.special_tokens()
    # what a message spells is text: twice the template's tokens, and never the message's
    assert (tokens == special['<|im_start|>']).sum() == (tokens == special['<|im_end|>']).sum() == 2
    assert batch['image_index'][0][tokens == image_token].tolist() == [0]


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"text": ', 'is not JSON'),
        ('[1]', 'not a JSON object'),
        ({'texts': 'a'}, 'needs either "text" or "messages" (its keys: texts)'),
        ({'text': 'a', 'messages': []}, 'needs either'),
        ({'text': 3}, '"text" is 3, not a text'),
        ({'text': 'a', 'images': 'a.png'}, 'not a list of file names'),
        ({'text': '<image>'}, 'has 1 image placeholders, but 0 files in "images"'),
        ({'text': 'a', 'images': ['a.png']}, 'has 0 image placeholders, but 1 files in "images"'),
        ('{"text": "\\ud800"}', 'unpaired surrogate'),
        ({'messages': []}, 'not a list of messages'),
        ({'messages': ['hi']}, 'not an object with a "role"'),
        ({'messages': [{'role': 'assistant'}]}, 'has no text in "content"'),
        (
            {'messages': [{'role': 'assistant', 'content': 3}]},
            'a "content" is 3, neither a text nor a list of parts',
        ),
        ({'messages': [{'role': 'user', 'content': 'hi'}]}, 'no message has the role'),
        (
            {'messages': [{'role': 'assistant', 'content': [{'type': 'video'}]}]},
            'neither a text nor an image',
        ),
        (
            {'messages': [{'role': 'assistant', 'content': '<image>'}]},
            'has 1 image placeholders, but 0 files in "images"',
        ),
        (
            {'messages': [{'role': 'assistant', 'content': 'x'}], 'images': ['a.png']},
            'has 0 image placeholders, but 1 files in "images"',
        ),
        ({'text': '<image>', 'images': ['none.png']}, 'none.png: is not a file'),
        ({'text': '<image>', 'images': ['text.png']}, 'text.png: is not an image'),
        ({'text': '<image>', 'images': ['../a.png']}, '../a.png: is outside'),
        ({'text': '<image>', 'images': ['thin.png']}, 'one side may be at most 200 times'),
    ],
)
def test_mistakes_are_refused_with_file_and_line(folder: Path, line: object, message: str) -> None:
    (folder / 'text.png').write_text('no picture')
    Image.new('RGB', (1, 201)).save(folder / 'thin.png')
    path = write(folder, {'text': 'fine'}, '', line)
    with pytest.raises(ConfigError) as found:
        documents(path)
    assert str(found.value).startswith(f'{path}:3: ')
    assert message in str(found.value)
    assert ';' in str(found.value)


@pytest.mark.parametrize(
    ('lines', 'messages'),
    [
        (
            [{'text': 'a' * 63}],
            ['1: has 65 tokens and a sequence can have 64; use train.seq_len=64, or'],
        ),
        (
            [{'text': 'a'}, {'text': 'a' * 70}, {'text': 'a' * 90}, {'text': 'a' * 80}],
            [
                '2: has 72 tokens and a sequence can have 64; too long: 3 of 4 documents; '
                'use train.seq_len=92 model.max_seq_len=92, or shorter documents'
            ],
        ),
        (
            [{'text': 'a' * 60 + '<image>', 'images': ['a.png']}, {'text': 'a'}],
            [
                '1: has 68 tokens, 6 of them for images, and a sequence can have 64; too long: '
                '1 of 2 documents; use train.seq_len=68, a smaller vision.max_patches, or'
            ],
        ),
        (
            [
                {'text': '<image>' * count + 'a' * 5 * count, 'images': ['b.png'] * count}
                for count in (2, 3, 2, 20, 4)
            ],
            [
                '2: has 3 images, and a sequence can have 2; too many: 3 of 5 documents; '
                'use vision.images=20, or fewer images',
                '4: has 122 tokens, 20 of them for images, and a sequence can have 64',
            ],
        ),
    ],
)
def test_documents_that_do_not_fit_are_counted_and_all_fit_what_is_named(
    folder: Path, lines: list[object], messages: list[str]
) -> None:
    path = write(folder, *lines)
    with pytest.raises(ConfigError) as found:
        load_rows(path, make_shape(max_seq_len=68, multiple=4))
    problems = [str(problem) for problem in found.value.problems]
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert problem.startswith(f'{path}:{message}')
    tokens, pictures = (re.search(rf'{key}=(\d+)', '\n'.join(problems)) for key in KEYS)
    fits = make_shape(
        seq_len=int(tokens[1]) if tokens else 63, images=int(pictures[1]) if pictures else 2
    )
    load_rows(path, fits)


PARTS = st.sampled_from(['a', ' ', '\n', 'é', '<|im_end|>', '<|im_start|>', '<|image_pad|>', '<'])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.booleans(), st.lists(PARTS, max_size=4)), max_size=5))
def test_no_message_can_write_a_special_token(
    folder: Path, turns: list[tuple[bool, list[str]]]
) -> None:
    messages = [
        {'role': 'assistant' if is_answer else 'user', 'content': ''.join(parts)}
        for is_answer, parts in [*turns, (True, [])]
    ]
    shape = make_shape(600, image_token=QWEN.special_tokens()['<|image_pad|>'])
    (document,) = documents(write(folder, {'messages': messages}), QWEN, shape)
    text, answered = shown(document, QWEN)
    end = '<|im_end|>\n'
    turn = '<|im_start|>{role}\n{content}'
    rendered = ''.join(turn.format(**message) + end for message in messages)
    answers = [m['content'] + end for m in messages if m['role'] == 'assistant']
    assert text == f'<|endoftext|>{rendered}<|endoftext|>'
    assert answered == ''.join(answers) + '<|endoftext|>'
    special = QWEN.special_tokens()
    for name, count in {
        '<|im_start|>': len(messages),
        '<|im_end|>': len(messages),
        '<|image_pad|>': 0,
    }.items():
        assert (document.tokens == special[name]).sum() == count


@pytest.mark.parametrize(
    'line',
    [
        {'file_name': 'a.png'},
        {'image': 'a.png', 'id': 'b.png.txt'},
        {'image_file_names': ['a.png', 'b.png']},
        {'left image': 'a.png', 'right': 'b.JPEG'},
        {'image': {'bytes': 'x', 'path': 'a.png'}},
    ],
)
def test_images_under_another_key_are_not_left_out(folder: Path, line: dict[str, object]) -> None:
    shutil.copy(folder / 'b.png', folder / 'b.JPEG')
    for text in ('a cat', '<image>' * 2 if len(line) > 1 or 'image_file_names' in line else 'a'):
        path = write(folder, {'text': text, **line}, name='metadata.jsonl')
        with pytest.raises(ConfigError, match=rf'{path}:1: names images under .*"images"'):
            documents(path)


@pytest.mark.skipif(shutil.which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize('text', ['a', '<image> and <image>'])
@pytest.mark.parametrize('keys', [{'files': ['a.png', 'b.png']}, {'x y': 'a.png', 'z': 'b.png'}])
def test_the_command_for_images_under_another_key_writes_documents_with_them(
    folder: Path, text: str, keys: dict[str, object]
) -> None:
    lines = [{'text': text, **keys}] + [{'text': 'b', **dict.fromkeys(keys)}] * (text == 'a')
    path = write(folder, *lines)
    with pytest.raises(ConfigError) as found:
        documents(path)
    command = str(found.value).rpartition('"images": ')[2]
    command = command.replace('OLD', str(path)).replace('NEW', str(folder / 'new'))
    subprocess.run(['sh', '-c', command], check=True)
    first, *others = documents(folder / 'new.jsonl')
    assert [image.name for image in first.paths] == ['a.png', 'b.png']
    assert [len(other.paths) for other in others] == [0] * (len(lines) - 1)


def test_text_next_to_a_name_that_is_not_an_image_is_text(folder: Path) -> None:
    for line in (
        {'file_name': 'a.py', 'url': 'https://a.org/a.png'},
        {'image': 'a.png', 'images': []},
        {'image': None},
        {'meta': {'path': 'src/a.py'}},
        {'meta': {'path': 'a.png', 'repo': 'b'}},
        {'audio': {'bytes': 'x', 'path': 'a.wav'}},
        {'documents': [{'path': 'a.md'}]},
        {'size': {'bytes': 3}},
    ):
        (document,) = documents(write(folder, {'text': 'a', **line}))
        assert not document.paths


@pytest.mark.parametrize(
    'line',
    [
        {'title': 'File:Eiffel.jpg'},
        {'source': ['scans/1.png', 'scans/2.png']},
        {'name': 'a' * 300 + '.png'},
        {'name': '\0.png'},
    ],
)
def test_names_of_images_that_are_elsewhere_are_counted_in_a_warning(
    folder: Path, line: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(folder, {'text': 'a', 'images': []}, *[{'text': 'a', **line}] * 2)
    assert not any(document.paths for document in documents(path))
    (said,) = caplog.messages
    assert '2 lines name images under a key that is not read' in said
    assert f'such as {path}:2 under {next(iter(line))};' in said


def test_a_picture_that_breaks_off_is_refused_when_its_row_is_read_ahead(folder: Path) -> None:
    data = (folder / 'a.png').read_bytes()
    (folder / 'cut.png').write_bytes(data[: len(data) // 2])
    path = write(folder, {'text': '<image>', 'images': ['cut.png']})
    batches = load_rows(path).train
    with pytest.raises(ConfigError, match=rf'{path}:1: .*cut.png: cannot be read .*truncated'):
        next(batches.read_ahead(0, 4, slice(0, 1)))


def test_a_picture_that_grew_since_the_start_is_refused(folder: Path) -> None:
    batches = load_rows(write(folder, {'text': '<image>', 'images': ['b.png']})).train
    Image.new('RGB', (12, 8)).save(folder / 'b.png')
    fix = r'keep or restore it \(a run that resumes with a different file needs run.allow_changed'
    with pytest.raises(ConfigError, match=f'has changed its size .*{fix}'):
        batches[0]


def test_a_template_that_does_not_know_pictures_is_refused(folder: Path) -> None:
    template = folder / 'chat.jinja'
    template.write_text('{% for m in messages %}{{ m.role }}{% endfor %}', 'utf-8')
    line = {'messages': [{'role': 'assistant', 'content': '<image>'}], 'images': ['a.png']}
    path = write(folder, line)
    with pytest.raises(ConfigError, match=rf'{path}:1: .*each of the 1 images once'):
        load_rows(path, template=template)


def test_a_template_that_rewrites_earlier_turns_is_refused(folder: Path) -> None:
    template = folder / 'chat.jinja'
    template.write_text('{{ messages | length }}', 'utf-8')
    turn = {'role': 'assistant', 'content': 'a'}
    path = write(folder, {'messages': [turn, turn]})
    with pytest.raises(ConfigError, match=rf'{path}:1: .*writes message 1 differently'):
        load_rows(path, template=template)


def test_a_template_that_loops_ends_with_file_and_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = folder / 'chat.jinja'
    template.write_text(
        '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}', 'utf-8'
    )
    path = write(folder, {'text': 'a'}, {'messages': [{'role': 'assistant', 'content': 'a'}]})
    monkeypatch.setattr('megajax.runtime.data.image_text.chat.MAX_SECONDS', 0.1)
    with pytest.raises(ConfigError, match=rf'{path}:2: .*takes more than .* s, in line 1') as found:
        load_rows(path, template=template)
    assert found.value.exit_code == 2


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=12),
    document_mask=st.booleans(),
    mrope=st.booleans(),
)
def test_rows_hold_whole_documents(
    folder: Path, lines: list[tuple[int, int]], document_mask: bool, mrope: bool
) -> None:
    names = ('a.png', 'b.png', 'c.png')
    path = write(
        folder,
        *(
            {'text': '<image>'.join(['x' * letters] * (1 + count)), 'images': names[:count]}
            for letters, count in lines
        ),
    )
    shape = make_shape(96, document_mask=document_mask, mrope=mrope)
    batches = load_rows(path, shape, split='100,0,0').train
    sources = documents(path, shape=shape)
    found = []
    for packed, row in ((p, batches.shape.empty(1)) for p in batches._packed):
        view = {name: x[0] for name, x in row.items()}
        shape.fill(view, [document.read(shape) for document in packed])
        found += [document.place for document in packed]
        window = np.append(view['tokens'][:1], view['labels'])
        expected = np.concatenate([document.tokens for document in packed])
        np.testing.assert_array_equal(window[: len(expected)], expected)
        np.testing.assert_array_equal(view['image_index'] >= 0, view['tokens'] == IMAGE)
        assert not view['loss_mask'][view['labels'] == IMAGE].any()
        used = sum(h * w // 4 for h, w in view['image_grid'])
        assert (view['image_index'] >= 0).sum() == used
        starts = np.cumsum([0, *(len(document.tokens) for document in packed)])[:-1]
        assert view['loss_mask'].sum() == sum(d.answered.sum() for d in packed)
        assert not view['loss_mask'][starts[1:] - 1].any()
        if document_mask:
            np.testing.assert_array_equal(view['segment_ids'][starts], np.arange(len(packed)))
            assert not view['positions'][starts].any()
            if not mrope:  # as in a sequence of one document without the mask
                each = np.concatenate([np.arange(len(document.tokens)) for document in packed])
                size = min(len(each), shape.seq_len)
                np.testing.assert_array_equal(view['positions'][:size], each[:size])
        elif mrope:
            text = view['positions'][view['image_index'] < 0]
            assert (text == text[:, :1]).all()
            assert (np.diff(text[:, 0]) > 0).all()
        else:
            assert 'positions' not in view
    assert sorted(found) == sorted(document.place for document in sources)


def test_with_relevance_a_row_has_one_question(folder: Path) -> None:
    path = write(folder, *({'text': 'a<image>b', 'images': ['a.png']} for _ in range(3)))
    patches = dataclasses.replace(SHAPE.patches, budget=6)
    for options, rows in (({}, 1), ({'patches': patches}, 3)):
        assert len(load_rows(path, make_shape(images=3, **options)).train._packed) == rows


def test_a_batch_depends_on_the_seed_and_the_step_alone(folder: Path) -> None:
    lines = [{'text': f'{i} ' * 10 + '<image>', 'images': ['a.png']} for i in range(20)]
    path = write(folder, *lines)
    straight = load_rows(path, batch_size=4, split='90,10,0')
    resumed = load_rows(path, batch_size=4, split='90,10,0')
    assert straight.fingerprints == resumed.fingerprints
    whole = straight.train[7]
    parts = [resumed.train.rows(7, *rows) for rows in ((0, 3), (3, 4))]
    (ahead,) = straight.train.read_ahead(7, 8, slice(0, 4))
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
        np.testing.assert_array_equal(array, ahead[name])
    other = load_rows(path, batch_size=4, split='90,10,0', seed=1).train[7]
    assert not np.array_equal(other['tokens'], whole['tokens'])
    assert len(straight.validation) >= 1
    assert straight.validation[0]['loss_mask'].any()


def test_files_of_a_folder_are_read_and_text_needs_no_pictures(folder: Path) -> None:
    (folder / 'more').mkdir()
    Image.new('RGB', (4, 4)).save(folder / 'more/d.png')
    write(folder, {'text': 'one'}, name='one.jsonl')
    write(folder / 'more', {'text': 'two<image>', 'images': ['d.png']}, name='two.jsonl')
    data = load_rows(folder)
    assert data.summary.startswith('2 documents with 1 images; 1 sequences to train on')
    assert sorted(TOKENIZER.decode(data.train[0]['tokens'][0]).rstrip('\0'))


@pytest.mark.parametrize('content', ['', '\n\n'])
def test_an_empty_corpus_is_refused(folder: Path, content: str) -> None:
    (folder / 'data.jsonl').write_text(content)
    with pytest.raises(ConfigError, match='contains no documents'):
        load_rows(folder / 'data.jsonl')
    with pytest.raises(ConfigError, match='contains no documents'):
        load_rows(folder / 'a.png')


def test_too_few_rows_for_a_batch_are_refused(folder: Path) -> None:
    path = write(folder, {'text': 'one'}, {'text': 'two'})
    with pytest.raises(ConfigError, match=r'fills 1 training sequences .* use train.batch_size=1'):
        load_rows(path, batch_size=2)
    lines = [{'text': 'x' * (SHAPE.seq_len - 5)}] * 5
    long = write(folder, *lines, name='long.jsonl')
    for multiple, fix in ((2, 'use train.batch_size=4, or more'), (8, 'is 8; use more documents')):
        with pytest.raises(ConfigError, match=rf'fills 5 training sequences .*{fix}'):
            load_rows(long, batch_size=8, multiple=multiple)
    assert load_rows(long, batch_size=4, multiple=2).train[0]


def test_a_prompt_is_the_beginning_of_the_document_that_was_trained_on(folder: Path) -> None:
    images = ['a.png', 'b.png']
    line = {'text': 'see <image> and <image>', 'images': images}
    (document,) = documents(write(folder, line))
    trained = document.read(SHAPE)
    files = [folder / name for name in images]
    prompt = encode_prompt(line['text'], files, SHAPE, TOKENIZER).read(SHAPE)
    np.testing.assert_array_equal(prompt.tokens, trained.tokens[:-1])
    assert prompt.grids == trained.grids
    for ours, theirs in zip(prompt.patches, trained.patches, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ConfigError, match='prompt: has 2 image placeholders, but 1 files in'):
        encode_prompt(line['text'], [folder / 'a.png'], SHAPE, TOKENIZER)
    with pytest.raises(ConfigError, match=r'none.png: is not a file'):
        encode_prompt('<image>', [folder / 'none.png'], SHAPE, TOKENIZER)
