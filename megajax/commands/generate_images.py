"""`megajax generate` for a folder of images, and for a drawing of relevance's token budget."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.base.files.exists import exists, is_folder
from megajax.base.files.outputs import output_problems, write_output
from megajax.commands.generate_output import is_cut, note_cut, print_json
from megajax.core.config import ConfigError

if TYPE_CHECKING:
    from megajax.core.config import Config
    from megajax.runtime.checkpoint.open import Opened
    from megajax.runtime.generate import Continuation, Request


def check_budget(path: Path, images: Sequence[Path]) -> None:
    """Raise ConfigError unless there is exactly one image and the file can be written."""
    problems = [*output_problems(path)]
    if len(images) != 1:
        problems.append(f'--show-budget needs exactly one --image, not {len(images)}')
    if problems:
        raise ConfigError(*problems)


def draw_budget(
    path: Path, file: Path, config: 'Config', rows: 'Sequence[Continuation | None]'
) -> None:
    """Write the image with the number of tokens of each region, for the only continuation."""
    from PIL import Image

    from megajax.runtime.data.budget_sheet import budget_png
    from megajax.runtime.data.images import read_image

    (row,) = rows
    assert row is not None
    assert row.region_tokens is not None
    assert config.relevance is not None
    tokens = row.region_tokens[0].reshape(config.relevance.regions)
    write_output(path, budget_png(Image.fromarray(read_image(file)), tokens))


def check_images(
    images: Path | None, image: list[Path] | None, prompts: Path | None, texts: Sequence[str]
) -> None:
    """Raise ConfigError for images that do not belong to the prompts, before jax is imported."""
    if images is None:
        _check_image_files(image or [], texts)
        return
    if image or prompts:
        raise ConfigError('--images answers a single --prompt: remove --image and --prompts')
    if len(texts) > 1 or any(text.count('<image>') != 1 for text in texts):
        raise ConfigError('--images needs a single --prompt that contains <image> once')
    if not is_folder(images, '--images'):
        raise ConfigError(f'--images {images}: no such folder')


def _check_image_files(image: Sequence[Path], texts: Sequence[str]) -> None:
    problems = [f'{path}: no such file' for path in image if not exists(path, '--image')]
    if image and texts and (places := texts[0].count('<image>')) != len(image):
        problems.append(
            f'the prompt contains <image> {places} times, but --image is given {len(image)} times: '
            f"write <image> once for each, for example '{'<image>' * len(image)}?'"
        )
    if problems:
        raise ConfigError(*problems)


def answer_all(opened: 'Opened', jax: Any, prompt: str, folder: Path, request: 'Request') -> None:
    """Print the answer for each image in a folder as JSON, in order."""
    from megajax.runtime.generate import (
        Generator,
        PromptReader,
        answer_all,
        check_prompts,
        find_pictures,
    )

    reader = PromptReader(opened.config, opened.tokenizer)
    documents = check_prompts(reader, prompt, find_pictures(folder))
    with jax.set_mesh(opened.mesh):
        generator = Generator(opened.config, opened.params, opened.tokenizer, donate=True)
        cut = 0
        for file, row in answer_all(generator, reader, documents, request):
            cut += is_cut(row, request)
            print_json(row, image=file.name)
    note_cut(cut, len(documents), request, opened.config)
