"""`megajax generate` and `megajax eval`: parse, call, render."""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megajax.base.files.exists import exists
from megajax.base.files.outputs import output_problems, writing
from megajax.base.render.logs import log_to_terminal
from megajax.commands.generate_chat import check_chat, check_unicode, converse
from megajax.commands.generate_images import (
    answer_all,
    check_budget,
    check_images,
    draw_budget,
)
from megajax.commands.generate_output import (
    as_json,
    as_text,
    is_cut,
    note_cut,
    note_letters,
    results_json,
)
from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.core.config.overrides import is_override
from megajax.runtime.data.sources.remote import is_remote

if TYPE_CHECKING:
    from megajax.runtime.checkpoint.open import Opened
    from megajax.runtime.generate import Continuation, Request

Run = Annotated[
    Path,
    typer.Argument(metavar='RUN', help="A run's directory (newest checkpoint), or RUN/STEP."),
]

PromptTexts = Annotated[
    list[str] | None,
    typer.Option(metavar='TEXT', help='A prompt; can be repeated. Default: an empty prompt.'),
]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar='FILE',
        help='An image for the next <image> in the prompt or chat; can be repeated.',
    ),
]
ImageFolder = Annotated[
    Path | None,
    typer.Option(
        metavar='DIR',
        help='Answer the prompt for each image in a folder. The output is JSON lines.',
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar='KEY=VALUE', help='For example mesh.data=1 mesh.model=4.'),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar='FILE',
        help="One prompt per line, or JSON lines or Parquet with the key 'prompt'. The output is "
        'JSON lines.',
    ),
]
BudgetFile = Annotated[
    Path | None,
    typer.Option(
        metavar='PNG', help='Draw the number of tokens per region (relevance) over the image.'
    ),
]
Stops = Annotated[
    list[str] | None,
    typer.Option(metavar='TEXT', help='Stop before this text; can be repeated.'),
]
TopK = Annotated[int | None, typer.Option(help='Sample from this many most probable tokens.')]
TopP = Annotated[
    float | None,
    typer.Option(help='Sample from the smallest set of tokens with this total probability.'),
]


def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: PromptTexts = None,
    prompts: PromptFile = None,
    image: ImageFiles = None,
    images: ImageFolder = None,
    show_budget: BudgetFile = None,
    max_tokens: Annotated[int, typer.Option(help='Maximum number of new tokens per prompt.')] = 256,
    temperature: Annotated[
        float, typer.Option(help='Sampling temperature; 0 always picks the most probable token.')
    ] = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help='The same seed gives the same text on every mesh.')] = 0,
    stop: Stops = None,
    chat: Annotated[
        bool, typer.Option('--chat', help='Chat: each --prompt, or each line of input, is a turn.')
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar='TEXT', help='With --chat: the system message.')
    ] = None,
) -> None:
    """Continue prompts with a trained model, or chat with it.

    Text is streamed, except with --prompts and --images.
    """
    from megajax.runtime.data.text.prompts import read_prompts  # here, because it imports numpy

    not_in_chat = {'--prompts': prompts, '--images': images, '--show-budget': show_budget}
    check_chat(chat, system, not_in_chat)
    texts = [*(prompt or []), *(read_prompts(prompts) if prompts else [])]
    check_unicode('--prompt', prompt or [])
    check_unicode('--stop', stop or [])
    check_unicode('--system', [system or ''])
    check_unicode(str(prompts), texts[len(prompt or []) :])
    if image and len(texts) > 1 and not chat:
        raise ConfigError(f'--image needs a single prompt, not {len(texts)}: give one')
    check_images(images, image, prompts, [''.join(texts)] if chat and texts else texts)
    if show_budget is not None:
        check_budget(show_budget, image or [])
    # Not at the top, because it imports jax.
    from megajax.runtime.generate import Request, Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    request = Request(max_tokens=max_tokens, sampling=sampling, seed=seed, stops=tuple(stop or ()))
    opened, jax = _open(run, overrides or [], cast=True)
    if chat:
        said, files = prompt or None, image or []
        return converse(
            run, opened, overrides or [], request, system=system, said=said, images=files
        )
    if show_budget is not None and opened.config.relevance is None:
        raise ConfigError(f'--show-budget needs relevance, which {run} does not have: remove it')
    if images:
        note_letters(texts, opened.tokenizer)
        return answer_all(opened, jax, (texts or ['<image>'])[0], images, request)
    rows = _continue(opened, jax, texts, image or [], request, as_lines=prompts is not None)
    if show_budget is not None and image:
        draw_budget(show_budget, image[0], opened.config, rows)


def _continue(
    opened: 'Opened',
    jax: Any,
    texts: Sequence[str],
    image: Sequence[Path],
    request: 'Request',
    *,
    as_lines: bool,
) -> 'Sequence[Continuation | None]':
    """Print the prompts and continuations as text or JSON lines, and return the continuations."""
    from megajax.runtime.generate import Generator, PromptReader, encode_prompts

    texts, pictures = texts or ['<image>' * len(image)], None
    note_letters(texts, opened.tokenizer)
    if image:
        reader = PromptReader(opened.config, opened.tokenizer)
        ids, of_prompt = reader.read(reader.check(texts[0], image))
        encoded, pictures = [ids], [of_prompt]
    else:
        encoded = encode_prompts(opened.config, opened.tokenizer, texts)
    with jax.set_mesh(opened.mesh):
        generator = Generator(opened.config, opened.params, opened.tokenizer, donate=True)
        show = as_json(texts) if as_lines else as_text(texts)
        for rows in generator.stream(encoded, request, pictures):
            show(rows)
    cut = sum(row is not None and is_cut(row, request) for row in rows)
    note_cut(cut, len(rows), request, opened.config)
    return rows


FilesAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar='FILES KEY=VALUE', help='Files to evaluate on, then overrides.'),
]
Task = Annotated[
    Literal['perplexity', 'wikitext', 'lambada'] | None,
    typer.Option(
        help='perplexity: for text, JSON lines, Parquet (with or without images), and folders. '
        'wikitext, lambada: as in the Megatron paper.'
    ),
]
HarnessTasks = Annotated[
    str | None,
    typer.Option(
        metavar='TASKS',
        help='Comma-separated tasks of lm-evaluation-harness; FOLDER/NAME for your own task.',
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        help='Tokens between windows; default: 32 for wikitext, the window size for perplexity.'
    ),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(
        '--json', help='Write the results to this file; values that are not finite are null.'
    ),
]


def evaluate(
    run: Run,
    arguments: FilesAndOverrides = None,
    task: Task = None,
    harness: HarnessTasks = None,
    stride: Stride = None,
    out: ResultsFile = None,
) -> None:
    """Evaluate a trained model on held-out text."""
    overrides = [argument for argument in arguments or [] if is_override(argument)]
    files = [argument for argument in arguments or [] if not is_override(argument)]
    _check(files, task, harness, stride, out)
    opened, jax = _open(run, overrides)
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise ConfigError(f'{run} has no tokenizer, so it cannot be evaluated on text')
    with jax.set_mesh(opened.mesh):
        results: Mapping[str, Mapping[str, float | None]]
        if harness:
            from megajax.runtime.evaluate.harness import evaluate_tasks

            results = evaluate_tasks(
                *(opened.config, opened.params, tokenizer, harness.split(',')),
                opened.companions.generation,
            )
        else:
            results = {
                str(task): dataclasses.asdict(
                    _evaluate(run, opened, overrides, files, task, stride)
                )
            }
    written = results_json(results, run=str(run), step=opened.step, files=files)
    with writing((out, written)):
        for name, values in results.items():
            print(_result_line(name, values))


def _result_line(name: str, values: Mapping[str, float | None]) -> str:
    return f'{name}  ' + '  '.join(
        f'{key} {value:.6g}' if isinstance(value, float) else f'{key} {value:,}'
        for key, value in values.items()
        if value is not None
    )


def _evaluate(
    run: Path,
    opened: 'Opened',
    overrides: Sequence[str],
    files: Sequence[str],
    task: str | None,
    stride: int | None,
) -> Any:
    from megajax.runtime.evaluate import (
        Scorer,
        are_documents,
        document_perplexity,
        lambada,
        perplexity,
        wikitext,
    )

    tokenizer = opened.tokenizer
    assert tokenizer is not None
    scorer = Scorer(opened.config, opened.params)
    if task == 'lambada':
        return lambada(scorer, tokenizer, files[0])
    if task == 'wikitext':
        return wikitext(
            scorer, tokenizer, files[0], **({} if stride is None else {'stride': stride})
        )
    if not are_documents(scorer, files):
        return perplexity(scorer, tokenizer, files, stride=stride)
    if stride is not None:
        raise ConfigError('--stride has no effect on documents that are read whole: remove it')
    template = opened.chat_template(run, overrides)
    return document_perplexity(scorer, tokenizer, files, template)


def _check(
    files: Sequence[str],
    task: str | None,
    harness: str | None,
    stride: int | None,
    out: Path | None,
) -> None:
    """Raise ConfigError with every mistake in the command, before jax is imported."""
    problems = []
    if bool(task) == bool(harness):
        problems.append('give either --task perplexity, wikitext or lambada, or --harness TASKS')
    if harness and not find_spec('lm_eval'):
        problems.append(f'--harness needs lm-evaluation-harness: {install("harness")}')
    if harness and (files or stride is not None):
        problems.append('--harness uses its own data: remove files and --stride')
    if task and (not files or (len(files) > 1 and task != 'perplexity')):
        problems.append(
            f'--task {task} needs {"files" if task == "perplexity" else "one file"}, '
            f'not {len(files)}'
        )
    if task == 'lambada' and stride is not None:
        problems.append('--task lambada does not support --stride: remove it')
    problems += [problem for file in files if (problem := _why_not_here(file))]
    paths = [Path(file).expanduser().resolve() for file in files]
    problems += [
        f'{file}: would be read twice: name it, or the folder that contains it, once'
        for i, (file, path) in enumerate(zip(files, paths, strict=True))
        if path in paths[:i] or not set(path.parents).isdisjoint(paths)
    ]
    problems += output_problems(out)
    if problems:
        raise ConfigError(*problems)


def _why_not_here(file: str) -> str:
    """Return why a file cannot be read; empty if it is there."""
    if is_remote(file):
        return f'{file}: eval does not read URLs: copy the file to this machine and give its path'
    return '' if exists(Path(file).expanduser()) else f'{file}: no such file or folder'


def _open(run: Path, overrides: Sequence[str], *, cast: bool = False) -> tuple['Opened', Any]:
    log_to_terminal()
    import jax

    from megajax.runtime.checkpoint.open import open_model

    return open_model(run, overrides, cast=cast), jax
