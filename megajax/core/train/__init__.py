"""The compiled training step; called as `megajax.train(config)`, the package trains a model."""

import sys
import types
from importlib import import_module
from typing import Any

from megajax.core.config import Config


class TrainPackage(types.ModuleType):
    """The package as a callable module.

    `megajax/runtime/run/run.py` is in a higher layer, so it is imported only when the package is
    called.
    """

    def __call__(self, config: Config, **options: Any) -> Any:
        return import_module('megajax.runtime.run.run').train(config, **options)


sys.modules[__name__].__class__ = TrainPackage
