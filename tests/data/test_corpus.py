"""Documents are the same wherever they lie, and stay in their part of the split."""

import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from megajax.config import ConfigError
from megajax.data import Document, read_documents, split_documents


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
        ('missing', None, 'there is no .*missing'),
        ('empty.txt', b'', r'empty\.txt.* holds no text'),
        ('image.png', b'PNG\0\xff', r'image\.png.* holds no text'),
        ('latin1.txt', 'né'.encode('latin-1'), r'latin1\.txt is not UTF-8 at byte 1; convert it'),
        (
            'folder/latin1.txt',
            'né'.encode('latin-1'),
            r'latin1\.txt is not UTF-8 at byte 1; convert it',
        ),
        ('folder/empty.txt', b'', 'folder.* holds no text'),
    ],
)
def test_a_corpus_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        write(tmp_path, {name: content})
    with pytest.raises(ConfigError, match=f'data.corpus: .*{message}'):
        read_documents(str(tmp_path / name.split('/')[0]))


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


@pytest.mark.parametrize('name', ['web.jsonl', 'web.jsonl.gz'])
def test_each_line_of_json_is_a_document(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({'text': f'line {i}: é\n', 'id': i}) for i in range(12)]
    content = '\n'.join([*lines[:3], '', *lines[3:]]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    for corpus in (tmp_path, tmp_path / name):
        assert [document.text for document in read_documents(str(corpus))] == [
            f'line {i}: é\n' for i in range(12)
        ]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / 'web.jsonl').write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(
        ConfigError, match=r'web.jsonl:2: is not JSON .*; fix it, or use megajax data build'
    ):
        read_documents(str(tmp_path / 'web.jsonl'))
