"""The compiled training step; and, called as `megajax.train(config)`, a whole run."""

import sys
import types
from typing import TYPE_CHECKING

from megajax.config import Config

if TYPE_CHECKING:
    from megajax.train.loop import Run


class TrainPackage(types.ModuleType):
    """The package, which can be called."""

    def __call__(self, config: Config, *, name: str = 'run') -> 'Run':
        from megajax.train.loop import train

        return train(config, name=name)


sys.modules[__name__].__class__ = TrainPackage
