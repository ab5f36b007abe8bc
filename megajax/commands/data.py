"""The subcommands of `megajax data`: parse, call, render."""

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from typer.core import TyperCommand

from megajax.base.errors import ConfigError
from megajax.base.render.console import plain_console, print_fitting
from megajax.base.render.folded import Folded
from megajax.base.render.logs import log_to_terminal

if TYPE_CHECKING:
    from megajax.corpus.describe import Description

data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help='Build, describe and verify token files.'
)

SECONDS = 30  # seconds between progress lines if there is no terminal


class _ManyInputs(TyperCommand):
    """A command that turns `--input a b c` into `--input a --input b --input c` for click."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        spread: list[str] = []
        inside, last = False, ''
        for arg in args:
            if arg.startswith('-') and arg != '-':
                inside = arg.startswith('--input')
            elif inside and spread[-1] != '--input':
                spread.append('--input')
                last = arg
            spread.append(arg)
        try:
            return super().parse_args(ctx, spread)
        except Exception as error:
            missing = getattr(error, 'param', None)
            if missing is None or missing.name != 'out' or not last:
                raise
            raise ConfigError(
                f'OUT: missing, because all words after --input are inputs, also {last}; put OUT '
                'before --input'
            ) from error


Prefix = Annotated[
    str,
    typer.Argument(
        metavar='OUT',
        help='The prefix of the files: OUT.bin, OUT.idx, OUT.json, OUT.tokenizer.json and, if its '
        'tokens have names, OUT.tokenizer_config.json.',
    ),
]
Inputs = Annotated[
    list[str],
    typer.Option(
        metavar='FILES...', help="Paths, URLs, globs, or '-' for JSON lines on standard input."
    ),
]
InputFormat = Annotated[
    Literal['jsonl', 'text', 'parquet'] | None,
    typer.Option(
        help='Default: by the suffix. .gz, .zst, .bz2 and .xz are decompressed. A text file is one '
        'document.'
    ),
]
JsonKey = Annotated[str, typer.Option(help='JSON key or Parquet column with the text.')]
TokenizerFile = Annotated[
    str | None,
    typer.Option(metavar='PATH|bytes', help='A tokenizer.json, or bytes (one token per byte).'),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        metavar='VOCAB',
        help='Train a byte-level BPE with this many entries on up to 256 MB of the text.',
    ),
]
NumWorkers = Annotated[
    int | None, typer.Option(help='Number of worker processes; default: one per core.')
]
AppendEod = Annotated[
    bool, typer.Option('--append-eod', help='End each document with the end-of-document token.')
]
SkipBad = Annotated[
    bool,
    typer.Option('--skip-bad', help='Skip and count lines that cannot be read.'),
]
ParseSpecial = Annotated[
    bool,
    typer.Option(
        '--parse-special',
        help='Read special tokens that a text spells out, such as <|endoftext|>, as special '
        'tokens. By default they are read as ordinary text.',
    ),
]


@data_app.command(cls=_ManyInputs)
def build(
    out: Prefix,
    input: Inputs,
    format: InputFormat = None,
    json_key: JsonKey = 'text',
    tokenizer: TokenizerFile = None,
    train_bpe: VocabSize = None,
    workers: NumWorkers = None,
    append_eod: AppendEod = False,
    skip_bad: SkipBad = False,
    parse_special: ParseSpecial = False,
) -> None:
    """Tokenize a corpus into Megatron's file format.

    If the build is killed or interrupted, the same command resumes it.
    """
    from megajax.corpus.build import build as run  # here, because it imports numpy
    from megajax.corpus.job import Job

    log_to_terminal()
    logging.getLogger('megajax').setLevel(logging.INFO)
    job = Job(
        out=out,
        inputs=tuple(input),
        format=format,
        json_key=json_key,
        tokenizer=tokenizer,
        train_bpe=train_bpe,
        workers=workers,
        append_eod=append_eod,
        skip_bad=skip_bad,
        parse_special=parse_special,
    )
    try:
        with _Progress() as progress:
            summary = run(job, report=progress)
    except KeyboardInterrupt:
        print(
            'interrupted: run the same command again; it resumes, unless it reads a stream, or a '
            'URL for which the server gives neither an ETag nor a time',
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    print(summary)


@data_app.command()
def info(
    prefix: Annotated[
        str, typer.Argument(metavar='PREFIX', help='The prefix of PREFIX.bin and PREFIX.idx.')
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar='PATH|bytes',
            help='The tokenizer to decode with; default: the one next to the files.',
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help='Number of documents whose beginning to show.')
    ] = 3,
) -> None:
    """Show the number of documents and tokens, and sample text."""
    from megajax.corpus.choose_tokenizer import load_given
    from megajax.corpus.describe import decode_samples, describe
    from megajax.runtime.data.text.tokenizer import load_tokenizer

    description = describe(prefix)
    console = plain_console(soft_wrap=True)
    print_fitting(Folded(_facts(description)), console)
    print_fitting(Folded(_histogram(description.histogram)), console)
    manifest = description.manifest
    path = tokenizer or (str(manifest.tokenizer_path) if manifest else None)
    if path:
        decoder = load_given(path) if tokenizer else load_tokenizer(path)
        for number, text, is_spelled in decode_samples(description.sequences, decoder, samples):
            letters = ', which spells special tokens in letters' if is_spelled else ''
            console.print(f'document {number}{letters}: {text!r}')


@data_app.command()
def verify(
    prefix: Annotated[
        str, typer.Argument(metavar='PREFIX', help='The prefix of PREFIX.bin and PREFIX.idx.')
    ],
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Upper limit of token ids; default: the tokenizer's size."),
    ] = None,
) -> None:
    """Check every invariant of token files.

    Exits with code 2 at the first violation.
    """
    from megajax.corpus.describe import verify as check

    with _Progress() as progress:
        for line in check(prefix, vocab_size=vocab_size, progress=progress):
            print(f'ok  {line}')


def _facts(description: 'Description') -> Table:
    sequences, manifest = description.sequences, description.manifest
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row('documents', f'{description.num_documents:,}')
    table.add_row('sequences', f'{len(sequences):,}')
    table.add_row(
        'tokens',
        f'{len(sequences.tokens):,} of {sequences.tokens.dtype.name}, '
        f'{sequences.tokens.nbytes:,} bytes',
    )
    if manifest:
        end = 'ends' if manifest.append_eod else 'does not end'
        table.add_row(
            'text',
            f'{manifest.text_bytes:,} bytes, '
            f'{manifest.text_bytes / max(manifest.tokens, 1):.2f} per token',
        )
        table.add_row(
            'tokenizer',
            f'{manifest.tokenizer}, {manifest.vocab_size:,} entries; '
            f'a document {end} with {manifest.eod}'
            + '; special tokens spelled in a text are tokens'
            * manifest.parse_special,
        )
    else:
        table.add_row('tokenizer', 'unknown: there is no manifest next to the files')
    return table


def _histogram(counts: Sequence[int]) -> Table:
    table = Table(
        Column('tokens per document', justify='right'),
        Column('documents', justify='right'),
        box=None,
        pad_edge=False,
    )
    table.add_column()
    for power, count in enumerate(counts):
        if count:
            table.add_row(
                '0' if not power else f'up to {2 ** (power - 1):,}',
                f'{count:,}',
                '█' * max(1, round(40 * count / max(counts))),
            )
    return table


class _Progress:
    """A progress bar on a terminal; otherwise a line every SECONDS seconds."""

    def __init__(self) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._console = plain_console(stderr=True)
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task('', total=None)
        self._begun: tuple[float, int] | None = None
        self._read = 0
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # stopping a bar that never started would print a line
            self._bar.stop()

    def __call__(self, read: int, total: int) -> None:
        now = time.monotonic()
        if self._begun is None or read < self._read:  # a tokenizer's training, then the build
            self._begun = now, read
            self._bar.reset(self._task)
            if self._console.is_terminal:
                self._bar.start()
        self._read = read
        self._bar.update(self._task, completed=read, total=total or None)
        begun, before = self._begun
        if not self._console.is_terminal and now - self._said > SECONDS and now > begun:
            self._said = now
            speed = (read - before) / 1e6 / (now - begun)
            of_total = f' of {total / 1e6:.0f}' if total else ''
            print(f'{read / 1e6:.0f}{of_total} MB, {speed:.2f} MB/s', file=sys.stderr, flush=True)
