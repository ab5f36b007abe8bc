"""Read the corpus of a run, and render its messages with the chat template of its model."""

import logging
from functools import partial
from pathlib import Path

from megajax.core.config import Config
from megajax.runtime.checkpoint.hf_files import Companions, read_companions
from megajax.runtime.data import Data, load_data
from megajax.runtime.data.image_text.chat import DEFAULT, Template, read_template
from megajax.runtime.data.image_text.load import keeps_documents
from megajax.runtime.data.remote_text import local_text
from megajax.runtime.processes.consensus import local_time
from megajax.runtime.run.infer_config import newest_data, with_own_tokenizer
from megajax.runtime.run.watchdog import Watchdog

logger = logging.getLogger(__name__)


def read_corpus(
    config: Config, run: Path, start: Path | None, watchdog: Watchdog | None = None
) -> tuple[Data, Companions]:
    """Return a run's data, and the files that its checkpoints carry; all processes must call this.

    The watchdog is told of progress. Raises ConfigError as `load_data` does.
    """
    companions = companions_of_run(config, run, start)
    own = with_own_tokenizer(config, run, start)
    progress = partial(watchdog.beat, 'reading the corpus', 'corpus') if watchdog else None
    template = template_of_run(config, run, companions)
    return load_data(own, template, progress=progress), companions


def companions_of_run(config: Config, run: Path, start: Path | None) -> Companions:
    """Return the files that the run's checkpoints carry along.

    They are the files that the model was imported with, the chat template that the run trains with,
    and the time that this template gets. This is the time of the run's first start, so a resumed
    run reads the same tokens. All processes must call this. Raises ConfigError if the template
    cannot be read.
    """
    there = read_companions(run if start is None else start)
    companions, path = there, config.data.chat_template
    if path is not None and (start is not None or not _began_with(path, run, there)):
        others = dict(read_template(path).texts)
        companions = there.with_template(others.pop(DEFAULT), others)
    template = companions.template('')
    # A streamed corpus has no messages; to look for some would copy a remote one.
    is_text = bool(config.data.blend) or config.data.order == 'streamed'
    # The cache knows the tokens of a remote corpus by the tokenizer that the run will use.
    own = with_own_tokenizer(config, run, start)
    if template is None or is_text or not _has_messages(own):
        return companions
    logger.info('chat       messages are written by %s', _name(config, start or run))
    if start is not None and path is not None and there.chat_templates not in ({}, template.texts):
        logger.info('chat       %s came with a different template', start)
    if not template.asks_for_time:
        return companions
    known = template.now if start is None else None
    return companions.with_chat_time(known or local_time())


def _has_messages(config: Config) -> bool:
    with local_text(config) as local:
        if local.kept and local.kept.found:
            return False
        return keeps_documents(local.config, local.config.data.corpus)


def template_of_run(config: Config, run: Path, companions: Companions) -> Template | None:
    """Return the chat template of `companions_of_run`; None if messages have their plain form."""
    return companions.template(_name(config, run))


def _began_with(path: str, run: Path, companions: Companions) -> bool:
    """Whether the config still names the file of the template that the run carries along."""
    _, data = newest_data(run)
    return path == data.get('chat_template') and companions.chat_template is not None


def _name(config: Config, run: Path) -> str:
    return config.data.chat_template or f'the chat template of {run}'
