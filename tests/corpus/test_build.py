"""The built pair is Megatron's for the same tokens, whatever the workers, the format and the kills;
a mistake leaves nothing behind.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tokenizers
import zstandard
from pyarrow import parquet
from support import disk_full_at, exhaustive, megajax, slow, start_token

from megajax.commands import data
from megajax.core.config import ConfigError
from megajax.corpus import choose_tokenizer
from megajax.corpus.build import build
from megajax.corpus.job import Job, fingerprint
from megajax.corpus.partial import Partial, Progress, read_progress
from megajax.runtime.data.sources.inputs import Input
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.sources.pieces import UNIT
from megajax.runtime.data.text.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from megajax.runtime.data.tokens.indexed import read_pair

pytestmark = pytest.mark.usefixtures('one_thread')
ROOT = Path(__file__).parents[2]
TEXTS = [f'text {i}: ' + 'Grüße, Ελλάδα, 日本語\n' * (i % 13) if i % 5 else '' for i in range(120)]

# The command, ended by SIGKILL (9) or SIGINT (2) before the given rename to a name that ends so.
ENDED = """
import os, signal, sys
number, name, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def hook(event, arguments):
    global count
    if event == 'os.rename' and str(arguments[1]).endswith(name):
        count -= 1
        if not count:
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
# A suite that runs in the background does not hand this on.
signal.signal(signal.SIGINT, signal.default_int_handler)
from megajax.corpus.build import build
from megajax.corpus.job import Job
options = eval(sys.argv[4])
try:
    build(Job(**options), unit=2000, checkpoint_units=1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def jsonl(texts: Sequence[str]) -> bytes:
    return (
        b'\n\n'.join(json.dumps({'id': i, 'text': text}).encode() for i, text in enumerate(texts))
        + b'\n'
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / 'corpus.jsonl'
    path.write_bytes(jsonl(TEXTS))
    return path


def job(out: Path, *inputs: Path | str, **options: object) -> Job:
    defaults: dict[str, object] = {'tokenizer': 'bytes', 'workers': 1} | (
        {'tokenizer': None} if 'train_bpe' in options else {}
    )
    return Job(out=str(out), inputs=tuple(map(str, inputs)), **(defaults | options))  # type: ignore[arg-type]


def files(prefix: Path) -> dict[str, bytes]:
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in sorted(prefix.parent.glob(f'{prefix.name}.*'))
    }


def tokens_and_index(prefix: Path) -> tuple[bytes, bytes]:
    found = files(prefix)
    assert set(found) == {'.bin', '.idx', '.json', '.tokenizer.json'}
    return found['.bin'], found['.idx']


def end(
    wanted: Job, *, before: str, count: int = 1, by: int = signal.SIGKILL
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-c', ENDED, str(int(by)), before, str(count), repr(vars(wanted))]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize('append_eod', [False, True])
def test_the_pair_is_what_megatron_writes_for_these_tokens(
    append_eod: bool, corpus: Path, tmp_path: Path
) -> None:
    build(job(tmp_path / 'out', corpus, append_eod=append_eod))
    tokenizer = byte_tokenizer()
    eod = [tokenizer.eod] if append_eod else []
    documents = [[*text.encode(), *eod] if text else [] for text in TEXTS]
    sequences = read_pair(tmp_path / 'out')
    assert sequences.tokens.dtype == tokenizer.dtype
    assert sequences.tokens.tolist() == [token for document in documents for token in document]
    assert sequences.lengths.tolist() == [len(document) for document in documents if document]
    assert sequences.documents.tolist() == [
        0,
        *np.cumsum([bool(document) for document in documents]).tolist(),
    ]


def test_neither_workers_nor_units_nor_format_nor_compression_change_the_bytes(
    corpus: Path, tmp_path: Path
) -> None:
    raw = corpus.read_bytes()
    parquet.write_table(pyarrow.table({'text': TEXTS}), tmp_path / 'a.parquet')
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(raw))
    (tmp_path / 'a.jsonl.zst').write_bytes(zstandard.ZstdCompressor().compress(raw))
    for i, text in enumerate(TEXTS):
        (tmp_path / f'{i:03}.txt').write_bytes(text.encode())
    cases = [
        (corpus, 2, 500),
        (tmp_path / 'a.jsonl.gz', 1, UNIT),
        (tmp_path / 'a.jsonl.zst', 1, 700),
    ]
    cases += [(tmp_path / 'a.parquet', 1, 1000), (tmp_path / '*.txt', 1, 2000)]
    built = set()
    for i, (path, workers, unit) in enumerate(cases):
        build(job(tmp_path / f'out{i}', path, workers=workers, append_eod=True), unit=unit)
        built.add(tokens_and_index(tmp_path / f'out{i}'))
    assert len(built) == 1


@pytest.mark.parametrize('unit', [slow(UNIT), 500])
def test_each_document_has_its_start_once(unit: int, tmp_path: Path) -> None:
    texts = ['first\n', 'line of a long text\n' * 400, '', 'last']
    for i, text in enumerate(texts):
        (tmp_path / f'{i}.txt').write_text(text)
    tokenizer = start_token(tmp_path / 'tokenizer.json')
    build(
        job(tmp_path / 'out', tmp_path / '*.txt', tokenizer=tokenizer, append_eod=True, workers=2),
        unit=unit,
    )
    assert read_pair(tmp_path / 'out').tokens.tolist() == [
        token for text in texts if text for token in [257, *text.encode(), 256]
    ]


def test_a_long_text_is_one_document(tmp_path: Path) -> None:
    texts = ['first\n', 'line of a long text\n' * 400, '', 'last']
    for i, text in enumerate(texts):
        (tmp_path / f'{i}.txt').write_text(text)
    build(job(tmp_path / 'out', tmp_path / '*.txt', append_eod=True), unit=500)
    sequences = read_pair(tmp_path / 'out')
    assert sequences.lengths.tolist() == [len(text) + 1 for text in texts if text]
    assert sequences.tokens.tolist() == [
        token for text in texts if text for token in [*text.encode(), 256]
    ]
    assert Manifest.read(tmp_path / 'out').max_token == 256  # type: ignore[union-attr]


def test_documents_that_spell_special_tokens_are_counted_once_over_units(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        text = 'a line\n' * 200 + '<|endoftext|>\n' * (i % 2 == 0) * 200
        (tmp_path / f'{i}.txt').write_text(text)
    build(job(tmp_path / 'out', tmp_path / '*.txt'), unit=500)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert warning.startswith('2 documents spell special tokens (<|endoftext|>), which are read as')


@pytest.mark.parametrize('unit', [slow(UNIT), 500])
def test_parsed_special_tokens_begin_and_end_a_document_once(
    unit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = 'line of a long text\n' * 60
    texts = ['a<|endoftext|>\nb', f'<s>{lines}<|endoftext|>', f'{lines}<s>', '<|endoftext|>', '']
    for i, text in enumerate(texts):
        (tmp_path / f'{i}.txt').write_text(text)
    tokenizer = start_token(tmp_path / 'tokenizer.json')
    options = {'tokenizer': tokenizer, 'append_eod': True, 'parse_special': True}
    with caplog.at_level('INFO'):
        build(job(tmp_path / 'out', tmp_path / '*.txt', **options), unit=unit)
    assert read_pair(tmp_path / 'out').tokens.tolist() == [
        *(257, ord('a'), 256, *b'\nb', 256),
        *(257, *lines.encode(), 256),
        *(257, *lines.encode(), 257, 256),
        *(257, 256),
    ]
    manifest = Manifest.read(tmp_path / 'out')
    assert manifest is not None
    assert manifest.parse_special
    assert (
        '4 documents spell special tokens (<s>, <|endoftext|>), which are read as these tokens'
    ) in caplog.messages


def test_a_bpe_learns_no_special_token_that_is_parsed(tmp_path: Path) -> None:
    for name, between in (('plain', ''), ('spelled', '<|endoftext|>')):
        (tmp_path / f'{name}.txt').write_text(f'{between}the end of the text\n' * 50)
        build(job(tmp_path / name, tmp_path / f'{name}.txt', train_bpe=270, parse_special=True))
    assert (
        files(tmp_path / 'plain')['.tokenizer.json']
        == (files(tmp_path / 'spelled')['.tokenizer.json'])
    )


def test_the_manifest_says_what_the_files_are(corpus: Path, tmp_path: Path) -> None:
    summary = build(job(tmp_path / 'out', corpus, train_bpe=300, append_eod=True))
    manifest = Manifest.read(tmp_path / 'out')  # checks the tokenizer's hash
    sequences, tokenizer = (
        read_pair(tmp_path / 'out'),
        load_tokenizer(str(tmp_path / 'out.tokenizer.json')),
    )
    assert manifest
    expected = Manifest(
        tokenizer='out.tokenizer.json',
        tokenizer_sha256=sha256((tmp_path / 'out.tokenizer.json').read_bytes()).hexdigest(),
        vocab_size=300,
        eod=tokenizer.eod,
        append_eod=True,
        documents=len(TEXTS),
        tokens=len(sequences.tokens),
        max_token=int(sequences.tokens.max()),
        text_bytes=sum(len(text.encode()) for text in TEXTS),
        bin_sha256=sha256((tmp_path / 'out.bin').read_bytes()).hexdigest(),
    )
    assert manifest.model_dump() == expected.model_dump()
    assert tokenizer.fingerprint == train_bpe(TEXTS, 300).fingerprint
    assert f'{manifest.documents} documents, {manifest.tokens} tokens' in str(summary)


def test_a_build_can_be_resumed_from_its_start_on(tmp_path: Path) -> None:
    begun = Progress(fingerprint='of its inputs')
    with Partial.lock(tmp_path / 'out') as partial:
        partial.start(begun)
    assert read_progress(tmp_path / 'out') == begun


@pytest.mark.parametrize(
    ('name', 'options'),
    [slow('corpus.jsonl', {}), slow('corpus.jsonl.gz', {'train_bpe': 300}), slow('long.txt', {})],
)
def test_a_killed_build_goes_on(
    name: str, options: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / 'corpus.jsonl.gz').write_bytes(gzip.compress(corpus.read_bytes()))
    (tmp_path / 'long.txt').write_text('\n'.join(TEXTS))
    wanted = job(tmp_path / 'out', tmp_path / name, append_eod=True, **options)
    build(replace(wanted, out=str(tmp_path / 'whole')), unit=2000)
    killed = end(wanted, before='progress.json', count=5)
    assert killed.returncode == -signal.SIGKILL
    partial = tmp_path / 'out.partial'
    progress = json.loads((partial / 'progress.json').read_bytes())
    trained = (partial / 'tokenizer.json').stat()
    assert 0 < progress['tokens'] * 2 < (tmp_path / 'whole.bin').stat().st_size
    assert not list(tmp_path.glob('out.[!p]*'))
    again = end(
        wanted, before='progress.json', count=3
    )  # once more, which needs what the first left
    assert again.returncode == -signal.SIGKILL
    assert json.loads((partial / 'progress.json').read_bytes())['tokens'] > progress['tokens']
    assert (partial / 'tokenizer.json').stat() == trained
    summary = build(wanted, unit=2000)
    assert summary.encoded < summary.progress.text_bytes
    assert tokens_and_index(tmp_path / 'out') == tokens_and_index(tmp_path / 'whole')
    assert (
        json.loads(files(tmp_path / 'out')['.json'])['bin_sha256']
        == sha256(files(tmp_path / 'whole')['.bin']).hexdigest()
    )
    assert not partial.exists()


def test_a_build_with_named_tokens_can_be_killed_and_leaves_no_folder(
    corpus: Path, tmp_path: Path
) -> None:
    byte_tokenizer().save(tmp_path / 'tokenizer.json')
    eod = byte_tokenizer().decode([byte_tokenizer().eod])
    names = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eod}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(names))
    wanted = job(tmp_path / 'out', corpus, tokenizer=str(tmp_path / 'tokenizer.json'))
    assert end(wanted, before='progress.json', count=5).returncode == -signal.SIGKILL
    summary = build(wanted, unit=2000)
    assert 0 < summary.encoded < summary.progress.text_bytes
    assert json.loads(files(tmp_path / 'out')['.tokenizer_config.json'])['eos_token'] == eod
    assert not (tmp_path / 'out.partial').exists()


@pytest.mark.parametrize(
    'name', [slow('out.tokenizer.json'), exhaustive('out.json'), slow('out.bin'), 'out.idx']
)
def test_a_kill_between_the_renames_is_completed(name: str, corpus: Path, tmp_path: Path) -> None:
    wanted = job(tmp_path / 'out', corpus)
    assert end(wanted, before=name).returncode == -signal.SIGKILL
    assert not (tmp_path / 'out.idx').exists()
    build(wanted, unit=2000)
    sequences = read_pair(tmp_path / 'out')
    assert len(sequences.tokens) == Manifest.read(tmp_path / 'out').tokens  # type: ignore[union-attr]
    assert not (tmp_path / 'out.partial').exists()


@pytest.mark.parametrize('option', ['append_eod', slow('parse_special')])
def test_another_build_starts_afresh(
    option: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = job(tmp_path / 'out', corpus)
    assert end(wanted, before='progress.json', count=5).returncode == -signal.SIGKILL
    with caplog.at_level('INFO'):
        summary = build(replace(wanted, **{option: True}), unit=2000)  # type: ignore[arg-type]
    assert 'starting over' in caplog.text
    assert (
        summary.encoded == summary.progress.text_bytes == sum(len(text.encode()) for text in TEXTS)
    )


def test_an_interrupt_exits_130_and_keeps_what_is_done(corpus: Path, tmp_path: Path) -> None:
    interrupted = end(
        job(tmp_path / 'out', corpus, workers=2), before='progress.json', count=4, by=signal.SIGINT
    )
    assert (interrupted.returncode, interrupted.stderr) == (130, '')  # workers say nothing
    assert json.loads((tmp_path / 'out.partial' / 'progress.json').read_bytes())['tokens']


def test_two_builders_do_not_share_a_folder(corpus: Path, tmp_path: Path) -> None:
    def second(read: int, total: int) -> None:
        with pytest.raises(ConfigError, match=r'out.partial: another build is writing here'):
            build(job(tmp_path / 'out', corpus))

    build(job(tmp_path / 'out', corpus), report=second)
    tokens_and_index(tmp_path / 'out')


BAD = [
    (
        b'{"text": "a"}\n\n{"text": "b"\n',
        (
            r'bad.jsonl:3: is not JSON \(Expecting .*{"text": "b"; fix it, '
            r'or skip such lines with --skip-bad'
        ),
    ),
    (b'{"body": "a"}', r"bad.jsonl:1: has no key 'text' \(its keys: body\); set --json-key"),
    (b'{"text": ["a"]}', r'bad.jsonl:1: \'text\' is \["a"\], not text'),
    (b'["a"]', r'bad.jsonl:1: is list, not a JSON object'),
    (b'{"text": "a\xff"}', r'bad.jsonl:1: is not UTF-8 at byte 11 \(0xff\)'),
    (b'{"text": "\\ud800"}', r"bad.jsonl:1: 'text' has an unpaired surrogate at character 0"),
    (b'[' * 10**5, r'bad.jsonl:1: is not JSON'),
    (
        b'{"text": "a <image>", "images": ["a.png"]}',
        r'bad.jsonl:1: has 1 images, but only the text is read; set data.corpus to the file',
    ),
    (b' \n', '--input: contains no text: 0 documents'),
]


@pytest.mark.parametrize('workers', [1, slow(2)])
@pytest.mark.parametrize(('data', 'message'), BAD)
def test_bad_input_is_named_and_leaves_nothing_behind(
    data: bytes, message: str, workers: int, corpus: Path, tmp_path: Path
) -> None:
    bad = tmp_path / 'bad.jsonl'
    bad.write_bytes(data)
    inputs = (bad,) if 'contains no text' in message else (corpus, bad)
    with pytest.raises(ConfigError, match=message):
        build(job(tmp_path / 'out', *inputs, workers=workers), unit=500)
    assert not files(tmp_path / 'out')


def test_text_that_is_not_utf8_is_named_by_its_byte(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_bytes(b'line\n' * 1000 + b'\xff')
    with pytest.raises(ConfigError, match=r'a.txt: is not UTF-8 at byte 5000 \(0xff\); convert it'):
        build(job(tmp_path / 'out', tmp_path / 'a.txt', skip_bad=True), unit=500)
    with pytest.raises(ConfigError, match=r'a.txt: is not UTF-8 at byte 5000'):  # and in training
        build(job(tmp_path / 'out', tmp_path / 'a.txt', train_bpe=300))
    assert not files(tmp_path / 'out')


def test_bad_lines_are_skipped_and_counted(corpus: Path, tmp_path: Path) -> None:
    lines = [line for line in corpus.read_bytes().split(b'\n') if line]
    bad = [data for data, message in BAD if 'bad.jsonl:1' in message]
    (tmp_path / 'bad.jsonl').write_bytes(b'\n'.join(lines[:50] + bad + lines[50:]))
    summary = build(
        job(tmp_path / 'out', tmp_path / 'bad.jsonl', skip_bad=True, workers=2), unit=500
    )
    assert f'; {len(bad)} bad lines skipped ({tmp_path}/bad.jsonl:51, ' in str(summary)
    build(job(tmp_path / 'clean', corpus))
    assert tokens_and_index(tmp_path / 'out') == tokens_and_index(tmp_path / 'clean')


@pytest.mark.parametrize('unit', [40, 500])
def test_rows_with_images_are_bad_and_others_are_read(unit: int, tmp_path: Path) -> None:
    texts = [f'text {number}' for number in range(9)]
    images = [['a.png', 'b.png'] if number in (3, 7) else [] for number in range(7)] + [None] * 2
    images[5] = ['c.png']
    table = pyarrow.table({'images': images, 'text': texts})
    parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=4)
    with pytest.raises(ConfigError, match=r'a.parquet: row 4: has 2 images, but only the text'):
        build(job(tmp_path / 'out', tmp_path / 'a.parquet'), unit=unit)
    build(job(tmp_path / 'out', tmp_path / 'a.parquet', skip_bad=True), unit=unit)
    text_alone = [texts[number] for number in (0, 1, 2, 4, 6, 7, 8)]
    (tmp_path / 'a.jsonl').write_bytes(jsonl(text_alone))
    build(job(tmp_path / 'clean', tmp_path / 'a.jsonl'))
    assert tokens_and_index(tmp_path / 'out') == tokens_and_index(tmp_path / 'clean')


def test_a_bad_line_of_a_file_whose_name_is_not_utf_8_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b'caf\xe9.jsonl')
    file.write_text('{"text": "a"}\n{"text": null}\n')
    summary = build(job(tmp_path / 'out', file, skip_bad=True))
    assert f'1 bad lines skipped ({tmp_path}/caf\\udce9.jsonl:2)' in str(summary)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'out': '{folder}/corpus.jsonl/no/out'},
            'no/out: .*/corpus.jsonl is a file; choose another OUT',
        ),
        ({'out': 's3://bucket/web'}, '^s3://bucket/web: is a URL; give a path on this machine'),
        ({'out': ''}, '^OUT: is the name of a folder; give the prefix .*, for example corpus$'),
        ({'out': '.'}, 'is the name of a folder; give the prefix .*, for example corpus$'),
        (
            {'out': '{folder}/..'},
            'is the name of a folder; give the prefix .*, for example /.*corp',
        ),
        ({'out': '{folder}/new/'}, 'is the name of a folder; .*, for example .*/new/corpus$'),
        ({'out': '{folder}/out.bin'}, 'out.bin: is the name of one of the files; give the prefix'),
        ({'tokenizer': None}, '--tokenizer: neither --tokenizer nor .* is given; give one'),
        (
            {'tokenizer': '{folder}/none.json'},
            "^--tokenizer: there is no file .*/none.json; give a tokenizer.json or 'bytes', or "
            '--train-bpe to train one$',
        ),
        ({'train_bpe': 256, 'tokenizer': None}, '--train-bpe: 256 is below 257'),
        ({'train_bpe': 300, 'tokenizer': None, 'inputs': ('-',)}, '-: cannot be read twice'),
        ({'workers': 0}, '--workers: 0 is below 1'),
    ],
)
def test_a_mistake_in_the_job_is_named(
    options: dict[str, object], message: str, corpus: Path, tmp_path: Path
) -> None:
    filled = {
        key: value.format(folder=tmp_path) if isinstance(value, str) else value
        for key, value in options.items()
    }
    with pytest.raises(ConfigError, match=message):
        build(replace(job(tmp_path / 'out', corpus), **filled))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ['corpus.jsonl']


def test_ends_of_empty_documents_alone_are_no_text(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigError, match=r'--input: contains no text: 3 documents without a text'):
        build(job(tmp_path / 'out', tmp_path / 'a.jsonl', append_eod=True))


def test_a_bpe_that_gets_smaller_than_asked_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'a.txt').write_text('to be or not to be')
    build(job(tmp_path / 'out', tmp_path / 'a.txt', train_bpe=400))
    (record,) = [each for each in caplog.records if each.levelname == 'WARNING']
    size = load_tokenizer(f'{tmp_path}/out.tokenizer.json').vocab_size
    assert 257 < size < 400
    assert f'the BPE has {size} entries; use --train-bpe {size}, ' in record.getMessage()


def test_a_bpe_is_trained_on_evenly_spaced_files_if_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_tokenizer, 'UNIT', 1000)
    monkeypatch.setattr(choose_tokenizer, 'TRAINING_BYTES', 10_000)
    for i in range(100):
        (tmp_path / f'{i:02}.txt').write_text(f'{i:02} ' * 500)
    reports = []
    every, some = tmp_path / '*.txt', [tmp_path / f'{i}0.txt' for i in range(10)]
    build(job(tmp_path / 'all', every, train_bpe=290), report=lambda *read: reports.append(read))
    build(job(tmp_path / 'ten', *some, train_bpe=290))
    assert reports[:10] == [(1000 * i, 10_000) for i in range(1, 11)]
    learned = [files(tmp_path / name)['.tokenizer.json'] for name in ('all', 'ten')]
    assert learned[0] == learned[1]
    monkeypatch.setattr(choose_tokenizer, 'TRAINING_BYTES', 10**6)
    reports.clear()
    build(job(tmp_path / 'small', every, train_bpe=290), report=lambda *read: reports.append(read))
    assert reports.count((150_000, 150_000)) == 2  # the training ends, and the build


def test_the_speed_of_the_build_does_not_count_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, 'SECONDS', 0)
    progress = data._Progress()
    for read in (0, 9, 0, 3):
        progress(read * 10**6, 9 * 10**6)
    trained, built = capsys.readouterr().err.splitlines()
    assert trained.startswith('9 of 9 MB, ')
    assert re.match(r'3 of 9 MB, \d', built)


def test_the_folders_of_the_output_are_created(corpus: Path, tmp_path: Path) -> None:
    summary = build(job(tmp_path / 'runs/new/out', corpus))
    assert {*summary.files} == set((tmp_path / 'runs/new').iterdir())


@pytest.mark.parametrize('suffix', ['.bin', '.idx', '.json', '.tokenizer.json'])
def test_what_is_there_is_not_touched(suffix: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / f'out{suffix}').write_text('precious')
    with pytest.raises(
        ConfigError, match=rf'out{suffix}: already exists; move it, or choose another OUT'
    ):
        build(job(tmp_path / 'out', corpus))
    assert files(tmp_path / 'out') == {suffix: b'precious'}


def test_a_full_disk_is_named_with_what_was_written(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('text\n' * 10**5)
    limit = 300_000
    arguments = [str(tmp_path / 'out'), '--input', str(tmp_path / 'a.txt'), '--tokenizer', 'bytes']
    with disk_full_at(limit):
        done = megajax('data', 'build', *arguments)
    assert (done.returncode, done.stdout) == (2, '')
    assert re.fullmatch(
        rf'error: .*out.partial/tokens: cannot be written after {limit} bytes: '
        r'File too large; free disk space, or delete OUT\.partial and .* command again to resume\n',
        done.stderr,
    )


def test_a_build_resumes_after_the_disk_was_full(corpus: Path, tmp_path: Path) -> None:
    wanted = job(tmp_path / 'out', corpus)
    with disk_full_at(9000), pytest.raises(ConfigError, match=r'tokens: cannot be written after'):
        build(wanted, unit=2000, checkpoint_units=1)
    assert_resumes(wanted, tmp_path)


def test_a_build_that_an_earlier_version_began_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its tokens would differ: a new hash deletes what days of work have written."""
    monkeypatch.setattr(tokenizers, '__version__', '0')
    monkeypatch.setattr(os.path, 'abspath', str)
    input = Input(path='/a.jsonl', format='jsonl', size=5, mtime_ns=7, stream=False)
    monkeypatch.setattr(tokenizer := byte_tokenizer(), 'fingerprint', 'bytes')
    found = fingerprint(job(Path('out'), '/a.jsonl'), [input], tokenizer, UNIT)
    assert found == 'e8b643593e1ca21bc359552dcd6257a6aac2d0a63e4a91476997e7e7c6b9d34c'


def test_a_build_from_a_stream_leaves_nothing_on_a_full_disk(corpus: Path, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / 'fifo.jsonl')
    with subprocess.Popen(['cp', corpus, fifo], stderr=subprocess.DEVNULL):
        with disk_full_at(9000), pytest.raises(ConfigError, match='cannot be written') as caught:
            build(job(tmp_path / 'out', fifo), unit=2000, checkpoint_units=1)
        assert 'resume' not in str(caught.value)
        assert not (tmp_path / 'out.partial').exists()


def test_the_files_of_a_stream_can_be_renamed_after_an_error(corpus: Path, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / 'fifo.jsonl')
    wanted, obstacle = job(tmp_path / 'a name', fifo), tmp_path / 'a name.bin'

    def obstruct(read: int, total: int) -> None:
        obstacle.mkdir(exist_ok=True)

    said = pytest.raises(ConfigError, match=r'a name\.bin: cannot be renamed from ')
    with subprocess.Popen(['cp', corpus, fifo]), said as caught:
        build(wanted, report=obstruct)
    obstacle.rmdir()
    fix = str(caught.value).split('`')[1]
    subprocess.run(fix, shell=True, check=True)
    build(job(tmp_path / 'whole', corpus))
    assert tokens_and_index(tmp_path / 'a name') == tokens_and_index(tmp_path / 'whole')


def test_a_build_resumes_after_an_input_could_not_be_read(corpus: Path, tmp_path: Path) -> None:
    second = tmp_path / 'second.jsonl'
    second.write_bytes(corpus.read_bytes())
    wanted = job(tmp_path / 'out', corpus, second)

    def unmount(read: int, total: int) -> None:
        if second.exists():
            second.rename(tmp_path / 'elsewhere')

    with pytest.raises(ConfigError, match=r'second.jsonl: .* No such file .*; run the same comm'):
        build(wanted, report=unmount, unit=2000, checkpoint_units=1)
    (tmp_path / 'elsewhere').rename(second)
    assert_resumes(wanted, tmp_path)


def assert_resumes(wanted: Job, folder: Path) -> None:
    summary = build(wanted, unit=2000)
    assert 0 < summary.encoded < summary.progress.text_bytes
    build(replace(wanted, out=str(folder / 'whole')), unit=2000)
    assert tokens_and_index(Path(wanted.out)) == tokens_and_index(folder / 'whole')


def test_the_command_takes_several_files_and_standard_input(corpus: Path, tmp_path: Path) -> None:
    lines = corpus.read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f'{i}.jsonl' for i in range(3)]
    for i, part in enumerate(parts):
        part.write_bytes(b''.join(lines[i * 80 : (i + 1) * 80]))
    first, second, third = map(str, parts)
    done = megajax(
        'data',
        'build',
        str(tmp_path / 'out'),
        '--input',
        first,
        second,
        '--append-eod',
        '--input',
        third,
        '--tokenizer',
        'bytes',
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert re.fullmatch(
        r'120 documents, \d+ tokens, \d\.\d\d bytes each; .* MB/s; wrote .*out.bin, '
        r'.*out.idx, .*out.json, .*out.tokenizer.json\n',
        done.stdout,
    )
    command = [
        sys.executable,
        '-m',
        'megajax',
        'data',
        'build',
        str(tmp_path / 'piped'),
        '--input',
        '-',
        '--tokenizer=bytes',
        '--append-eod',
        '--workers=1',
    ]
    subprocess.run(command, input=corpus.read_bytes(), cwd=ROOT, check=True, capture_output=True)
    assert tokens_and_index(tmp_path / 'piped') == tokens_and_index(tmp_path / 'out')


def test_a_worker_that_is_killed_ends_the_build_which_goes_on(corpus: Path, tmp_path: Path) -> None:
    def kill(read: int, total: int) -> None:
        # none is left when what it had sent before is read
        for worker in subprocess.run(
            ['pgrep', '-P', str(os.getpid()), '-f', 'megajax.corpus.encode'],
            capture_output=True,
        ).stdout.split():
            os.kill(int(worker), signal.SIGKILL)

    with pytest.raises(ConfigError, match=r'--workers: 2: a worker ended with exit code -9'):
        build(job(tmp_path / 'out', corpus, workers=2), report=kill, unit=500, checkpoint_units=1)
    summary = build(job(tmp_path / 'out', corpus), unit=500)
    assert summary.encoded < summary.progress.text_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    program = (
        'import re, resource, sys; from pathlib import Path; '
        'from megajax.corpus.build import build\n'
        'from megajax.corpus.job import Job\n'
        'build(Job(out=sys.argv[1], inputs=(sys.argv[2],), tokenizer="bytes", workers=2))\n'
        # not ru_maxrss of itself, which begins with that of the process that started it
        'own = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])\n'
        'print([own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024])'
    )
    peaks = []
    for megabytes in (5, 40):
        path = tmp_path / f'{megabytes}.jsonl'
        path.write_bytes(jsonl(['some text in a line\n' * 50] * (1000 * megabytes)))
        command = [sys.executable, '-c', program, str(tmp_path / str(megabytes)), str(path)]
        peaks.append(
            json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        )
    print(peaks)
    small, large = np.array(peaks)
    assert (large < small + 15).all(), peaks
