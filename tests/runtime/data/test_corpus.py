"""A file is read as what it is; documents do not depend on where they are, nor on their number."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path
from shutil import which

import pytest
from ordinary_user import as_ordinary_user
from support import ROOT

from megajax.core.config import ConfigError
from megajax.runtime.data import Document, read_documents, split_documents
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.data.sources.read import check_inputs
from megajax.runtime.data.sources.shapes import as_messages
from megajax.runtime.data.text.prompts import read_prompts


def write(root: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(root)


def some(count: int) -> list[Document]:
    return [Document(name=f'{i}.txt', text=f'text {i}') for i in range(count)]


def test_the_standard_library_is_the_interpreters_own_without_tests_and_packages() -> None:
    names = [document.name for document in read_documents('stdlib')]
    assert {'os.py', 'json/decoder.py'} <= set(names)
    assert names == sorted(names)
    folders = {folder for name in names for folder in name.split('/')[:-1]}
    assert not folders & {
        'site-packages',
        'dist-packages',
        '__pycache__',
        'test',
        'tests',
        'idle_test',
    }
    assert all((Path(sysconfig.get_path('stdlib')) / name).is_file() for name in names)


def test_a_folder_is_its_text_files(tmp_path: Path) -> None:
    no_text = {
        'empty.txt': b'',
        '.git/config': b'hidden',
        '.hidden': b'x',
        'image.png': b'PNG\0\xff',
    }
    files = {'b.txt': b'b\r\n', 'a/ä.py': 'é'.encode(), **no_text}
    expected = [Document(name='a/ä.py', text='é'), Document(name='b.txt', text='b\r\n')]
    assert (
        read_documents(write(tmp_path / 'here', files))
        == read_documents(write(tmp_path / 'there', files))
        == expected
    )


def test_a_file_is_one_document(tmp_path: Path) -> None:
    write(tmp_path, {'a.txt': b'one\ntwo\n', 'b.txt': b'other'})
    assert read_documents(str(tmp_path / 'a.txt')) == [Document(name='a.txt', text='one\ntwo\n')]


@pytest.mark.parametrize('url', ['s3://bucket/a.jsonl', 'hf://datasets/o/n/a.parquet'])
def test_a_url_is_refused_with_the_command_that_reads_it(url: str) -> None:
    with pytest.raises(ConfigError, match=f'megajax data build OUT --input {url}, and set data.co'):
        read_documents(url)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('missing', None, 'data.corpus: no such file or folder: .*missing'),
        ('empty.txt', b'', r'data.corpus: .*empty\.txt.* contains no text'),
        ('image.png', b'PNG\0\xff', r'image\.png: is binary'),
        (
            'latin1.txt',
            'né'.encode('latin-1'),
            r'latin1\.txt: is not UTF-8 at byte 1 .*; convert it',
        ),
        (
            'folder/latin1.txt',
            'né'.encode('latin-1'),
            r'latin1\.txt: is not UTF-8 at byte 1 .*; convert it',
        ),
        ('empty.jsonl', b'{"text": ""}\n' * 3, r'data.corpus: .*empty\.jsonl.* contains no text'),
        ('folder/empty.txt', b'', 'data.corpus: .*folder.* contains no text'),
    ],
)
def test_a_corpus_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        write(tmp_path, {name: content})
    with pytest.raises(ConfigError, match=message):
        read_documents(str(tmp_path / name.split('/')[0]))


@pytest.mark.parametrize('name', ['a b.csv', 'a.tsv', 'a.csv.gz'])
def test_the_command_that_the_error_of_a_table_gives_writes_the_documents_of_its_rows(
    tmp_path: Path, name: str
) -> None:
    rows = [{'text': 'one, "quoted"\nand two\tlines', 'n': '1'}, {'text': 'é' * 200_000, 'n': '2'}]
    table = io.StringIO(newline='')
    dialect = 'excel-tab' if '.tsv' in name else 'excel'
    writer = csv.DictWriter(table, ['text', 'n'], dialect=dialect)
    writer.writeheader()
    writer.writerows(rows)
    content = f'\ufeff{table.getvalue()}'.encode()
    write(tmp_path, {name: gzip.compress(content) if name.endswith('.gz') else content})
    with pytest.raises(ConfigError) as error:
        read_documents(str(tmp_path / name))
    command = str(error.value).split('named "text": ')[1].split('; or rename')[0]
    new = tmp_path / 'new.jsonl'
    command = command.replace('| python', f'| {sys.executable}').replace('NEW.jsonl', str(new))
    subprocess.run(['sh', '-c', command], check=True)
    assert texts(new) == [row['text'] for row in rows]


def test_a_table_is_read_as_text_among_other_files_or_if_its_format_is_given(
    tmp_path: Path,
) -> None:
    write(tmp_path, {'a.py': b'x = 1\n', 'b.csv': b'text,n\nx,1\n', 'only/b.csv': b'a,b\n'})
    assert texts(tmp_path) == ['x = 1\n', 'text,n\nx,1\n', 'a,b\n']
    check_inputs(find_inputs([f'{tmp_path}/[ab].*'], None), 'text')
    check_inputs(find_inputs([f'{tmp_path}/b.csv'], 'text'), 'text')
    for pattern in ('b.csv', '*.csv', 'b.*'):
        with pytest.raises(ConfigError, match=r'b\.csv: is CSV or TSV'):
            check_inputs(find_inputs([f'{tmp_path}/{pattern}'], None), 'text')
    with pytest.raises(ConfigError, match=r'b\.csv: is CSV or TSV'):
        read_prompts(tmp_path / 'b.csv')


@pytest.mark.parametrize(
    ('line', 'name'),
    [
        ({'question': 'a', 'answer': 'b'}, 'question'),
        ({'query': 'a', 'response': 'b'}, 'query'),
        ({'input': 'a', 'target': 'b'}, 'input'),
        ({'text': 'a'}, 'text'),
    ],
)
def test_a_line_without_a_prompt_gets_the_command_that_writes_one(
    tmp_path: Path, line: dict[str, object], name: str
) -> None:
    (tmp_path / 'a.jsonl').write_text(json.dumps(line))
    command = re.escape(f"jq -c '{{prompt: .{name}}}' OLD > NEW.jsonl")
    with pytest.raises(ConfigError, match=command):
        read_prompts(tmp_path / 'a.jsonl')


def test_the_column_of_a_table_is_named_as_its_reader_needs_it(tmp_path: Path) -> None:
    write(tmp_path, {'b.csv': b'text,n\nx,1\n'})
    with pytest.raises(ConfigError, match='a column named "prompt"'):
        read_prompts(tmp_path / 'b.csv')
    with pytest.raises(ConfigError, match='a column named "body"'):
        check_inputs(find_inputs([f'{tmp_path}/b.csv'], None), 'body')


def test_the_readme_of_a_data_set_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {'a/README.md': b'# A\n', 'a/b/a.csv': b'text\nx\n', 'c/README.md': b'# C\n'})
    with pytest.raises(ConfigError, match=r'a\.csv: is CSV or TSV'):
        read_documents(str(tmp_path / 'a'))
    assert texts(tmp_path / 'c') == ['# C\n']
    write(tmp_path, {'c/x.txt': b'x\n', 'c/y.jsonl.gz': gzip.compress(JSONL)})
    for pattern in ('c/*', '[cx]/**'):
        inputs = find_inputs([f'{tmp_path}/{pattern}'], None)
        assert [Path(input.path).name for input in inputs] == ['x.txt', 'y.jsonl.gz']
    assert 'README.md, which describes the data' in caplog.text
    (tmp_path / 'c/y.jsonl.gz').unlink()
    assert texts(tmp_path / 'c') == ['x\n']
    assert 'reading x.txt, but not README.md' in caplog.text
    write(tmp_path, {'c/more.md': b'more\n'})
    assert texts(tmp_path / 'c') == ['# C\n', 'more\n', 'x\n']


def test_the_split_is_by_document_and_in_proportion() -> None:
    documents = some(2000)
    parts = split_documents(documents, '80,15,5')
    assert (
        sorted(
            (document for part in parts for document in part),
            key=lambda document: documents.index(document),
        )
        == documents
    )
    assert [len(part) / 2000 for part in parts] == pytest.approx([0.8, 0.15, 0.05], abs=0.02)
    assert split_documents(documents[::-1], '80,15,5') == parts


def test_the_split_does_not_move_when_documents_are_added() -> None:
    before, after = split_documents(some(500), '8,1,1'), split_documents(some(1000), '8,1,1')
    for few, many in zip(before, after, strict=True):
        assert {document.name for document in few} <= {document.name for document in many}


@pytest.mark.parametrize('count', [3, 4, 10])
@pytest.mark.parametrize('split', ['95,5,0', '0.98,0.01,0.01', '1,98,1', '1,0,0', '1,0,1'])
def test_a_part_with_a_weight_is_never_empty_and_one_without_always_is(
    count: int, split: str
) -> None:
    parts = split_documents(some(count), split)
    assert [len(part) > 0 for part in parts] == [float(weight) > 0 for weight in split.split(',')]
    assert sum(len(part) for part in parts) == count


def test_one_document_is_cut() -> None:
    (train,), (validation,), test = split_documents(
        [Document(name='a', text='0123456789')], '80,20,0'
    )
    assert (train.text, validation.text, test) == ('01234567', '89', [])


def test_fewer_documents_than_parts() -> None:
    with pytest.raises(ConfigError, match=r'data.split: .*documents \(2\); use'):
        split_documents(some(2), '90,5,5')


LINES = [json.dumps({'text': f'line {i}: é\n', 'id': i}) for i in range(12)]
TEXTS = [f'line {i}: é\n' for i in range(12)]
JSONL = '\n'.join([*LINES[:3], '', *LINES[3:]]).encode()
WRITERS = {'gz': gzip.compress, 'bz2': bz2.compress, 'xz': lzma.compress}


def texts(corpus: Path) -> list[str]:
    return [document.text for document in read_documents(str(corpus))]


def test_a_text_corpus_leaves_out_no_images(tmp_path: Path) -> None:
    line = {'text': 'A cat <image>', 'images': ['a.png', 'b.png']}
    (tmp_path / 'a.jsonl').write_text(json.dumps({**line, 'images': []}))
    assert texts(tmp_path) == ['A cat <image>']
    (tmp_path / 'a.jsonl').write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=r'a.jsonl:1: has 2 images, .*use a model with'):
        texts(tmp_path)


@pytest.mark.parametrize('image', ['a.png', {'bytes': None, 'path': 'a.png'}])
@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_placeholders_of_images_under_another_key_are_no_text(
    tmp_path: Path, name: str, image: object
) -> None:
    for text in ('A cat', 'A cat <image>'):
        if name == 'a.parquet':
            write_parquet(tmp_path / name, text=[text], image=[image])
        else:
            (tmp_path / name).write_text(json.dumps({'text': text, 'image': image}))
        if text == 'A cat':
            assert texts(tmp_path) == [text]
    with pytest.raises(ConfigError, match=r'has 1 images, .*use a model with a vision section'):
        texts(tmp_path)


@pytest.mark.parametrize('text', ['A feed', 'A feed: <image>'])
@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
@pytest.mark.parametrize(
    'key',
    [
        {'meta': {'path': 'feed.png', 'repo': 'b'}},
        {'meta': {'bytes': 3, 'path': 'feed.xml'}},
        {'meta': {'bytes': 3}},
        {'documents': [{'path': 'a.md'}]},
        {'title': 'File:A.jpg'},
        {'image': 'python:3.12'},
    ],
)
def test_a_text_may_have_the_path_of_its_source(
    tmp_path: Path, key: dict[str, object], name: str, text: str
) -> None:
    if name == 'a.parquet':
        write_parquet(tmp_path / name, text=[text], **{key: [value] for key, value in key.items()})
    else:
        (tmp_path / name).write_text(json.dumps({'text': text, **key}))
    assert texts(tmp_path) == [text]


def test_all_images_under_another_key_are_counted(tmp_path: Path) -> None:
    line = {'text': '<image><image>', 'image': ['a.png', 'b.png']}
    (tmp_path / 'a.jsonl').write_text(json.dumps(line))
    with pytest.raises(ConfigError, match='has 2 images, but only the text is read'):
        texts(tmp_path)


def write_parquet(path: Path, **columns: list[object]) -> None:
    pyarrow = pytest.importorskip('pyarrow')
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    'name',
    ['a.jsonl', 'a.json', 'a.ndjson', 'a.JSON', 'a.jsonl.gz', 'a.json.bz2', 'a.ndjson.xz'],
)
def test_each_line_of_json_is_a_document(tmp_path: Path, name: str) -> None:
    compress = WRITERS.get(name.rpartition('.')[2], bytes)
    (tmp_path / name).write_bytes(compress(codecs.BOM_UTF8 + JSONL))
    assert texts(tmp_path) == texts(tmp_path / name) == TEXTS


def test_each_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    write_parquet(tmp_path / 'a.parquet', text=TEXTS, id=[*range(12)])
    assert texts(tmp_path) == texts(tmp_path / 'a.parquet') == TEXTS


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_a_first_text_that_is_null_is_named(tmp_path: Path, name: str) -> None:
    if name == 'a.parquet':
        write_parquet(tmp_path / name, text=[None, 'a'])
    else:
        (tmp_path / name).write_text('{"text": null}\n{"text": "a"}\n')
    with pytest.raises(ConfigError, match="'text' is null, not text; fix it"):
        read_documents(str(tmp_path))


def test_what_comes_with_a_dataset_is_not_read_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / 'data/train-00000-of-00001.parquet', text=TEXTS)
    (tmp_path / 'README.md').write_text('# A dataset')
    (tmp_path / 'dataset_infos.json').write_text('{"default": {"description": "of lines"}}')
    (tmp_path / 'a.png').write_bytes(b'\x89PNG\0')
    assert texts(tmp_path) == TEXTS
    assert 'reading data/train-00000-of-00001.parquet, but not README.md, data' in caplog.text
    assert 'png' not in caplog.text


def test_linked_folders_are_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = 'here/own/a.jsonl', 'there/b.jsonl', 'there/more/c.jsonl'
    write(tmp_path, {name: b'{"text": "%s"}\n' % name.encode() for name in names})
    links = {'linked': '../there', 'again': '../there/more', 'an_own': 'own', 'up': '..'}
    for name, target in {**links, 'gone.jsonl': 'nowhere'}.items():
        (tmp_path / 'here' / name).symlink_to(target)
    found = read_documents(str(tmp_path / 'here'))
    assert {document.name: document.text for document in found} == {
        'again/c.jsonl:000000000000': names[2],
        'linked/b.jsonl:000000000000': names[1],
        'own/a.jsonl:000000000000': names[0],
    }
    assert 'but not gone.jsonl' in caplog.text


@pytest.mark.parametrize('closed', ['.', 'more'])
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, closed: str) -> None:
    write(tmp_path, {'a.jsonl': b'{"text": "a"}\n', 'more/b.jsonl': b'{"text": "b"}\n'})
    (tmp_path / closed).chmod(0)
    folder = re.escape(str(tmp_path / closed))
    with pytest.raises(ConfigError, match=f'^data.corpus: {folder} cannot be read: Permission de'):
        as_ordinary_user(lambda: read_documents(str(tmp_path)))
    (tmp_path / closed).chmod(0o755)


def test_settings_in_json_are_a_text_among_texts(tmp_path: Path) -> None:
    for name, content in {'a.json': '{"name": "a"}\n', 'b.json': '{\n "b": [1]\n}\n'}.items():
        (tmp_path / name).write_text(content)
    assert texts(tmp_path) == ['{"name": "a"}\n', '{\n "b": [1]\n}\n']


@pytest.mark.parametrize('end', ['\u2028', '\u2029', '\x85', '\f', '\v', '\x1c', '\r'])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, end: str) -> None:
    text, path = f'one{end}two', tmp_path / 'a.jsonl'
    path.write_text(json.dumps({'text': text, 'prompt': text}, ensure_ascii=False) + '\n')
    assert texts(path) == read_prompts(path) == [text]
    (tmp_path / 'a.txt').write_bytes(f'\ufeff{text}\r\n\nthree\n'.encode())
    assert read_prompts(tmp_path / 'a.txt') == [text, '', 'three']
    assert texts(tmp_path / 'a.txt') == [f'{text}\r\n\nthree\n']


ARRAY = ('[' + ',\n'.join(LINES) + ']').encode()


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.txt', JSONL, r'a.txt: is JSON lines \(its first line: {"text": "line 0.*a.jsonl'),
        ('a', b'{"messages": []}', r'a: is JSON lines .*rename it to .*/a.jsonl'),
        ('a.txt.gz', gzip.compress(JSONL, mtime=0), r'rename it to .*/a.jsonl.gz'),
        ('a.json', ARRAY, r'a.json: is a JSON array \(its first line: \[{"text".* jq -c'),
        ('a.txt', ARRAY, r'a.txt: is a JSON array'),
        ('a.json', json.dumps({'text': 'x'}, indent=1).encode(), r'is JSON over several lines'),
        ('a.txt', gzip.compress(JSONL, mtime=0), r'compressed by gzip .*rename it to .*a.txt.gz'),
        ('a.jsonl', lzma.compress(JSONL), r'compressed by xz .*rename it to .*a.jsonl.xz'),
        ('a.txt', b'PAR1\x15\x04', r'a.txt: is Parquet .*rename it to .*a.txt.parquet'),
        ('folder/a.arrow', b'\xff\xff\xff\xffx\0', r'a.arrow: is Arrow .*to_parquet'),
        ('a.txt', 'text'.encode('utf-16'), r'is UTF-16 .*; convert it: iconv -f UTF-16'),
        ('folder/a.txt', 'text'.encode('utf-16'), r'is UTF-16 '),
        (
            'a b.txt',
            'text'.encode('utf-32'),
            r"UTF-32 .*: iconv -f UTF-32 -t UTF-8 '.*a b.txt' >",
        ),
        ("a'b.pdf", b'%PDF-1.7\n', r"pdftotext '.*a'\"'\"'b\.pdf' NEW"),
        ('a b.json', ARRAY, r"jq -c '.\[\]' '.*a b.json' > NEW"),
        ('a.parquet', b'version https://git-lfs.github.com/spec/v1\n', r'a Git LFS pointer.*pull'),
        ('folder/a.txt', b'version https://git-lfs.github.com/spec/v1\n', r'a Git LFS pointer'),
        ('a.jsonl', b'<!DOCTYPE html>\n<html>', r'an HTML page, .*first line: <!DOCTYPE html>'),
        ('a.parquet', b'<html><body>404', r'a.parquet: is an HTML page'),
        ('a.zip', b'PK\3\4 and more', r'a.zip: is a ZIP archive, .*; unpack it'),
        ('a.xlsx', b'PK\3\4 and more', r'a.xlsx: is a ZIP archive, .* save the .* as plain text'),
        ('a.pdf', b'%PDF-1.7\n%\xe2', r'is PDF \(its first line: %PDF-1.7\); .*pdftotext .*a.pdf'),
        ('a.csv', b'text,n\nx,1\n', r'a.csv: is CSV or TSV \(its first line: text,n\); .*a.txt to'),
        (
            'a.TSV.gz',
            gzip.compress(b'a\tb\n', mtime=0),
            r'is CSV or TSV .*gzip -dc .*excel-tab.*a.txt.gz',
        ),
        ('a.csv', JSONL, r'a.csv: is JSON lines .*rename it to .*a.jsonl'),
        ('a.csv', b'<html>\n', r'a.csv: is an HTML page'),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_its_first_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    write(tmp_path, {name: content})
    if name.endswith('.parquet'):
        pytest.importorskip('pyarrow')
    with pytest.raises(ConfigError, match=message):
        read_documents(str(tmp_path / name.split('/')[0]))
    with pytest.raises(ConfigError, match=message):
        check_inputs(find_inputs([str(tmp_path / name)], None), 'text')


def test_a_page_of_html_and_a_line_of_settings_are_texts(tmp_path: Path) -> None:
    (tmp_path / 'a.html').write_text('<html>')
    (tmp_path / 'b.txt').write_text('{"name": 1}\n')
    assert texts(tmp_path) == ['<html>', '{"name": 1}\n']


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ({'prompt': 'a', 'completion': 'b'}, 'role: "user", content: .prompt}'),
        ({'instruction': 'a', 'input': '', 'output': 'b'}, 'join'),
        ({'conversations': [{'from': 'human', 'value': 'a'}]}, '.conversations'),
        ({'dialog': ['a', 'b']}, '.dialog'),
        ({'context': '', 'question': 'a', 'answers': {'text': ['b']}}, 'name the text "text"'),
        ({'conversation': [{'role': 'user', 'content': 'a'}]}, '{messages: .conversation}'),
        ({'body': 'a'}, r'its keys: body\); name the text "text", or build .* --json-key'),
    ],
)
def test_lines_of_another_form_name_what_is_read(
    tmp_path: Path, line: dict[str, object], message: str
) -> None:
    (tmp_path / 'a.jsonl').write_text(json.dumps(line))
    with pytest.raises(ConfigError, match='neither "text" nor "messages"') as caught:
        read_documents(str(tmp_path / 'a.jsonl'))
    assert re.search(message if '--' in message else re.escape(message), str(caught.value))


def test_the_page_shows_the_error_of_such_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = {'conversations': [{'from': 'human', 'value': 'a'}]}
    Path('sharegpt.jsonl').write_text(json.dumps(line))
    with pytest.raises(ConfigError) as caught:
        read_documents('sharegpt.jsonl')
    assert f'error: {caught.value}\n' in (ROOT / 'docs/data.md').read_text()


def converted(line: dict[str, object]) -> dict[str, list[dict[str, str]]]:
    """The line that the command for a line writes."""
    command = as_messages(line, 'a.jsonl:1').partition("jq -c '")[2].rpartition("' OLD")[0]
    done = subprocess.run(
        ['jq', '-c', command], input=json.dumps(line), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize(
    'line',
    [
        {'prompt': 'a', 'completion': 'b'},
        {'instruction': 'a', 'input': '', 'output': 'b'},
        {'instruction': 'a', 'output': 'b'},
        {'instruction': 'a', 'context': '', 'response': 'b'},
        {'input': 'a', 'target': 'b'},
        {'inputs': 'a', 'targets': 'b'},
        {'question': 'a', 'answer': 'b'},
        {'query': 'a', 'response': 'b'},
        {'problem': 'a', 'solution': 'b'},
        {'system_prompt': '', 'question': 'a', 'response': 'b'},
        {'system': None, 'dialog': ['a', 'b']},
        {'instruction': 'a', 'output': 'b', 'history': []},
        {'instruction': 'a', 'output': 'b', 'history': None},
        {'documents': ['c'], 'question': 'a', 'answer': 'b'},
        {'conversations': ['a', 'b']},
        {'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]},
        {
            'prompt': [{'role': 'user', 'content': 'a'}],
            'completion': [{'role': 'assistant', 'content': 'b'}],
        },
    ],
)
def test_the_command_that_is_named_writes_messages(line: dict[str, object]) -> None:
    question, answer = converted(line)['messages']
    assert question == {'role': 'user', 'content': 'a'}
    assert answer == {'role': 'assistant', 'content': 'b'}


TOLD = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize('turns', ['question', 'dialog', 'from', 'role'])
@pytest.mark.parametrize(
    ('keys', 'kept'),
    [
        (
            {'system': 'Be short.'},
            {'messages': [{'role': 'system', 'content': 'Be short.'}, *TOLD]},
        ),
        ({'tools': '[{"a": 1}]'}, {'tools': '[{"a": 1}]'}),
        ({'tools': ''}, {'tools': None}),
        ({'documents': [{'a': 1}]}, {'documents': [{'a': 1}]}),
        ({'images': []}, {'images': []}),
        ({'image': 'a.jpg'}, {'images': ['a.jpg']}),
        ({'image': ['a.jpg', 'b.jpg']}, {'images': ['a.jpg', 'b.jpg']}),
    ],
)
def test_the_command_that_is_named_loses_nothing_that_is_read(
    turns: str, keys: dict[str, object], kept: dict[str, object]
) -> None:
    speakers = [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]
    line = {
        'question': {'question': 'a', 'answer': 'b'},
        'dialog': {'dialog': ['a', 'b']},
        'from': {'conversations': speakers},
        'role': {'conversation': TOLD},
    }[turns]
    assert converted({**keys, **line}) == {'messages': TOLD, **kept}


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize(
    'line',
    [
        {'question': 'How do I open a.png', 'answer': 'See b.png'},
        {'dialog': ['see a.png', 'b']},
        {'prompt': 'a', 'completion': 'b', 'meta': {'path': 'a.py'}},
        {'prompt': 'a', 'completion': 'b', 'documents': [{'path': 'a.png'}]},
    ],
)
def test_the_command_that_is_named_takes_no_words_for_an_image(line: dict[str, object]) -> None:
    assert 'images' not in converted(line)


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
def test_the_command_that_is_named_writes_one_system_prompt() -> None:
    turns = [{'from': 'system', 'value': 'Be short.'}, {'from': 'human', 'value': 'a'}]
    line = {'system': 'Be short.', 'conversations': [*turns, {'from': 'gpt', 'value': 'b'}]}
    roles = [message['role'] for message in converted(line)['messages']]
    assert roles == ['system', 'user', 'assistant']


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
def test_the_command_that_is_named_keeps_earlier_turns() -> None:
    line = {'system': 's', 'instruction': 'a', 'output': 'b', 'history': [['c', 'd'], ['e', 'f']]}
    assert [message['content'] for message in converted(line)['messages']] == [
        's',
        'c',
        'd',
        'e',
        'f',
        'a',
        'b',
    ]


def carried_out(message: str, old: Path) -> Path:
    """The file that the command at the end of an error writes."""
    new = old.with_name('new.jsonl')
    programs = 'jq -c|gzip -dc|bzip2 -dc|xz -dc|python -c'
    command = re.search(rf': ((?:{programs}) .* > NEW\.jsonl)', message)
    assert command, message
    words = command[1].replace('OLD', str(old)).replace('NEW.jsonl', str(new))
    words = words.replace('python -c', f'{sys.executable} -c')
    subprocess.run(['sh', '-c', words], check=True)
    return new


@pytest.mark.skipif(which('jq') is None, reason='jq is not installed')
@pytest.mark.parametrize('suffix', ['jsonl', 'jsonl.gz', 'jsonl.bz2', 'JSONL.XZ', 'parquet'])
def test_the_command_that_is_named_reads_the_file_as_it_is_stored(
    tmp_path: Path, suffix: str
) -> None:
    rows = [{'question': f'é {i}', 'answer': 'b', 'day': date(2026, 1, 1 + i)} for i in range(3)]
    old = tmp_path / f'old.{suffix}'
    if suffix == 'parquet':
        tables = pytest.importorskip('pyarrow.parquet')
        tables.write_table(pytest.importorskip('pyarrow').Table.from_pylist(rows), old)
    else:
        pack = {'gz': gzip, 'bz2': bz2, 'xz': lzma}.get(suffix.lower().rpartition('.')[2])
        content = '\n'.join(json.dumps(row, default=str) for row in rows).encode()
        old.write_bytes(pack.compress(content) if pack else content)
    with pytest.raises(ConfigError) as error:
        read_documents(str(old))
    chats = [json.loads(line)['messages'] for line in carried_out(str(error.value), old).open()]
    assert [[turn['content'] for turn in turns] for turns in chats] == [
        [row['question'], 'b'] for row in rows
    ]
    with pytest.raises(ConfigError) as error:
        read_prompts(old)
    new = carried_out(str(error.value), old)
    assert read_prompts(new) == [row['question'] for row in rows]


@pytest.mark.parametrize(
    ('content', 'plain'), [(ARRAY, 'a b.json'), ('text'.encode('utf-16'), 'a b.json')]
)
def test_a_compressed_file_is_unpacked_before_it_is_converted(
    tmp_path: Path, content: bytes, plain: str
) -> None:
    write(tmp_path, {f'{plain}.gz': gzip.compress(content)})
    with pytest.raises(ConfigError) as error:
        read_documents(f'{tmp_path}/{plain}.gz')
    subprocess.run(['sh', '-c', str(error.value).rpartition('; unpack it: ')[2]], check=True)
    assert (tmp_path / plain).read_bytes() == content


def test_a_parquet_file_without_texts_gets_the_advice_of_training(tmp_path: Path) -> None:
    pyarrow, parquet = map(pytest.importorskip, ('pyarrow', 'pyarrow.parquet'))
    for columns, message in (
        ({'text': [['a']]}, r"'text' is list<.*>, not text; its columns: text; name a column"),
        ({'messages': [[{'role': 'user', 'content': 'a'}]]}, r'; put lines with "messages" into a'),
    ):
        parquet.write_table(pyarrow.table(columns), tmp_path / 'a.parquet')
        with pytest.raises(ConfigError, match=message) as error:
            read_documents(str(tmp_path / 'a.parquet'))
        assert '--json-key' not in str(error.value)


def test_names_like_that_of_a_corpus_which_is_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ('web.bin', 'web.idx', 'notes.txt'):
        (tmp_path / name).write_bytes(b'')
    with pytest.raises(ConfigError, match=rf': wbe in {tmp_path} .similar names: web') as caught:
        read_documents('wbe')
    for kind in ('.jsonl', 'Parquet', 'folder', '.idx', "'stdlib'"):
        assert kind in str(caught.value)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / 'web.jsonl').write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(
        ConfigError, match=r'web.jsonl:2: is not JSON .*; fix it, or use megajax data build'
    ):
        read_documents(str(tmp_path / 'web.jsonl'))


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.jsonl', b'{"prompt": "a"}\n{"text": "b"}', r"a.jsonl:2: has no text under 'prompt'"),
        ('a.txt', b'{"prompt": "a"}\n', r'a.txt: is JSON lines'),
        ('a.txt', b'', 'a.txt: holds no prompts'),
        ('a.txt', None, 'a.txt: there is no such file'),
    ],
)
def test_prompts_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)
