"""`megajax generate` and `megajax eval`: parse, call, render."""

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megajax.config import ConfigError
from megajax.files.outputs import output_problems

if TYPE_CHECKING:
    from megajax.checkpoint.open import Opened
    from megajax.generate import Continuation

_OVERRIDE = re.compile(r'[a-z]+\.\w+=')

Run = Annotated[
    Path,
    typer.Argument(
        metavar='RUN', help="A run's directory, for its newest checkpoint, or RUN/checkpoints/STEP."
    ),
]


def generate(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar='KEY=VALUE', help='For example mesh.data=1 mesh.model=4.'),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar='TEXT', help='May be given several times; empty if left out.'),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar='FILE',
            help="A prompt per line, or .jsonl with 'prompt'. The output is JSON lines.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help='To make after each prompt, at most.')] = 256,
    temperature: Annotated[float, typer.Option(help='0 for the most probable token.')] = 0.8,
    top_k: Annotated[int | None, typer.Option(help='Choose among so many tokens.')] = None,
    top_p: Annotated[
        float | None, typer.Option(help='Choose among the fewest tokens with so much probability.')
    ] = None,
    seed: Annotated[int, typer.Option(help='The same gives the same text, on every mesh.')] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar='TEXT', help='End before this text; may be given several times.'),
    ] = None,
) -> None:
    """Continue prompts with a trained model; on a terminal one text appears as it is made."""
    texts = [*(prompt or []), *(_read_prompts(prompts) if prompts else [])]
    _check_unicode(
        {'--prompt': prompt or [], '--stop': stop or [], str(prompts): texts[len(prompt or []) :]}
    )
    from megajax.generate import (
        Generator,
        Request,
        Sampling,
        encode_prompts,
    )  # here, because it imports jax

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    request = Request(max_tokens=max_tokens, sampling=sampling, seed=seed, stops=tuple(stop or ()))
    opened, jax = _open(run, overrides or [])
    texts = texts or ['']
    encoded = encode_prompts(opened.config, opened.tokenizer, texts)
    with jax.set_mesh(opened.mesh):
        stream = Generator(opened.config, opened.params, opened.tokenizer).stream(encoded, request)
        show = _as_json(texts) if prompts else _as_text(texts)
        for rows in stream:
            show(rows)


def evaluate(
    run: Run,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar='FILES KEY=VALUE', help='What to evaluate on, then overrides.'),
    ] = None,
    task: Annotated[
        Literal['perplexity', 'wikitext', 'lambada'] | None,
        typer.Option(
            help='perplexity: of text, .jsonl and folders. wikitext, lambada: by the rules of the Megatron paper.'
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            metavar='TASKS',
            help='Of lm-evaluation-harness, with commas between them; FOLDER/NAME is one of yours.',
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help='By how many tokens the window moves; wikitext: 32, perplexity: its length.'
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option('--json', help='Write the results to this file.')
    ] = None,
) -> None:
    """Evaluate a trained model on text that it has not seen."""
    overrides = [argument for argument in arguments or [] if _OVERRIDE.match(argument)]
    files = [argument for argument in arguments or [] if not _OVERRIDE.match(argument)]
    _check(files, task, harness, stride, out)
    opened, jax = _open(run, overrides)
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise ConfigError(f'{run} has no tokenizer, so it cannot read text')
    with jax.set_mesh(opened.mesh):
        results: dict[str, dict[str, float]]
        if harness:
            from megajax.evaluate.harness import evaluate_tasks

            results = evaluate_tasks(opened.config, opened.params, tokenizer, harness.split(','))
        else:
            results = {
                str(task): dataclasses.asdict(_evaluate(opened, tokenizer, files, task, stride))
            }
    for name, values in results.items():
        print(
            f'{name}  '
            + '  '.join(
                f'{key} {value:.6g}' if isinstance(value, float) else f'{key} {value:,}'
                for key, value in values.items()
            )
        )
    if out:
        out.write_text(
            json.dumps(
                {'run': str(run), 'step': opened.step, 'files': files, 'results': results}, indent=2
            )
            + '\n'
        )


def _evaluate(
    opened: 'Opened', tokenizer: Any, files: Sequence[str], task: str | None, stride: int | None
) -> Any:
    from megajax.evaluate import Scorer, lambada, perplexity, wikitext

    scorer = Scorer(opened.config, opened.params)
    if task == 'lambada':
        return lambada(scorer, tokenizer, files[0])
    if task == 'wikitext':
        return wikitext(
            scorer, tokenizer, files[0], **({} if stride is None else {'stride': stride})
        )
    return perplexity(scorer, tokenizer, files, stride=stride)


def _check(
    files: Sequence[str],
    task: str | None,
    harness: str | None,
    stride: int | None,
    out: Path | None,
) -> None:
    """What is wrong with the command, before jax is imported."""
    problems = []
    if bool(task) == bool(harness):
        problems.append('give one of --task and --harness')
    if harness and not find_spec('lm_eval'):
        problems.append("--harness needs lm-evaluation-harness: pip install 'megajax[harness]'")
    if harness and (files or stride):
        problems.append('--harness reads its own data: leave out files and --stride')
    if task and (not files or (len(files) > 1 and task != 'perplexity')):
        problems.append(
            f'--task {task} needs {"files" if task == "perplexity" else "one file"}, not {len(files)}'
        )
    if task == 'lambada' and stride:
        problems.append('--task lambada has no --stride')
    problems += [
        f'{file}: no such file or folder' for file in files if not Path(file).expanduser().exists()
    ]
    problems += output_problems(out)
    if problems:
        raise ConfigError(*problems)


def _open(run: Path, overrides: Sequence[str]) -> tuple['Opened', Any]:
    logging.basicConfig(format='%(message)s')
    import jax

    from megajax.checkpoint.open import open_model

    return open_model(run, overrides), jax


def _check_unicode(texts: Mapping[str, Sequence[str]]) -> None:
    for where, several in texts.items():
        for text in several:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f'{where}: {text!r} is not UTF-8 at character {error.start}: write it in UTF-8'
                ) from error


def _read_prompts(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding='utf-8').splitlines()
        prompts = (
            [json.loads(line)['prompt'] for line in lines] if file.suffix == '.jsonl' else lines
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error!r}; write a prompt per line, or in .jsonl {{'prompt': text}}"
        ) from error
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f'{file} holds no prompts, or some that are not text')
    return prompts


def _as_json(prompts: Sequence[str]) -> Any:
    """Each prompt and its text as a line of JSON, in order, as soon as it is complete."""
    written = 0

    def show(rows: 'Sequence[Continuation | None]') -> None:
        nonlocal written
        while written < len(rows) and (row := rows[written]) and row.end:
            line = {
                'prompt': prompts[written],
                'text': row.text,
                'tokens': len(row.ids),
                'end': row.end,
            }
            print(json.dumps(line, ensure_ascii=False), flush=True)
            written += 1

    return show


def _as_text(prompts: Sequence[str]) -> Any:
    """Each prompt and its text, in order, as far as they are known."""
    current, shown = 0, 0

    def show(rows: 'Sequence[Continuation | None]') -> None:
        nonlocal current, shown
        while current < len(rows) and (row := rows[current]):
            text = prompts[current] + row.text
            sys.stdout.write(text[shown:])
            shown = len(text)
            if row.end:
                sys.stdout.write('\n' if current + 1 == len(rows) else '\n\n')
                current, shown = current + 1, 0
            else:
                break
        sys.stdout.flush()

    return show
