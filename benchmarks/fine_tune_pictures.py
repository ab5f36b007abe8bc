"""What the commands of "Fine-tune on images" in docs/data.md show:
`python benchmarks/fine_tune_pictures.py OUT.md`.

Draws a corpus of images of words, runs each of COMMANDS in its folder and writes what it
printed, without times. The first command takes three minutes on two idle cores; `--reader RUN`
takes a run that it has made.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from PIL import Image

from megajax.runtime.data.synthetic_images import Part, word_picture

READER = 'train tiny_vlm run.dir=reader'
COMMANDS = [
    'train tiny_vlm run.dir=shouter run.start_from=reader data.corpus=labels/train '
    'vision.freeze=[encoder] train.steps=300 train.eval_every=150 train.seq_len=48 '
    'model.max_seq_len=48',
    'eval shouter labels/held_out --task perplexity',
    "generate shouter --images labels/held_out/images --temperature 0 --prompt $'user: "
    "<image>Shout it.\\nassistant: '",
]
PACKAGES = 'megajax', 'jax', 'flax', 'optax', 'pillow'
SIZES: dict[Part, int] = {'train': 2000, 'held_out': 64}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--reader', type=Path, help='a run that the first command has made')
    arguments = parser.parse_args()
    found = [heading()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder / 'labels')
        if arguments.reader:
            shutil.copytree(arguments.reader, folder / 'reader')
        for command in COMMANDS if arguments.reader else [READER, *COMMANDS]:
            found.append(run(command, folder))
            print(found[-1], flush=True)
            arguments.out.write_text('\n'.join(found))
        found.append(right(found[-1], folder / 'labels/held_out/data.jsonl'))
        arguments.out.write_text('\n'.join(found))


def heading() -> str:
    """The day, the versions and the machine."""
    versions = ', '.join(f'{name} {version(name)}' for name in PACKAGES)
    return (
        f'# Fine-tuning with images, {datetime.date.today()}\n\n'
        f'`python benchmarks/fine_tune_pictures.py`: {versions}, '
        f'Python {platform.python_version()}, {os.cpu_count()} cores, shared with other programs.\n'
        f'Reader: `megajax {READER}`.\n'
    )


def draw(labels: Path) -> None:
    """Write images of words, and lines in which the word is answered in capital letters."""
    for part, count in SIZES.items():
        images = labels / part / 'images'
        images.mkdir(parents=True)
        lines = []
        for i in range(count):
            picture = word_picture(part, 7, i)
            Image.fromarray(picture.image_HWC).save(images / f'{i:04}.png')
            messages = [
                {'role': 'user', 'content': '<image>Shout it.'},
                {'role': 'assistant', 'content': picture.answer.upper()},
            ]
            lines.append(json.dumps({'messages': messages, 'images': [f'images/{i:04}.png']}))
        (labels / part / 'data.jsonl').write_text('\n'.join(lines) + '\n')


def run(command: str, folder: Path) -> str:
    """The command and what it printed, as a block; of a run without what depends on the clock."""
    words = shlex.split(command.replace("$'", "'"))
    words = [word.replace('\\n', '\n') for word in words]
    done = subprocess.run(
        [sys.executable, '-m', 'megajax', *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    said = done.stdout.replace(f'{folder}/', '')
    lines = [line for line in said.splitlines() if not re.search('tokens/s', line)]
    return f'```\n$ megajax {command}\n' + '\n'.join(lines) + '\n```\n'


def right(answers: str, data: Path) -> str:
    """How many of the answers are those of the lines."""
    texts = [json.loads(line)['text'] for line in answers.splitlines() if line.startswith('{')]
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    expected = [line['messages'][1]['content'] for line in lines]
    count = sum(text == answer for text, answer in zip(texts, expected, strict=True))
    return f'{count} of {len(expected)} held-out words are right.\n'


if __name__ == '__main__':
    main()
