"""Files of data and settings that megajax reads: small valid ones, and their readers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
SENTENCES = ['def f(x):\n    return x + 1\n', 'é ☃', '', 'a' * 2000]


def write_configs(folder: Path) -> None:
    for name in ('tiny', 'tiny_vlm', 'tiny_arr_coc', 'qwen3_vl_2b', 'bert_336m'):
        shutil.copy(ROOT / f'configs/{name}.yaml', folder)


def read_config(path: Path) -> None:
    from megajax.core.config import load

    load(path)


def write_gpu(folder: Path) -> None:
    for name in ('h100', 'a100'):
        shutil.copy(ROOT / f'megajax/core/hardware/gpus/{name}.yaml', folder)


def read_gpu(path: Path) -> None:
    from megajax.core.hardware.records import hardware

    hardware(path).ring_bandwidth(members=2, hosts=2)


def write_budget(folder: Path) -> None:
    (folder / 'budget.yaml').write_text(
        'milliseconds: 60\ngigabytes: 40\ntemporaries: 6\nlaunches: 2000\n'
        'kinds: {fill: 0.5, cast: 4}\nwire: {model: 6}\n'
    )


def read_budget(path: Path) -> None:
    from megajax.analysis.inspect.budget import Budget
    from megajax.core.config.records import read_record

    read_record(path, Budget)


def _documents() -> list[dict[str, Any]]:
    return [{'text': text, 'id': number} for number, text in enumerate(SENTENCES)]


def write_lines(folder: Path) -> None:
    import gzip

    import zstandard

    content = '\n'.join(map(json.dumps, _documents())).encode()
    (folder / 'a.jsonl').write_bytes(content)
    (folder / 'a.jsonl.gz').write_bytes(gzip.compress(content))
    (folder / 'a.jsonl.zst').write_bytes(zstandard.compress(content))
    (folder / 'a.txt').write_text('\n\n'.join(SENTENCES))
    (folder / 'prompts.jsonl').write_text('{"prompt": "a"}\n{"prompt": "b"}')
    (folder / 'passages.jsonl').write_bytes(content.replace(b'""', b'"a b"'))


def read_build_input(path: Path) -> None:
    from megajax.runtime.data.sources.inputs import find_inputs
    from megajax.runtime.data.sources.parse import parse
    from megajax.runtime.data.sources.pieces import Position
    from megajax.runtime.data.sources.read import read_pieces

    for piece, _ in read_pieces(find_inputs([str(path)], None), 'text', Position(), 1 << 16):
        for text in parse(piece, 'text'):
            str(text)


def read_lines(path: Path) -> None:
    from megajax.runtime.data.text.prompts import read_prompts
    from megajax.runtime.evaluate.lambada import _read

    if path.stem == 'prompts':
        read_prompts(path)
    elif path.stem == 'passages':
        list(_read(str(path)))
    else:
        read_build_input(path)


def write_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(_documents())
    parquet.write_table(table, folder / 'plain.parquet', compression='none', row_group_size=2)
    parquet.write_table(table, folder / 'packed.parquet', compression='zstd')


def write_pair(folder: Path) -> None:
    from typer.testing import CliRunner

    from megajax.commands.main import app

    (folder / 'a.txt').write_text('\n\n'.join(SENTENCES))
    command = ['data', 'build', f'{folder}/pair', '--input', f'{folder}/a.txt']
    done = CliRunner().invoke(app, [*command, '--tokenizer', 'bytes'])
    assert done.exit_code == 0, done.output


def read_pair(path: Path) -> None:
    from megajax.runtime.data.sources.manifest import Manifest
    from megajax.runtime.data.tokens import indexed
    from megajax.runtime.data.tokens.token_ids import check_token_ids, token_range

    if path.suffix == '.json':
        Manifest.read(path.with_name('pair'))
    else:
        sequences = indexed.read_pair(path.with_name('pair'))
        check_token_ids(sequences, 300, token_range(sequences))


def write_pictures(folder: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 4), np.uint8)
    picture = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / 'a.png', exif=exif)
    picture.convert('P').save(folder / 'palette.png', transparency=3)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / 'grey.png')
    for suffix in ('jpeg', 'webp', 'gif', 'bmp', 'tiff', 'jp2', 'ppm', 'avif'):
        picture.convert('RGB').save(
            folder / f'a.{suffix}', **({'exif': exif} if suffix == 'jpeg' else {})
        )


def read_picture(path: Path) -> None:
    from megajax.runtime.data.images import read_image, read_size

    size = read_size(path)
    assert read_image(path).shape == (*size, 3)


def write_image_text(folder: Path) -> None:
    write_pictures(folder)
    parts = [{'type': 'image', 'image': 'a.png'}, {'type': 'text', 'text': 'what?'}]
    answer = {'role': 'assistant', 'content': 'é'}
    lines = [
        {'text': 'a <image> b', 'images': ['a.png']},
        {'messages': [{'role': 'user', 'content': parts}, answer]},
        {'messages': [{'role': 'user', 'content': '<image>?'}, answer], 'images': ['a.jpeg']},
    ]
    (folder / 'data.jsonl').write_text('\n'.join(map(json.dumps, lines)))


def read_image_text(path: Path) -> None:
    from megajax.runtime.data.image_rows import RowShape
    from megajax.runtime.data.image_text.chat import PlainChat
    from megajax.runtime.data.image_text.documents import read_documents
    from megajax.runtime.data.patches import PatchSize
    from megajax.runtime.data.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer(('<image>',))
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=24)
    shape = RowShape(seq_len=63, images=2, patches=patches, image_token=257, mrope=True)
    chat = PlainChat(tokenizer.special_tokens(), image='<image>', eod='')
    list(read_documents(path, shape, tokenizer, chat))


TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content | trim }}{% else %}
        {%- for part in message.content %}{{ part['text'] }}{%- endfor %}
    {%- endif %}
    {{- loop.index ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_template(folder: Path) -> None:
    (folder / 'template.jinja').write_text(TEMPLATE)


def read_template(path: Path) -> None:
    from megajax.runtime.data.image_text.chat import Request, TemplateChat, read_template

    messages = [{'role': 'user', 'content': 'é'}, {'role': 'assistant', 'content': [{'text': 'b'}]}]
    requests = [Request(messages=messages), Request(messages=messages[:1], begins=True)]
    with TemplateChat(read_template(path)) as chat:
        chat.render(requests, place='a.jsonl:1')


def write_tokenizers(folder: Path) -> None:
    from megajax.runtime.data.text.tokenizer import byte_tokenizer, train_bpe

    byte_tokenizer(('[MASK]',)).save(folder / 'bytes.json')
    train_bpe([SENTENCES[0] * 20], 290).save(folder / 'bpe.json')
    byte_tokens = [f'<0x{byte:02X}>' for byte in range(256)]
    vocab = {name: i for i, name in enumerate(['<unk>', '<s>', '</s>', *byte_tokens, '▁', 'a'])}
    model = {
        'type': 'BPE',
        'byte_fallback': True,
        'unk_token': '<unk>',
        'vocab': vocab,
        'merges': [],
    }
    decoder = {'type': 'ByteFallback'}
    sentencepiece = {'version': '1.0', 'added_tokens': [], 'model': model, 'decoder': decoder}
    (folder / 'sentencepiece.json').write_text(json.dumps(sentencepiece))
    words = {name: i for i, name in enumerate(['[UNK]', '[CLS]', '[SEP]', 'a', '##b'])}
    model = {
        'type': 'WordPiece', 'unk_token': '[UNK]', 'continuing_subword_prefix': '##',
        'max_input_chars_per_word': 100, 'vocab': words,
    }  # fmt: skip
    (folder / 'wordpiece.json').write_text(json.dumps({**sentencepiece, 'model': model}))


def read_tokenizer(path: Path) -> None:
    from megajax.runtime.data.text.tokenizer import encode_documents, load_tokenizer

    tokenizer = load_tokenizer(str(path))
    ids, _ = encode_documents(SENTENCES, tokenizer)
    tokenizer.decode(ids[:100])
    tokenizer.special_tokens()
