"""The compiled training step; and, called as `megajax.train(config)`, a whole run."""

import sys
import types
from importlib import import_module
from typing import Any

from megajax.config import Config


class TrainPackage(types.ModuleType):
    """The package, which can be called; `megajax/run/run.py` is above it, and imported by then."""

    def __call__(self, config: Config, *, name: str = 'run') -> Any:
        return import_module('megajax.run.run').train(config, name=name)


sys.modules[__name__].__class__ = TrainPackage
