"""Megatron-LM's tensor parallelism as JAX wants it.

The names that a notebook needs; each is imported when it is first used, so that `import megajax` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megajax.config import Config as Config
    from megajax.config import ConfigError as ConfigError
    from megajax.config import load as load
    from megajax.inspect import inspect as inspect
    from megajax.model.transformer import Decoder as Decoder
    from megajax.model.transformer import LanguageModel as LanguageModel
    from megajax.parallel.mesh import make_mesh as make_mesh
    from megajax.plan import plan as plan
    from megajax.train.feed import place_batch as place_batch
    from megajax.train.placements import placements as placements
    from megajax.train.step import TrainState as TrainState
    from megajax.train.step import init_state as init_state
    from megajax.train.step import make_train_step as make_train_step

_HOMES = {
    'Config': 'megajax.config',
    'ConfigError': 'megajax.config',
    'Decoder': 'megajax.model.transformer',
    'LanguageModel': 'megajax.model.transformer',
    'TrainState': 'megajax.train.step',
    'init_state': 'megajax.train.step',
    'load': 'megajax.config',
    'make_mesh': 'megajax.parallel.mesh',
    'make_train_step': 'megajax.train.step',
    'place_batch': 'megajax.train.feed',
    'placements': 'megajax.train.placements',
}
_CALLABLE = 'inspect', 'plan'  # packages that can be called


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f'megajax.{name}')
    if name not in _HOMES:
        raise AttributeError(f'module megajax has no attribute {name!r}')
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_CALLABLE])
