"""Find the pass of XLA's GPU compiler after which the step of a config is wrong."""

import tempfile
from pathlib import Path

from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.tolerances import Say
from megajax.core.config import Config
from megajax.xla.emulate.bisect import dump_options, first_wrong, modules


def culprit(config: Config, target: str, *, exact: bool, say: Say) -> str:
    """Compile again with a dump after every pass, and bisect for the first wrong dump."""
    with tempfile.TemporaryDirectory() as folder:
        say('compiling with a dump of every pass ...')
        step = EmulatedStep(config, target, dump_options(Path(folder)))

        def is_right(text: str) -> bool:
            return step.results(exact=exact, text=text)[0].ok

        return str(first_wrong(modules(Path(folder)), is_right, say))
