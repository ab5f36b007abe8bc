"""From a config with an encoder to batches: JSON lines, plain text and Megatron's files."""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from vlm import vlm

from megajax.core.config import Config, ConfigError
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train.feed import abstract_batch
from megajax.runtime.data import Data, load_data, make_tokenizer
from megajax.runtime.data.image_text.documents import FileDocument
from megajax.runtime.data.image_text.load import BETWEEN_CALLS, _warn_of_copies
from megajax.runtime.data.sources.commands import images_to_files
from megajax.runtime.data.tokens.indexed import write_index

pytestmark = pytest.mark.usefixtures('forked_renderers')

TURNS = [
    {'role': 'user', 'content': '<image>What?'},
    {'role': 'assistant', 'content': 'Red.'},
]
CHAT = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %};{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / 'corpus'
    folder.mkdir()
    for name in 'ab':
        Image.new('RGB', (8, 8), 'red' if name == 'a' else 'blue').save(folder / f'{name}.png')
    return folder


def write(folder: Path, *lines: object, name: str = 'data.jsonl') -> None:
    (folder / name).write_text(''.join(json.dumps(line) + '\n' for line in lines))


def config(corpus: object, *, train: dict[str, object] | None = None, **data: object) -> Config:
    return vlm(
        data={'corpus': str(corpus), 'tokenizer': 'bytes', 'split': '80,20,0'} | data,
        model={'vocab_size': 300, 'max_seq_len': 64},
        vision={'image_token': 257},
        train={'batch_size': 1, 'seq_len': 48} | (train or {}),
    )


def text_config(corpus: object, **data: object) -> Config:
    seen = config(corpus, **data).model_dump(exclude_none=True)
    return Config(**{name: keys for name, keys in seen.items() if name != 'vision'})


def shown(data: Data) -> str:
    assert data.tokenizer is not None
    batch = data.train[0]
    return data.tokenizer.decode(batch['labels'][batch['loss_mask'] == 1])


def kinds(batch: dict[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (x.shape, np.dtype(x.dtype)) for name, x in batch.items()}


def test_json_lines_with_pictures_are_read_where_a_config_has_an_encoder(folder: Path) -> None:
    write(folder, *[{'messages': TURNS, 'images': ['a.png']}] * 3)
    data = load_data(config(folder))
    assert shown(data) == 'Red.<|endoftext|>'
    assert data.summary.startswith('3 documents with 3 images')
    assert len(data.validation) == 1
    assert data.train[0]['image_grid'][0].tolist() == [[2, 2], [0, 0]]
    tokens, index = data.train[0]['tokens'], data.train[0]['image_index']
    np.testing.assert_array_equal(tokens == 257, index >= 0)


@pytest.mark.parametrize('document_mask', [False, True])
@pytest.mark.parametrize('corpus', ['text', 'lines', 'pair'])
def test_every_corpus_fills_the_arrays_that_a_step_compiles_for(
    folder: Path, corpus: str, document_mask: bool
) -> None:
    if corpus == 'lines':
        write(folder, *[{'text': 'see <image>.', 'images': ['a.png']}] * 3)
    elif corpus == 'text':
        for i in range(4):
            (folder / f'{i}.txt').write_text('plain text, nothing to see ' * 9)
    else:
        tokens = np.arange(400, dtype=np.uint16) % 250
        (folder / 'pair.bin').write_bytes(tokens.tobytes())
        with (folder / 'pair.idx').open('wb') as file:
            write_index(file, tokens.dtype, np.full(4, 100, np.int32), np.arange(5))
    of_config = config(
        folder / 'pair' if corpus == 'pair' else folder,
        tokenizer='none' if corpus == 'pair' else 'bytes',
        document_mask=document_mask,
        split='100,0,0',
    )
    batch = load_data(of_config).train[0]
    with jax.set_mesh(mesh_for(of_config)):
        assert kinds(batch) == kinds(abstract_batch(of_config))
    if corpus != 'lines':
        assert not batch['image_grid'].any()
        assert (batch['image_index'] == -1).all()
        assert (batch['positions'] == batch['positions'][..., :1]).all()
        assert batch['positions'][0, :3, 0].tolist() == [0, 1, 2]


def test_of_a_folder_with_json_lines_no_other_text_is_read(folder: Path) -> None:
    write(folder, *[{'text': 'a line'}] * 2)
    (folder / 'README.md').write_text('about them')
    assert load_data(config(folder, split='100,0,0')).summary.startswith('2 documents')


def test_captions_in_files_next_to_their_images_are_refused_with_the_command_that_joins_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / 'more').mkdir()
    Image.new('RGB', (8, 8)).save(folder / 'more/b.JPG', 'JPEG')
    (folder / 'b.png').unlink()
    for name in ('a', 'more/b'):
        (folder / f'{name}.txt').write_text(f'the color of {name} ' * 2)
        (folder / f'{name}.json').write_text('{"caption": "a"}')
    with pytest.raises(ConfigError, match=r'data.corpus: .* has an image for 4 of its') as found:
        load_data(config(folder, split='100,0,0'))
    command = str(found.value).rpartition('in the folder: ')[2]
    command = command.replace('python -c', f'{sys.executable} -c')
    subprocess.run(['sh', '-c', command], check=True, cwd=folder)
    lines = map(json.loads, (folder / 'NEW.jsonl').read_text('utf-8').splitlines())
    captions = [f'the color of {name} ' * 2 for name in ('a', 'more/b')]
    # On a line of its own, a caption counts whole with relevance, too.
    assert [line['text'] for line in lines] == [f'<image>\n{caption}' for caption in captions]
    data = load_data(config(folder, split='100,0,0'))
    assert data.summary.startswith('2 documents with 2 images')
    assert 'are not used' not in caplog.text


@pytest.mark.parametrize('name', ['data.jsonl', 'text.txt'])
def test_images_that_no_line_names_are_counted_in_a_warning(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, *['a line' if name == 'text.txt' else {'text': 'a line'}] * 20, name=name)
    load_data(text_config(folder))
    assert 'are not used' not in caplog.text
    load_data(config(folder))
    assert 'no line names an image, so the 2 images of the folder are not used' in caplog.text


@pytest.mark.parametrize('kind', ['lines', 'pages'])
def test_images_with_the_names_of_texts_that_are_no_captions_are_counted_in_a_warning(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in 'ab':
        suffix = {'lines': 'txt', 'pages': 'md'}[kind]
        (folder / f'{name}.{suffix}').write_text(f'what {name} shows ' * 20)
    if kind == 'lines':
        write(folder, *[{'text': 'a line', 'images': []}] * 20)
    load_data(config(folder))
    assert 'no line names an image, so the 2 images of the folder are not used' in caplog.text


def test_a_chat_template_writes_the_turns(folder: Path, tmp_path: Path) -> None:
    write(folder, *[{'messages': TURNS, 'images': ['a.png']}] * 2)
    (tmp_path / 'chat.jinja').write_text(CHAT)
    data = load_data(config(folder, chat_template=str(tmp_path / 'chat.jinja')))
    assert shown(data) == 'Red.;<|endoftext|>'


def test_a_model_of_text_learns_the_turns_of_messages(folder: Path) -> None:
    write(folder, *[{'messages': [{**TURNS[0], 'content': 'What?'}, TURNS[1]]}] * 2)
    data = load_data(text_config(folder))
    assert shown(data) == 'Red.<|endoftext|>'
    assert 'pixels' not in data.train[0]
    assert data.summary == '2 documents; 1 sequences to train on, 1 to validate'


@pytest.mark.parametrize('document_mask', [False, True])
def test_chats_of_a_text_model_with_mrope_have_one_number_per_position(
    folder: Path, document_mask: bool
) -> None:
    write(folder, *[{'messages': [{**TURNS[0], 'content': 'What?'}, TURNS[1]]}] * 2)
    of_text = text_config(folder, document_mask=document_mask)
    assert of_text.model.position == 'mrope'
    batch = load_data(of_text).train[0]
    assert kinds(batch) == kinds(abstract_batch(of_text))
    assert ('positions' in batch) == document_mask


@pytest.mark.parametrize('name', ['data.json', 'data.ndjson', 'data.parquet'])
def test_messages_are_learned_from_every_kind_of_file(folder: Path, name: str) -> None:
    line = {'messages': [{**TURNS[0], 'content': 'What?'}, TURNS[1]]}
    if name == 'data.parquet':
        pyarrow = pytest.importorskip('pyarrow')
        from pyarrow import parquet

        columns = pyarrow.Table.from_pylist([{**line, 'images': None}, {**line, 'images': []}])
        parquet.write_table(columns, folder / name)
        (folder / 'README.md').write_text('About the conversations.')
    else:
        write(folder, *[line] * 2, name=name)
    for corpus in (folder, folder / name):
        assert shown(load_data(text_config(corpus))) == 'Red.<|endoftext|>'


def test_a_table_of_messages_whose_first_row_has_none_is_read_as_messages(folder: Path) -> None:
    pyarrow = pytest.importorskip('pyarrow')
    from pyarrow import parquet

    chat = [{**TURNS[0], 'content': 'What?'}, TURNS[1]]
    rows = [{'messages': None, 'text': 'Red.'}, {'messages': chat, 'text': None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / 'data.parquet')
    assert shown(load_data(text_config(folder))) == 'Red.<|endoftext|>'


@pytest.mark.parametrize(('text', 'chat'), [('a.jsonl', 'b.jsonl'), ('b.jsonl', 'a.jsonl')])
def test_files_of_text_and_of_messages_are_read_in_every_order(
    folder: Path, text: str, chat: str
) -> None:
    write(folder, {'text': 'Blue.'}, {'text': 'Red.'}, name=text)
    write(folder, {'messages': [{**TURNS[0], 'content': 'What?'}, TURNS[1]]}, name=chat)
    data = load_data(text_config(folder))
    assert data.summary.startswith('3 documents; ')
    rows = (data.train[0], data.validation[0])
    learned = ''.join(data.tokenizer.decode(x['labels'][x['loss_mask'] == 1]) for x in rows)
    assert ('What?' in learned, 'Red.' in learned, 'Blue.' in learned) == (False, True, True)


def test_messages_are_read_from_a_file_whose_name_is_not_utf_8(folder: Path) -> None:
    chat = [{**TURNS[0], 'content': 'What?'}, TURNS[1]]
    write(folder, *[{'messages': chat}] * 2, name=os.fsdecode(b'caf\xe9.jsonl'))
    assert shown(load_data(text_config(folder))) == 'Red.<|endoftext|>'


def test_a_corpus_that_is_not_there_is_named_beside_a_chat_template(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'data.corpus: no such file or folder: .*gone.jsonl'):
        load_data(text_config(folder / 'gone.jsonl', chat_template=str(folder / 't.jinja')))


def test_messages_of_another_form_name_the_form_that_is_read(folder: Path) -> None:
    write(folder, *[{'conversations': [{'from': 'human', 'value': 'a'}]}] * 2)
    with pytest.raises(ConfigError, match=r'data.jsonl:1: .*"text" nor "messages".*conversations'):
        load_data(text_config(folder))
    with pytest.raises(ConfigError, match=r'data.jsonl:1: .*"text" or "messages".*jq -c'):
        load_data(config(folder))


@pytest.mark.skipif(shutil.which('jq') is None, reason='jq is not installed')
def test_the_command_for_conversations_with_images_writes_what_is_read(folder: Path) -> None:
    turns = [{'from': 'human', 'value': '<image>What?'}, {'from': 'gpt', 'value': 'Red.'}]
    write(folder, *[{'image': 'a.png', 'conversations': turns}] * 2)
    with pytest.raises(ConfigError, match='"text" or "messages"') as found:
        load_data(config(folder))
    command = str(found.value).rpartition('write messages: ')[2]
    command = command.replace('OLD', 'data.jsonl').replace('NEW', 'new')
    subprocess.run(['sh', '-c', command], check=True, cwd=folder)
    (folder / 'data.jsonl').unlink()
    data = load_data(config(folder))
    assert data.summary.startswith('2 documents with 2 images')
    assert shown(data) == 'Red.<|endoftext|>'


def test_a_tokenizer_is_trained_on_what_is_trained_on(folder: Path) -> None:
    write(folder, *[{'messages': TURNS, 'images': ['a.png']}] * 20)
    many = config(folder, tokenizer='bpe')
    tokenizer = make_tokenizer('bpe', 300, ['What?\nRed.'] * 16, special=['<image>'])
    assert tokenizer.token_id('<image>') == 263
    seen = many.vision.model_copy(update={'image_token': 263})
    data = load_data(many.model_copy(update={'vision': seen}))
    assert data.tokenizer.fingerprint == tokenizer.fingerprint
    with pytest.raises(ConfigError, match='257 is not the image placeholder token; use 263'):
        load_data(many)


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        ({'order': 'megatron'}, 'data.order: megatron cuts sequences .*; use stateless'),
        ({'chat_template': 'gone.jinja'}, 'gone.jinja: cannot be read'),
        ({'tokenizer': 'none'}, 'data.tokenizer: none is not supported for text'),
    ],
)
def test_what_does_not_go_with_pictures_is_refused(
    folder: Path, keys: dict[str, str], message: str
) -> None:
    write(folder, *[{'text': 'see <image>.', 'images': ['a.png']}] * 2)
    with pytest.raises(ConfigError, match=message):
        load_data(config(folder, **keys))


def test_a_template_without_chats_is_refused(folder: Path) -> None:
    (folder / 'a.txt').write_text('text ' * 99)
    with pytest.raises(ConfigError, match=r'data.chat_template: is for JSON lines'):
        load_data(config(folder, chat_template='chat.jinja'))


def test_a_picture_for_a_model_of_text_is_refused_with_its_line(folder: Path) -> None:
    write(folder, {'messages': TURNS, 'images': ['a.png']})
    with pytest.raises(ConfigError, match=r'data.jsonl:1: has 1 images, but this is a text'):
        load_data(text_config(folder))


@pytest.mark.parametrize(('token', 'fix'), [(65, '257'), (256, '257'), (258, '257')])
def test_a_token_that_a_text_could_have_is_no_image_token(
    folder: Path, token: int, fix: str
) -> None:
    write(folder, *[{'text': 'a line'}] * 2)
    wrong = config(folder)
    vision = wrong.vision.model_copy(update={'image_token': token})
    with pytest.raises(ConfigError, match=f'vision.image_token: {token} .*; use {fix}'):
        load_data(wrong.model_copy(update={'vision': vision}))


@pytest.mark.skipif(shutil.which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize('form', ['images', 'part', 'image', 'conversation'])
def test_the_command_for_images_inside_a_table_writes_files_and_what_is_read(
    folder: Path, form: str
) -> None:
    tables, table = map(pytest.importorskip, ('pyarrow', 'pyarrow.parquet'))
    image = {'bytes': (folder / 'a.png').read_bytes(), 'path': None}
    parts = [{'type': 'image', 'image': image}, {'type': 'text', 'text': 'What?'}]
    said = [{'from': 'human', 'value': '<image>What?'}, {'from': 'gpt', 'value': 'Red.'}]
    asked = {'role': 'user', 'content': parts}
    answer = {'role': 'assistant', 'content': [{'type': 'text', 'text': 'Red.'}]}
    row = {
        'images': {'messages': TURNS, 'images': [image]},
        'part': {'messages': [asked, answer]},
        'image': {'text': 'Red.', 'image': image},
        'conversation': {'conversations': said, 'image': image},
    }[form]
    table.write_table(tables.Table.from_pylist([row] * 2), folder / 'old.parquet')
    for old, new in (('old.parquet', 'new.jsonl'), ('new.jsonl', 'last.jsonl')):
        with pytest.raises(ConfigError) as found:
            load_data(config(folder / old))
        command = re.search(r'(?:python|jq) -[ c].* > NEW\.jsonl$', str(found.value))[0]
        command = command.replace('OLD', old).replace('NEW.jsonl', new)
        command = command.replace('python -c', f'{sys.executable} -c')
        subprocess.run(['sh', '-c', command], check=True, cwd=folder)
        if form in ('images', 'part'):
            break
    data = load_data(config(folder / new))
    assert data.summary.startswith('2 documents with 2 images')
    assert 'Red.' in shown(data)


def test_the_command_for_images_inside_tables_keeps_those_of_each_table(folder: Path) -> None:
    tables, table = map(pytest.importorskip, ('pyarrow', 'pyarrow.parquet'))
    command = images_to_files('old.parquet:1').partition(': ')[2].partition(' | jq')[0]
    command = command.replace('python -c', f'{sys.executable} -c')
    (folder / 'out').mkdir()
    for number, name in enumerate('ab'):
        data = (folder / f'{name}.png').read_bytes()
        row = {'images': [{'bytes': data, 'path': name}], 'meta': {'bytes': number, 'path': 'x.py'}}
        table.write_table(tables.Table.from_pylist([row]), folder / f'{name}.parquet')
        written = command.replace('OLD', f'{name}.parquet').replace('NEW', f'out/{name}')
        subprocess.run(f'{written} > out/{name}.jsonl', shell=True, check=True, cwd=folder)
    for number, name in enumerate('ab'):
        line = json.loads((folder / f'out/{name}.jsonl').read_text())
        assert line['meta'] == {'bytes': number, 'path': 'x.py'}
        (image,) = line['images']
        assert image.endswith('.png')
        assert (folder / 'out' / image).read_bytes() == (folder / f'{name}.png').read_bytes()


def test_images_inside_lines_are_not_for_a_model_of_text(folder: Path) -> None:
    write(folder, {'messages': TURNS, 'images': [{'bytes': 'x', 'path': 'a.png'}]})
    with pytest.raises(ConfigError, match=r'data.jsonl:1: has 1 images, but this is a text'):
        load_data(text_config(folder))
    with pytest.raises(ConfigError, match='images are read from files; write the images to files'):
        load_data(config(folder))


def test_progress_is_told_again_and_again_while_lines_are_read(folder: Path) -> None:
    write(folder, *[{'text': 'a', 'images': []}] * (2 * BETWEEN_CALLS + 1))
    told = []
    load_data(config(folder), progress=lambda: told.append(1))
    assert len(told) == 2


def test_copies_are_found_without_a_copy_of_all_tokens(caplog: pytest.LogCaptureFixture) -> None:
    documents = [
        FileDocument(place='', tokens=np.full(9999, i), answered=np.ones(1), paths=(), grids=())
        for i in (*range(40), 0)
    ]
    tracemalloc.start()
    _warn_of_copies([documents[:30], documents[30:]])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert '1 of 11 documents to validate on are copies' in caplog.text
    assert most < sum(document.tokens.nbytes for document in documents) / 4


@pytest.mark.parametrize('as_chat', [True, False])
def test_copies_on_both_sides_of_the_split_are_counted(
    folder: Path, as_chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def line(number: int) -> object:
        turns = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': f'{number}'}]
        return {'messages': turns} if as_chat else {'text': f'document {number} ' * 5}

    write(folder, *map(line, range(40)))
    load_data(text_config(folder))
    assert 'copies' not in caplog.text
    write(folder, *map(line, range(40)), *map(line, range(40)), name='again.jsonl')
    write(folder, name='data.jsonl')
    load_data(text_config(folder))
    said = re.search(r'(\d+) of (\d+) documents to validate on are copies', caplog.text)
    assert said
    assert 0 < int(said[1]) <= int(said[2]) < 40


@pytest.mark.parametrize('ends', [True, False])
@pytest.mark.parametrize('answers', [1, 2])
def test_answers_that_a_template_does_not_end_are_counted(
    folder: Path, ends: bool, answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    end = '<|endoftext|>' if ends else ';'
    (folder / 'chat.jinja').write_text(CHAT.replace(';', end))
    turns = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}] * answers
    write(folder, *[{'messages': turns}] * 20)
    load_data(text_config(folder, chat_template=str(folder / 'chat.jinja')))
    said = [line for line in caplog.messages if line.startswith('data.chat_template')]
    if ends or answers == 1:
        assert not said
    else:
        assert 'in 20 documents the model learns to end only the last answer' in said[0]
