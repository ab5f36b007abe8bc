"""Print continuations as they are generated, as JSON lines or as text."""

import codecs
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megajax.base.render.text import visible

if TYPE_CHECKING:
    from megajax.core.config import Config
    from megajax.runtime.data.text.tokenizer import Tokenizer
    from megajax.runtime.generate import Continuation, Request


def print_json(row: 'Continuation', **asked: str) -> None:
    """Print the fields of `asked`, and the generated text, as a line of JSON in UTF-8 or ASCII."""
    line = {**asked, 'text': row.text, 'tokens': len(row.ids), 'end': row.end}
    # For what its encoding lacks, stdout writes escapes such as \xe9, which JSON does not have.
    is_utf8 = codecs.lookup(sys.stdout.encoding or 'utf-8').name == 'utf-8'
    print(json.dumps(line, ensure_ascii=not is_utf8), flush=True)


def results_json(results: Mapping[str, Mapping[str, float | None]], **about: Any) -> str:
    """Return the results of an evaluation by task as JSON; values that are not finite are null."""
    finite = {
        task: {
            name: value if value is None or math.isfinite(value) else None
            for name, value in values.items()
        }
        for task, values in results.items()
    }
    return json.dumps({**about, 'results': finite}, indent=2) + '\n'


def as_json(prompts: Sequence[str]) -> Any:
    """Return a function that prints each complete prompt and its text as JSON, in order."""
    written = 0

    def show(rows: 'Sequence[Continuation | None]') -> None:
        nonlocal written
        while written < len(rows) and (row := rows[written]) and row.end:
            print_json(row, prompt=prompts[written])
            written += 1

    return show


def as_text(prompts: Sequence[str]) -> Any:
    """Return a function that prints each prompt and the text generated so far, in order.

    Control characters are escaped on a terminal, but unchanged in a pipe.
    """
    current, shown = 0, 0

    def show(rows: 'Sequence[Continuation | None]') -> None:
        nonlocal current, shown
        while current < len(rows) and (row := rows[current]):
            text = prompts[current] + row.text
            new = text[shown:]
            sys.stdout.write(visible(new) if sys.stdout.isatty() else new)
            shown = len(text)
            if row.end:
                sys.stdout.write('\n' if current + 1 == len(rows) else '\n\n')
                current, shown = current + 1, 0
            else:
                break
        sys.stdout.flush()

    return show


def is_cut(row: 'Continuation', request: 'Request') -> bool:
    """Return whether a text ended at model.max_seq_len, before the requested number of tokens."""
    return row.end == 'length' and row.limit < request.max_tokens


def note_cut(number: int, total: int, request: 'Request', config: 'Config') -> None:
    """Print a note with the number of texts that were cut off, if any."""
    if number:
        note(
            f'{number} of {total} texts were cut before --max-tokens {request.max_tokens}, at '
            f'model.max_seq_len={config.model.max_seq_len} including the prompt'
        )


def note_letters(prompts: Sequence[str], tokenizer: 'Tokenizer | None') -> None:
    """Print a note if prompts spell special tokens other than the place of an image."""
    # Not at the top, because it imports numpy.
    from megajax.runtime.data.text.spelled_tokens import prompts_warning

    if tokenizer is not None:
        names = tokenizer.special_tokens().keys() - {'<image>'}
        if said := prompts_warning(prompts, names):
            note(said)


def note(text: str) -> None:
    """Print a note to standard error, so that a pipe gets only the texts."""
    print(f'note: {visible(text)}', file=sys.stderr, flush=True)
