"""Read prompts from a file."""

from collections.abc import Iterator
from pathlib import Path

from megajax.base.errors import mistake
from megajax.runtime.data.sources.inputs import format_of
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.sources.shapes import as_prompt
from megajax.runtime.data.text.corpus import read_text


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a text, or the values of 'prompt' in JSON lines or Parquet.

    Only a line feed, after an optional carriage return, ends a line. Raises ConfigError with file
    and line.
    """
    if format_of(path.name) != 'text':
        prompts = list(_prompts(path))
    else:
        prompts = [line.removesuffix('\r') for line in read_text(path, 'prompt').split('\n')]
        prompts = prompts if prompts[-1] else prompts[:-1]
    if not prompts:
        message = "holds no prompts; write one per line, or JSON lines with 'prompt'"
        raise mistake(path, message)
    return prompts


def _prompts(path: Path) -> Iterator[str]:
    for place, line in read_objects(path):
        if not isinstance(line.get('prompt'), str):
            keys = ', '.join(map(str, line)) or 'none'
            fix = as_prompt(line, place) or 'give it one'
            message = f"has no text under 'prompt' (its keys: {keys}); {fix}"
            raise mistake(place, message)
        yield line['prompt']
